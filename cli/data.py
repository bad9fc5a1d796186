"""``tandemrl data``: look at rows, and build data sets as files."""

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Look at data, build data sets.", no_args_is_help=True)
build = typer.Typer(help="Write a data set as Parquet files in verl's row schema.", no_args_is_help=True)
app.add_typer(build, name="build")


@app.command()
def show(
    sources: Annotated[
        list[str], typer.Argument(help="JSONL or Parquet file, synthetic:PAIR:SPLIT, hf:REPO:CONFIG:SPLIT")
    ],
    limit: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 3,
) -> None:
    """Print rows as the library reads them."""
    from tandemrl.data.rows import load_rows

    rows = load_rows(sources)
    for row in rows[:limit]:
        typer.echo(f"{row.example_id}  [{row.data_source}]  ground truth: {row.ground_truth}")
        for message in row.messages:
            typer.echo(f"  {message['role']}: {message['content']}")
    typer.echo(f"{min(limit, len(rows))} of {len(rows)} rows")


@build.command()
def gsm8k(
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    source: Annotated[
        Path | None, typer.Option(help="Folder with the original train.jsonl and test.jsonl; default: the hub.")
    ] = None,
    expect_rows: Annotated[int | None, typer.Option(min=0, max=0, help="0 accepts any number of rows.")] = None,
) -> None:
    """GSM8K: 6,973 training, 500 held-out (from the original training split) and 1,319 test problems."""
    from tandemrl.data.builders import GSM8K_ROWS, build_gsm8k

    _report(out, build_gsm8k(source, out, expect_rows=GSM8K_ROWS if expect_rows is None else 0))


@build.command()
def synthetic(
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    pair: Annotated[str, typer.Option(help="The tiny pair the problems are for.")] = "plain",
    train: Annotated[int, typer.Option(min=1, help="Training rows.")] = 2048,
    heldout: Annotated[int, typer.Option(min=1, help="Held-out rows.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the generator.")] = 0,
) -> None:
    """Generated word problems; training and held-out problems are disjoint."""
    from tandemrl.data.builders import build_synthetic

    _report(out, build_synthetic(pair, out, {"train": train, "heldout": heldout}, seed))


def _report(out: Path, manifest: dict[str, Any]) -> None:
    for split, entry in manifest["splits"].items():
        typer.echo(f"{split}: {entry['rows']} rows in {out / entry['file']}")
