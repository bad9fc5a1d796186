"""Turns samples into numbers: the measures of one problem's samples, and how problems, sets and arms are averaged."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from tandemrl.evals.stats import macro_interval, maj_at_k, pass_at_k
from tandemrl.rewards.calls import OF_K
from tandemrl.rewards.functions import means_of
from tandemrl.rewards.scoring import surely_equal
from tandemrl.rollout.engine import LOST
from tandemrl.types import Author, Metrics, Response

MAX_COMPARED = 200
"""Longer answers, such as programs, vote together only if they are correct or the same text."""
MANY_ROUNDS = 150
"""Handoff chains with more rounds than this are counted. The original protocol stops there; this one does not."""

GoodEnd = Literal["higher", "lower"] | None
"""Which values of a rate are better; None if neither end is."""

WITH_INTERVAL: Mapping[str, GoodEnd] = {
    **dict.fromkeys(("acceptance", "em", "f1", "f1_official", "recall", "precision", "citation"), "higher"),
    **dict.fromkeys(("support_f1", "format"), "higher"),
    **dict.fromkeys(("rejected_rate", "cross_entropy", "cross_entropy_per_byte", "unlikely_rate"), "lower"),
    **dict.fromkeys(("area", "gain", "legible", "effect", "worst_effect"), "higher"),
    **dict.fromkeys(("judge_legibility", "auroc", "tpr", "tnr"), "higher"),
    **dict.fromkeys(("worse", "illegible", "harmful_places"), "lower"),
    **dict.fromkeys(("surprisal", "excess", "kl", "entropy", "answer_leaked", "undecided", "aoc", "same")),
}
"""Rates that get a bootstrap interval, beside those of k."""

HEADLINE: Mapping[str, GoodEnd] = {
    **WITH_INTERVAL,
    **dict.fromkeys(("truncation_rate", "tool_errors", "invalid_calls"), "lower"),
    **dict.fromkeys(("length", "turns")),
}
"""Rates that a summary or a comparison shows, beside those of k."""

_GOOD_ENDS = {**HEADLINE, "score": "higher", "tool_timeouts": "lower", "cut_results": "lower"}

_IN_NATS = ("cross_entropy", "cross_entropy_per_byte", "surprisal", "excess", "kl")
_SAID = ("acc", "answer_present", "timeout", "failure", "unscored")
"""Parts of a score that samples and counts hold under other names."""


def is_headline(metric: str) -> bool:
    """Whether a rate, of one arm or of all arms, is a headline metric.

    Examples:
        >>> is_headline("senior_first/pass@1"), is_headline("rounds"), is_headline("format_errors")
        (True, False, False)
    """
    return is_of(metric, HEADLINE)


def is_of(metric: str, names: Collection[str]) -> bool:
    """Whether a rate, of one arm or of all arms, is one of k or has one of these names."""
    name = metric.rpartition("/")[2]
    return name in names or name.startswith(OF_K)


def good_end(metric: str) -> GoodEnd:
    """Which values of a metric are better.

    Examples:
        >>> good_end("senior_first/pass@1"), good_end("cross_entropy"), good_end("length"), good_end("format_errors")
        ('higher', 'lower', None, None)
    """
    return "higher" if is_of(metric, ()) else _GOOD_ENDS.get(metric.rpartition("/")[2])


def ends_of(metric: str) -> tuple[float, float] | None:
    """The lowest and the highest value that a metric with an interval can have; None if it has no such ends.

    Examples:
        >>> ends_of("senior_first/pass@1"), ends_of("free/50/gain"), ends_of("cross_entropy")
        ((0.0, 1.0), (-1.0, 1.0), None)
    """
    name = metric.rpartition("/")[2]
    if name in ("gain", "area", "aoc", "effect", "worst_effect"):
        return -1.0, 1.0
    known = name == "truncation_rate" or is_of(name, WITH_INTERVAL.keys() - {"judge_legibility", *_IN_NATS})
    return (0.0, 1.0) if known else (0.0, 4.0) if name == "judge_legibility" else None


class EvalError(ValueError):
    """An evaluation cannot be run, or a result file is not of this evaluation. The message names the fix."""


class Sample(NamedTuple):
    """One evaluated completion: a line of ``PHASE.samples.jsonl``.

    problem: its position among the prompts. author: who wrote which tokens, as run lengths; "S12J5" means 12 tokens of
    the senior, then 5 of the junior, and "C" stands for tokens of the environment between turns. rounds: the number of
    runs of either author. text, length, rounds and senior_share describe the authors' own tokens. author and
    senior_share are None if it is unknown who wrote what. score, correct and answer are None if nothing was graded;
    score alone is None if a judge gave no score. judge is the judge's score of the reasoning, from 0 to 1. Only correct
    samples of the verified phase have it, unless no reply of the judge held a score. verified says whether the judge
    accepts the reasoning, and is None in the other phases.

    turns, transcript (`types.Transcript` as JSON): those of an episode. parts: the other parts of the score, by name.
    group: the problem's group, see ``group_of``. same_as: the example_id of the first row with the same problem, if
    that is another one. plain: the text without special tokens, None if it has none. opened: what the chat template
    wrote of the response before it (`types.Response`). given: of the phases with other readers, what the reader (the
    arm) got of the text (`evals.transfer`), which counts as the senior's. places: the effects of handovers
    (`handover.handover_effects`). draws: what decides the label of a text (`transfer.label_of`). A line has these
    fields only if they differ from their defaults.

    The remaining fields are of the phases in which a model reads the text. They are means over its tokens, in nats, and
    None if the text was not read or is too long. In legibility and drift: cross_entropy, the junior's, per token of the
    vocabulary that it reads in. In drift alone: surprisal (the senior's own cross-entropy), kl (KL(senior || junior) of
    the next token) and unlikely_rate (the share of tokens that the junior finds unlikely). In legibility alone:
    cross_entropy_per_byte, the junior's over a text as UTF-8, which readers of other vocabularies can be compared by;
    and acceptance, the share of tokens that the junior also draws from the same random numbers. In entropy alone:
    entropy, of the distributions that the senior drew from.
    """

    problem: int
    example_id: str
    set: str
    arm: str
    sample: int
    key: int
    text: str
    tokens: list[int]
    length: int
    author: str | None
    rounds: int
    senior_share: float | None
    stop_reason: str
    score: float | None = None
    correct: bool | None = None
    answer: str | None = None
    cross_entropy: float | None = None
    judge: float | None = None
    verified: bool | None = None
    surprisal: float | None = None
    kl: float | None = None
    unlikely_rate: float | None = None
    turns: int = 1
    parts: Mapping[str, float] | None = None
    transcript: Mapping[str, Any] | None = None
    group: str | None = None
    acceptance: float | None = None
    cross_entropy_per_byte: float | None = None
    same_as: str | None = None
    plain: str | None = None
    opened: str = ""
    given: str | None = None
    places: Sequence[Mapping[str, Any]] | None = None
    entropy: float | None = None
    draws: Sequence[Sequence[bool]] | None = None

    @property
    def response(self) -> Response:
        """What rewards read."""
        plain = self.text if self.plain is None else self.plain
        return Response(self.text, plain, self.opened, None if self.author is None else tuple(self.tokens))

    def to_json(self) -> dict[str, Any]:
        """The sample as a line of ``PHASE.samples.jsonl``; ``Sample(**line)`` is the inverse."""
        first = self._fields.index("turns")
        return {
            name: value
            for i, (name, value) in enumerate(self._asdict().items())
            if i < first or value != self._field_defaults[name]
        }

    @property
    def asks(self) -> str:
        """What tells problems apart: several rows may have the same one."""
        return self.same_as or self.example_id


def author_runs(author: np.ndarray) -> str:
    """The authors of tokens as run lengths.

    Examples:
        >>> author_runs(np.array([1, 1, 0, -1, 1]))
        'S2J1C1S1'
    """
    return "".join(f"{_LETTERS[who]}{len(list(run))}" for who, run in groupby(author.tolist()))


def authors_of(runs: str) -> np.ndarray:
    """The authors of tokens, from their run lengths: the inverse of ``author_runs``.

    Raises:
        ValueError: the text is not run lengths.

    Examples:
        >>> authors_of("S2J1").tolist()
        [1, 1, 0]
    """
    if not re.fullmatch(r"([SJC]\d+)*", runs):
        raise ValueError(f"author {runs!r}: expected run lengths such as 'S12J5'")
    each = {letter: int(who) for who, letter in _LETTERS.items()}
    found = ([each[letter]] * int(count) for letter, count in re.findall(r"([SJC])(\d+)", runs))
    return np.array([*chain.from_iterable(found)], dtype=np.int8)


_LETTERS = {Author.SENIOR: "S", Author.JUNIOR: "J", Author.CONTEXT: "C"}


def parts_of(score_parts: Mapping[str, float]) -> dict[str, float] | None:
    """The parts of a score that a sample keeps, or None if there are none."""
    return {name: float(value) for name, value in score_parts.items() if name not in _SAID} or None


def group_of(extra_info: Mapping[str, Any]) -> str | None:
    """The group of a problem, or None. The headline rates are also given for each group, as in ``hops=2/em``.

    Examples:
        >>> group_of({"n_hops": 2})
        'hops=2'
    """
    hops = extra_info.get("n_hops")
    return None if hops is None else f"hops={hops}"


Measure = Callable[[Sequence[Sample]], tuple[Metrics, Metrics]]
"""A function that returns the rates and the counts of one problem, from its samples in one arm."""

# ---------------------------------------------------------------------------------------------------------- one problem


def votes(answers: Sequence[str | None], correct: Sequence[bool]) -> list[str | None]:
    r"""The answers by which ``maj@K`` votes: one for all that the grader calls equal, None for one without content.

    Correct answers are equal. Wrong ones are if `surely_equal` says so, directly or over others.

    Examples:
        >>> votes(["5", "5.0", "7", r"\frac{14}{2}", " ", None], [True, True, False, False, False, False])
        ['5', '5', '7', '7', None, None]
    """
    grades: dict[str, set[bool]] = {}
    for answer, grade in zip(answers, correct, strict=True):
        if answer is not None and answer.strip():
            grades.setdefault(answer, set()).add(grade)
    voted: dict[str, str] = {}
    for answer, seen in grades.items():
        comparable = [] if len(seen) == 2 else [other for other in voted if grades[other] == seen]
        same = [voted[other] for other in comparable if seen == {True} or _equal(other, answer)]
        voted[answer] = same[0] if same else answer
        voted |= {other: same[0] for other, name in voted.items() if name in same}
    return [None if answer is None else voted.get(answer) for answer in answers]


def _equal(a: str, b: str) -> bool:
    return max(len(a), len(b)) <= MAX_COMPARED and (surely_equal(a, b) or surely_equal(b, a))


def graded(problem: Sequence[Sample], k: Sequence[int]) -> tuple[Metrics, Metrics]:
    """The rates and the counts of the graded samples of one problem. Parts of the score are rates, too.

    ``unscored`` counts samples to which a judge gave no score; the mean score counts them as 0. Those that are
    `LOST` have no score either, and are no part of it. ``out_of_turns`` counts episodes that the limit on turns
    ended.
    """
    n = len(problem)
    correct = [bool(sample.correct) for sample in problem]
    answers = votes([sample.answer for sample in problem], correct)
    rates = {f"pass@{m}": pass_at_k(sum(correct), n, m) for m in k}
    rates |= {f"maj@{m}": maj_at_k(answers, correct, m) for m in k if m > 1}
    rates |= {
        "score": sum(sample.score or 0.0 for sample in problem) / n,
        "truncation_rate": sum(sample.stop_reason == "length" for sample in problem) / n,
        "length": sum(sample.length for sample in problem) / n,
    }
    counts: Metrics = {
        "samples": n,
        "unfinished": sum(sample.stop_reason == "length" for sample in problem),
        "unscored": sum(sample.score is None and sample.stop_reason not in LOST for sample in problem),
    }
    if problem[0].author is not None:
        rates |= {
            "senior_share": sum(sample.senior_share or 0.0 for sample in problem) / n,
            "rounds": sum(sample.rounds for sample in problem) / n,
        }
        counts[f"above_{MANY_ROUNDS}_rounds"] = sum(sample.rounds > MANY_ROUNDS for sample in problem)
    if problem[0].transcript is not None:
        rates["turns"] = sum(sample.turns for sample in problem) / n
        counts["out_of_turns"] = sum(sample.stop_reason == "turns" for sample in problem)
        rates = means_of([sample.transcript["counts"] for sample in problem if sample.transcript]) | rates
    return means_of([sample.parts for sample in problem if sample.parts]) | rates, counts


def accepted(problem: Sequence[Sample], k: Sequence[int]) -> tuple[Metrics, Metrics]:
    """The rates and counts of `graded`, and those of a judge that reads the reasoning of correct samples.

    ``rejected_rate`` is the share of all samples whose answer is correct but whose reasoning the judge does not accept
    (the paper's false positives). ``judge_failures`` counts correct samples without a judge's score, which count as
    rejected.
    """
    rates, counts = graded(problem, k)
    n, correct = len(problem), sum(bool(sample.correct) for sample in problem)
    verified = sum(bool(sample.verified) for sample in problem)
    rates |= {f"verified_pass@{m}": pass_at_k(verified, n, m) for m in k}
    rates["rejected_rate"] = (correct - verified) / n
    counts |= {
        "judged": correct,
        "judge_failures": sum(bool(sample.correct) and sample.judge is None for sample in problem),
    }
    return rates, counts


def rated(problem: Sequence[Sample], k: Sequence[int]) -> tuple[Metrics, Metrics]:
    """The rates and counts of `graded`, and ``judge_legibility``: the mean grade, 0 to 4, of the correct samples."""
    rates, counts = graded(problem, k)
    found = [sample.judge for sample in problem if sample.correct and sample.judge is not None]
    rates |= {"judge_legibility": 4 * sum(found) / len(found)} if found else {}
    right = sum(bool(sample.correct) for sample in problem)
    return rates, counts | {"judged": right, "judge_failures": right - len(found)}


def legible(problem: Sequence[Sample], k: Sequence[int] = ()) -> tuple[Metrics, Metrics]:
    """The mean cross-entropy of one problem's texts that the junior read, that per byte and the acceptance if they are
    known, and the number of texts that it did not read."""
    return _read(problem, ("cross_entropy", "cross_entropy_per_byte", "acceptance"))


def alone(problem: Sequence[Sample], k: Sequence[int]) -> tuple[Metrics, Metrics]:
    """The rates and counts of `graded` and of `legible`, for texts that the junior generated and read itself."""
    (rates, counts), (read, unread) = graded(problem, k), legible(problem)
    return rates | read, counts | unread


def drifted(problem: Sequence[Sample], k: Sequence[int] = ()) -> tuple[Metrics, Metrics]:
    """How far the senior's texts of one problem are from the junior's distribution.

    ``excess`` is the junior's cross-entropy minus the senior's own surprisal.
    """
    rates, counts = _read(problem, ("kl", "surprisal", "cross_entropy", "unlikely_rate"))
    if rates:
        rates["excess"] = rates["cross_entropy"] - rates["surprisal"]
    return rates, counts


def sampled(problem: Sequence[Sample], k: Sequence[int] = ()) -> tuple[Metrics, Metrics]:
    """The mean sampling entropy of one problem's texts, in nats per token."""
    return _read(problem, ("entropy",))


def _read(problem: Sequence[Sample], fields: Sequence[str]) -> tuple[Metrics, Metrics]:
    """The means of those fields that are known over the texts that were read."""
    read = [sample for sample in problem if sample.cross_entropy is not None]
    known = [name for name in fields if read and getattr(read[0], name) is not None]
    rates = {name: sum(getattr(sample, name) for sample in read) / len(read) for name in known}
    return rates, {"samples": len(problem), "dropped": len(problem) - len(read)}


# --------------------------------------------------------------------------------------------------------- all problems


class SetMeasures(NamedTuple):
    """The measures of one set of problems.

    rates: for each metric, the value of every problem that has one, by example_id. Rows with the same problem
    (``Sample.same_as``) are one problem, with the samples of all of them. counts: the totals.

    With several arms, each arm has its own ``ARM/NAME``. The plain ``NAME`` of a rate is the mean over arms, problem by
    problem; that of a count is the sum over arms. If problems have groups, ``GROUP/NAME`` covers the problems of one
    group.
    """

    rates: dict[str, dict[str, float]]
    counts: Metrics


def silent_sets(samples: Sequence[Sample]) -> set[str]:
    """The sets in which no sample has an answer, as with a scorer that extracts none. There is no majority there."""
    return {sample.set for sample in samples} - {sample.set for sample in samples if sample.answer is not None}


def measure_sets(
    samples: Sequence[Sample], measure: Measure, *, silent: Collection[str] | None = None
) -> dict[str, SetMeasures]:
    """Measure every problem with ``measure``, and collect the results by set.

    Args:
        silent: the sets that have no ``maj@K``. None means those in which no sample has an answer (`silent_sets`).

    Raises:
        EvalError: no problem of a set has any rate, or two problems of a set have the same example_id.
    """
    silent = silent_sets(samples) if silent is None else silent
    by_set: dict[str, list[Sample]] = {}
    for sample in samples:
        by_set.setdefault(sample.set, []).append(sample)
    return {name: _measure_set(name, own, measure, votes=name not in silent) for name, own in by_set.items()}


def _measure_set(name: str, samples: Sequence[Sample], measure: Measure, *, votes: bool) -> SetMeasures:
    problems = {(sample.problem, sample.example_id) for sample in samples}
    if len({example for _, example in problems}) < len(problems):
        raise EvalError(f"set {name}: two of its {len(problems)} problems have the same example_id; it must be unique")
    arms: dict[str, dict[str, list[Sample]]] = {}
    groups: dict[str, str] = {}
    for sample in _filled(samples):
        problem = sample.asks
        arms.setdefault(sample.arm, {}).setdefault(problem, []).append(sample)
        groups |= {} if sample.group is None else {problem: sample.group}
    by_arm: dict[str, dict[str, dict[str, float]]] = {}
    totals: dict[str, Counter[str]] = {}
    for arm, members in arms.items():
        table, total = by_arm.setdefault(arm, {}), totals.setdefault(arm, Counter())
        for problem, own in members.items():
            found, counted = measure(own)
            for metric in found:
                if votes or not metric.startswith("maj@"):
                    table.setdefault(metric, {})[problem] = found[metric]
            total.update(counted)
        if not table:
            what = f"none of its {len(members)} problems could be measured"
            raise EvalError(f"set {name}: {what} (texts empty or too long)")
    rates = {
        metric: {problem: float(np.mean([table[metric][problem] for table in by_arm.values()])) for problem in column}
        for metric, column in next(iter(by_arm.values())).items()
        if all(table.get(metric, {}).keys() >= column.keys() for table in by_arm.values())
    }
    counts: Metrics = {metric: sum(total[metric] for total in totals.values()) for metric in total}
    counts["problems"] = max(map(len, arms.values()))
    if len(arms) > 1:
        rates |= {f"{arm}/{metric}": column for arm in arms for metric, column in by_arm[arm].items()}
        counts |= {f"{arm}/{metric}": total for arm in arms for metric, total in totals[arm].items()}
    shown = {metric: column for metric, column in rates.items() if is_headline(metric)}
    for group in sorted(set(groups.values())):
        for metric, column in shown.items():
            if inside := {problem: x for problem, x in column.items() if groups.get(problem) == group}:
                rates[f"{group}/{metric}"] = inside
        counts[f"{group}/problems"] = sum(each == group for each in groups.values())
    return SetMeasures(rates, counts)


def summarise(samples: Sequence[Sample], measure: Measure, *, bootstrap: int, seed: int) -> dict[str, dict[str, Any]]:
    """Measure every problem with ``measure``, and average to ``{"macro": …, "by_set": …}``.

    See ``SetMeasures`` for the names. The macro value of a rate is the mean over the sets that have the rate, since
    sets may differ in the parts of their scores, and those without any answer have no ``maj@K``.

    Args:
        bootstrap: number of resamples for the intervals. 0 means no intervals.
        seed: seed of the resamples.

    Raises:
        EvalError: no problem of a set has any rate, or two problems of a set have the same example_id.
    """
    sets = measure_sets(samples, measure)

    def describe(names: Sequence[str]) -> Metrics:
        out: Metrics = {}
        for metric in dict.fromkeys(metric for name in names for metric in sets[name].rates):
            columns = [sets[name].rates[metric] for name in names if metric in sets[name].rates]
            values = [np.array(list(column.values())) for column in columns]
            out[metric] = float(np.mean([value.mean() for value in values]))
            if bootstrap and is_of(metric, WITH_INTERVAL):
                _, out[f"{metric}/low"], out[f"{metric}/high"] = macro_interval(
                    values, [[*column] for column in columns], resamples=bootstrap, seed=seed, ends=ends_of(metric)
                )
        totals = dict.fromkeys(metric for name in names for metric in sets[name].counts)
        return out | {metric: sum(sets[name].counts.get(metric, 0) for name in names) for metric in totals}

    return {"macro": describe(list(sets)), "by_set": {name: describe([name]) for name in sets}}


# --------------------------------------------------------------------------------------------------------------------


def _filled(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, each with all parts and counts that any of them has. Those that it lacked are 0."""
    parts = dict.fromkeys((name for sample in samples for name in sample.parts or ()), 0.0)
    counts = dict.fromkeys((name for sample in samples for name in (sample.transcript or {}).get("counts", ())), 0.0)
    return [
        sample._replace(
            parts=parts | dict(sample.parts or {}) if parts else None,
            transcript=sample.transcript and {**sample.transcript, "counts": counts | sample.transcript["counts"]},
        )
        for sample in samples
    ]
