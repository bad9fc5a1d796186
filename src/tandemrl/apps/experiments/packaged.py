"""The tiny pair that comes with the library, so that the quickstart need not build one.

``pairs/NAME-SEED/`` holds the weights of both models in bfloat16, the tokenizer and the manifest of a finished build.
It is used only if recipe, texts and criteria in the manifest are those of today's code. A new one is packed
from a finished build by ``python -m tandemrl.apps.experiments.packaged FOLDER``.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tandemrl.data.rows import DataError
from tandemrl.data.sources import checksum

PAIRS = Path(__file__).parent / "pairs"


class Packaged(NamedTuple):
    """A pair in memory: its manifest without the hashes, its tokenizer and the weights of ``senior`` and ``junior``."""

    manifest: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast
    weights: dict[str, dict[str, Tensor]]


def find_packaged(identity: Mapping[str, Any]) -> Packaged | None:
    """The packaged pair whose manifest has all entries of ``identity``, or None.

    Raises:
        DataError: its weights are not those that were packaged.
    """
    folder = PAIRS / f"{identity['pair']}-{identity['seed']}"
    if not folder.is_dir():
        return None
    manifest = json.loads((folder / "manifest.json").read_text())
    if any(manifest.get(key) != value for key, value in identity.items()):
        return None
    for name, expected in manifest.pop("sha256").items():
        file = folder / f"{name}.safetensors"
        if not file.is_file() or checksum(file) != expected:
            raise DataError(f"{file}: not the file that was packaged; install tandemrl again, or build the pair here")
    weights = {name: load_file(folder / f"{name}.safetensors") for name in ("senior", "junior")}
    return Packaged(manifest, PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"), weights)


def pack(built: Path, pairs: Path = PAIRS) -> Path:
    """Pack a finished build of ``build_tiny_pair``. Its weights are exact in bfloat16 already. Returns the folder."""
    manifest = json.loads((built / "manifest.json").read_text())
    manifest["sha256"] = {}  # of the packed files, not of those in float32
    folder = pairs / f"{manifest['pair']}-{manifest['seed']}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("senior", "junior"):
        weights = load_file(built / name / "model.safetensors")
        file = folder / f"{name}.safetensors"
        save_file({key: tensor.bfloat16() for key, tensor in weights.items()}, file)
        file.chmod(0o644)  # safetensors makes files that only their owner may read
        manifest["sha256"][name] = checksum(file)
    PreTrainedTokenizerFast.from_pretrained(built / "senior").save_pretrained(folder / "tokenizer")
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return folder


if __name__ == "__main__":
    print(pack(Path(sys.argv[1])))
