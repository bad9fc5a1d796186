"""``tandemrl compare``: paired differences between two evaluations, or between two sets of seeds."""

from pathlib import Path
from typing import Annotated

import typer


def compare(
    a: Annotated[
        Path,
        typer.Argument(
            help="An evaluation folder, a folder of repetitions seed-N, or a path with 'seed-*' (quoted) for all seeds."
        ),
    ],
    b: Annotated[Path, typer.Argument(help="The same for the other side, on the same problems.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Show this metric only, e.g. pass@1; repeatable. Default: the headline ones."),
    ] = None,
    resamples: Annotated[int, typer.Option(min=1, help="Resamples of the bootstrap.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    out: Annotated[Path | None, typer.Option(help="Also write the contrasts to this JSON file.")] = None,
) -> None:
    """Say how A differs from B, metric by metric; "A > B" only where the interval of A - B excludes 0.

    One evaluation on each side: bootstrap interval over problems. Seeds on each side: t interval over the seeds.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tandemrl.compare import CompareError, show_interval, write_comparison
    from tandemrl.compare import compare as contrasts_of
    from tandemrl.evals import is_headline

    if not 0 < level < 1:
        raise CompareError(f"--level {level}: expected a number between 0 and 1, e.g. 0.95")
    wanted = (lambda name: name in metric) if metric else is_headline
    contrasts = contrasts_of(a, b, shown=wanted, resamples=resamples, seed=seed, level=level)
    if not contrasts:
        raise CompareError(f"--metric {', '.join(metric or [])}: no phase that both sides have has such a metric")
    seeds = len(contrasts[0].per_seed)
    over = f"t interval over {seeds} seeds" if seeds > 1 else f"bootstrap over {contrasts[0].problems} problems"
    table = Table(title=f"A = {a}, B = {b}", title_justify="left")
    table.add_column("phase")
    table.add_column("metric")
    for title in ("A", "B", f"A - B [{level:.0%}, {over}]"):
        table.add_column(Text(title), justify="right")
    table.add_column("")
    for i, each in enumerate(contrasts):
        last = i + 1 == len(contrasts) or contrasts[i + 1].phase != each.phase
        figures = (f"{each.a:.4f}", f"{each.b:.4f}", show_interval(each.difference, digits=4))
        style = "bold" if each.verdict[0] == "A" else "dim"
        table.add_row(*map(Text, (each.phase, each.metric, *figures)), Text(each.verdict, style), end_section=last)
    Console().print(table)
    if out is not None:
        write_comparison(out, contrasts, a=str(a), b=str(b), level=level)
        typer.echo(f"written to {out}")
