"""Compares retrievers: every model answers the same questions with each of them.

The models are given, or they are tiny pairs of agents, which every seed builds for itself. Nothing else is trained. A
killed benchmark continues when it is started again.

    OUT/experiment.json                      what was asked for
    OUT/PAIR/seed-N/pair/                    senior, junior, manifest.json
    OUT/PAIR/seed-N/eval/RETRIEVER/          an evaluation; of a model that was given: OUT/MODEL/eval/RETRIEVER/
    OUT/results.json                         a row per model, seed and retriever; contrasts with the first retriever
    OUT/report.html
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl import evals
from tandemrl.apps.experiments.experiment import SCHEMA, ExperimentError, reported
from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.config import load
from tandemrl.evals import Phase
from tandemrl.evals.compare import compare, to_json
from tandemrl.files import versions, write_text

NAME = "retrievers"
METRICS: dict[str, tuple[Phase, str]] = {
    **{
        f"solo/{name}": ("pass-at-k", name)
        for name in ("pass@1", "em", "f1", "recall", "precision", "citation", "format", "turns", "tool_errors")
    },
    "tandem/pass@1": ("tandem", "pass@1"),
    "handoff/senior_then_junior": ("handoff", "senior_then_junior/pass@1"),
}
"""The measures in the rows of ``results.json``, each with its phase and metric."""


class Entry(NamedTuple):
    """A model in the benchmark. ``home`` is the folder for its evaluations. If ``junior`` is None, it answers alone."""

    name: str
    seed: int
    senior: str
    junior: str | None
    home: Path


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
            data or with pairs or seeds, or a junior without models; or ``out`` holds another experiment.
    """
    out = Path(out)
    _check(benchmark)
    described = json.dumps(_described(benchmark), indent=2) + "\n"
    file = out / "experiment.json"
    if not file.exists():
        write_text(file, described)
    elif (other := json.loads(file.read_text()).get("name")) != NAME:
        raise ExperimentError(f"{out} holds the experiment {other}; choose another folder")
    entries = []
    for entry in _entries(benchmark, out, say):
        entries.append(entry)
        for retriever in benchmark.retrievers:
            macro = _evaluate(benchmark, entry, retriever)
            say(f"{entry.home.relative_to(out)}, {retriever}: solo pass@1 {macro['pass@1']:.3f}")
    write_text(file, described)  # what earlier results were not made with, the evaluations have refused
    return reported(_results(benchmark, entries), out, say)


# --------------------------------------------------------------------------------------------------------------------


def _check(benchmark: Benchmark) -> None:
    if len(set(benchmark.retrievers)) < max(2, len(benchmark.retrievers)):
        raise ExperimentError(f"retrievers {', '.join(benchmark.retrievers)}: give at least two, each once")
    names = [Path(model).name for model in benchmark.models]
    if len(set(names)) < len(names):
        raise ExperimentError(f"two of the models have one name: {', '.join(names)}")
    if benchmark.models and not benchmark.data:
        raise ExperimentError("models that are given need questions: --data, or data of the benchmark")
    default = Benchmark()
    if benchmark.models and (benchmark.pairs, benchmark.seeds) != (default.pairs, default.seeds):
        raise ExperimentError("pairs and seeds are of the tiny models; leave out --pair and --seeds, or --model")
    if benchmark.junior is not None and not benchmark.models:
        raise ExperimentError("the tiny pairs have juniors of their own; leave out --junior, or give --model")


def _described(benchmark: Benchmark) -> dict[str, Any]:
    arms = [{"name": name, "title": name} for name in benchmark.retrievers]
    return {"name": NAME, **asdict(benchmark), "arms": arms, "versions": versions()}


def _entries(benchmark: Benchmark, out: Path, say: Callable[[str], None]) -> Iterator[Entry]:
    for model in benchmark.models:
        yield Entry(Path(model).name, 0, model, benchmark.junior, out / Path(model).name)
    for pair in () if benchmark.models else benchmark.pairs:
        for seed in benchmark.seeds:
            home = out / pair / f"seed-{seed}"
            build_tiny_pair(home / "pair", pair=pair, seed=seed, device=benchmark.device)
            say(f"{home.relative_to(out)}: the pair is there")
            yield Entry(pair, seed, str(home / "pair" / "senior"), str(home / "pair" / "junior"), home)


def _evaluate(benchmark: Benchmark, entry: Entry, retriever: str) -> dict[str, float]:
    data = benchmark.data or (f"synthetic:{entry.name}:heldout:{benchmark.problems}",)
    settings = [
        f"model.junior={entry.junior or 'null'}",
        f"model.device={benchmark.device}",
        f"data.eval={json.dumps(data)}",
        f"eval.samples={benchmark.samples}",
        f"eval.k={[k for k in (1, 2, 4, 8) if k <= benchmark.samples]}",
        *benchmark.overrides,
        f"retrieval.retriever={retriever}",
    ]
    limit = benchmark.problems if benchmark.data else None
    results = evals.evaluate(
        load(benchmark.config, settings),
        model=entry.senior,
        out=_folder(entry, retriever),
        phases=_phases(entry),
        limit=limit,
    )
    macro: dict[str, float] = results["pass-at-k"]["metrics"]["macro"]
    return macro


def _phases(entry: Entry) -> tuple[Phase, ...]:
    return ("pass-at-k",) if entry.junior is None else ("pass-at-k", "tandem", "handoff")


def _folder(entry: Entry, retriever: str) -> Path:
    return entry.home / "eval" / retriever


def _results(benchmark: Benchmark, entries: Sequence[Entry]) -> dict[str, Any]:
    first, *others = benchmark.retrievers
    rows = [
        {"pair": entry.name, "seed": entry.seed, "arm": retriever} | _measures(entry, retriever)
        for entry in entries
        for retriever in benchmark.retrievers
    ]
    metrics = {metric for _, metric in METRICS.values()}
    contrasts = []
    for name in dict.fromkeys(entry.name for entry in entries):
        own = [entry for entry in entries if entry.name == name]
        for other in others:
            sides = ([_folder(entry, retriever) for entry in own] for retriever in (other, first))
            # The environment's signature holds its retriever, and nothing else differs.
            found = compare(*sides, shown=metrics.__contains__, varied=("retrieval", "signature"))
            contrasts += [{"pair": name, "A": other, "B": first, **each} for each in to_json(found)]
    described = _described(benchmark)
    return {"schema": SCHEMA, "experiment": described, "rows": rows, "contrasts": contrasts, "claims": []}


def _measures(entry: Entry, retriever: str) -> dict[str, float]:
    macros = {
        phase: evals.read_result(_folder(entry, retriever) / f"{phase}.json")["metrics"]["macro"]
        for phase in _phases(entry)
    }
    return {
        name: macros[phase][metric]
        for name, (phase, metric) in METRICS.items()
        if phase in macros and metric in macros[phase]
    }
