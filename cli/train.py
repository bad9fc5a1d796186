"""``tandemrl train``."""

from typing import Annotated

import typer


def train(
    context: typer.Context,
    config: Annotated[str, typer.Option("--config", "-c", help="A YAML file, or the name of a packaged config.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.lr=1e-5")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the config and the batch plan, and stop.")] = False,
    resume: Annotated[
        str,
        typer.Option(help="auto (from the newest checkpoint, if any), never (output_dir must be fresh), or a folder."),
    ] = "auto",
) -> None:
    """Train a senior as a config says; KEY=VALUE arguments override the file."""
    from tandemrl.config import batch_plan, load, to_yaml

    resolved = load(config, overrides or ())
    if dry_run:
        typer.echo(f"{to_yaml(resolved)}\n{batch_plan(resolved)}")
        return
    from tandemrl import train as training
    from tandemrl.parallel import leave

    context.find_root().call_on_close(leave)  # after an error, once it is printed; not as the interpreter ends
    output = training.train(resolved, resume=resume)
    if leave():
        typer.echo(f"done: {output}")
