"""The hashes of a checkpoint's files, so that a file that differs from what was written is noticed before it is used.

``meta.json`` holds them under ``files``: for every file but itself, its path relative to the folder and its SHA-256.
"""

import hashlib
import json
from collections.abc import Mapping
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
    """The hash of each file of a checkpoint, or {} if there is no meta.json.

    Raises:
        DamagedError: meta.json cannot be read.
    """
    file = folder / "meta.json"
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_bytes()).get("files", {}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"{file}: not readable: {error}") from None


def read_bytes(file: Path) -> bytes:
    """The content of a file of a checkpoint.

    Raises:
        DamagedError: the content differs from what was written.
    """
    content = file.read_bytes()
    expected = read_hashes(file.parent).get(file.name)
    if expected is not None and hashlib.sha256(content).hexdigest() != expected:
        raise _changed(file)
    return content


def verify(folder: Path, hashes: Mapping[str, str]) -> None:
    """Read files of a folder and compare them with their hashes.

    Raises:
        DamagedError: a file is missing or differs from what was written; the message names the first one.
    """
    for name, expected in hashes.items():
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"{file}: missing, but the checkpoint was written with it")
        if _digest(file) != expected:
            raise _changed(file)


def refuse_others(folder: Path, pattern: str, hashes: Mapping[str, str]) -> None:
    """Check that all files of a folder that match a pattern belong to the checkpoint.

    Raises:
        DamagedError: one of them does not.
    """
    for file in sorted(folder.glob(pattern)):
        if str(file.relative_to(folder)) not in hashes:
            raise DamagedError(f"{file}: not one of the files that the checkpoint was written with")


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _changed(file: Path) -> DamagedError:
    return DamagedError(f"{file}: not as it was written (its SHA-256 is not the one in meta.json)")
