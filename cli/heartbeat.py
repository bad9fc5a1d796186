"""Says how far a command is: a progress bar on a terminal, elsewhere a line now and then."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import typer

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
    from tandemrl.training.tracking import time_left

    try:
        steps = read_steps(run / "metrics.jsonl")
        total = (read_config(run).get("train") or {}).get("steps")
    except ReportError:  # a file is being written
        return ""
    if not steps:
        return ""
    done = steps[-1]["step"]
    times = [step["time/step"] for step in steps if "time/step" in step]
    if not isinstance(total, int):
        return f", step {done}"
    left = f", {time_left(median(times[-5:]) * (total - done))}" if times and done < total else ""
    return f", step {done} of {total}{left}"
