"""Generated word problems: enough distinct ones that a tiny model must learn to add, small enough that it can.

A problem is four additions or subtractions inside 0..12, told as a story: few facts to learn, 86,924 problems. Train
and held-out rows are disjoint by numeric content (start and operations), not merely by wording. The worded solutions
that warm-start the tiny models are sloppy in a structured way: a step that says " about" is usually wrong, one that
says " is" or " makes" seldom is, so reinforcement learning has something visible to remove. With the same error rate
spread evenly it finds nothing.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal, NamedTuple

from tandemrl.data.rows import DataError, Row

Split = Literal["train", "heldout"]

PAIRS = ("plain",)
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


class Numbers(NamedTuple):
    """The numeric content of a problem: what two splits never share. ``deltas`` are signed."""

    start: int
    deltas: tuple[int, ...]

    @property
    def answer(self) -> int:
        return self.start + sum(self.deltas)


class Problem(NamedTuple):
    """Numbers told as a story; ``question`` is the whole user message."""

    numbers: Numbers
    question: str


def split_of(numbers: Numbers) -> Split:
    """Which split a problem belongs to, from a hash of its numbers alone."""
    digest = hashlib.blake2b(repr(tuple(numbers)).encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_ONE_IN == 0 else "train"


def number_space(split: Split) -> tuple[Numbers, ...]:
    """Every numeric problem of a split, in a fixed order: all running values stay in 0..MAX_VALUE."""
    return _number_spaces()[split]


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
) -> str:
    r"""Worded steps separated by blank lines, then ``\boxed{}``; wrong steps carry forward into it.

    about_rate: probability that a step says " about". about_error, plain_error: probability that a step is wrong, by 1
    or 2, when it does and when it does not.
    """
    value, lines = problem.numbers.start, []
    for step, delta in enumerate(problem.numbers.deltas):
        about = rng.random() < about_rate
        word = "about" if about else rng.choice(("is", "makes"))
        result = value + delta
        if rng.random() < (about_error if about else plain_error):
            # A slip from which the rest of the story stays in range, so that the later lines are sound in themselves;
            # a rest that spans the whole range leaves no room for one, and the step is right.
            rest = problem.numbers.deltas[step + 1 :]
            slips = [r for slip in (-2, -1, 1, 2) if _in_range(Numbers(r := result + slip, rest))]
            result = rng.choice(slips or [result])
        lines.append(f"{OPENERS[step]} {value} {'plus' if delta > 0 else 'minus'} {abs(delta)} {word} {result}.")
        value = result
    return "\n\n".join([*lines, f"\\boxed{{{value}}}"])


def examples(pair: str, seed: int) -> Iterator[tuple[Problem, str]]:
    """Endless (problem, sloppy solution) pairs of the train split, for the warm start of the tiny models.

    Raises:
        DataError: unknown pair.
    """
    write = _writer(pair)
    rng = random.Random(f"examples/{pair}/{seed}")
    space = number_space("train")
    while True:
        problem = tell(rng.choice(space), rng)
        yield problem, write(problem, rng)


def generate(pair: str, split: Split, count: int | None, seed: int) -> list[Row]:
    """``count`` rows (None: the split's default), all different in their numbers; equal for equal arguments.

    Raises:
        DataError: unknown pair or split, or more rows asked for than the split has distinct problems.
    """
    _writer(pair)
    if split not in SPLITS:
        raise DataError(f"synthetic:{pair}: unknown split {split!r}; known: {', '.join(SPLITS)}")
    space = number_space(split)
    count = DEFAULT_COUNTS[split] if count is None else count
    if not 1 <= count <= len(space):
        raise DataError(f"synthetic:{pair}:{split} has {len(space)} distinct problems; asked for {count}")
    rng = random.Random(f"rows/{pair}/{split}/{seed}")
    return [
        _row(pair, split, seed, index, tell(numbers, rng)) for index, numbers in enumerate(rng.sample(space, count))
    ]


def _row(pair: str, split: Split, seed: int, index: int, problem: Problem) -> Row:
    return Row(
        example_id=f"synthetic/{pair}/{split}/{index}",
        messages=({"role": "user", "content": problem.question},),
        data_source=f"synthetic/{pair}",
        ground_truth=str(problem.numbers.answer),
        extra_info={
            "split": split,
            "index": index,
            "start": problem.numbers.start,
            "deltas": list(problem.numbers.deltas),
        },
    )


@cache
def _number_spaces() -> dict[Split, tuple[Numbers, ...]]:
    everything = [Numbers(start, deltas) for start in range(MAX_VALUE + 1) for deltas in _deltas(start, STEPS)]
    splits = [split_of(numbers) for numbers in everything]
    return {split: tuple(itertools.compress(everything, (s == split for s in splits))) for split in SPLITS}


def _deltas(value: int, steps: int) -> Iterator[tuple[int, ...]]:
    """All sequences of ``steps`` signed operands that keep the running value in range."""
    if steps == 0:
        yield ()
        return
    for delta in (sign * size for size in range(1, MAX_OPERAND + 1) for sign in (1, -1)):
        if 0 <= value + delta <= MAX_VALUE:
            for rest in _deltas(value + delta, steps - 1):
                yield (delta, *rest)


def _in_range(numbers: Numbers) -> bool:
    return all(0 <= value <= MAX_VALUE for value in itertools.accumulate(numbers.deltas, initial=numbers.start))


_WRITERS: dict[str, Callable[[Problem, random.Random], str]] = {"plain": solution}


def _writer(pair: str) -> Callable[[Problem, random.Random], str]:
    """How a pair's models write a solution before reinforcement learning."""
    if pair not in _WRITERS:
        raise DataError(f"unknown synthetic pair {pair!r}; known: {', '.join(PAIRS)}")
    return _WRITERS[pair]
