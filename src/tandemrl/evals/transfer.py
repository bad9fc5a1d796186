r"""Can other models follow a text? Each reader gets a growing part of a model's solution, then has to answer.

The final answer and its line are removed first. ``free/N``: the reader has N percent of the steps and goes on as it
likes; ``forced/N``: it has to answer at once. ``step`` is the first step alone. Controls, in both ways:

- 0: nothing; the reader alone.
- ``before``: the text is cut before the step in which the true answer first appears, even as another quantity.
- ``masked``: all steps, with the true answer masked wherever it appears.
- ``forced/own``: the reader's own steps (going on freely after them is what it did alone).
- ``copy/N``: no model, but a function that copies the answer that the part states, or its last number.

A transfer is labelled by the longest part from which the copier is not right (`label_of`): the reader goes on from
there up to ``eval.draws`` times (see `unsettled`), and begins alone as often. ``legible``: it is right more often than
alone; ``illegible``: less often; ``undecided``: no difference is shown, as of a reader that needs no help, or ignores
what it cannot follow. If the copier is right from the first part on, the answer is ``answer_leaked``: nothing can be
said of the reasoning. Labels are of texts with a right answer and with steps; a share of a short text that holds no
step is no part.

A text that does not fit into a reader's context with all its steps is left out of all of that reader's conditions.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tandemrl.data.rows import Prompt
from tandemrl.evals.handover import effect
from tandemrl.evals.measures import Sample
from tandemrl.evals.readers import Job, Reader
from tandemrl.evals.traces import Cue, before, copied, cue_of, masked, reasoning, steps_of
from tandemrl.selection.draws import mix64
from tandemrl.types import Metrics

SHARES = (0, 25, 50, 75, 100)
WAYS = ("free", "forced")
LABELS = ("answer_leaked", "legible", "illegible", "undecided")
DRAW = 0x1AB7
"""Among the words of a key, what tells the draws that decide a label from the text."""
LOOKS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""After which shares of the draws a label may be decided."""
PROMISING = 1 / 4
"""From this share of the draws on, a text goes on only if with its rates so far all draws would decide it."""
ALONE, TEXT = "free/0", "text"
"""The conditions of the reader's own text, and of the model's as it stands."""

Grade = Callable[[Sequence[Sample]], list[Sample]]


