"""The claims of an experiment with their bars, written before it is run, and the verdicts on its results."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tandemrl.apps.report.records import BASE, Claim, Verdict
from tandemrl.evals.stats import Interval, at_least

ResultRow = Mapping[str, Any]
"""``pair``, ``seed``, ``arm`` and the measures of one evaluation."""
Contrast = Mapping[str, Any]
"""``pair``, ``A``, ``B`` and their difference in a metric of a phase, as ``results.json`` has it."""

SOLO_MARGIN = 0.05
"""The loss of solo pass@1 against GRPO up to which tandem GRPO counts as not inferior. The interval must exclude a
greater loss."""
SOLO_MEAN_MARGIN = 0.02
"""The loss of solo pass@1 that the mean over seeds may show at most."""


def claims_of(pair: str, rows: Sequence[ResultRow], contrasts: Sequence[Contrast], *, refused: int = 0) -> list[Claim]:
    """The claims about a pair, for the arms that exist. For some pairs nothing is claimed beforehand.

    Args:
        refused: how many pairs did not meet their criteria, and so have no rows. If there are any, the first claim
            counts them.
    """
    of = {
        "jargon": _paper,
        "jargon_two_tokenizers": _paper,
        "hops": _hops,
        "hops_jargon": _hops_jargon,
        "word_problems": _pretrained,
    }.get(pair)
    claims = [] if of is None else of(_Found(pair, rows, contrasts))
    if refused:
        what = "pairs refused, because they missed the criteria before training"
        claims.insert(0, Claim(what, "<= 0", (refused,), "fails"))
    return claims


_BEFORE = "over the model before training, solo pass@1"


class _Found:
    """The results of one pair."""

    def __init__(self, pair: str, rows: Sequence[ResultRow], contrasts: Sequence[Contrast]) -> None:
        self.arms = {
            row["arm"]: [each for each in rows if (each["pair"], each["arm"]) == (pair, row["arm"])] for row in rows
        }
        self.contrasts = [each for each in contrasts if each["pair"] == pair]
        self.seeds = len(self.arms.get(BASE, ()))

    def has(self, *arms: str) -> bool:
        return all(self.arms.get(arm) for arm in arms)

    def each(self, arm: str, measure: str) -> np.ndarray:
        """A measure of an arm, by seed."""
        return np.array([row[measure] for row in self.arms[arm]])

    def gain(self, arm: str, over: str, measure: str = "solo/pass@1") -> np.ndarray:
        """By how much a measure of one arm is above another arm's, by seed."""
        return self.each(arm, measure) - self.each(over, measure)

    def every_seed(self, what: str, sense: Literal["<=", ">="], bar: float, values: np.ndarray) -> Claim:
        holds = (values <= bar if sense == "<=" else values >= bar).all()
        name = what if self.seeds == 1 else f"{what}, every seed"
        return Claim(name, f"{sense} {bar:g}", tuple(values.tolist()), "holds" if holds else "fails")

    def gains(self, **arms: tuple[str, float]) -> list[Claim]:
        """The claims that arms, each with its title and a bar, gain over the model before training. There is none for a
        missing arm."""
        return [
            self.every_seed(f"gain of {title} {_BEFORE}", ">=", bar, self.gain(arm, BASE))
            for arm, (title, bar) in arms.items()
            if self.has(BASE, arm)
        ]

    def solo_difference(self, arm: str, than: str = "grpo") -> Interval | None:
        """The difference in solo pass@1 between an arm and another, over seeds, or over problems of one seed."""
        solo_skill = {"A": arm, "B": than, "phase": "pass-at-k", "metric": "pass@1"}
        differences = [each["difference"] for each in self.contrasts if solo_skill.items() <= each.items()]
        return Interval(**differences[0]) if differences else None

    def loss_excluded(self, what: str, difference: Interval, margin: float) -> Claim:
        """The claim that a difference shows no loss above ``margin``; being better is no fault.

        It holds if the lower end of the 95 % interval is above ``-margin``, fails if the whole interval is below, and
        is undecided otherwise.
        """
        support = at_least(difference, -margin)
        verdict: Verdict = "undecided" if support is None else "holds" if support else "fails"
        over = "seeds" if self.seeds > 1 else "problems"
        name = f"{what}, lower end of the 95 % interval over {over}"
        return Claim(name, f">= {-margin:g}", (difference.low,), verdict)

    def not_inferior(self, name: str, difference: Interval) -> list[Claim]:
        """The claims that an arm's solo skill is not inferior to GRPO's. One seed is not asked about the mean."""
        what, bar = f"{name} - GRPO in solo pass@1", f">= {-SOLO_MEAN_MARGIN:g}"
        holds: Verdict = "holds" if difference.mean >= -SOLO_MEAN_MARGIN else "fails"
        asked: tuple[tuple[float, ...], Verdict] = (
            ((difference.mean,), holds) if self.seeds > 1 else ((), "not asked of one seed")
        )
        return [
            self.loss_excluded(f"solo skill not inferior: {what}", difference, SOLO_MARGIN),
            Claim(f"{what}, mean over seeds", bar, *asked),
        ]


