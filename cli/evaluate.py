"""``tandemrl eval PHASE``: one command per phase and one for all of them, with the same options."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandemrl.cli.keys import keys
from tandemrl.cli.lines import table

if TYPE_CHECKING:
    from rich.table import Table

    from tandemrl.config import Config

COMMANDS = {
    "all": "Every phase that the junior and the judge allow. One file each; rerun to resume.",
    "pass-at-k": "The senior alone: unbiased pass@k. With bootstrap intervals over problems.",
    "tandem": "Senior and junior generate together, by word. Two vocabularies: by whole words; agents that were "
    "trained with turn: by turn.",
    "handoff": "Senior and junior take turns, one step each. Either of them starts.",
    "legibility": "How well the junior predicts the senior's solo responses. Cross-entropy per token and per byte, in "
    "nats, and acceptance, the fraction of tokens that the junior also draws from the same random numbers.",
    "drift": "How far the senior's solo responses are from the junior. Surprisals and exact KL per token, in nats.",
    "junior": "The junior alone: pass@k, and cross-entropy in nats.",
    "surprise": "How the senior's texts, and their own, surprise each of eval.readers. Needs no ground truths.",
    "recover": "Do eval.readers get back on track after a wrong step that is planted in the senior's right texts?",
    "checkable": "Do eval.readers tell the senior's right texts from its wrong ones? AUROC within problems.",
    "monitor": "Do eval.readers see a cue that is planted in the senior's texts? TPR, TNR, and their product g_mean2.",
    "judge-legibility": "How well can correct responses be followed? A judge says, from 0 to 4.",
    "intervene": "Does the senior answer the same from a part of its own text, or after a planted mistake?",
    "entropy": "How sharply does the senior sample? The mean entropy, in nats per token, of what it draws from.",
    "transfer": "Can other models follow the senior? Each of eval.readers gets 0 to 100 % of the steps, then answers.",
    "handover-effect": "Where the senior's solo responses stop being legible. What handing over to the junior does to "
    "the reward, step by step, against the senior with the same random numbers. Not part of all: try it with --limit.",
    "verified": "Pass@k of responses whose reasoning a judge also accepts. The judge: judge.url.",
}

Overrides = Annotated[list[str] | None, keys("Any config key, e.g. reward.gsm8k=tandem")]
Data = Annotated[
    list[str] | None, typer.Option(help="JSONL or Parquet file, synthetic:PAIR:SPLIT[:COUNT] …; repeatable.")
]
K = Annotated[str | None, typer.Option(help="The k of pass@k, e.g. 1,2,4,8.")]
Profile = Annotated[
    str | None, typer.Option(help="tiny (64 tokens), paper (3,000) or custom (eval.…); default: the run's or model's.")
]
Settings = Annotated[
    str | None, typer.Option("--config", help="Take all else from this config or run; default: the model's own run.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use the first rows only, of all sources together.")]
Out = Annotated[Path, typer.Option(help="Folder, or a file ending in .json.")]

app = typer.Typer(help="Evaluate a senior alone or together with a junior.", no_args_is_help=True)


def _command(name: str) -> Callable[..., None]:
    def command(
        model: Annotated[str, typer.Option(help="The senior: HF folder or hub id.")],
        overrides: Overrides = None,
        junior: Annotated[str | None, typer.Option(help="The junior, where one is needed; default: the run's.")] = None,
        data: Data = None,
        config: Settings = None,
        k: K = None,
        samples: Annotated[int | None, typer.Option(help="Samples per problem.")] = None,
        profile: Profile = None,
        limit: Limit = None,
        out: Out = Path("eval"),
    ) -> None:
        from rich.console import Console

        from tandemrl.cli.heartbeat import progress_bars
        from tandemrl.evals import PHASES, evaluate, left_out

        resolved, stated = resolved_for(model, config, overrides, data, k=k, samples=samples, profile=profile)
        resolved = replace(resolved, model=replace(resolved.model, junior=junior or resolved.model.junior))
        phases = None if name == "all" else (name,)
        with progress_bars("loading", err=True) as progress:
            results = evaluate(
                resolved, model=model, out=out, phases=phases, limit=limit, stated=stated, progress=progress
            )
        settings = f"profile {resolved.eval.profile}, {resolved.eval.samples} samples per problem"
        if name == "all":
            Console().print(summary_table(f"all phases ({settings})", results))
            unmet = {name: reason for name, reason in left_out(resolved).items() if not PHASES[name].by_name}
            for phase, reason in unmet.items():
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


@app.command()
def qa(
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="HF folder or hub id; with --endpoint its name there.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Of an OpenAI-compatible server, http://HOST:PORT/v1.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable with the endpoint's key; default: none.")
    ] = None,
    data: Data = None,
    config: Settings = None,
    predictions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write MuSiQue's official prediction file, in the rows' order.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples per question; predictions are the first ones.")] = 1,
    k: K = None,
    profile: Profile = None,
    limit: Limit = None,
    out: Out = Path("eval"),
) -> None:
    """Questions about documents (MuSiQue). One model searches and answers; EM, F1, citations … by number of hops.

    The environment is rollout.environment, or multihop. The result is one of the phase pass-at-k.
    """
    from rich.console import Console

    from tandemrl.cli.heartbeat import progress_bars
    from tandemrl.config import ConfigError
    from tandemrl.data.loading import load_rows
    from tandemrl.evals import Endpoint, evaluate, read_samples
    from tandemrl.evals.files import result_file
    from tandemrl.tasks.qa.predictions import by_group, write_predictions
    from tandemrl.tasks.qa.predictions import predictions as predicted

    source = Endpoint(endpoint, model, api_key_env) if endpoint is not None else model
    if source is None or (endpoint is None and api_key_env is not None):
        raise ConfigError("give --model, or --endpoint URL" if source is None else "--api-key-env needs --endpoint URL")
    own = None if endpoint is not None else model
    resolved, stated = resolved_for(own, config, overrides, data, k=k, samples=samples, profile=profile)
    if not resolved.rollout.environment_kind.turns:
        resolved = replace(resolved, rollout=replace(resolved.rollout, environment="multihop"))
    resolved = replace(resolved, model=replace(resolved.model, junior=None))
    with progress_bars("loading", err=True) as progress:
        done = evaluate(
            resolved, model=source, out=out, phases=("pass-at-k",), limit=limit, stated=stated, progress=progress
        )
    result = done["pass-at-k"]
    title = f"questions (profile {resolved.eval.profile}, {resolved.eval.samples} samples each)"
    Console().print(groups_table(title, by_group(result["metrics"]["macro"])))
    if predictions is not None:
        rows = load_rows(resolved.data.eval, columns=resolved.data.columns)[:limit]
        said = read_samples(result_file("pass-at-k", out).with_name(result["samples"]))
        write_predictions(predictions, predicted(said, rows))
    if endpoint is not None:
        typer.echo("authors unknown: the tokens of a model behind an endpoint are not known")
    typer.echo(f"written to {out}" + (f", {predictions}" if predictions is not None else ""))


@app.command()
def verifier(
    data: Annotated[str, typer.Option(help="HardVerify-Math: its file, or hf:REPO:CONFIG:SPLIT.")],
    overrides: Overrides = None,
    config: Annotated[str | None, typer.Option(help="Of rewards and judge; default: judge.prompt=tinyv.")] = None,
    limit: Limit = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the counts and every verdict.")] = None,
) -> None:
    """A judge or a scorer on HardVerify-Math. Correct answers that it accepts, wrong ones that it rejects."""
    from rich.console import Console

    from tandemrl.config import load, stated_keys
    from tandemrl.tasks.math.verifier import DEFAULTS, Verdicts, bench_verifier

    typed = overrides or ()
    resolved = load(config, [*(DEFAULTS if config is None else ()), *typed])
    stated = None if config is None else stated_keys(typed)
    counts = bench_verifier(resolved, data, limit=limit, out=out, stated=stated)
    columns = [name.replace("_", " ") for name in Verdicts._fields]
    rows = [(source, *map(str, row)) for source, row in counts.items()]
    Console().print(table(None, ["problems from"], columns, rows))
    if out is not None:
        typer.echo(f"written to {out}")


def resolved_for(
    model: str | None,
    config: str | None,
    overrides: Sequence[str] | None,
    data: Sequence[str] | None,
    *,
    k: str | None,
    samples: int | None,
    profile: str | None,
) -> "tuple[Config, Collection[str] | None]":
    """The configuration that the options of a command ask for, and the keys of it that have to be used (None: all).

    Without --config it is that of the model's own run. Without a profile, the sampling is that of the run, or what the
    model's files recommend; the command prints it.

    Raises:
        ConfigError: an option is malformed, or there is no data.
    """
    from tandemrl.config import CUSTOM_SAMPLING, ConfigError, load, stated_keys
    from tandemrl.evals import profile_of, run_of_model, sampling_of_model

    no_training = {"train.eval_every": 0, "data.monitor": []}  # which need other k and samples
    chosen: dict[str, object] = {**no_training}
    if profile not in (None, "custom"):  # in place of that of the config and its sampling
        chosen |= {f"eval.{key}": "null" if value is None else value for key, value in CUSTOM_SAMPLING.items()}
    if samples is not None:
        chosen |= {"eval.samples": samples, "eval.k": [each for each in (1, 2, 4, 8) if each <= samples]}
    chosen |= {} if k is None else {"eval.k": f"[{k}]"}
    typed, own = stated_keys(overrides or ()), run_of_model(model) if config is None and model is not None else None
    source = config or (None if own is None else str(own))
    if not data and source is None and "data.eval" not in typed:
        raise ConfigError("no data to evaluate on: give --data, or --config for its data.eval")
    asked = profile is not None or "eval.profile" in typed
    if profile is not None:
        chosen["eval.profile"] = profile
    elif not asked:
        said = sampling_of_model(model) if source is None else {}
        other = [each for each in overrides or () if not each.startswith("eval.")]
        of_run = load(source, [*_assigned(no_training), *other]) if source is not None else None
        if of_run is not None and of_run.eval.profile == "tiny":
            # the default, with which a config says nothing: its own limit is that of its rollouts
            said = {"max_tokens": of_run.rollout.max_tokens}
        chosen |= {f"eval.{key}": value for key, value in ({"profile": "custom"} | said if said else {}).items()}
    resolved = load(source, [*_assigned(chosen), *(overrides or ())])
    if not asked:
        used, where = profile_of(resolved.eval).sampling, "the defaults" if model is None else f"{model}, no run"
        drawn = f"at most {used.max_tokens} tokens, temperature {used.temperature:g}, top_p {used.top_p:g}"
        typer.echo(f"{drawn}, top_k {used.top_k} (from {source or where}); others: --profile, --config")
    resolved = replace(resolved, data=replace(resolved.data, eval=tuple(data or resolved.data.eval)))
    return resolved, None if source is None else typed


def _assigned(values: Mapping[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def summary_table(title: str, results: Mapping[str, Mapping[str, Any]]) -> "Table":
    """A table of the headline metrics: a row per metric, a column per set, and macro if there are several. For lack of
    room, there are none of a single arm by hops."""
    from tandemrl.evals import is_headline

    sets = _columns(next(iter(results.values()))["metrics"])
    rows = list[tuple[str, ...]]()
    for phase, result in results.items():
        columns = _columns(result["metrics"]).values()
        shown = [name for name in result["metrics"]["macro"] if is_headline(name) and name.count("/") < 2]
        rows += [*((phase, name, *(_cell(values, name) for values in columns)) for name in shown), ()]
    return table(title, ["phase", "metric"], sets, rows)


def groups_table(title: str, groups: Mapping[str, Mapping[str, float]]) -> "Table":
    """A table with a row per headline metric and a column per group of problems. The first column is for all problems,
    and has the intervals."""
    from tandemrl.evals import is_headline

    rows = []
    for metric in ("problems", *filter(is_headline, groups["all"])):
        first, *others = (_cell(values, metric) for values in groups.values())
        rows.append((metric, first, *(cell.partition(" [")[0] for cell in others)))
    return table(title, ["metric"], [name.replace("=", " ") for name in groups], rows)


def metrics_table(title: str, metrics: Mapping[str, Any]) -> "Table":
    """A table with a row per metric, a column per set, and macro. A bootstrap interval follows its value."""
    columns = {**metrics["by_set"], "macro": metrics["macro"]}
    names = [name for name in metrics["macro"] if not name.endswith(("/low", "/high"))]
    rows = [(name, *(_cell(values, name) for values in columns.values())) for name in names]
    return table(title, ["metric"], columns, rows)


def _columns(metrics: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    return metrics["by_set"] | ({"macro": metrics["macro"]} if len(metrics["by_set"]) > 1 else {})


def _cell(values: Mapping[str, float], metric: str) -> str:
    value, low, high = (values.get(f"{metric}{end}") for end in ("", "/low", "/high"))
    if value is None:
        return "—"
    shown = f"{value:.4f}" if isinstance(value, float) else str(value)
    return shown if low is None or high is None else f"{shown} [{low:.3f}, {high:.3f}]"
