"""Atomic writes: a file or directory appears under its name only when all of its content is on disk.

It is written under a hidden name in the same directory, synced, then renamed. What a killed process leaves behind is
hidden; readers ignore it and ``recover`` tidies up. The module also says which versions of the code wrote a result
(``versions``). It does not import torch.
"""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

NEW, OLD = ".new-", ".old-"
"""Prefixes of hidden names: of what is being written, and of what was set aside to be replaced."""


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves either the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{NEW}{path.name}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write into a hidden directory, then put it in place of ``path``.

    A new path appears in one rename. Replacing an existing directory takes two: the old one is set aside under a hidden
    name first, so a crash between the two leaves it there and ``recover`` puts it back.
    """
    new = begin(path)
    try:
        fill(new)
    except Exception:
        with suppress(OSError):  # the first error is what matters
            _remove(new)
        raise
    publish(path)


def begin(path: Path) -> Path:
    """Make the empty hidden directory that ``publish`` later renames to ``path``, and return it.

    What a killed process left of one for the same path is removed. Others in the parent may be of other processes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{NEW}{path.name}")
    _remove(new)
    _recover(path.with_name(f"{OLD}{path.name}"))
    new.mkdir()
    return new


def publish(path: Path, new: Path | None = None) -> None:
    """Put a finished hidden directory in place of ``path``, after syncing all of its files.

    Args:
        new: the hidden directory, named ``.new-*`` and beside ``path``. The default is the one that ``begin`` made.
    """
    new = new or path.with_name(f"{NEW}{path.name}")
    old = path.with_name(f"{OLD}{path.name}")
    for folder, _, files in os.walk(new, topdown=False):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    if os.path.lexists(path):
        _remove(old)
        os.rename(path, old)
    os.rename(new, path)
    sync(path.parent)
    with suppress(OSError):  # the new one is there
        _remove(old)


def recover(parent: Path) -> None:
    """Tidy up what a killed process left in ``parent``.

    Half-written files and directories are removed. A directory that was set aside gets its name back, or is removed if
    its replacement is already there. Only the process that alone writes into ``parent`` may call this.
    """
    for entry in sorted(parent.glob(f"{NEW}*")):
        _remove(entry)
    for entry in sorted(parent.glob(f"{OLD}*")):
        _recover(entry)


def _recover(old: Path) -> None:
    home = old.with_name(old.name.removeprefix(OLD))
    if os.path.lexists(home):
        _remove(old)
    elif os.path.lexists(old):
        os.rename(old, home)


def _remove(path: Path) -> None:
    """Remove a file, a link (and not what it leads to) or a directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def drop(path: Path) -> None:
    """Remove a directory. It is renamed to a hidden name first, so that a half-removed one is never visible."""
    hidden = path.with_name(f"{NEW}{path.name}")
    _remove(hidden)  # a killed process was about to replace what goes now
    os.rename(path, hidden)
    _remove(hidden)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineError(ValueError):
    """A line of a file could not be parsed. ``line`` is its number, from 1."""

    def __init__(self, line: int, error: Exception) -> None:
        reason = f"its bytes are not UTF-8: {error}" if isinstance(error, UnicodeDecodeError) else str(error)
        if isinstance(error, json.JSONDecodeError):  # its own line and column count from the start of this line
            reason = f"{error.msg} at character {error.pos + 1}; write one JSON object on each line"
        super().__init__(reason)
        self.line = line


def parse_json(text: str, *, halves: bool = False) -> Any:
    """The value of a JSON text that can be read in one way only.

    NaN and Infinity are read, too, which are no JSON: Python writes them, for instance where a value is missing.

    Args:
        halves: read halves of characters (see `is_unicode`), too.

    Raises:
        ValueError: it is not JSON, is nested too deeply to read, has a key twice in one object, or holds half of a
            character.
    """
    try:
        value = json.loads(text, object_pairs_hook=each_key_once)
    except RecursionError:
        raise ValueError("nested too deeply to read") from None
    if not halves and "\\ud" in text.lower() and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ValueError(
            "a text has half of a character (a lone surrogate \\ud800 to \\udfff), as where a text was cut inside an "
            "emoji; cut it elsewhere, or write another character there"
        )
    return value


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for a JSON decoder, which would keep the last of several values of a key."""
    value = dict(pairs)
    if len(value) < len(pairs):
        for name, _ in reversed(pairs):
            if name not in value:
                raise ValueError(f"the key {name!r:.100} stands twice in one object")
            del value[name]
    return value


def read_json_lines(
    file: Path, *, parse: Callable[[str], Any] = json.loads, encoding: str = "utf-8", skip_blank: bool = False
) -> Iterator[tuple[int, Any]]:
    """Yield the number (from 1) and the value of every line of a file, one JSON value per line.

    Args:
        parse: turns the text of a line into its value.
        skip_blank: leave out blank lines, which ``parse`` would refuse.

    Raises:
        LineError: a line is not text in this encoding, or ``parse`` refuses it with a `ValueError`, a `TypeError` or a
            `RecursionError`.
        OSError: the file cannot be read.
    """
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode(encoding)
                if skip_blank and not text.strip():
                    continue
                value = parse(text)
            except (ValueError, TypeError, RecursionError) as error:
                raise LineError(number, error) from None
            yield number, value


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8. JSON may hold halves of characters (lone surrogates such as
    ``"\\ud800"``), which no file and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def versions() -> dict[str, str | bool | None]:
    """The versions that produced a result: Python, the libraries, and the git revision of this code.

    ``git_revision`` and ``git_dirty`` are None if the code does not run from a git checkout.
    """
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    revision = _git("rev-parse", "HEAD") if tracked else None
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "tandemrl")},
        "git_revision": revision,
        "git_dirty": None if revision is None else bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        here = str(Path(__file__).parent)
        done = subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
