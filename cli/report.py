"""``tandemrl report`` and ``tandemrl export``."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Everything below it is reported on.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="The page; default DIR/report.html.")] = None,
    title: Annotated[str | None, typer.Option(help="Default: the experiment's name, or DIR's.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id of the models' tokenizer, if it is not found.")
    ] = None,
) -> None:
    """Turn the runs and evaluations below DIR into one HTML page. Give it again while a run is in progress."""
    if out is not None and out.suffix != ".html":
        raise typer.BadParameter(f"{out}: the page needs a name that ends in .html", param_hint="--out")
    from tandemrl.apps.report import build_report, write_report
    from tandemrl.cli.lines import echo

    built = build_report(folder, title=title, tokenizer=tokenizer)
    page = write_report(built, out)
    typer.echo(f"{page} ({page.stat().st_size / 1e6:.2f} MB)")
    for caveat in built.caveats:
        echo(f"note: {caveat}", err=True)


app = typer.Typer(help="Write results in the formats of other tools.", no_args_is_help=True)


@app.command("inspect")
def inspect_logs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run, or a folder of runs and evaluations.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the logs; default DIR/inspect.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id of the models' tokenizer, if it is not found.")
    ] = None,
) -> None:
    """Write the samples as logs of Inspect, one per step of a run and per arm of an evaluation, with the author of
    each span. Look at them with `inspect view --log-dir DIR/inspect`."""
    from tandemrl.apps.report.inspect_log import export_inspect
    from tandemrl.cli.lines import echo
    from tandemrl.models.loading import load_tokenizer

    known = None if tokenizer is None else load_tokenizer(tokenizer)
    written = export_inspect(folder, out, tokenizer=known, say=lambda line: echo(f"note: {line}", err=True))
    typer.echo(f"{len(written)} logs in {written[0].parent}")
