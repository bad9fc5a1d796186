"""``tandemrl model``."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Build models.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps ``tiny`` a named command while it is the only one."""


@app.command()
def tiny(
    out: Annotated[Path, typer.Option(help="Folder for senior/, junior/ and manifest.json.")] = Path("runs/tiny"),
    pair: Annotated[str, typer.Option(help="Which pair: plain, jargon or repair.")] = "plain",
    seed: Annotated[int, typer.Option(help="Seed of data, weights and order.")] = 0,
) -> None:
    """Build the tiny senior/junior pair, a minute or two on two CPU cores; a finished one is kept."""
    from rich.progress import Progress

    from tandemrl.tiny import build_tiny_pair

    with Progress(transient=True) as bars:
        bar = bars.add_task(f"warm start of the {pair} pair", total=None)
        manifest = build_tiny_pair(
            out,
            pair=pair,
            seed=seed,
            progress=lambda step, steps, loss: bars.update(bar, completed=step, total=steps),
        )
    base = ", ".join(f"{name} {value:.3g}" for name, value in manifest["base"].items())
    typer.echo(f"{out}: {manifest['parameters']:,} parameters, {manifest['vocab_size']} tokens, {base}")
