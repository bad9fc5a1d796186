"""The hashes of a checkpoint's files, so that a file that differs from what was written is noticed before it is used.

``meta.json`` holds them under ``files``: for every file but itself, its path relative to the folder and its SHA-256.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or continued from; the message names the file and the fix."""


class DamagedError(CheckpointError):
    """A file of a run differs from what was written. Another checkpoint may be undamaged."""


def hashes(folder: Path, rank: int) -> list[tuple[str, str]]:
    """The names and hashes of the files that a process wrote: shards have its rank, rank 0 wrote all others."""
    own = [
        file
        for file in folder.rglob("*")
        if file.name.startswith(f"__{rank}_") or (rank == 0 and not file.name.startswith("__"))
    ]
    return [(str(file.relative_to(folder)), _digest(file)) for file in own if file.is_file()]


def read_hashes(folder: Path) -> dict[str, str]:
    """The hash of each file of a checkpoint.

    Raises:
        DamagedError: meta.json is missing, or has none.
    """
    file = folder / "meta.json"
    try:
        return dict(json.loads(file.read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{file}: missing, or without the hashes that it was written with ({error})") from None


def verify(folder: Path, names: Iterable[str]) -> None:
    """Compare files of a checkpoint with their hashes.

    Raises:
        DamagedError: a file is missing, was added, or differs from what was written; the message names the first one.
    """
    written = read_hashes(folder)
    for name in names:
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"{file}: missing, but the checkpoint was written with it")
        if name not in written:
            raise DamagedError(f"{file}: not one of the files that the checkpoint was written with")
        if _digest(file) != written[name]:
            raise DamagedError(f"{file}: not as it was written (its SHA-256 is not the one in meta.json)")


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
