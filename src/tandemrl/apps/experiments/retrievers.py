"""Compares retrievers: every model answers the same questions with each of them.

The models are given, or they are tiny pairs of agents, which every seed builds for itself. Nothing else is trained. A
killed benchmark continues when it is started again.

    OUT/PAIR/seed-N/pair/                    senior, junior, manifest.json
    OUT/PAIR/seed-N/eval/RETRIEVER/          an evaluation; of a model that was given: OUT/MODEL/eval/RETRIEVER/
    OUT/experiment.json                      what was asked for
    OUT/results.json                         a row per model, seed and retriever; contrasts with the first retriever
    OUT/report.html
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandemrl import evals
from tandemrl.apps.experiments.arms import ExperimentError
from tandemrl.apps.experiments.experiment import SCHEMA, contrasts_of, measured, reported
from tandemrl.apps.experiments.tiny import build_tiny_pair
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
    ids, the last part of which is the model's name; without any, a tiny pair for each entry of ``pairs`` and ``seeds``.
    junior: the junior of all ``models``. data: sources of questions; without any, ``problems`` held-out ones of the
    pair. config, overrides: the config of every evaluation, and assignments of keys on top of it.
    """

    retrievers: tuple[str, ...] = ("hops", "golden")
    models: tuple[str, ...] = ()
    junior: str | None = None
    pairs: tuple[str, ...] = ("hops",)
    seeds: tuple[int, ...] = (0,)
    data: tuple[str, ...] = ()
    config: str = "hops_tandem"
    overrides: tuple[str, ...] = ()
    problems: int = 512
    samples: int = 2
    device: str = "cpu"


def run_retrievers(benchmark: Benchmark, out: str | Path, *, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run what is not finished yet of a benchmark, and write and return the results.

    Args:
        out: the folder of the benchmark.
        say: called with a line for each finished part, and with the headline tables at the end.

    Raises:
        ConfigError, DataError, EngineError, EvalError: an evaluation cannot be run.
        ExperimentError: there are fewer than two retrievers, two models have the same name, models are given without
            data or with pairs or seeds, or a junior or data without models; or ``out`` holds another experiment.
    """
    out, (first, *others) = Path(out), benchmark.retrievers
    if not others or len({*benchmark.retrievers}) < len(benchmark.retrievers):
        raise ExperimentError(f"retrievers {', '.join(benchmark.retrievers)}: give at least two, each once")
    default, names = Benchmark(), {Path(model).name for model in benchmark.models}
    if len(names) < len(benchmark.models):
        raise ExperimentError(f"two of the models have one name: {', '.join(benchmark.models)}; give others")
    if names and ((benchmark.pairs, benchmark.seeds) != (default.pairs, default.seeds) or not benchmark.data):
        raise ExperimentError("models that are given need --data; leave out --pair and --seeds of the tiny ones")
    if not names and (benchmark.data or benchmark.junior):
        raise ExperimentError("the tiny pairs have questions and juniors of their own; give --model, too")
    file = out / "experiment.json"
    if file.exists() and (other := json.loads(file.read_text()).get("name")) != NAME:
        raise ExperimentError(f"{out} holds the experiment {other}; choose another folder")
    rows: list[dict[str, Any]] = []
    homes: dict[str, list[Path]] = {}
    for name, seed, senior, junior, home in _models(benchmark, out):
        homes.setdefault(name, []).append(home / "eval")
        for retriever in benchmark.retrievers:
            phases: tuple[str, ...] = ("pass-at-k",) if junior is None else ("pass-at-k", "tandem", "handoff")
            config = load(benchmark.config, _settings(benchmark, name, junior, retriever))
            limit = benchmark.problems if benchmark.data else None
            evals.evaluate(config, model=senior, out=home / "eval" / retriever, phases=phases, limit=limit)
            measures = measured(home / "eval" / retriever, METRICS)
            rows.append({"pair": name, "seed": seed, "arm": retriever} | measures)
            say(f"{home.relative_to(out)}, {retriever}: solo pass@1 {measures['solo/pass@1']:.3f}")
    arms = [{"name": name, "title": name} for name in benchmark.retrievers]
    asked = {"name": NAME, **asdict(benchmark), "arms": arms, "versions": versions()}
    write_text(file, json.dumps(asked, indent=2) + "\n")
    # The environment's signature holds its retriever, and nothing else.
    contrasts = contrasts_of(homes, [(other, first) for other in others], METRICS, varied=("retrieval", "signature"))
    results = {"schema": SCHEMA, "experiment": asked, "rows": rows, "contrasts": contrasts, "claims": []}
    return reported(results, out, say)


# --------------------------------------------------------------------------------------------------------------------


def _models(benchmark: Benchmark, out: Path) -> Iterator[tuple[str, int, str, str | None, Path]]:
    """Yield (name, seed, senior, junior, folder for the evaluations). Without a junior, a model answers alone."""
    for model in benchmark.models:
        yield Path(model).name, 0, model, benchmark.junior, out / Path(model).name
    for pair in () if benchmark.models else benchmark.pairs:
        for seed in benchmark.seeds:
            home = out / pair / f"seed-{seed}"
            build_tiny_pair(home / "pair", pair=pair, seed=seed, device=benchmark.device)
            yield pair, seed, str(home / "pair" / "senior"), str(home / "pair" / "junior"), home


def _settings(benchmark: Benchmark, name: str, junior: str | None, retriever: str) -> list[str]:
    data = benchmark.data or (f"synthetic:{name}:heldout:{benchmark.problems}",)
    return [
        f"model.junior={junior or 'null'}",
        f"model.device={benchmark.device}",
        f"data.eval={json.dumps(data)}",
        f"eval.samples={benchmark.samples}",
        f"eval.k={[k for k in (1, 2, 4, 8) if k <= benchmark.samples]}",
        *benchmark.overrides,
        f"retrieval.retriever={retriever}",
    ]
