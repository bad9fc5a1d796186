"""Generated sums of numbers of two digits, which a tiny model cannot work out alone, and the tool that does it."""

import random
from collections.abc import Iterator

from tandemrl.data.rows import Row
from tandemrl.tasks.countdown.grader import evaluate
from tandemrl.tasks.generated.synthetic import Numbers, Problem, Split, row_of, split_of, tell

PAIRS = ("calculator",)
DEFAULT_COUNTS = {"train": 4096, "heldout": 512}
OPERATIONS = 2
"""How many numbers are added to the first one, or taken away."""


def calculator(expression: str) -> str:
    """Work out an expression of whole numbers.

    Args:
        expression: Numbers, + - * / and brackets.
    """
    return str(evaluate(expression))


def expression_of(numbers: Numbers) -> str:
    """What a problem asks for, such as ``47 + 38 - 16``."""
    return f"{numbers.start}" + "".join(f" {'+' if delta > 0 else '-'} {abs(delta)}" for delta in numbers.deltas)


def problems(split: Split, rng: random.Random) -> Iterator[Problem]:
    """Yield problems of a split without end. No value on the way is negative."""
    while True:
        start, *sizes = (rng.randrange(10, 100) for _ in range(1 + OPERATIONS))
        numbers = Numbers(start, tuple(rng.choice((1, -1)) * size for size in sizes))
        on_the_way = [start + sum(numbers.deltas[:count]) for count in range(1, OPERATIONS + 1)]
        if min(on_the_way) >= 0 and split_of(numbers) == split:
            yield tell(numbers, rng)


def generate(pair: str, split: Split, count: int, seed: int) -> list[Row]:
    """``count`` rows of a split. Equal arguments give equal rows."""
    asked = problems(split, random.Random(f"rows/{pair}/{split}/{seed}"))
    return [row_of(pair, split, seed, index, problem) for index, problem in zip(range(count), asked, strict=False)]
