"""Pack a finished build of ``build_tiny_pair`` into the folder of the pairs that come with the library.

python .ci/pack_pair.py FOLDER
"""

import json
import shutil
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tandemrl.apps.experiments.pair import MANIFEST, PACKAGED, cast_weights


def pack(built: Path, pairs: Path = PACKAGED) -> Path:
    """Pack a build into the folder ``pairs``, and return the file. Equal builds give equal bytes."""
    manifest = json.loads((built / MANIFEST).read_text())
    file = pairs / f"{manifest['pair']}-{manifest['seed']}.tar.xz"
    with TemporaryDirectory() as folder:
        packed = Path(folder, "pair")
        shutil.copytree(built, packed)
        cast_weights(packed, torch.bfloat16)
        with tarfile.open(file, "w:xz", preset=9) as archive:
            for each in sorted(path for path in packed.rglob("*") if path.is_file()):
                entry = tarfile.TarInfo(str(each.relative_to(packed)))  # without owner and date: the same bytes again
                entry.size = each.stat().st_size
                with open(each, "rb") as content:
                    archive.addfile(entry, content)
    return file


if __name__ == "__main__":
    print(pack(Path(sys.argv[1])))
