"""``tandemrl score``: grade stored responses."""

from pathlib import Path
from typing import Annotated

import typer

from tandemrl.cli.keys import keys


def score(
    data: Annotated[
        list[str], typer.Option(help="The rows: JSONL or Parquet file, synthetic:PAIR:SPLIT[:COUNT] …; repeatable.")
    ],
    responses: Annotated[
        Path,
        typer.Option(help="JSONL file; per line a response (or text) and example_id or index, or in the rows' order."),
    ],
    overrides: Annotated[list[str] | None, keys("Any config key, e.g. reward.gsm8k=tandem")] = None,
    config: Annotated[
        str | None, typer.Option(help="Take reward, judge and sandbox from this config, e.g. of a run.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSONL file for the scores, a line per response.")] = None,
) -> None:
    """Score stored responses as training would. Prints the means by data source."""
    from rich.console import Console

    from tandemrl.apps.score import score_file
    from tandemrl.cli.lines import table
    from tandemrl.config import load, stated_keys, warn_of_reward_function

    stated = None if config is None else stated_keys(overrides or ())
    resolved = load(config, overrides or ())
    warn_of_reward_function(resolved)
    summary = score_file(resolved, data, responses, out=out, stated=stated)

    names = dict.fromkeys(name for means in summary.by_set.values() for name in means)
    figures = ((name, "{:.0f}" if name == "responses" else "{:.4f}") for name in names)
    rows = [(name, *(form.format(means.get(name, 0.0)) for means in summary.by_set.values())) for name, form in figures]
    Console().print(table(None, ["mean of"], summary.by_set, rows))
    rate = summary.responses / summary.seconds
    typer.echo(f"{summary.responses} responses in {summary.seconds:.1f} s ({rate:.0f} per second)")
    if out is not None:
        typer.echo(f"written to {out}")
