"""``tandemrl regrade``: other graders over the stored texts of an evaluation."""

from pathlib import Path
from typing import Annotated

import typer

from tandemrl.cli.keys import keys


def regrade(
    evaluation: Annotated[
        Path, typer.Argument(help="An evaluation (folder or file), a run, or a folder of seed-N of either.")
    ],
    overrides: Annotated[list[str] | None, keys("Keys of reward, judge or sandbox, e.g. reward.gsm8k=tandem")] = None,
    grader: Annotated[
        str | None, typer.Option(help="For all rows: a grader's name, module:function, or a sum of both.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Take judge and data.columns from this config; default: the run's own.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="How many of the changed verdicts to show per phase.")] = 5,
    out: Annotated[
        Path | None, typer.Option(help="New folder; default: beside the old, with the grader's name.")
    ] = None,
) -> None:
    """Grade the stored texts of an evaluation again. Writes a new evaluation folder; no model is loaded.

    Says how many verdicts changed and shows some; changed.jsonl has all. tandemrl compare takes the new folders, too.
    """
    from rich.console import Console

    from tandemrl.cli.lines import echo, table
    from tandemrl.evals.regrade import CHANGED
    from tandemrl.evals.regrade import regrade as graded_again

    done = graded_again(evaluation, grader=grader, overrides=overrides or (), config=config, out=out)
    rows, several = [], len(done) > len({each.phase for each in done})
    for each in done:
        place = f"{each.file.parent.parent.name}: {each.phase}" if several else each.phase
        up = sum(bool(new.correct) for _, new in each.changed)
        share = f"{len(each.changed)} ({len(each.changed) / each.samples:.1%})"
        moved = [f"{metrics['pass@1']:.4f}" for metrics in (each.before, each.metrics["macro"])]
        rows.append((place, str(each.samples), share, f"+{up} -{len(each.changed) - up}", str(each.rescored), *moved))
    titles = ["texts", "changed", "right", "other scores", "pass@1", "now"]
    Console().print(table(None, ["phase"], titles, rows))
    for each in done:
        for old, new in each.changed[:show]:
            verdict = "wrong -> right" if new.correct else "right -> wrong"
            tail = " ".join(old.text.split())[-80:]
            of = f"{each.phase}, {old.example_id}, sample {old.sample}"
            echo(f"{of}: {verdict}; {old.answer!r} -> {new.answer!r}; …{tail}")
    for folder in dict.fromkeys(each.file.parent for each in done):
        typer.echo(f"written to {folder} (every changed verdict: {CHANGED})")
