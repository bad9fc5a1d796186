"""The claims of an experiment with their bars, written before it is run, and the verdicts on its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tandemrl.apps.experiments.arms import BASE
from tandemrl.apps.report.records import Claim, Verdict
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
        "jargon": paper_claims,
        "jargon_two_tokenizers": paper_claims,
        "hops": hops_claims,
        "hops_jargon": hops_jargon_claims,
        "word_problems": pretrained_claims,
    }.get(pair)
    claims = [] if of is None else of(pair, rows, contrasts)
    if refused:
        claims.insert(
            0, Claim("pairs refused, because they missed the criteria before training", "<= 0", (refused,), "fails")
        )
    return claims


def paper_claims(pair: str, rows: Sequence[ResultRow], contrasts: Sequence[Contrast]) -> list[Claim]:
    """The paper's three claims as statements about GRPO and tandem GRPO on the jargon pair.

    None if an arm or the contrast of the two is missing.
    """
    found = _Found.of(pair, rows)
    difference = _solo_difference(pair, contrasts, "tandem")
    if difference is None or not found.has(BASE, "grpo", "tandem"):
        return []
    each, gain, claim = found.each, found.gain, found.every_seed
    legible = each("grpo", "junior_ce") / each("tandem", "junior_ce")
    handed = gain("tandem", "grpo", "handoff/pass@1")
    return [
        *_not_inferior(found, difference, "tandem"),
        claim("solo pass@1 of tandem GRPO", ">=", 0.9, each("tandem", "solo/pass@1")),
        claim("its gain over the model before training", ">=", 0.15, gain("tandem", BASE, "solo/pass@1")),
        claim("handoff robustness: tandem - GRPO in handoff pass@1", ">=", 0.2, handed),
        claim("legibility: junior cross-entropy of GRPO / of tandem GRPO", ">=", 5, legible),
        claim("jargon rate after GRPO", ">=", 0.8, each("grpo", "jargon_rate")),
        claim("jargon rate after tandem GRPO", "<=", 0.05, each("tandem", "jargon_rate")),
    ]


def hops_claims(pair: str, rows: Sequence[ResultRow], contrasts: Sequence[Contrast]) -> list[Claim]:
    """The claims that agents which write alike can be trained, alone and in tandem.

    Each is about the gain of an arm over the model before training. There is none for a missing arm.
    """
    found = _Found.of(pair, rows)
    titles = {"grpo": "GRPO", "turns": "tandem by turns", "words": "tandem by words"}
    return [
        found.every_seed(f"gain of {title} {_BEFORE}", ">=", 0.25, found.gain(arm, BASE, "solo/pass@1"))
        for arm, title in titles.items()
        if found.has(BASE, arm)
    ]


def pretrained_claims(pair: str, rows: Sequence[ResultRow], contrasts: Sequence[Contrast]) -> list[Claim]:
    """The claims that a pretrained model learns by GRPO, and in tandem with what it was before, as published.

    Tandem GRPO is compared with ``grpo``, of as many rollouts, and with ``grpo_8``, of as many trained tokens. There is
    no claim for a missing arm.
    """
    found = _Found.of(pair, rows)
    claims = [
        found.every_seed(f"gain of {title} {_BEFORE}", ">=", bar, found.gain(arm, BASE, "solo/pass@1"))
        for arm, title, bar in (("grpo", "GRPO", 0.15), ("tandem_self", "tandem GRPO", 0.1))
        if found.has(BASE, arm)
    ]
    for reference, equal, margin in (("grpo_8", "trained tokens", SOLO_MARGIN), ("grpo", "rollouts", 2 * SOLO_MARGIN)):
        if (difference := _solo_difference(pair, contrasts, "tandem_self", than=reference)) is not None:
            what = f"tandem GRPO - GRPO in solo pass@1, at equal numbers of {equal}"
            claims.append(_loss_excluded(found, what, difference, margin))
    return claims


def hops_jargon_claims(pair: str, rows: Sequence[ResultRow], contrasts: Sequence[Contrast]) -> list[Claim]:
    """The paper's claims carried over to agents, for GRPO and the tandem by turns.

    None if an arm or the contrast of the two is missing.
    """
    found = _Found.of(pair, rows)
    difference = _solo_difference(pair, contrasts, "turns")
    if difference is None or not found.has(BASE, "grpo", "turns"):
        return []
    each, gain, claim = found.each, found.gain, found.every_seed
    once, often = (gain("turns", "grpo", f"handoff/{how}") for how in ("senior_then_junior", "senior_first_turns"))
    legible = each("grpo", "junior_ce") / each("turns", "junior_ce")
    return [
        *_not_inferior(found, difference, "turns"),
        claim(f"gain of tandem by turns {_BEFORE}", ">=", 0.15, gain("turns", BASE, "solo/pass@1")),
        claim("handoff after the senior's first turn: tandem by turns - GRPO", ">=", 0.15, once),
        claim("handoff after every turn, the senior first: tandem by turns - GRPO", ">=", 0.15, often),
        claim("legibility: junior cross-entropy of GRPO / of tandem by turns", ">=", 2, legible),
        claim("jargon rate after GRPO", ">=", 0.8, each("grpo", "jargon_rate")),
        claim("jargon rate after tandem by turns", "<=", 0.2, each("turns", "jargon_rate")),
    ]


# --------------------------------------------------------------------------------------------------------------------


_BEFORE = "over the model before training, solo pass@1"


@dataclass(frozen=True)
class _Found:
    """The rows of one pair, by arm and seed."""

    arms: Mapping[str, Mapping[int, ResultRow]]

    @classmethod
    def of(cls, pair: str, rows: Sequence[ResultRow]) -> "_Found":
        arms: dict[str, dict[int, ResultRow]] = {}
        for row in rows:
            if row["pair"] == pair:
                arms.setdefault(row["arm"], {})[row["seed"]] = row
        return cls(arms)

    def has(self, *arms: str) -> bool:
        return self.arms.keys() >= set(arms)

    @property
    def seeds(self) -> list[int]:
        return list(self.arms[BASE])

    def each(self, arm: str, measure: str) -> np.ndarray:
        """A measure of an arm, by seed."""
        return np.array([self.arms[arm][seed][measure] for seed in self.seeds])

    def gain(self, arm: str, over: str, measure: str) -> np.ndarray:
        """By how much a measure of one arm is above another arm's, by seed."""
        return self.each(arm, measure) - self.each(over, measure)

    def every_seed(self, what: str, sense: Literal["<=", ">="], bar: float, values: np.ndarray) -> Claim:
        holds = (values <= bar if sense == "<=" else values >= bar).all()
        name = what if len(self.seeds) == 1 else f"{what}, every seed"
        return Claim(name, f"{sense} {bar:g}", tuple(values.tolist()), "holds" if holds else "fails")


