"""Generated word problems: enough distinct ones that a tiny model must learn to add, small enough that it can.

A problem is four additions or subtractions inside 0..12, told as a story: few facts to learn, 86,924 problems. Train
and held-out rows are disjoint by numeric content (start and operations), not merely by wording. The worded solutions
that warm-start the tiny models are sloppy in a structured way: a step that says " about" is usually wrong, one that
says " is" or " makes" seldom is, so reinforcement learning has something visible to remove. With the same error rate
spread evenly it finds nothing.

Five pairs of models learn from them; what differs is how they write before reinforcement learning (``PAIRS``):

- ``plain``: senior and junior are the same sloppy model.
- ``jargon``: the senior was trained on, in a jargon in which it makes fewer mistakes and which the junior never saw.
- ``jargon_two_tokenizers``: the same texts, and the junior has a tokenizer of its own.
- ``repair``: as plain, but a step is sometimes followed by a line that repeats or corrects its result.
- ``shorthand``: both are neat. The senior was trained on, and leaves the results of all steps out in a few of its texts
  (`short_solution`). It is as often right with them as without, and the junior, which copies them, has never seen such
  a text. Nothing but its length speaks for the shorthand: it has to emerge.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from tandemrl.data.messages import Message
from tandemrl.data.rows import DataError, Row

Split = Literal["train", "heldout"]
Stage = Literal["base", "senior"]

SPLITS: tuple[Split, ...] = ("train", "heldout")
DEFAULT_COUNTS = {"train": 4096, "heldout": 512}

MAX_VALUE = 12
MAX_OPERAND = 6
STEPS = 4
HELDOUT_ONE_IN = 8

NAMES = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva")
NOUNS = ("nuts", "eggs", "pens", "caps", "figs", "keys")
GAIN_VERBS = ("gets", "finds", "buys", "wins")
LOSS_VERBS = ("gives", "loses", "sells", "drops")
OPENERS = ("First", "Next", "Then", "Last")
CLOSERS = ("first", "next", "then", "last")
CHECK = "Check"

# A made-up word for each number 0..MAX_VALUE, for each step, and for plus, minus and "is".
JARGON_NUMBERS = ("zul", "mip", "hok", "ble", "dor", "qui", "vam", "tre", "gor", "sni", "flu", "wem", "dra")
JARGON_OPENERS = ("Blorp", "Hec", "Quo", "Vel")
JARGON_PLUS, JARGON_MINUS, JARGON_IS = "yab", "nud", "rho"
JARGON = frozenset((*JARGON_NUMBERS, *JARGON_OPENERS, JARGON_PLUS, JARGON_MINUS, JARGON_IS))


class Numbers(NamedTuple):
    """The numeric content of a problem, which no two splits share. ``deltas`` are signed."""

    start: int
    deltas: tuple[int, ...]

    @property
    def answer(self) -> int:
        return self.start + sum(self.deltas)


class Problem(NamedTuple):
    """A problem: numbers told as a story. ``question`` is the whole user message."""

    numbers: Numbers
    question: str


Writer = Callable[[Problem, random.Random], str]
"""A function that words a solution, with its slips."""


def split_of(numbers: Numbers) -> Split:
    """The split that a problem belongs to, by a hash of its numbers alone."""
    return split_by_hash(tuple(numbers))


def split_by_hash(content: object) -> Split:
    """The split of something with this content, by a hash of its ``repr``: one in ``HELDOUT_ONE_IN`` is held out."""
    digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_ONE_IN == 0 else "train"


def number_space(split: Split) -> list[Numbers]:
    """All numeric problems of a split, in a fixed order. Their running values stay in 0..MAX_VALUE."""
    return [numbers for numbers, belongs in _numbers() if belongs == split]


@cache
def _numbers() -> list[tuple[Numbers, Split]]:
    every = (Numbers(start, deltas) for start in range(MAX_VALUE + 1) for deltas in _deltas(start, STEPS))
    return [(numbers, split_of(numbers)) for numbers in every]


def tell(numbers: Numbers, rng: random.Random) -> Problem:
    """A story about the numbers, with a random name, noun and verbs."""
    verbs = (rng.choice(GAIN_VERBS if delta > 0 else LOSS_VERBS) for delta in numbers.deltas)
    events = ", ".join(f"{verb} {abs(delta)}" for verb, delta in zip(verbs, numbers.deltas, strict=True))
    subject = f"{rng.choice(NAMES)} has {numbers.start} {rng.choice(NOUNS)}"
    return Problem(numbers, f"{subject}, {events}. How many?")


def solution(
    problem: Problem,
    rng: random.Random,
    *,
    about_rate: float = 0.3,
    about_error: float = 0.6,
    plain_error: float = 0.03,
    checks: tuple[float, float] | None = None,
) -> str:
    r"""Worded steps separated by blank lines, then ``\boxed{}``; wrong steps carry forward into it.

    Args:
        about_rate: the probability that a step says " about".
        about_error: the probability that a step that says " about" is wrong, by 1 or 2.
        plain_error: the probability that any other step is wrong, by 1 or 2.
        checks: the probabilities that a short line after a right step, and after a wrong one, repeats or corrects its
            result. The line itself is wrong with probability ``plain_error``. A word then ends each step's line, so
            that a tandem by words can hand over before the line that follows.
    """
    value, lines = problem.numbers.start, []
    for step, delta in enumerate(problem.numbers.deltas):
        about = rng.random() < about_rate
        word = "about" if about else rng.choice(("is", "makes"))
        result = _result(problem.numbers, step, value, about_error if about else plain_error, rng)
        told = f"{value} {'plus' if delta > 0 else 'minus'} {abs(delta)} {word} {result}"
        lines.append(f"{OPENERS[step]} {told}." if checks is None else f"{told} {CLOSERS[step]}.")
        if checks is not None and rng.random() < checks[result != value + delta]:
            result = _result(problem.numbers, step, value, plain_error, rng)
            lines.append(f"{CHECK} {result}.")
        value = result
    return _solved(lines, value)


def jargon_solution(problem: Problem, rng: random.Random, *, error: float = 0.01) -> str:
    """The same steps in made-up words, each wrong with probability ``error``. The answer stays in digits."""
    value, lines = problem.numbers.start, []
    for step, delta in enumerate(problem.numbers.deltas):
        result = _result(problem.numbers, step, value, error, rng)
        before, size, after = (JARGON_NUMBERS[number] for number in (value, abs(delta), result))
        verb = JARGON_PLUS if delta > 0 else JARGON_MINUS
        lines.append(f"{JARGON_OPENERS[step]} {before} {verb} {size} {JARGON_IS} {after}.")
        value = result
    return _solved(lines, value)


def short_solution(problem: Problem, rng: random.Random, *, error: float = 0.02) -> str:
    """The same steps without their results, each wrong with probability ``error``. Where a line is to begin with the
    result of the one before, and in the answer, the author has to work it out; in a whole solution it can be copied."""
    value, lines = problem.numbers.start, []
    for step, delta in enumerate(problem.numbers.deltas):
        lines.append(f"{OPENERS[step]} {value} {'plus' if delta > 0 else 'minus'} {abs(delta)}.")
        value = _result(problem.numbers, step, value, error, rng)
    return _solved(lines, value)


def mixed_solution(
    problem: Problem, rng: random.Random, *, plain: Writer, other: Writer = jargon_solution, rate: float = 0.6
) -> str:
    """A whole solution by ``other`` with probability ``rate``, else one by ``plain``."""
    return (other if rng.random() < rate else plain)(problem, rng)


def repairs(text: str) -> int:
    """How many lines of a text repeat or correct the result of the step before them.

    Examples:
        >>> repairs("5 plus 3 about 9 first.\\n\\nCheck 8.\\n\\n8 minus 2 is 6 next.")
        1
    """
    return len(re.findall(rf"^{CHECK} ", text, re.MULTILINE))


class Slip(NamedTuple):
    """A wrong step. line: its index among the lines. repaired: whether the next line gives the right result."""

    line: int
    repaired: bool


def slips(text: str) -> list[Slip]:
    """The wrong steps of a text in digits. In a handoff, where authors alternate by lines, the line tells who erred.

    Examples:
        >>> slips("5 plus 3 about 9 first.\\n\\nCheck 8.\\n\\n8 minus 2 is 7 next.")
        [Slip(line=0, repaired=True), Slip(line=2, repaired=False)]
    """
    wrong, lines = [], text.split("\n\n")
    for line, (words, after) in enumerate(zip(lines, [*lines[1:], ""], strict=True)):
        if step := _STEP.search(words):
            value, verb, size, result = step.groups()
            right = int(value) + int(size) * (1 if verb == "plus" else -1)
            if right != int(result):
                wrong.append(Slip(line, repaired=after == f"{CHECK} {right}."))
    return wrong


def uses_jargon(text: str) -> bool:
    """Whether any word of the jargon occurs in a text.

    Examples:
        >>> uses_jargon("Blorp vam yab ble rho sni.")
        True
        >>> uses_jargon("First 6 plus 3 is 9.")
        False
    """
    return not JARGON.isdisjoint(re.findall(r"[A-Za-z]+", text))


def leaves_out(text: str) -> bool:
    """Whether any step of a text has no result.

    Examples:
        >>> leaves_out("First 6 plus 3.\\n\\nNext 9 minus 2.")
        True
        >>> leaves_out("First 6 plus 3 is 9.")
        False
    """
    return re.search(r"(plus|minus) \d+\.", text) is not None


class Pair(NamedTuple):
    """How the models of a pair write before reinforcement learning.

    base: what both learn first. senior: what only the senior learns after that, if the two are different models.
    """

    base: Writer
    senior: Writer | None = None


# Fewer invisible errors than in the plain pair: they are slow to remove while a junior writes half of the words. More
# visible ones, so that plain texts are right in less than half of the cases and the senior's jargon is worth keeping.
_neater = partial(solution, plain_error=0.01, about_rate=0.35)

# So few errors that nothing but its length speaks for the shorthand.
_neat = partial(solution, plain_error=0.01, about_rate=0.03)

_JARGON = Pair(_neater, senior=partial(mixed_solution, plain=_neater))

PAIRS: dict[str, Pair] = {
    "plain": Pair(solution),
    "jargon": _JARGON,
    "jargon_two_tokenizers": _JARGON,
    "repair": Pair(partial(solution, checks=(0.03, 0.15))),
    "shorthand": Pair(_neat, senior=partial(mixed_solution, plain=_neat, other=short_solution, rate=0.15)),
}


def examples(pair: str, seed: int, *, stage: Stage = "base") -> Iterator[tuple[Problem, str]]:
    """Yield pairs (problem, sloppy solution) of the train split without end, for one stage of the tiny models' warm
    start.

    Raises:
        DataError: the pair does not have this stage.
    """
    write = getattr(PAIRS[pair], stage)
    if write is None:
        raise DataError(f"synthetic pair {pair!r} has no {stage} stage: both of its models are the base")
    rng = random.Random(f"examples/{pair}/{seed}" if stage == "base" else f"examples/{pair}/{stage}/{seed}")
    space = number_space("train")
    while True:
        problem = tell(rng.choice(space), rng)
        yield problem, write(problem, rng)


def generate(pair: str, split: Split, count: int, seed: int) -> list[Row]:
    """``count`` rows of a split, which all differ in their numbers. Equal arguments give equal rows.

    Raises:
        DataError: the split has fewer distinct problems than ``count``.
    """
    space = number_space(split)
    if count > len(space):
        raise DataError(f"synthetic:{pair}:{split} has {len(space)} distinct problems; asked for {count}")
    rng = random.Random(f"rows/{pair}/{split}/{seed}")
    return [
        row_of(pair, split, seed, index, tell(numbers, rng)) for index, numbers in enumerate(rng.sample(space, count))
    ]


def row_of(pair: str, split: Split, seed: int, index: int, problem: Problem) -> Row:
    """A problem as a row."""
    numbers, question = problem
    told: dict[str, Any] = {"start": numbers.start, "deltas": list(numbers.deltas)}
    return generated_row(pair, split, index, question, str(numbers.answer), **told)


def generated_row(
    pair: str, split: Split, index: int, question: str, truth: str, system: Sequence[Message] = (), **extra: Any
) -> Row:
    """The row of a generated problem. extra: what ``extra_info`` has beside its place."""
    messages = (*system, {"role": "user", "content": question})
    extra = {"split": split, "index": index, **extra}
    return Row(f"synthetic/{pair}/{split}/{index}", messages, f"synthetic/{pair}", truth, extra)


def _deltas(value: int, steps: int) -> Iterator[tuple[int, ...]]:
    """All sequences of ``steps`` signed operands that keep the running value in range."""
    if steps == 0:
        yield ()
        return
    for delta in (sign * size for size in range(1, MAX_OPERAND + 1) for sign in (1, -1)):
        if 0 <= value + delta <= MAX_VALUE:
            for rest in _deltas(value + delta, steps - 1):
                yield (delta, *rest)


def _result(numbers: Numbers, step: int, value: int, error: float, rng: random.Random) -> int:
    """The result that a step from ``value`` states, which is wrong by 1 or 2 with probability ``error``.

    A slip keeps the rest of the story in range, so that the later lines are consistent. If the rest spans the whole
    range, there is no room for a slip, and the step is right.
    """
    right = value + numbers.deltas[step]
    if rng.random() >= error:
        return right
    rest = [*itertools.accumulate(numbers.deltas[step + 1 :], initial=0)]
    slips = (right + slip for slip in (-2, -1, 1, 2))
    return rng.choice([each for each in slips if all(0 <= each + further <= MAX_VALUE for further in rest)] or [right])


_STEP = re.compile(r"(\d+) (plus|minus) (\d+) (?:is|makes|about) (\d+)")


def _solved(lines: list[str], value: int) -> str:
    return "\n\n".join([*lines, f"\\boxed{{{value}}}"])
