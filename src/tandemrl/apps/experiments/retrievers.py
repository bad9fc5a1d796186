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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandemrl import evals
from tandemrl.apps.experiments.arms import ExperimentError
from tandemrl.apps.experiments.experiment import SCHEMA, reported
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
    arms = [{"name": name, "title": name} for name in benchmark.retrievers]
    asked = {"name": NAME, **asdict(benchmark), "arms": arms, "versions": versions()}
    described, file = json.dumps(asked, indent=2) + "\n", out / "experiment.json"
    if not file.exists():
        write_text(file, described)
    elif (other := json.loads(file.read_text()).get("name")) != NAME:
        raise ExperimentError(f"{out} holds the experiment {other}; choose another folder")
    rows: list[dict[str, Any]] = []
    homes: dict[str, list[Path]] = {}
    for name, seed, senior, junior, home in _models(benchmark, out, say):
        homes.setdefault(name, []).append(home / "eval")
        for retriever in benchmark.retrievers:
            phases: tuple[Phase, ...] = ("pass-at-k",) if junior is None else ("pass-at-k", "tandem", "handoff")
            config = load(benchmark.config, _settings(benchmark, name, junior, retriever))
            limit = benchmark.problems if benchmark.data else None
            found = evals.evaluate(config, model=senior, out=homes[name][-1] / retriever, phases=phases, limit=limit)
            macros = {phase: result["metrics"]["macro"] for phase, result in found.items()}
            rows.append({"pair": name, "seed": seed, "arm": retriever})
            rows[-1] |= {key: macros[p][m] for key, (p, m) in METRICS.items() if p in macros and m in macros[p]}
            say(f"{home.relative_to(out)}, {retriever}: solo pass@1 {rows[-1]['solo/pass@1']:.3f}")
    write_text(file, described)  # what earlier results were not made with, the evaluations have refused
    contrasts = [
        {"pair": name, "A": other, "B": first, **each}
        for name, own in homes.items()
        for first, *others in [benchmark.retrievers]
        for other in others
        for each in to_json(
            compare(
                *([home / retriever for home in own] for retriever in (other, first)),
                shown={metric for _, metric in METRICS.values()}.__contains__,
                varied=("retrieval", "signature"),  # the environment's signature holds its retriever, and nothing else
            )
        )
    ]
    results = {"schema": SCHEMA, "experiment": asked, "rows": rows, "contrasts": contrasts, "claims": []}
    return reported(results, out, say)


# --------------------------------------------------------------------------------------------------------------------


def _check(benchmark: Benchmark) -> None:
    names = [Path(model).name for model in benchmark.models]
    default = Benchmark()
    wrong = {
        f"retrievers {', '.join(benchmark.retrievers)}: give at least two, each once": len({*benchmark.retrievers})
        < max(2, len(benchmark.retrievers)),
        f"two of the models have one name: {', '.join(names)}": len({*names}) < len(names),
        "models that are given need questions: --data, or data of the benchmark": names and not benchmark.data,
        "pairs and seeds are of the tiny models; leave out --pair and --seeds, or --model": names
        and (benchmark.pairs, benchmark.seeds) != (default.pairs, default.seeds),
        "the tiny pairs have juniors of their own; leave out --junior, or give --model": benchmark.junior is not None
        and not names,
    }
    for message, holds in wrong.items():
        if holds:
            raise ExperimentError(message)


def _models(
    benchmark: Benchmark, out: Path, say: Callable[[str], None]
) -> Iterator[tuple[str, int, str, str | None, Path]]:
    """Yield (name, seed, senior, junior, folder for the evaluations). Without a junior, a model answers alone."""
    for model in benchmark.models:
        yield Path(model).name, 0, model, benchmark.junior, out / Path(model).name
    for pair in () if benchmark.models else benchmark.pairs:
        for seed in benchmark.seeds:
            home = out / pair / f"seed-{seed}"
            build_tiny_pair(home / "pair", pair=pair, seed=seed, device=benchmark.device)
            say(f"{home.relative_to(out)}: the pair is there")
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
