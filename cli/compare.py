"""``tandemrl compare``: paired differences between two runs, two evaluations, or two sets of seeds of either."""

import json
from pathlib import Path
from typing import Annotated, cast, get_args

import typer


def compare(
    a: Annotated[
        Path, typer.Argument(help="A run, an evaluation (folder or file), a folder of seed-N, or a path with 'seed-*'.")
    ],
    b: Annotated[Path, typer.Argument(help="The same for the other side, on the same problems.")],
    metric: Annotated[list[str] | None, typer.Option(help="Show it only, e.g. pass@1; repeatable.")] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(
            help="truncation: only samples that ended by themselves on both sides, in every arm; problems: only those "
            "that both have; repeatable."
        ),
    ] = None,
    all_groups: Annotated[bool, typer.Option("--all", help="Show every metric, also of an arm by groups.")] = False,
    resamples: Annotated[int, typer.Option(min=1, help="Number of bootstrap resamples.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    level: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
    out: Annotated[Path | None, typer.Option(help="Also write the differences to this JSON file.")] = None,
) -> None:
    """Say how A differs from B, metric by metric. "A > B" only where the interval of A - B excludes 0.

    Beside each phase stands the share of the texts that a limit cut off.

    Of a run, its evaluation (DIR/eval) is compared, or else the last one during training. With one evaluation on each
    side, the intervals are bootstrapped over problems; with several seeds, they are t intervals over seeds.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tandemrl.cli.lines import echo
    from tandemrl.config import ConfigError
    from tandemrl.evals import PHASES, is_headline
    from tandemrl.evals.compare import (
        UNDECIDED,
        CompareError,
        Contrast,
        Match,
        config_differences,
        judgement,
        show_interval,
        step_of_texts,
        write_contrasts,
    )
    from tandemrl.evals.compare import compare as contrasts_of

    if not 0 < level < 1:
        raise CompareError(f"--level {level}: expected a number between 0 and 1, e.g. 0.95")

    if unknown := {*(match or ())} - {*get_args(Match)}:
        raise CompareError(f"--match {unknown.pop()}: expected {' or '.join(get_args(Match))}")

    def shown(name: str) -> bool:
        return name in metric if metric else all_groups or (is_headline(name) and name.count("/") < 2)

    matched = cast("tuple[Match, ...]", tuple(match or ()))
    contrasts = contrasts_of(a, b, shown=shown, match=matched, resamples=resamples, seed=seed, level=level)
    if not contrasts:
        raise CompareError(f"--metric {', '.join(metric or [])}: no phase that both sides have has such a metric")
    seeds = len(contrasts[0].per_seed)
    if match:
        echo(f"matched by {' and '.join(match)}: {contrasts[0].problems} problems are left")
    over = f"t interval over {seeds} seeds" if seeds > 1 else f"bootstrap over {contrasts[0].problems} problems"
    typer.echo(f"A = {a}\nB = {b}\n{level:.0%} intervals: {over}")
    if contrasts[0].phase not in PHASES:
        steps = " and ".join(f"step {step_of_texts(side)} of {name}" for name, side in (("A", a), ("B", b)))
        echo(f"the last evaluations during training, of the senior alone: {steps}")
    try:
        differing = config_differences(a, b)
    except ConfigError as error:  # of a run of an earlier version; its results can be compared all the same
        differing = {}
        echo(f"configs not compared: {error}", err=True)
    for key, values in differing.items():
        echo("{}: {} in A, {} in B".format(key, *(json.dumps(value, ensure_ascii=False) for value in values)))
    table = Table(box=SIMPLE_HEAD, padding=0, collapse_padding=True)
    table.add_column("metric", overflow="fold")
    for title in ("A", "B", "A - B"):
        table.add_column(Text(title), justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    groups: dict[str, list[Contrast]] = {}  # a group in a heading, and not in front of every metric: 80 columns
    for each in contrasts:
        group = each.metric.rpartition("/")[0]
        groups.setdefault(f"{each.phase}: {group}" if group else each.phase, []).append(each)
    for group, members in groups.items():
        table.add_row(Text(group, "bold"))
        cut = (f"{share:.1%}" for share in members[0].truncated or ())
        table.add_row(*(Text(cell, "dim") for cell in ("  cut by a limit", *cut)))
        for each in members:
            digits = 3 if max(map(abs, (each.a, each.b, *each.difference))) < 10 else 1
            figures = (f"{each.a:.{digits}f}", f"{each.b:.{digits}f}", show_interval(each.difference, digits=digits))
            style, said = ("dim" if each.verdict == UNDECIDED else "bold"), judgement(each.metric, each.difference)
            said = f"{each.verdict}: {said}" if said in ("better", "worse") else each.verdict
            table.add_row(*map(Text, (f"  {each.metric.rpartition('/')[2]}", *figures)), Text(said, style))
    Console().print(table)
    if out is not None:
        sides = {"schema": 1, "a": str(a), "b": str(b), "level": level, "match": matched, "config": differing}
        write_contrasts(out, contrasts, sides)
        typer.echo(f"written to {out}")
