"""``tandemrl eval PHASE``: one command per phase, all with the same options."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

Phase = Literal["pass-at-k", "tandem", "handoff", "legibility", "verified"]
PHASES: dict[Phase, str] = {
    "pass-at-k": "The senior alone: unbiased pass@k with bootstrap intervals over problems.",
    "tandem": "Senior and junior write together, by the word schedule of training.",
    "handoff": "Senior and junior take turns, one step each; with either of them first.",
    "legibility": "How well the junior predicts what the senior writes alone: cross-entropy per token, in nats.",
    "verified": "Pass@k of correct answers whose reasoning a judge (judge.url or judge.model) accepts.",
}

app = typer.Typer(help="Evaluate a senior alone or together with a junior.", no_args_is_help=True)


def _command(phase: Phase) -> Callable[..., None]:
    def command(
        model: Annotated[str, typer.Option(help="The senior: HF folder or hub id.")],
        overrides: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Any config key, e.g. reward.gsm8k=tandem")
        ] = None,
        junior: Annotated[
            str | None, typer.Option(help="The junior; default: that of --config. Not used by pass-at-k, verified.")
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
        from tandemrl.config import ConfigError, load

        if k is not None and not all(part.strip().isdigit() for part in k.split(",")):
            raise ConfigError(f"--k {k}: expected whole numbers with commas between them, e.g. 1,2,4,8")
        given: dict[str, object] = {
            "eval.k": k and f"[{k}]",
            "eval.samples": samples,
            "eval.profile": profile,
            "eval.seed": seed,
            "model.device": device,
            "model.dtype": dtype,
        }
        if samples is not None and k is None:
            given["eval.k"] = [each for each in (1, 2, 4, 8) if each <= samples]
        options = [f"{key}={value}" for key, value in given.items() if value is not None]
        resolved = load(config, [*options, *(overrides or ())])
        if not data and config is None:
            raise ConfigError("no data to evaluate on: give --data, or --config for its data.eval")

        from tandemrl.evals import run_phase

        result = run_phase(
            phase,
            model=model,
            junior=junior or (resolved.model.junior if config else None),
            data=data or resolved.data.eval,
            eval=resolved.eval,
            out=out,
            reward=resolved.reward,
            sandbox=resolved.sandbox,
            judge=resolved.judge,
            dtype=resolved.model.dtype,
            device=resolved.model.device,
            prompt_suffix=resolved.data.prompt_suffix,
            max_prompt_tokens=resolved.data.max_prompt_tokens,
            limit=limit,
            threads=resolved.train.threads,
            prob_senior=resolved.selection.prob_senior,
            max_gap_tokens=resolved.selection.max_gap_tokens,
            rollout=resolved.rollout,
        )
        from rich.console import Console

        settings = f"profile {resolved.eval.profile}, {resolved.eval.samples} samples per problem"
        Console().print(metrics_table(f"{phase} ({settings})", result["metrics"]))
        typer.echo(f"written to {out}")

    command.__doc__ = PHASES[phase]
    return command


for _phase in PHASES:
    app.command(_phase)(_command(_phase))


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
        if not metric.endswith(("/low", "/high")):
            table.add_row(Text(metric), *(Text(_cell(values, metric)) for values in columns.values()))
    return table


def _cell(values: Mapping[str, float], metric: str) -> str:
    value, low, high = (values.get(f"{metric}{end}") for end in ("", "/low", "/high"))
    if value is None:
        return ""
    shown = f"{value:.4f}" if isinstance(value, float) else str(value)
    return shown if low is None or high is None else f"{shown} [{low:.3f}, {high:.3f}]"
