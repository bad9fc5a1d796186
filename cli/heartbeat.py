"""Prints a line now and then, if there is no terminal to draw a progress bar on."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY_S = 10.0


@contextmanager
def heartbeat(say: Callable[[str], None], line: Callable[[], str], *, every_s: float = EVERY_S) -> Iterator[None]:
    """A context in which a thread calls ``say`` every ``every_s`` seconds, with the time so far and the text of
    ``line``."""
    ended, start = threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(every_s):
            try:
                shown = line()
            except OSError:  # a file went while it was looked at
                continue
            say(f"{time.monotonic() - start:.0f} s: {shown}")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def last_written(folder: Path) -> str:
    """What an experiment in ``folder`` is doing, by its newest file. For a warm start or a training run it includes the
    step, and how long the rest of it takes."""
    files = {file: file.stat().st_mtime for file in folder.glob("*/*/**/*.json*") if file.is_file()}
    if not files:
        return "building the models"
    newest = max(files, key=lambda file: files[file])
    if newest.name == "pair.progress.json":
        return json.loads(newest.read_text(encoding="utf-8"))["says"]
    shown = f"last written: {newest.relative_to(folder)}"
    return shown + _progress_of(newest.parent) if newest.name == "metrics.jsonl" else shown


def _progress_of(run: Path) -> str:
    """The step of a run that goes on, and the time that its other steps take; an empty text if it has none yet."""
    from tandemrl.apps.report.records import ReportError, read_config, read_steps
    from tandemrl.training.tracking import rest_of_steps

    try:
        steps, _ = read_steps(run / "metrics.jsonl")
        total = (read_config(run).get("train") or {}).get("steps")
    except ReportError:  # a file is being written
        return ""
    if not steps:
        return ""
    done = steps[-1]["step"]
    times = [step["time/step"] for step in steps if "time/step" in step]
    if not isinstance(total, int):
        return f", step {done}"
    left = f", {rest_of_steps(times, total - done)}" if times and done < total else ""
    return f", step {done} of {total}{left}"
