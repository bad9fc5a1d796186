"""The families of pairs: how their models are built, and what is measured of their texts (``PAIRS``, by pair)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from tandemrl.apps.experiments import pretrained, smollm2, tiny
from tandemrl.apps.experiments.arms import DEFAULT_SIZE
from tandemrl.apps.experiments.warm_start import Progress
from tandemrl.tasks.generated import hops
from tandemrl.tasks.generated.synthetic import repairs, slips, uses_jargon
from tandemrl.tasks.generated.word_problems import uses_shorthand


class Recipe(NamedTuple):
    """What decides which pair is built. steps: of each stage of the warm start; None means the pair's own."""

    pair: str
    seed: int
    steps: int | None = None
    size: str = DEFAULT_SIZE


class Build(Protocol):
    """A function that puts a pair into a folder, unless it is there, and returns its manifest."""

    def __call__(
        self, out: Path, recipe: Recipe, *, device: str, progress: Progress | None = None
    ) -> dict[str, Any]: ...


Measures = Callable[[Mapping[str, float], Sequence[str], Sequence[str]], dict[str, float]]
"""A function of the solo metrics (macro), the solo texts and the handoff texts of an evaluation."""


class Family(NamedTuple):
    """How the pairs of a family are built and measured.

    identity: what the manifest of a pair says of how it was built. measures: what an evaluation says beside the
    measures of every pair. evaluation_rows: how many texts an evaluation writes at once on a CPU; on a GPU, eight times
    as many. memory_gb: what a process that builds, trains or evaluates needs at most. sizes: those that the models can
    have, if any. prepare: is called once before pairs are built, with a function that is told in lines what is done.
    """

    build: Build
    identity: Callable[[Recipe], dict[str, Any]]
    measures: Measures
    evaluation_rows: int
    memory_gb: float
    sizes: Collection[str] = ()
    prepare: Callable[[Callable[[str], None]], object] = lambda say: None


def worded_measures(macro: Mapping[str, float], solo: Sequence[str], handoff: Sequence[str]) -> dict[str, float]:
    """The share of solo texts that use jargon, the number of repairing lines per handoff text, and the share of wrong
    steps in handoff texts that the next line repairs."""
    row = {"jargon_rate": fmean(map(uses_jargon, solo)), "handoff/repairs": fmean(map(repairs, handoff))}
    if wrong := [slip for text in handoff for slip in slips(text)]:
        row["handoff/repaired"] = fmean(slip.repaired for slip in wrong)
    return row


def agents_measures(macro: Mapping[str, float], solo: Sequence[str], handoff: Sequence[str]) -> dict[str, float]:
    """The solo measures by hops, the citations, and the share of solo texts that use jargon."""
    by_hops = {name: value for name, value in macro.items() if name.startswith("hops=") and name.endswith("/pass@1")}
    row = {f"solo/{name}": value for name, value in by_hops.items()} | {"solo/citation": macro["citation"]}
    return row | {"jargon_rate": fmean(map(hops.uses_jargon, solo))}


def shorthand_measures(macro: Mapping[str, float], solo: Sequence[str], handoff: Sequence[str]) -> dict[str, float]:
    """The share of solo texts that are in shorthand."""
    return {"shorthand_rate": fmean(map(uses_shorthand, solo))}


def _build_tiny(out: Path, recipe: Recipe, *, device: str, progress: Progress | None = None) -> dict[str, Any]:
    return tiny.build_tiny_pair(out, **recipe._asdict(), device=device, progress=progress)


def _build_pretrained(out: Path, recipe: Recipe, *, device: str, progress: Progress | None = None) -> dict[str, Any]:
    pair, seed, steps, _ = recipe
    return pretrained.build_pretrained_pair(out, pair=pair, seed=seed, steps=steps, device=device, progress=progress)


WORDED = Family(
    build=_build_tiny,
    identity=lambda recipe: tiny.pair_identity(**recipe._asdict()),
    measures=worded_measures,
    evaluation_rows=1024,  # of tiny models: large batches cost memory only
    memory_gb=1.0,
    sizes=tuple(tiny.SIZES),
)
AGENTS = WORDED._replace(measures=agents_measures)
PRETRAINED = Family(
    build=_build_pretrained,
    identity=lambda recipe: pretrained.pretrained_identity(pair=recipe.pair, seed=recipe.seed, steps=recipe.steps),
    measures=shorthand_measures,
    evaluation_rows=64,
    memory_gb=7.0,
    prepare=lambda say: smollm2.fetch(say),
)

PAIRS: dict[str, Family] = {
    **{pair: AGENTS if pair in hops.PAIRS else WORDED for pair in tiny.WARM_STARTS},
    **dict.fromkeys(pretrained.STEPS, PRETRAINED),
}
"""The family of each pair."""
