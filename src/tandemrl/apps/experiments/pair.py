"""What all pairs of models have in common: a folder with a manifest that says what they are."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.data.sources import checksum
from tandemrl.files import NEW, publish
from tandemrl.models.loading import no_progress_bars

MANIFEST, WEIGHTS = "manifest.json", "model.safetensors"


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
    if stored is not None and stored.items() >= identity.items() and _intact(out, stored):
        return stored
    if stored is not None and (stored.get("pair"), stored.get("seed")) != (identity["pair"], identity["seed"]):
        raise FileExistsError(
            f"{out} holds the {stored.get('pair')} pair of seed {stored.get('seed')}, which runs may rely on: choose "
            "another folder"
        )
    if stored is None and out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty and has no manifest.json of a pair: choose another folder")
    return None


def store(
    out: Path,
    models: Mapping[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    manifest: dict[str, Any],
) -> dict[str, Any]:
    """Write a pair into ``out`` in one rename, and return its manifest, with versions, sizes, and hashes of weights.

    Args:
        models: each with its tokenizer.
    """
    new = building(out)
    for name, (model, tokenizer) in models.items():
        with no_progress_bars():
            model.save_pretrained(new / name)
        tokenizer.save_pretrained(new / name)
    senior, tokenizer = models["senior"]
    found = {
        "versions": {library.__name__: library.__version__ for library in (torch, transformers, tokenizers)},
        "parameters": sum(p.numel() for p in senior.parameters()),
        "vocab_size": len(tokenizer),
        "sha256": weight_hashes(new),
    }
    stored = json.loads(json.dumps(manifest | found))
    (new / MANIFEST).write_text(json.dumps(stored, indent=2) + "\n")
    publish(out, new)
    return stored


def building(out: Path) -> Path:
    """The hidden folder in which this process writes a pair before it is renamed to ``out``."""
    return out.with_name(f"{NEW}{out.name}-{os.getpid()}")


def weight_hashes(folder: Path) -> dict[str, str]:
    """The checksums of both models' weights, as a manifest has them."""
    return {name: checksum(folder / name / WEIGHTS) for name in ("senior", "junior")}


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


def _intact(out: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether both models exist with the weights that the manifest records."""
    if not all((out / name / WEIGHTS).is_file() for name in ("senior", "junior")):
        return False
    return weight_hashes(out) == manifest["sha256"]