def transfer(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    readers: Iterable[Reader],
    grade: Grade,
    draws: int = 256,
) -> list[Sample]:
    """What readers make of parts of graded texts: samples whose ``arm`` is the reader and ``given`` the condition.

    The texts themselves are among them, for each reader with its cross-entropy (``given`` is `TEXT`), and what the
    copier answers.

    Args:
        readers: each is closed before the next one is made, if that is how they are made.
        draws: how often a reader goes on, at most, for a label (``Sample.draws`` of the text); 0: there are no labels.
    """
    cue = cue_of([sample.response.plain for sample in samples])
    jobs, copies = list[Job](), list[Sample]()
    for sample in samples:
        trace, truth = reasoning(sample.response.plain, sample.answer), prompts[sample.problem].row.ground_truth
        steps = steps_of(trace)
        parts = {str(share): part_of(steps, share) for share in SHARES}
        copies += [_copy(sample, f"copy/{share}", part, cue) for share, part in parts.items()]
        parts |= {"step": "".join(steps[:1]), "before": "".join(steps[: before(steps, truth)])}
        parts["masked"] = masked(trace, truth)
        jobs += [Job(sample, f"free/{name}", part) for name, part in parts.items()]
        jobs += [forced(Job(sample, f"forced/{name}", part), cue) for name, part in parts.items()]
    copies, decisive = grade(copies), dict[tuple[int, int], Job | None]()
    of_place = {(_text(job.sample), job.given): job for job in jobs}
    for copy in copies if draws else ():
        job = of_place[_text(copy), str(copy.given).replace("copy", "free")]
        if job.sample.correct and copy.rounds:
            decisive[_text(copy)] = decisive.get(_text(copy)) if copy.correct else job
    out: list[Sample] = []
    for reader in readers:
        alone = grade(reader.write([job for job in jobs if job.given == ALONE]))
        own = [Job(each, "forced/own", reasoning(each.response.plain, each.answer), own=each) for each in alone]
        rest = [*(job for job in jobs if job.given != ALONE), *(forced(job, cue) for job in own)]
        written = reader.write(rest)
        counts = Counter(_text(each) for each in alone + written if each.given != "forced/own")
        fit = {text for text, count in counts.items() if count == len(jobs) // len(samples)}
        drawn = _draw(reader, {text: job for text, job in decisive.items() if text in fit}, grade, draws)
        reader.session.close_engine()
        graded = [each for each in alone + grade(written) + copies if _text(each) in fit]
        of_model = [
            reader.in_own_tokens(sample)._replace(given=TEXT, draws=drawn.get(_text(sample))) for sample in samples
        ]
        read = reader.read([e for e in of_model if _text(e) in fit] + [e for e in graded if e.given == ALONE])
        out += [each._replace(arm=reader.name) for each in graded if each.given != ALONE] + read
        out += [each for each in of_model if _text(each) not in fit]
    return out


def surprise(
    samples: Sequence[Sample], prompts: Sequence[Prompt], readers: Iterable[Reader], grade: Grade
) -> list[Sample]:
    """What readers write alone, and how the texts and that surprise them; nothing is graded."""
    out: list[Sample] = []
    for reader in readers:
        alone = reader.write([Job(sample, ALONE, "") for sample in samples])
        reader.session.close_engine()
        out += reader.read([reader.in_own_tokens(sample)._replace(given=TEXT) for sample in samples] + alone)
    return out


def transferred(problem: Sequence[Sample], k: Sequence[int] = ()) -> tuple[Metrics, Metrics]:
    """The rates and counts of one problem's texts, as one reader reads them.

    By condition: pass@1 and its ``gain`` over nothing given, length, the share of texts that were cut off, and the
    cross-entropy where it is known. By way:
    ``area`` is that between the curve of pass@1 over the share of steps and its value at 0, from -1 to 1; ``worse``
    says whether pass@1 with all steps is below that at 0. Those of `LABELS` are shares of the labelled texts.
    """
    by_condition: dict[str, list[Sample]] = {}
    for sample in problem:
        by_condition.setdefault(str(sample.given), []).append(sample)
    rates: Metrics = {}
    for given, each in by_condition.items():
        if each[0].correct is not None:
            rates[f"{given}/pass@1"] = fmean(bool(sample.correct) for sample in each)
        if not given.startswith("copy/"):
            rates[f"{given}/truncation_rate"] = fmean(sample.stop_reason == "length" for sample in each)
            rates[f"{given}/length"] = fmean(sample.length for sample in each)
        for name in ("cross_entropy", "cross_entropy_per_byte"):
            if known := [getattr(sample, name) for sample in each if getattr(sample, name) is not None]:
                rates[f"{given}/{name}"] = fmean(known)
    for given in [given for given in by_condition if given.startswith(WAYS) and given != ALONE]:
        alone = f"{given.partition('/')[0]}/0/pass@1"
        if alone in rates and f"{given}/pass@1" in rates:
            rates[f"{given}/gain"] = rates[f"{given}/pass@1"] - rates[alone]
    for way in WAYS:
        curve = [rates[name] for share in SHARES if (name := f"{way}/{share}/pass@1") in rates]
        if len(curve) == len(SHARES):
            points = [value - curve[0] for value in curve]
            rates[f"{way}/area"] = sum(points[:-1] + points[1:]) / 2 / (len(points) - 1)
            rates[f"{way}/worse"] = float(points[-1] < 0)
    labels = [*labels_of(problem).values()]
    rates |= {name: labels.count(name) / len(labels) for name in LABELS if labels}
    texts = by_condition.get(TEXT, [])
    read = by_condition.get("free/100") or [each for each in texts if each.cross_entropy is not None]
    return rates, {"texts": len(texts), "labelled": len(labels), "dropped": len(texts) - len(read)}


def labels_of(samples: Iterable[Sample]) -> dict[tuple[int, int], str]:
    """The labels of one reader's transfers, by problem and text; none of texts whose answer is wrong, that have no
    steps, or that do not fit into the reader's context."""
    return {_text(each): label_of(*each.draws) for each in samples if each.given == TEXT and each.draws is not None}


def label_of(alone: Sequence[bool], after: Sequence[bool]) -> str:
    """The label of a text by whether a reader was right in draws alone, and after its part; without draws it leaks.

    The interval of the gain is that of `effect`, at 96 percent. With all looks (`LOOKS`, `unsettled`) together, a text
    that changes nothing is called legible in at most one case of twenty, and illegible as well: exactly, in at most
    .045, whatever the reader's rate, with 256 draws; with fewer less often.

    Examples:
        >>> label_of([True] * 5 + [False] * 11, [True] * 14 + [False] * 2), label_of([True] * 16, [True] * 16)
        ('legible', 'undecided')
    """
    if not alone:
        return "answer_leaked"
    gain = effect([*map(float, alone)], [*map(float, after)], level=0.96)
    return "legible" if gain.low > 0 else "illegible" if gain.high < 0 else "undecided"


def unsettled(alone: Sequence[bool], after: Sequence[bool], draws: int) -> bool:
    """Whether a text gets further draws, of at most ``draws``: it is undecided, and may be decided (`PROMISING`)."""
    times = draws // max(1, len(alone)) if len(alone) >= PROMISING * draws else 0
    told = label_of([*alone] * times, [*after] * times) if times else None
    return not alone or (label_of(alone, after) == "undecided" != told)


def part_of(steps: Sequence[str], share: int) -> str:
    """A share of the steps, in percent."""
    return "".join(steps[: round(len(steps) * share / 100)])


def forced(job: Job, cue: Cue) -> Job:
    """The job with the begin of an answer, on a line of its own."""
    return job._replace(cue=("" if not job.part or job.part.endswith("\n") else "\n") + cue.begin)


def untruncated(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of the texts that were not cut off, and beside which no reader was cut off alone."""
    cut = {_text(each) for each in samples if each.given in (TEXT, ALONE) and each.stop_reason == "length"}
    return [each for each in samples if _text(each) not in cut]


# --------------------------------------------------------------------------------------------------------------------


def _text(sample: Sample) -> tuple[int, int]:
    return sample.problem, sample.sample


def _draw(
    reader: Reader, decisive: Mapping[tuple[int, int], Job | None], grade: Grade, draws: int
) -> dict[tuple[int, int], tuple[list[bool], list[bool]]]:
    """Whether the reader is right in each draw, alone and after the part of a text's job; no draws where there is none.
    A text gets further draws as long as it is `unsettled`. Draw i has one key, alone and after the part."""
    found = {text: (list[bool](), list[bool]()) for text in decisive}
    for share in LOOKS:
        jobs = [
            Job(job.sample._replace(key=mix64(job.sample.key, DRAW, i)), given, part)
            for text, job in decisive.items()
            if job is not None and unsettled(*found[text], draws)
            for i in range(len(found[text][0]), max(1, round(draws * share)))
            for given, part in ((ALONE, ""), ("after", job.part))
        ]
        for each in grade(reader.write(jobs)):
            found[_text(each)][each.given != ALONE].append(bool(each.correct))
    return found


def _copy(sample: Sample, given: str, part: str, cue: Cue) -> Sample:
    """The copier's answer, not graded; ``rounds`` is 0 where it got nothing."""
    answer = copied(part)
    text = "" if answer is None else f"{cue.begin}{answer}{cue.end}"
    told: dict[str, Any] = {"text": text, "plain": None, "opened": "", "tokens": [], "author": "", "length": 0}
    return sample._replace(given=given, **told, rounds=int(bool(part.strip())), senior_share=0.0, stop_reason="eos")
