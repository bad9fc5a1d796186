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
    step."""
    files = {file: file.stat().st_mtime for file in folder.glob("*/*/**/*.json*") if file.is_file()}
    if not files:
        return "building the models"
    newest = max(files, key=lambda file: files[file])
    if newest.name == "pair.progress.json":
        return json.loads(newest.read_text(encoding="utf-8"))["says"]
    shown = f"last written: {newest.relative_to(folder)}"
    if newest.name != "metrics.jsonl":
        return shown
    *_, last = newest.read_text(encoding="utf-8").splitlines() or [""]
    try:
        return f"{shown}, step {json.loads(last)['step']}"
    except ValueError:  # the line is being written
        return shown
