"""``tandemrl report``."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Everything below it is reported on.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page; default DIR/report.html. FILE.md is beside it.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Default: the experiment's name, or DIR's.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id of the models' tokenizer, if it is not below DIR.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page on this machine, and update it while runs are in progress.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --watch: the port; 0: any free one.")] = 8766,
    every: Annotated[float, typer.Option(min=1, help="With --watch: seconds between updates.")] = 10,
) -> None:
    """Turn the runs and evaluations below DIR into one HTML page. A Markdown page is beside it."""
    if out is not None and out.suffix != ".html":
        raise typer.BadParameter(f"{out}: the page needs a name that ends in .html", param_hint="--out")
    from tandemrl.apps.report import build_report, write_report
    from tandemrl.cli.lines import echo

    if watch:
        from contextlib import suppress

        from tandemrl.apps.report.watch import LiveReport, server
        from tandemrl.files import hint

        if out is not None:
            raise typer.BadParameter("--watch writes no file; leave it out", param_hint="--out")
        if not folder.is_dir():
            raise typer.BadParameter(f"{folder}: no such folder{hint(folder)}", param_hint="DIR")
        live = LiveReport(folder, lambda: build_report(folder, title=title, tokenizer=tokenizer))
        with server(live, port=port, every_s=every) as serving:
            typer.echo(f"open http://127.0.0.1:{serving.server_port} (Ctrl-C ends it)")
            with suppress(KeyboardInterrupt):
                serving.serve_forever()
        return
    built = build_report(folder, title=title, tokenizer=tokenizer)
    page, text = write_report(built, out)
    typer.echo(f"{page} ({page.stat().st_size / 1e6:.2f} MB), {text}")
    for caveat in built.caveats:
        echo(f"note: {caveat}", err=True)