def _paper(found: _Found) -> list[Claim]:
    """The paper's three claims as statements about GRPO and tandem GRPO on the jargon pair.

    None if an arm or the contrast of the two is missing.
    """
    difference = found.solo_difference("tandem")
    if difference is None or not found.has(BASE, "grpo", "tandem"):
        return []
    each, claim = found.each, found.every_seed
    legible = each("grpo", "junior_ce") / each("tandem", "junior_ce")
    handed = found.gain("tandem", "grpo", "handoff/pass@1")
    return [
        *found.not_inferior("tandem", difference),
        claim("solo pass@1 of tandem GRPO", ">=", 0.9, each("tandem", "solo/pass@1")),
        claim("its gain over the model before training", ">=", 0.15, found.gain("tandem", BASE)),
        claim("handoff robustness: tandem - GRPO in handoff pass@1", ">=", 0.2, handed),
        claim("legibility: junior cross-entropy of GRPO / of tandem GRPO", ">=", 5, legible),
        claim("jargon rate after GRPO", ">=", 0.8, each("grpo", "jargon_rate")),
        claim("jargon rate after tandem GRPO", "<=", 0.05, each("tandem", "jargon_rate")),
    ]


def _hops(found: _Found) -> list[Claim]:
    """The claims that agents which write alike can be trained, alone and in tandem."""
    return found.gains(grpo=("GRPO", 0.25), turns=("tandem by turns", 0.25), words=("tandem by words", 0.25))


def _pretrained(found: _Found) -> list[Claim]:
    """The claims that a pretrained model learns by GRPO, and in tandem with what it was before, as published.

    Tandem GRPO is compared with ``grpo``, of as many rollouts, and with ``grpo_8``, of as many trained tokens. There is
    no claim for a missing arm.
    """
    claims = found.gains(grpo=("GRPO", 0.15), tandem_self=("tandem GRPO", 0.1))
    for reference, equal, margin in (("grpo_8", "trained tokens", SOLO_MARGIN), ("grpo", "rollouts", 2 * SOLO_MARGIN)):
        if (difference := found.solo_difference("tandem_self", than=reference)) is not None:
            what = f"tandem GRPO - GRPO in solo pass@1, at equal numbers of {equal}"
            claims.append(found.loss_excluded(what, difference, margin))
    return claims


def _hops_jargon(found: _Found) -> list[Claim]:
    """The paper's claims carried over to agents, for GRPO and the tandem by turns.

    None if an arm or the contrast of the two is missing.
    """
    difference = found.solo_difference("turns")
    if difference is None or not found.has(BASE, "grpo", "turns"):
        return []
    each, claim = found.each, found.every_seed
    once, often = (
        found.gain("turns", "grpo", f"handoff/{how}") for how in ("senior_then_junior", "senior_first_turns")
    )
    legible = each("grpo", "junior_ce") / each("turns", "junior_ce")
    return [
        *found.not_inferior("tandem by turns", difference),
        claim(f"gain of tandem by turns {_BEFORE}", ">=", 0.15, found.gain("turns", BASE)),
        claim("handoff after the senior's first turn: tandem by turns - GRPO", ">=", 0.15, once),
        claim("handoff after every turn, the senior first: tandem by turns - GRPO", ">=", 0.15, often),
        claim("legibility: junior cross-entropy of GRPO / of tandem by turns", ">=", 2, legible),
        claim("jargon rate after GRPO", ">=", 0.8, each("grpo", "jargon_rate")),
        claim("jargon rate after tandem by turns", "<=", 0.2, each("turns", "jargon_rate")),
    ]