def _solo_difference(pair: str, contrasts: Sequence[Contrast], arm: str, than: str = "grpo") -> Interval | None:
    """The difference in solo pass@1 between an arm and another, over seeds, or over problems if there is one seed."""
    solo_skill = {"pair": pair, "A": arm, "B": than, "phase": "pass-at-k", "metric": "pass@1"}
    differences = [contrast["difference"] for contrast in contrasts if solo_skill.items() <= contrast.items()]
    return Interval(**differences[0]) if differences else None


def _loss_excluded(found: _Found, what: str, difference: Interval, margin: float) -> Claim:
    """The claim that a difference shows no loss above ``margin``; being better is no fault.

    It holds if the lower end of the 95 % interval is above ``-margin``, fails if the whole interval is below, and is
    undecided otherwise.
    """
    support = at_least(difference, -margin)
    return Claim(
        f"{what}, lower end of the 95 % interval over {'seeds' if len(found.seeds) > 1 else 'problems'}",
        f">= {-margin:g}",
        (difference.low,),
        "undecided" if support is None else "holds" if support else "fails",
    )


def _not_inferior(found: _Found, difference: Interval, arm: str) -> list[Claim]:
    """The claims that an arm's solo skill is not inferior to GRPO's.

    With one seed, the claim about the mean over seeds is not asked.
    """
    several = len(found.seeds) > 1
    mean_holds: Verdict = "holds" if difference.mean >= -SOLO_MEAN_MARGIN else "fails"
    name = {"turns": "tandem by turns"}.get(arm, arm)
    return [
        _loss_excluded(found, f"solo skill not inferior: {name} - GRPO in solo pass@1", difference, SOLO_MARGIN),
        Claim(
            f"{name} - GRPO in solo pass@1, mean over seeds",
            f">= {-SOLO_MEAN_MARGIN:g}",
            (difference.mean,) if several else (),
            mean_holds if several else "not asked of one seed",
        ),
    ]
