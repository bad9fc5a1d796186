"""The claims of an experiment with their bars, written before it is run, and the verdicts on its results."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from tandemrl.apps.report.records import BASE, Claim, Verdict
from tandemrl.evals.stats import Interval, at_least

Arms = Mapping[str, Sequence[Mapping[str, Any]]]
"""The rows of ``results.json`` about one pair by arm, a row per seed."""
Solo = Mapping[tuple[str, str], Interval]
"""The difference in solo pass@1 between two arms, over seeds, or over the problems of one seed."""


class Bar(NamedTuple):
    """The claim that a measure of an arm, minus (with ``ratio``: over) another arm's, meets a bar in every seed."""

    what: str
    sense: Literal["<=", ">="]
    bar: float
    arm: str
    measure: str = "solo/pass@1"
    than: str | None = None
    ratio: bool = False

    def verdict(self, arms: Arms, solo: Solo) -> Claim | None:
        if not all(arms.get(arm) for arm in (self.arm, self.than or self.arm)):
            return None
        values = np.array([row[self.measure] for row in arms[self.arm]])
        if self.than is not None:
            other = np.array([row[self.measure] for row in arms[self.than]])
            values = values / other if self.ratio else values - other
        holds = (values <= self.bar if self.sense == "<=" else values >= self.bar).all()
        name = self.what if len(values) == 1 else f"{self.what}, every seed"
        return Claim(name, f"{self.sense} {self.bar:g}", tuple(values.tolist()), "holds" if holds else "fails")


class NoLoss(NamedTuple):
    """The claim that an arm's solo pass@1 is below another's by no more than a margin; being better is no fault.

    It holds if the lower end of the 95 % interval is above ``-margin``, fails if the whole interval is below, and is
    undecided otherwise. With ``mean`` it is about the mean over seeds instead, and not asked of one seed.
    """

    what: str
    arm: str
    than: str = "grpo"
    margin: float = 0.05
    mean: bool = False

    def verdict(self, arms: Arms, solo: Solo) -> Claim | None:
        difference, seeds = solo.get((self.arm, self.than)), len(arms.get(self.arm, ()))
        if difference is None:
            return None
        name = f"lower end of the 95 % interval over {'seeds' if seeds > 1 else 'problems'}"
        values, holds = (difference.low,), at_least(difference, -self.margin)
        if self.mean:
            name, values, holds = "mean over seeds", (difference.mean,), difference.mean >= -self.margin
        verdict: Verdict = "undecided" if holds is None else "holds" if holds else "fails"
        asked = ((), "not asked of one seed") if self.mean and seeds == 1 else (values, verdict)
        return Claim(f"{self.what}, {name}", f">= {-self.margin:g}", *asked)


def _gain(of: str, arm: str, bar: float) -> Bar:
    return Bar(f"gain of {of} over the model before training, solo pass@1", ">=", bar, arm, than=BASE)


def _paper(of: str, arm: str, *own: Bar, legibility: float, jargon: float) -> tuple[Bar | NoLoss, ...]:
    """The paper's claims about an arm, of which ``own`` are those about its gain and its handoffs."""
    solo, ratio = f"{of} - GRPO in solo pass@1", f"legibility: junior cross-entropy of GRPO / of {of}"
    return (
        NoLoss(f"solo skill not inferior: {solo}", arm),
        NoLoss(solo, arm, margin=0.02, mean=True),
        *own,
        Bar(ratio, ">=", legibility, "grpo", "junior_ce", arm, ratio=True),
        Bar("jargon rate after GRPO", ">=", 0.8, "grpo", "jargon_rate"),
        Bar(f"jargon rate after {of}", "<=", jargon, arm, "jargon_rate"),
    )


_TANDEM = _paper(
    *("tandem GRPO", "tandem"),
    Bar("solo pass@1 of tandem GRPO", ">=", 0.9, "tandem"),
    _gain("tandem GRPO", "tandem", 0.15),
    Bar("handoff robustness: tandem - GRPO in handoff pass@1", ">=", 0.2, "tandem", "handoff/pass@1", "grpo"),
    legibility=5,
    jargon=0.05,
)
_TURNS = _paper(
    *("tandem by turns", "turns"),
    _gain("tandem by turns", "turns", 0.15),
    *(
        Bar(f"handoff after {when}: tandem by turns - GRPO", ">=", 0.15, "turns", f"handoff/{how}", "grpo")
        for when, how in (
            ("the senior's first turn", "senior_then_junior"),
            ("every turn, the senior first", "senior_first_turns"),
        )
    ),
    legibility=2,
    jargon=0.2,
)
_HOPS = (("GRPO", "grpo"), ("tandem by turns", "turns"), ("tandem by words", "words"))
CLAIMS: dict[str, tuple[Bar | NoLoss, ...]] = {
    "jargon": _TANDEM,
    "jargon_two_tokenizers": _TANDEM,
    "hops": tuple(_gain(of, arm, 0.25) for of, arm in _HOPS),
    "hops_jargon": _TURNS,
    "word_problems": (
        _gain("GRPO", "grpo", 0.15),
        _gain("tandem GRPO", "tandem_self", 0.1),
        NoLoss("tandem GRPO - GRPO in solo pass@1, at equal numbers of trained tokens", "tandem_self", "grpo_8"),
        NoLoss("tandem GRPO - GRPO in solo pass@1, at equal numbers of rollouts", "tandem_self", margin=0.1),
    ),
}
"""By pair, the paper's claims, those carried over to agents, and that models learn by GRPO and in tandem. A pretrained
model in tandem with itself is compared with GRPO of as many trained tokens, and of as many rollouts."""


def claims_of(
    pair: str, rows: Sequence[Mapping[str, Any]], contrasts: Sequence[Mapping[str, Any]], *, refused: int = 0
) -> list[Claim]:
    """The claims about a pair, for the arms that exist. For some pairs nothing is claimed beforehand.

    Args:
        rows, contrasts: those of ``results.json``.
        refused: how many pairs did not meet their criteria, and so have no rows. If there are any, the first claim
            counts them.
    """
    own = [row for row in rows if row["pair"] == pair]
    arms = {arm: [row for row in own if row["arm"] == arm] for arm in {row["arm"] for row in own}}
    solo = {
        (each["A"], each["B"]): Interval(**each["difference"])
        for each in contrasts
        if (each["pair"], each["phase"], each["metric"]) == (pair, "pass-at-k", "pass@1")
    }
    what = "pairs refused, because they missed the criteria before training"
    counted = [Claim(what, "<= 0", (refused,), "fails")] if refused else []
    return [*counted, *filter(None, (claim.verdict(arms, solo) for claim in CLAIMS.get(pair, ())))]
