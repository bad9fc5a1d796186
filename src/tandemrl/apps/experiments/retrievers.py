"""Compares retrievers: every model answers the same questions with each of them. Nothing is trained.

A killed benchmark continues when it is started again.

    OUT/MODEL/eval/RETRIEVER/     an evaluation
    OUT/experiment.json           what was asked for
    OUT/results.json              a row per model and retriever; contrasts with the first retriever
    OUT/report.html
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandemrl import evals
from tandemrl.apps.experiments.arms import ExperimentError
from tandemrl.apps.experiments.experiment import SCHEMA, contrasts_of, measured, reported
from tandemrl.config import load
from tandemrl.files import versions, write_text

NAME = "retrievers"
METRICS: dict[str, tuple[str, str]] = {
    **{
        f"solo/{name}": ("pass-at-k", name)
        for name in ("pass@1", "em", "f1", "recall", "precision", "citation", "format", "turns", "tool_errors")
    },
    "tandem/pass@1": ("tandem", "pass@1"),
    "handoff/senior_then_junior": ("handoff", "senior_then_junior/pass@1"),
}
"""The measures in the rows of ``results.json``, each with its phase and metric."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What to compare.

    retrievers: names for ``retrieval.retriever``; all others are compared with the first one. models: folders or hub
    ids, the last part of which is the model's name. junior: the junior of all of them; without one they answer alone.
    data: sources of questions, ``problems`` of each. config, overrides: the config of every evaluation, and assignments
    of keys on top of it.
    """

    models: tuple[str, ...]
    data: tuple[str, ...]
    retrievers: tuple[str, ...] = ("hops", "golden")
    junior: str | None = None
    config: str = "hops_tandem"
    overrides: tuple[str, ...] = ()
    problems: int = 512
    samples: int = 2


def run_retrievers(benchmark: Benchmark, out: str | Path, *, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run what is not finished yet of a benchmark, and write and return the results.

    Args:
        out: the folder of the benchmark.
        say: called with a line for each finished part, and with the headline tables at the end.

    Raises:
        ConfigError, DataError, EngineError, EvalError: an evaluation cannot be run.
        ExperimentError: there are fewer than two retrievers, or two models have the same name; or ``out`` holds another
            experiment.
    """
    out, (first, *others) = Path(out), benchmark.retrievers
    if not others or len({*benchmark.retrievers}) < len(benchmark.retrievers):
        raise ExperimentError(f"retrievers {', '.join(benchmark.retrievers)}: give at least two, each once")
    homes = {Path(model).name: out / Path(model).name / "eval" for model in benchmark.models}
    if len(homes) < len(benchmark.models):
        raise ExperimentError(f"two of the models have one name: {', '.join(benchmark.models)}; give others")
    file = out / "experiment.json"
    if file.exists() and (other := json.loads(file.read_text()).get("name")) != NAME:
        raise ExperimentError(f"{out} holds the experiment {other}; choose another folder")
    phases: tuple[str, ...] = ("pass-at-k", "tandem", "handoff") if benchmark.junior else ("pass-at-k",)
    rows: list[dict[str, Any]] = []
    for model, (name, home) in zip(benchmark.models, homes.items(), strict=True):
        for retriever in benchmark.retrievers:
            config = load(
                benchmark.config,
                [
                    f"model.junior={benchmark.junior or 'null'}",
                    f"data.eval={json.dumps(benchmark.data)}",
                    f"eval.samples={benchmark.samples}",
                    f"eval.k={[k for k in (1, 2, 4, 8) if k <= benchmark.samples]}",
                    *benchmark.overrides,
                    f"retrieval.retriever={retriever}",
                ],
            )
            evals.evaluate(config, model=model, out=home / retriever, phases=phases, limit=benchmark.problems)
            measures = measured(home / retriever, METRICS)
            rows.append({"pair": name, "seed": 0, "arm": retriever} | measures)
            say(f"{name}, {retriever}: solo pass@1 {measures['solo/pass@1']:.3f}")
    arms = [{"name": name, "title": name} for name in benchmark.retrievers]
    asked = {"name": NAME, **asdict(benchmark), "arms": arms, "versions": versions()}
    write_text(file, json.dumps(asked, indent=2) + "\n")
    # The environment's signature holds its retriever, and nothing else.
    contrasts = contrasts_of(
        {name: [home] for name, home in homes.items()},
        [(other, first) for other in others],
        METRICS,
        varied=("retrieval", "signature"),
    )
    results = {"schema": SCHEMA, "experiment": asked, "rows": rows, "contrasts": contrasts, "claims": []}
    return reported(results, out, say)
