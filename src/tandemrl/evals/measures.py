"""Turns samples into numbers: the measures of one problem's samples, and how problems, sets and arms are averaged."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np

from tandemrl.evals.stats import macro_interval, maj_at_k, pass_at_k
from tandemrl.rewards.calls import OF_K
from tandemrl.rewards.scoring import surely_equal
from tandemrl.rollout.engine import LOST
from tandemrl.types import Author, Metrics, Response

MAX_COMPARED = 200
"""Longer answers, such as programs, vote together only if they are correct or the same text."""
MANY_ROUNDS = 150
"""Handoff chains with more rounds than this are counted. The original protocol stops there; this one does not."""

WITH_INTERVAL = (
    *("rejected_rate", "cross_entropy", "cross_entropy_per_byte", "acceptance", "surprisal", "excess", "kl"),
    *("unlikely_rate", "em", "f1", "f1_official", "recall", "precision", "citation", "support_f1", "format"),
)
"""Rates that get a bootstrap interval, beside those of k."""

HEADLINE = (*WITH_INTERVAL, "length", "truncation_rate", "turns", "tool_errors", "invalid_calls")
"""Rates that a summary or a comparison shows, beside those of k."""

GROUPED_BY = {"n_hops": "hops"}
"""Keys of a row's ``extra_info`` that divide problems into groups, with the name of the groups. The headline rates are
also given for each group, as in ``hops=2/em``."""

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


def says_one_author(metric: str, values: Iterable[float]) -> bool:
    """Whether the values of a metric say no more than that one author generated every text: ``rounds`` is 1 at most.

    Examples:
        >>> says_one_author("senior_first/rounds", [1.0, 6.5]), says_one_author("rounds", [1.0, 1.0])
        (False, True)
    """
    return metric.rpartition("/")[2] == "rounds" and all(value <= 1 for value in values)


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
    group: the problem's group, see ``GROUPED_BY``. same_as: the example_id of the first row with the same problem, if
    that is another one. plain: the text without special tokens, None if it has none. opened: what the chat template
    wrote of the response before it (`types.Response`). A line has these fields only if they differ from their defaults.

    The remaining fields are of the phases in which a model reads the text. They are means over its tokens, in nats, and
    None if the text was not read or is too long. In legibility and drift: cross_entropy, the junior's, per token of the
    vocabulary that it reads in. In drift alone: surprisal (the senior's own cross-entropy), kl (KL(senior || junior) of
    the next token) and unlikely_rate (the share of tokens that the junior finds unlikely). In legibility alone:
    cross_entropy_per_byte, the junior's over a text as UTF-8, which readers of other vocabularies can be compared by;
    and acceptance, the share of tokens that the junior also draws from the same random numbers.
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

    @property
    def response(self) -> Response:
        """What rewards read."""
        plain = self.text if self.plain is None else self.plain
        return Response(self.text, plain, self.opened, None if self.author is None else tuple(self.tokens))

    def to_json(self) -> dict[str, Any]:
        """The sample as a line of ``PHASE.samples.jsonl``; ``Sample(**line)`` is the inverse."""
        later = (
            *("turns", "parts", "transcript", "group", "acceptance", "cross_entropy_per_byte"),
            *("same_as", "plain", "opened"),
        )
        return {k: v for k, v in self._asdict().items() if k not in later or v != self._field_defaults[k]}


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
    """The group of a problem (see ``GROUPED_BY``), or None.

    Examples:
        >>> group_of({"n_hops": 2})
        'hops=2'
    """
    found = [f"{name}={extra_info[key]}" for key, name in GROUPED_BY.items() if extra_info.get(key) is not None]
    return ",".join(found) or None


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
        rates = _means_of([sample.transcript["counts"] for sample in problem if sample.transcript]) | rates
    return _means_of([sample.parts for sample in problem if sample.parts]) | rates, counts


def _means_of(values: Sequence[Mapping[str, float]]) -> Metrics:
    """The mean of each entry over several mappings. A missing entry counts as 0, that of a reward that gives no score
    (``NAME/none``) does not count."""
    names = dict.fromkeys(name for each in values for name in each)
    having = {name: [each.get(name, 0.0) for each in values if f"{name}/none" not in each] for name in names}
    return {name: sum(have) / len(have) for name, have in having.items()}


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


def legible(problem: Sequence[Sample]) -> tuple[Metrics, Metrics]:
    """The mean cross-entropy of one problem's texts that the junior read, their means per byte and of the acceptance if
    they are known (of older results they are not), and the number of texts that it did not read."""
    later = ("cross_entropy_per_byte", "acceptance")
    known = [name for name in later if any(getattr(sample, name) is not None for sample in problem)]
    return _read(problem, ("cross_entropy", *known))


def alone(problem: Sequence[Sample], k: Sequence[int]) -> tuple[Metrics, Metrics]:
    """The rates and counts of `graded` and of `legible`, for texts that the junior generated and read itself."""
    (rates, counts), (read, unread) = graded(problem, k), legible(problem)
    return rates | read, counts | unread


def drifted(problem: Sequence[Sample]) -> tuple[Metrics, Metrics]:
    """How far the senior's texts of one problem are from the junior's distribution.

    ``excess`` is the junior's cross-entropy minus the senior's own surprisal.
    """
    rates, counts = _read(problem, ("kl", "surprisal", "cross_entropy", "unlikely_rate"))
    if rates:
        rates["excess"] = rates["cross_entropy"] - rates["surprisal"]
    return rates, counts


def _read(problem: Sequence[Sample], fields: Sequence[str]) -> tuple[Metrics, Metrics]:
    """The means of some fields over the texts that were read. In the other texts, all of these fields are None."""
    read = [sample for sample in problem if sample.cross_entropy is not None]
    rates = {name: sum(getattr(sample, name) for sample in read) / len(read) for name in fields} if read else {}
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


def with_majorities(metrics: Mapping[str, Any]) -> list[str]:
    """The names of metrics, with those ``maj@K`` that are missing where a scorer gives no answers.

    Examples:
        >>> with_majorities({"pass@1": 0.5, "pass@2": 1.0, "score": 0.5})
        ['pass@1', 'pass@2', 'maj@2', 'score']
    """
    names = []
    for name in metrics:
        of, passes, k = name.rpartition("pass@")
        majority = f"{of}maj@{k}"
        missing = passes and of in ("", f"{of[:-1]}/") and k.isdigit() and int(k) > 1 and majority not in metrics
        names += [name, majority] if missing else [name]
    return names


def measure_sets(
    samples: Sequence[Sample], measure: Measure, *, silent: Collection[str] | None = None
) -> dict[str, SetMeasures]:
    """Measure every problem with ``measure``, and collect the results by set.

    Args:
        silent: the sets that have no ``maj@K``. None means those in which no sample has an answer (`silent_sets`).

    Raises:
        EvalError: no problem of a set has any rate, or two problems of a set have the same example_id.
    """
    sets, silent = {}, silent_sets(samples) if silent is None else silent
    for name in dict.fromkeys(sample.set for sample in samples):
        members = _filled([sample for sample in samples if sample.set == name])
        _refuse_equal_ids(members, name)
        answers: dict[str, dict[str, list[Sample]]] = {}
        for sample in members:
            answers.setdefault(sample.arm, {}).setdefault(_problem(sample), []).append(sample)
        arms = {arm: [(key, *measure(each)) for key, each in found.items()] for arm, found in answers.items()}
        by_arm = {arm: _columns(problems, name) for arm, problems in arms.items()}
        if name in silent:
            by_arm = {
                arm: {metric: column for metric, column in columns.items() if not metric.startswith("maj@")}
                for arm, columns in by_arm.items()
            }
        totals = {arm: _totals([counts for _, _, counts in problems]) for arm, problems in arms.items()}
        rates = {metric: _mean_of_arms(columns) for metric, columns in _transpose(by_arm).items()}
        counts = {metric: sum(values) for metric, values in _transpose(totals).items()}
        counts["problems"] = max(len(problems) for problems in arms.values())
        if len(arms) > 1:
            rates |= {f"{arm}/{metric}": column for arm in arms for metric, column in by_arm[arm].items()}
            counts |= {f"{arm}/{metric}": total for arm in arms for metric, total in totals[arm].items()}
        groups = {_problem(sample): sample.group for sample in members if sample.group is not None}
        shown = {metric: column for metric, column in rates.items() if is_headline(metric)}
        for group in sorted(set(groups.values())):
            for metric, column in shown.items():
                if inside := {example: x for example, x in column.items() if groups.get(example) == group}:
                    rates[f"{group}/{metric}"] = inside
            counts[f"{group}/problems"] = sum(each == group for each in groups.values())
        sets[name] = SetMeasures(rates, counts)
    return sets


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
                    values, [[*column] for column in columns], resamples=bootstrap, seed=seed
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


def _problem(sample: Sample) -> str:
    return sample.same_as or sample.example_id


def _refuse_equal_ids(samples: Sequence[Sample], name: str) -> None:
    problems = {(sample.problem, sample.example_id) for sample in samples}
    if len({example for _, example in problems}) < len(problems):
        raise EvalError(f"set {name}: two of its {len(problems)} problems have the same example_id; it must be unique")


def _columns(problems: Sequence[tuple[str, Metrics, Metrics]], name: str) -> dict[str, dict[str, float]]:
    """For each rate, its value in every problem that has it, by example_id."""
    metrics = dict.fromkeys(metric for _, rates, _ in problems for metric in rates)
    if not metrics:
        raise EvalError(f"set {name}: none of its {len(problems)} problems could be measured (texts empty or too long)")
    return {metric: {example: rates[metric] for example, rates, _ in problems if metric in rates} for metric in metrics}


def _totals(problems: Sequence[Metrics]) -> Metrics:
    return {metric: sum(problem[metric] for problem in problems) for metric in problems[0]}


def _mean_of_arms(columns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {example: float(np.mean([column[example] for column in columns])) for example in columns[0]}


def _transpose(by_arm: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """For each metric, its values in the order of the arms."""
    first = next(iter(by_arm.values()))
    return {metric: [values[metric] for values in by_arm.values()] for metric in first}
