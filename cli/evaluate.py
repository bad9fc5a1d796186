"""``tandemrl eval PHASE``: one command per phase and one for all of them, with the same options."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID
    from rich.table import Table

    from tandemrl.evals import Phase, Progress

Command = Literal["all", "pass-at-k", "tandem", "handoff", "legibility", "drift", "verified"]
COMMANDS: dict[Command, str] = {
    "all": "All phases that the junior and the judge allow, one file each; what a killed run has finished is kept.",
    "pass-at-k": "The senior alone: unbiased pass@k with bootstrap intervals over problems.",
    "tandem": "Senior and junior write together, by the word schedule of training.",
    "handoff": "Senior and junior take turns, one step each; with either of them first.",
    "legibility": "How well the junior predicts what the senior writes alone: cross-entropy per token, in nats.",
    "drift": "How far what the senior writes alone is from the junior: surprisals and exact KL per token, in nats.",
    "verified": "Pass@k of correct answers whose reasoning a judge (judge.url or judge.model) accepts.",
}

_BOUNDS = ("/low", "/high")

app = typer.Typer(help="Evaluate a senior alone or together with a junior.", no_args_is_help=True)


def _command(name: Command) -> Callable[..., None]:
    def command(
        model: Annotated[str, typer.Option(help="The senior: HF folder or hub id.")],
        overrides: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Any config key, e.g. reward.gsm8k=tandem")
        ] = None,
        junior: Annotated[
            str | None, typer.Option(help="The junior; default: that of --config. pass-at-k and verified need none.")
        ] = None,
        data: Annotated[
            list[str] | None, typer.Option(help="JSONL or Parquet file, synthetic:PAIR:SPLIT[:COUNT] …; repeatable.")
        ] = None,
        config: Annotated[
            str | None, typer.Option(help="Take data, prompts, rewards and profile from this config, e.g. of a run.")
        ] = None,
        k: Annotated[str | None, typer.Option(help="The k of pass@k, e.g. 1,2,4,8.")] = None,
        samples: Annotated[int | None, typer.Option(help="Samples per problem.")] = None,
        profile: Annotated[str | None, typer.Option(help="tiny, paper or custom (eval.temperature=… etc.).")] = None,
        limit: Annotated[
            int | None, typer.Option(min=1, help="Use the first rows only, of all sources together.")
        ] = None,
        out: Annotated[Path, typer.Option(help="Folder, or a file ending in .json.")] = Path("eval"),
        seed: Annotated[int | None, typer.Option(help="Seed of every completion.")] = None,
        device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
        dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    ) -> None:
        from tandemrl.config import ConfigError, load, stated_keys

        if k is not None and not all(part.strip().isdigit() for part in k.split(",")):
            raise ConfigError(f"--k {k}: expected whole numbers with commas between them, e.g. 1,2,4,8")
        options: dict[str, object] = {
            "eval.k": k and f"[{k}]",
            "eval.samples": samples,
            "eval.profile": profile,
            "eval.seed": seed,
            "model.device": device,
            "model.dtype": dtype,
        }
        if samples is not None and k is None:
            options["eval.k"] = [each for each in (1, 2, 4, 8) if each <= samples]
        assignments = [f"{key}={value}" for key, value in options.items() if value is not None]
        resolved = load(config, [*assignments, *(overrides or ())])
        if not data and config is None:
            raise ConfigError("no data to evaluate on: give --data, or --config for its data.eval")

        from tandemrl.evals import evaluate, left_out

        if junior is None and config is not None:
            junior = resolved.model.junior
        resolved = replace(
            resolved,
            model=replace(resolved.model, junior=junior),
            data=replace(resolved.data, eval=tuple(data or resolved.data.eval)),
        )
        with _bars() as progress:
            results = evaluate(
                resolved,
                model=model,
                out=out,
                phases=None if name == "all" else (name,),
                limit=limit,
                stated=None if config is None else stated_keys(overrides or ()),
                progress=progress,
            )
        from rich.console import Console

        settings = f"profile {resolved.eval.profile}, {resolved.eval.samples} samples per problem"
        if name == "all":
            Console().print(summary_table(f"all phases ({settings})", results))
            for phase, reason in left_out(resolved).items():
                typer.echo(f"left out: {phase} {reason}")
        else:
            Console().print(metrics_table(f"{name} ({settings})", results[name]["metrics"]))
        dropped = next(iter(results.values()))["metrics"]["macro"].get("prompts_dropped", 0)
        if dropped:
            typer.echo(f"{dropped:.0f} rows are longer than data.max_prompt_tokens and were left out")
        typer.echo(f"written to {out}")

    command.__doc__ = COMMANDS[name]
    return command


for _name in COMMANDS:
    app.command(_name)(_command(_name))


@contextmanager
def _bars() -> "Iterator[Progress]":
    """A progress bar for what is under way, on a terminal; elsewhere a line every ten seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from tandemrl.cli.heartbeat import heartbeat

    console = Console(stderr=True)
    if not console.is_terminal:
        now = ["loading"]

        def note(what: str, done: int, total: int) -> None:
            now[0] = f"{what}: {done:,} of {total:,}"

        with heartbeat(lambda line: typer.echo(line, err=True), lambda: now[0]):
            yield note
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield progress


def summary_table(title: str, results: "Mapping[Phase, Mapping[str, Any]]") -> "Table":
    """The metrics to look at first, a row each; a column per set, and macro where there are several."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    table.add_column("phase")
    table.add_column("metric", no_wrap=True)
    for name in _columns(next(iter(results.values()))["metrics"]):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for phase, result in results.items():
        columns = _columns(result["metrics"])
        shown = [name for name in result["metrics"]["macro"] if _is_summary(phase, name)]
        for name in shown:
            cells = [Text(_cell(values, name)) for values in columns.values()]
            table.add_row(Text(phase), Text(name), *cells, end_section=name == shown[-1])
    return table


def _columns(metrics: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    return metrics["by_set"] | ({"macro": metrics["macro"]} if len(metrics["by_set"]) > 1 else {})


def _is_summary(phase: str, metric: str) -> bool:
    """Of every phase what it is about; what else there is to say of a text, of the solo texts only."""
    about = ("pass@", "verified_pass@", "rejected_rate", "cross_entropy", "kl", "excess", "unlikely_rate")
    own = (*about, "maj@", "length", "truncation_rate") if phase == "pass-at-k" else about
    return metric.rpartition("/")[2].startswith(own) and not metric.endswith(_BOUNDS)


def metrics_table(title: str, metrics: Mapping[str, Any]) -> "Table":
    """A row per metric, a column per set, and macro; a bootstrap interval stands behind its value."""
    from rich.table import Table
    from rich.text import Text

    columns = {**metrics["by_set"], "macro": metrics["macro"]}
    table = Table(title=title, title_justify="left")
    table.add_column("metric")
    for name in columns:
        table.add_column(Text(name), justify="right")
    for metric in metrics["macro"]:
        if not metric.endswith(_BOUNDS):
            table.add_row(Text(metric), *(Text(_cell(values, metric)) for values in columns.values()))
    return table


def _cell(values: Mapping[str, float], metric: str) -> str:
    value, low, high = (values.get(f"{metric}{end}") for end in ("", "/low", "/high"))
    if value is None:
        return ""
    shown = f"{value:.4f}" if isinstance(value, float) else str(value)
    return shown if low is None or high is None else f"{shown} [{low:.3f}, {high:.3f}]"
