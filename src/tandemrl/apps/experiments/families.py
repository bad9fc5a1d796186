"""The families of pairs: how their models are built, and what is measured of their texts (``PAIRS``, by pair)."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from tandemrl.apps.experiments import pretrained, tiny
from tandemrl.tasks.generated import hops
from tandemrl.tasks.generated.synthetic import repairs, slips, uses_jargon
from tandemrl.tasks.generated.word_problems import uses_shorthand

Measures = Callable[[Mapping[str, float], Sequence[str], Sequence[str]], dict[str, float]]
"""A function of the solo metrics (macro), the solo texts and the handoff texts of an evaluation."""


class Family(NamedTuple):
    """How the pairs of a family are built and measured.

    build: puts a pair into a folder, unless it is there, and returns its manifest; it is called with ``pair``, ``seed``
    and ``steps``, ``device`` and ``progress``. identity: what the manifest says of how a pair was built, from the first
    three of these. measures: what an evaluation says beside the measures of every pair. evaluation_rows: how many texts
    an evaluation writes at once on a CPU; on a GPU, eight times as many. memory_gb: what a process that builds, trains
    or evaluates needs at most.
    """

    build: Callable[..., dict[str, Any]]
    identity: Callable[..., dict[str, Any]]
    measures: Measures
    evaluation_rows: int
    memory_gb: float


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


# Of tiny models, large batches cost memory only.
WORDED = Family(tiny.build_tiny_pair, tiny.pair_identity, worded_measures, evaluation_rows=1024, memory_gb=1.0)
AGENTS = WORDED._replace(measures=agents_measures)
PRETRAINED = Family(
    pretrained.build_pretrained_pair,
    pretrained.pretrained_identity,
    shorthand_measures,
    evaluation_rows=64,
    memory_gb=7.0,
)

PAIRS: dict[str, Family] = {
    **{pair: AGENTS if pair in hops.PAIRS else WORDED for pair in tiny.WARM_STARTS},
    **dict.fromkeys(pretrained.STEPS, PRETRAINED),
}
"""The family of each pair."""
