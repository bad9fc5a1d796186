"""What all pairs of models have in common: a folder with a manifest that says what they are.

Some tiny pairs come with the library, so that nobody has to train them: ``pairs/NAME-SEED.tar.xz`` is the folder of a
finished build, with weights in bfloat16, in which they are exact (``build_tiny_pair`` rounds them). It is used only if
recipe, texts and criteria in its manifest are those of today's code. ``.ci/pack_pair.py`` packs a finished build.
"""

import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.apps.experiments.warm_start import save
from tandemrl.data.rows import DataError
from tandemrl.data.sources import checksum
from tandemrl.files import NEW, publish

MANIFEST, WEIGHTS = "manifest.json", "model.safetensors"
PACKAGED = Path(__file__).parent / "pairs"


class PairError(RuntimeError):
    """A pair does not meet its criteria. The message says what was measured."""


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The content of a pair's ``manifest.json``, or None if there is none."""
    path = folder / MANIFEST
    return json.loads(path.read_text()) if path.is_file() else None


def finished(out: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a pair in ``out`` with all entries of ``identity`` and intact weights, or None.

    Raises:
        FileExistsError: ``out`` holds another pair or seed, or something else than a pair, so none may be built there.
    """
    stored = read_manifest(out)
    if stored is None:
        if out.exists() and any(out.iterdir()):
            raise FileExistsError(f"{out} is not empty and has no manifest.json of a pair: choose another folder")
        return None
    if (stored.get("pair"), stored.get("seed")) != (identity["pair"], identity["seed"]):
        raise FileExistsError(
            f"{out} holds the {stored.get('pair')} pair of seed {stored.get('seed')}, which runs may rely on: choose "
            "another folder"
        )
    return stored if stored.items() >= identity.items() and _weight_hashes(out) == stored["sha256"] else None


def store(
    out: Path,
    models: Mapping[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    manifest: dict[str, Any],
) -> dict[str, Any]:
    """Write a pair into ``out`` in one rename, and return its manifest, with versions, sizes, and hashes of weights.

    Args:
        models: each with its tokenizer.
    """
    new = _building(out)
    for name, (model, tokenizer) in models.items():
        save(model, tokenizer, new / name)
    senior, tokenizer = models["senior"]
    found = {
        "versions": {library.__name__: library.__version__ for library in (torch, transformers, tokenizers)},
        "parameters": sum(p.numel() for p in senior.parameters()),
        "vocab_size": len(tokenizer),
        "sha256": _weight_hashes(new),
    }
    stored = json.loads(json.dumps(manifest | found))
    (new / MANIFEST).write_text(json.dumps(stored, indent=2) + "\n")
    publish(out, new)
    return stored


def unpack(identity: Mapping[str, Any], out: Path) -> dict[str, Any] | None:
    """Put the packaged pair whose manifest has all entries of ``identity`` in place of ``out``, in one rename.

    Returns:
        its manifest, or None if there is no such pair.

    Raises:
        DataError: its weights are not those that were packed.
    """
    file = PACKAGED / f"{identity['pair']}-{identity['seed']}.tar.xz"
    if not file.is_file():
        return None
    with TemporaryDirectory() as folder:
        packed = Path(folder)
        with tarfile.open(file) as archive:
            archive.extractall(packed, filter="data")
        manifest = json.loads((packed / MANIFEST).read_text())
        if not manifest.items() >= identity.items():
            return None
        cast_weights(packed, torch.float32)
        if _weight_hashes(packed) != manifest["sha256"]:
            raise DataError(f"{file}: not the weights that were packed; install tandemrl again, or train the pair here")
        publish(out, Path(shutil.copytree(packed, _building(out))))
    return manifest


def cast_weights(folder: Path, dtype: torch.dtype) -> None:
    """Store the weights of both models in another dtype."""
    for file in _weights(folder).values():
        save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A context with a fixed number of threads, so that a seed gives the same weights.

    Float sums depend on how they are divided over threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------------------------


def _building(out: Path) -> Path:
    """The hidden folder in which this process writes a pair before it is renamed to ``out``."""
    return out.with_name(f"{NEW}{out.name}-{os.getpid()}")


def _weights(folder: Path) -> dict[str, Path]:
    files = {name: folder / name / WEIGHTS for name in ("senior", "junior")}
    return {name: file for name, file in files.items() if file.is_file()}


def _weight_hashes(folder: Path) -> dict[str, str]:
    """The checksums of both models' weights, as a manifest has them."""
    return {name: checksum(file) for name, file in _weights(folder).items()}
