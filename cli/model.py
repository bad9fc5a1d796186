"""``tandemrl model``."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tandemrl.experiments.warm_start import Progress

app = typer.Typer(help="Build models.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps ``tiny`` a named command while it is the only one."""


@app.command()
def tiny(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for senior/, junior/ and manifest.json; default runs/tiny, of agents runs/tiny-PAIR."
        ),
    ] = None,
    pair: Annotated[str, typer.Option(help="Which pair: plain, jargon, repair, hops or hops_jargon.")] = "plain",
    seed: Annotated[int, typer.Option(help="Seed of data, weights and order.")] = 0,
) -> None:
    """Build the tiny senior/junior pair. One to four minutes on a CPU; a finished one is kept."""
    from tandemrl.data import hops
    from tandemrl.experiments.tiny import build_tiny_pair

    out = out or Path(f"runs/tiny-{pair}" if pair in hops.PAIRS else "runs/tiny")
    with _shown(f"warm start of the {pair} pair") as progress:
        manifest = build_tiny_pair(out, pair=pair, seed=seed, progress=progress)
    base = ", ".join(f"{name} {value:.3g}" for name, value in manifest["base"].items())
    typer.echo(f"{out}: {manifest['parameters']:,} parameters, {manifest['vocab_size']} tokens, {base}")


@contextmanager
def _shown(what: str) -> "Iterator[Progress]":
    """A context with a progress bar on a terminal, and elsewhere a line every ten seconds."""
    from rich.console import Console
    from rich.progress import Progress as Bars

    from tandemrl.cli.heartbeat import heartbeat
    from tandemrl.experiments.warm_start import progress_line

    console, now, started = Console(), [what], time.monotonic()
    if console.is_terminal:
        with Bars(console=console, transient=True) as bars:
            bar = bars.add_task(what, total=None)
            yield lambda step, steps, loss: bars.update(bar, completed=step, total=steps)
        return

    def note(step: int, steps: int, loss: float) -> None:
        now[0] = f"{what}: {progress_line(step, steps, loss, time.monotonic() - started)}"

    with heartbeat(typer.echo, lambda: now[0]):
        yield note
