"""``tandemrl report``."""

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
