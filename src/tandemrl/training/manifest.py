"""The files of a checkpoint with their hashes: what is not as it was written is found before it is used.

``meta.json`` holds them under ``files``: path relative to the folder -> SHA-256, for every file but itself.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or continued from; the message names the file and the fix."""


class DamagedError(CheckpointError):
    """A file of a run is not as it was written; another checkpoint may be."""


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_hashes(folder: Path) -> dict[str, str]:
    """The hash of each file of a checkpoint; {} where it was written before there were hashes.

    Raises:
        DamagedError: meta.json is not readable.
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
        DamagedError: it is not what was written.
    """
    content = file.read_bytes()
    expected = read_hashes(file.parent).get(file.name)
    if expected is not None and hash_of(content) != expected:
        raise _changed(file)
    return content


def verify(folder: Path, hashes: Mapping[str, str]) -> None:
    """Read files and compare their hashes.

    Raises:
        DamagedError: names the first that is missing or not what was written.
    """
    for name, expected in hashes.items():
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"{file}: missing, but the checkpoint was written with it")
        with open(file, "rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != expected:
                raise _changed(file)


def refuse_others(folder: Path, pattern: str, hashes: Mapping[str, str]) -> None:
    """Raises:
    DamagedError: a file of the folder that matches the pattern is not one of the checkpoint's.
    """
    for file in sorted(folder.glob(pattern)):
        if str(file.relative_to(folder)) not in hashes:
            raise DamagedError(f"{file}: not one of the files that the checkpoint was written with")


def _changed(file: Path) -> DamagedError:
    return DamagedError(f"{file}: not as it was written (its SHA-256 is not the one in meta.json)")
