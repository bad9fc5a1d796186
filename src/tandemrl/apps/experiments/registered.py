"""What is stated before an experiment is run: its contrasts, its measures, what it can show, and how it is tested.

A difference between two arms is tested over seeds by Student's paired t test, two-sided. The tests of a pair are one
family, whose p values are Holm's. ``deviation`` is the standard deviation of a paired difference over seeds that is
expected, from results that were there before.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t

from tandemrl.apps.report.records import Verdict
from tandemrl.evals.stats import holm, seed_interval


class Registered(NamedTuple):
    """The contrasts (a, b) that are tested, each in every measure, and of each measure the expected deviation.

    expected: what is said of the ``pair``; of others, nothing is. above: the contrasts of which a is claimed to be
    above b there, each in the measures of ``legible``."""

    contrasts: tuple[tuple[str, str], ...]
    deviations: Mapping[str, float]
    expected: str
    above: tuple[tuple[str, str], ...] = ()
    legible: tuple[str, ...] = ()
    pair: str = "jargon"


REGISTERED: dict[str, Registered] = {
    "frontier": Registered(
        tuple(("tandem", arm) for arm in ("grpo", "matched", "junior_kl", "distilled", "brevity")),
        # Of solo and handoff: the largest of tandem - GRPO and tandem by steps - GRPO in docs/ablations.json, three
        # seeds. The statement was made before any run but one of 24 steps and one seed, in which the length penalty
        # counted characters and came out at tandem's handoff. It counts tokens since then; what is expected was not
        # changed. Transfer and GRPO at tandem's entropy were added before either was measured; transfer's deviation is
        # that of handoff with the senior first in docs/paper_claims_jargon.json (.051), rounded up.
        {"solo/pass@1": 0.16, "handoff/pass@1": 0.06, "unseen/pass@1": 0.06},
        "tandem is above GRPO, GRPO at tandem's entropy and the length penalty in handoff and in transfer to unseen "
        "readers, and not below GRPO in solo; against the two arms with the junior's probabilities no difference is "
        "expected. Transfer is the pass@1 of three readers that were never in training and that go on freely from the "
        "steps before the true answer first appears; answering at once, the junior as a reader, and truncation are "
        "reported beside it",
        above=(("tandem", "grpo"), ("tandem", "matched"), ("tandem", "brevity")),
        legible=("handoff/pass@1", "unseen/pass@1"),
    ),
    "shorthand": Registered(
        (("tandem_brevity", "brevity"), ("grpo", "brevity"), ("tandem", "grpo")),
        # As for the frontier: nothing of this pair was known but the senior before training.
        {"solo/pass@1": 0.16, "handoff/pass@1": 0.06, "unseen/pass@1": 0.06},
        "a step without its result is three tokens shorter and no more often right, so that by itself GRPO has no "
        "reason to write it: without the penalty no shift to it and no difference between GRPO and tandem are expected "
        "(null). With the penalty (twelve tokens a text are .12 of reward) GRPO is expected to move to the short form, "
        "and its handoff and transfer to fall, as the junior and a reader that was never in training copy results; "
        "tandem is expected to keep the full form, since a text in which the junior follows a short step is wrong",
        above=(("tandem_brevity", "brevity"), ("grpo", "brevity")),
        legible=("handoff/pass@1", "unseen/pass@1"),
        pair="shorthand",
    ),
}
REGISTERED["frontier-quick"] = REGISTERED["frontier"]


def smallest_difference(deviation: float, seeds: int, *, tests: int, level: float = 0.95, power: float = 0.8) -> float:
    """The smallest true difference that a paired t test over seeds finds with this power, at a level that is divided by
    the number of tests (the first step of Holm's procedure). Infinite for one seed.

    Examples:
        >>> round(smallest_difference(0.06, 5, tests=8), 3)
        0.174
    """
    if seeds < 2:
        return float("inf")
    quantiles = t.ppf(1 - (1 - level) / tests / 2, seeds - 1) + t.ppf(power, seeds - 1)
    return float(quantiles * deviation / np.sqrt(seeds))


def stated(name: str, pairs: Sequence[str], arms: Sequence[str], seeds: int) -> list[str]:
    """What is said before the experiment is run; nothing of one without a statement.

    Args:
        arms: those that are run. Contrasts of others are left out.
    """
    if name not in REGISTERED or not (family := _family(name, arms)):
        return []
    known = REGISTERED[name]
    lines = [f"stated beforehand of the {known.pair} pair: {known.expected}"] if known.pair in pairs else []
    for measure, deviation in REGISTERED[name].deviations.items():
        least = smallest_difference(deviation, seeds, tests=len(family))
        shown = f"{least:.3f}" if np.isfinite(least) else "none: one seed"
        lines.append(
            f"smallest detectable difference in {measure}: {shown} ({seeds} seeds, deviation {deviation:g}, power .8, "
            f"{len(family)} tests)"
        )
    return lines


def paired_tests(name: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tests of an experiment on the rows of ``results.json``: of each pair, contrast and measure the mean
    difference with its 95 % interval, its number of seeds, p and Holm's p. Of fewer than two seeds there are none."""
    pairs = dict.fromkeys(row["pair"] for row in rows) if name in REGISTERED else ()
    return [each for pair in pairs for each in _of_pair(name, pair, [row for row in rows if row["pair"] == pair])]


def _of_pair(name: str, pair: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for (a, b), measure in _family(name, [row["arm"] for row in rows]):
        known = [row for row in rows if row.get(measure) is not None]
        x, y = ({row["seed"]: row[measure] for row in known if row["arm"] == arm} for arm in (a, b))
        shared = [key for key in x if key in y]
        if len(shared) > 1:
            differences = np.array([x[key] - y[key] for key in shared])
            error = differences.std(ddof=1) / np.sqrt(len(shared))
            mean, low, high = seed_interval(differences.tolist())
            sure = 1.0 if mean == 0 else 0.0  # all seeds differ by the very same
            p = sure if error == 0 else float(2 * t.sf(abs(mean) / error, len(shared) - 1))
            ends = {"mean": mean, "low": low, "high": high}
            found.append({"pair": pair, "a": a, "b": b, "measure": measure, **ends, "seeds": len(shared), "p": p})
    adjusted = holm([each["p"] for each in found])
    return [each | {"holm": p} for each, p in zip(found, adjusted, strict=True)]


def verdicts(name: str, tests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The registered claims that one arm is above another, as in ``results.json``: each holds if the test says so."""
    found: list[dict[str, Any]] = []
    for each in tests:
        known = REGISTERED[name]
        claimed = each["pair"] == known.pair and (each["a"], each["b"]) in known.above
        if claimed and each["measure"] in known.legible:
            verdict: Verdict = "holds" if each["mean"] > 0 and each["holm"] <= 0.05 else "fails"
            what = f"{each['a']} is above {each['b']} in {each['measure']}, Holm's p"
            found.append(
                {"pair": known.pair, "claim": what, "bar": "<= 0.05", "values": [each["holm"]], "verdict": verdict}
            )
    return found


def _family(name: str, arms: Sequence[str]) -> list[tuple[tuple[str, str], str]]:
    contrasts = [each for each in REGISTERED[name].contrasts if {*each} <= {*arms}]
    return [*product(contrasts, REGISTERED[name].deviations)]
