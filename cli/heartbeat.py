"""Says how far a command is: a progress bar on a terminal, elsewhere a line now and then."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

EVERY_S = 10.0
TAIL = 1 << 16
"""How many bytes are read from the end of a file for its last step."""


@contextmanager
def heartbeat(say: Callable[[str], None], line: Callable[[], str], *, every_s: float = EVERY_S) -> Iterator[None]:
    """A context in which a thread calls ``say`` every ``every_s`` seconds, with the time so far and the text of
    ``line``."""
    ended, start = threading.Event(), time.monotonic()

    def beat() -> None:
        while not ended.wait(every_s):
            try:
                shown = line()
            except (OSError, ValueError):  # a file went, or was replaced, while it was looked at
                continue
            say(f"{time.monotonic() - start:.0f} s: {shown}")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def progress_bars(start: str, *, err: bool = False) -> Iterator[Callable[..., None]]:
    """A context with a function of what is done, how much of it, of how much, and a note.

    Args:
        start: the line until it is called.
        err: whether lines go to standard error.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=err)
    if not console.is_terminal:
        now = [start]

        def note(what: str, done: int, total: int, more: str = "") -> None:
            now[0] = f"{what}: {done:,} of {total:,}{more}"

        with heartbeat(lambda line: typer.echo(line, err=err), lambda: now[0]):
            yield note
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int, more: str = "") -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total, description=f"{what}{more}")

        yield advance


def last_written(folder: Path) -> str:
    """What an experiment in ``folder`` has written last, of a training run with the step."""
    from tandemrl.apps.report.records import read_steps

    files = {file: file.stat().st_mtime for file in folder.glob("*/*/**/*.json*") if file.is_file()}
    if not files:
        return "building the models"
    newest = max(files, key=lambda file: files[file])
    steps = read_steps(newest, TAIL) if newest.name == "metrics.jsonl" else []
    return f"last written: {newest.relative_to(folder)}" + (f", step {steps[-1]['step']}" if steps else "")
