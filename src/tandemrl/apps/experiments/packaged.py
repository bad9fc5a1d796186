"""The tiny pairs that come with the library, so that nobody has to train them.

``pairs/NAME-SEED.tar.xz`` is the folder of a finished build, with weights in bfloat16, in which they are exact
(``build_tiny_pair`` rounds them). It is used only if recipe, texts and criteria in its manifest are those of today's
code. A new one is packed from a finished build by ``python -m tandemrl.apps.experiments.packaged FOLDER``.
"""

import json
import shutil
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tandemrl.apps.experiments.pair import MANIFEST, WEIGHTS, building, weight_hashes
from tandemrl.data.rows import DataError
from tandemrl.files import publish

PAIRS = Path(__file__).parent / "pairs"


def unpack(identity: Mapping[str, Any], out: Path) -> dict[str, Any] | None:
    """Put the packaged pair whose manifest has all entries of ``identity`` in place of ``out``, in one rename.

    Returns:
        its manifest, or None if there is no such pair.

    Raises:
        DataError: its weights are not those that were packed.
    """
    file = PAIRS / f"{identity['pair']}-{identity['seed']}.tar.xz"
    if not file.is_file():
        return None
    with TemporaryDirectory() as folder:
        packed = Path(folder)
        with tarfile.open(file) as archive:
            archive.extractall(packed, filter="data")
        manifest = json.loads((packed / MANIFEST).read_text())
        if not manifest.items() >= identity.items():
            return None
        _cast_weights(packed, torch.float32)
        if weight_hashes(packed) != manifest["sha256"]:
            raise DataError(f"{file}: not the weights that were packed; install tandemrl again, or train the pair here")
        publish(out, Path(shutil.copytree(packed, building(out))))
    return manifest


def pack(built: Path, pairs: Path = PAIRS) -> Path:
    """Pack a finished build of ``build_tiny_pair`` into the folder ``pairs``, and return the file."""
    manifest = json.loads((built / MANIFEST).read_text())
    file = pairs / f"{manifest['pair']}-{manifest['seed']}.tar.xz"
    pairs.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        packed = Path(folder, "pair")
        shutil.copytree(built, packed)
        _cast_weights(packed, torch.bfloat16)
        with tarfile.open(file, "w:xz", preset=9) as archive:
            for each in sorted(path for path in packed.rglob("*") if path.is_file()):
                entry = tarfile.TarInfo(str(each.relative_to(packed)))  # without owner and date: the same bytes again
                entry.size = each.stat().st_size
                with open(each, "rb") as content:
                    archive.addfile(entry, content)
    return file


def _cast_weights(folder: Path, dtype: torch.dtype) -> None:
    for name in ("senior", "junior"):
        file = folder / name / WEIGHTS
        save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


if __name__ == "__main__":
    print(pack(Path(sys.argv[1])))
