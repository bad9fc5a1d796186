"""Which lines of ``metrics.jsonl`` and ``samples.jsonl`` a checkpoint covers, and whether they are still there.

Each line has its ``step``, and steps never decrease from line to line. A checkpoint covers the lines up to those of its
step, and stores their number, their size and their SHA-256. A resumed run needs exactly these lines, and drops the
lines after them. If lines that were written had gone when the checkpoint was saved, it says how much was written.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandemrl.training.checkpoint.manifest import DamagedError

FILES = ("metrics.jsonl", "samples.jsonl")
_CHUNK = 1 << 20
_STEP = re.compile(rb'\{"step": (\d+)[,}]')


@dataclass(eq=False)
class Coverage:
    """The covered lines at the beginning of one file. It grows by reading only new lines, so nothing is read twice.

    size: the size of the covered lines in bytes. written: how large they were when they were written; more than
    ``size`` if the file has lost lines since.
    """

    file: Path
    size: int = 0
    lines: int = 0
    written: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def extend(self, step: int) -> None:
        """Extend the coverage to all complete lines up to those of ``step``."""
        if not self.file.is_file():
            return  # a resume will miss what was covered, and what was not
        with open(self.file, "rb") as content:
            content.seek(self.size)
            for line in content:
                match = _STEP.match(line)
                if not line.endswith(b"\n") or (match and int(match[1]) > step):
                    return
                self.digest.update(line)
                self.size += len(line)
                self.lines += 1

    def to_plain(self) -> dict[str, int | str]:
        """The coverage in the form that a checkpoint stores."""
        written = max(self.size, self.written)
        return {"size": self.size, "lines": self.lines, "written": written, "sha256": self.digest.hexdigest()}

    def drop_rest(self) -> None:
        """Cut the file after the covered lines."""
        if self.file.is_file() and self.file.stat().st_size > self.size:
            with open(self.file, "r+b") as content:
                content.truncate(self.size)
                os.fsync(content.fileno())


def restored(file: Path, stored: Mapping[str, Any], step: int) -> Coverage:
    """The coverage that a checkpoint stored, after a check that the lines in ``file`` still match it.

    Args:
        stored: what ``to_plain`` returned.
        step: the step of the checkpoint, for the message.

    Raises:
        DamagedError: lines are missing, torn or changed; the message says which.
    """
    coverage = Coverage(
        file, size=int(stored["size"]), lines=int(stored["lines"]), written=int(stored.get("written", 0))
    )
    left = coverage.size
    if file.is_file():
        with open(file, "rb") as content:
            while left and (chunk := content.read(min(left, _CHUNK))):
                coverage.digest.update(chunk)
                left -= len(chunk)
    if left or coverage.digest.hexdigest() != stored["sha256"]:
        raise DamagedError(f"{file}: {_loss(coverage, step)}")
    if coverage.size < coverage.written:  # lines were missing when the checkpoint was saved; they may be back
        coverage.extend(step)
        if coverage.size != coverage.written:
            raise DamagedError(f"{file}: {_loss(coverage, step)}")
    return coverage


def of_step(file: Path, step: int) -> Coverage:
    """The coverage of the lines up to those of ``step`` as they are now, for a checkpoint that stored none.

    Raises:
        DamagedError: one of these lines is not a record, or there is no line of the step.
    """
    coverage = Coverage(file)
    coverage.extend(step)
    if loss := _gaps(coverage, step):
        raise DamagedError(f"{file}: {loss}")
    return coverage


def begins_after(file: Path, step: int) -> bool:
    """Whether a file holds no line of ``step`` or before, since it is missing, empty, or of a run that began there."""
    if not file.is_file():
        return True
    with open(file, "rb") as content:
        first = content.readline()
    match = _STEP.match(first)
    return not first or (match is not None and int(match[1]) > step)


def _loss(coverage: Coverage, step: int) -> str:
    """What is wrong with the covered lines, for a message."""
    if not coverage.file.is_file():
        return f"missing, with the {coverage.lines} lines of step {step} and before"
    return _gaps(coverage, step) or f"the lines of step {step} and before are not those that were written"


def _gaps(coverage: Coverage, step: int) -> str:
    """The lines that are not records and the steps without a line, for a message; "" if there are none."""
    steps: set[int] = set()
    bad, whole = 0, False
    if coverage.file.is_file():
        with open(coverage.file, "rb") as content:
            for number, line in enumerate(content, 1):
                try:
                    line_step = int(json.loads(line)["step"])
                except (ValueError, KeyError, TypeError):
                    line_step = None
                if line_step is None or not line.endswith(b"\n"):
                    bad, whole = number, line.endswith(b"\n")
                    break
                if line_step > step:
                    break
                steps.add(line_step)
    missing = [str(s) for s in range(min(steps, default=1), step + 1) if s not in steps]
    parts = [f"line {bad} is torn or damaged"] if bad and (missing or whole) else []
    if missing:
        shown = ", ".join(missing[:5]) + (f", … ({len(missing)})" if len(missing) > 5 else "")
        parts.append(f"no readable line of step {shown}")
    return "; ".join(parts)
