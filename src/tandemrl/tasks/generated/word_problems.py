"""Word problems in English with one or two steps, whole numbers from 0 to 30: easy for a small pretrained model.

A problem is a template with numbers, names and things. Train and held-out rows are disjoint by template and numbers,
not merely by names. Solutions give one step a line, with blank lines between them, and the answer as GSM8K does:

    We get 3 * 4 = 12.

    Then 12 + 9 = 21.

    #### 21

Two pairs of models learn from them (``PAIRS``). In ``word_problems`` both write this. In ``word_problems_terse``, the
senior has learnt a shorthand that the junior never saw:

    3×4→12

    12+9→21

    #### 21

A row keeps its solution as GSM8K's rows do (``rows.SOLUTION``), so a warm start can learn from it.
"""

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tandemrl.data.rows import SOLUTION, DataError, Row
from tandemrl.tasks.generated.synthetic import Split, generated_row, split_by_hash

DEFAULT_COUNTS: dict[Split, int] = {"train": 2048, "heldout": 256}
MOST: dict[Split, int] = {"train": 8192, "heldout": 1024}
"""How many rows a split can have. There are more questions."""
MAX_VALUE = 30
"""Small, so that most wrong answers are about what to compute, not about large sums and products."""
MAX_TOKENS = 44
"""Enough for every solution and its EOS, with common tokenizers."""

NAMES = ("Tom", "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Julia", "Leo", "Maria")
THINGS = ("apples", "books", "cards", "pencils", "cookies", "stickers", "marbles", "shells", "stamps", "coins")

YIELDS = "→"
SHORTHAND = {"+": "+", "-": "−", "*": "×", "/": ":"}
"""The operators of the shorthand. Each, and ``YIELDS``, is one token for SmolLM2."""


class Template(NamedTuple):
    """A story with its ``steps``. ranges: for each number of the story, the least and the greatest value.

    Names ``{x}`` and ``{y}`` are different people, ``{t}`` are things. A step is an operation on two operands: numbers
    of the story by letter, or the result so far, ``_``.
    """

    story: str
    steps: str
    ranges: dict[str, tuple[int, int]]


_TEMPLATES = """
{x} has {a} {t} and finds {b} more. How many {t} does {x} have now?
    a + b; a 3-24, b 2-12
{x} had {a} {t} and gave {b} of them to {y}. How many {t} are left?
    a - b; a 8-30, b 2-12
{x} has {a} boxes with {b} {t} in each. How many {t} are there?
    a * b; a 2-9, b 2-9
{x} puts {a} {t} into bags of {b}. How many bags are full?
    a / b; a 4-30, b 2-9
{x} has {a} boxes with {b} {t} in each. Then {x} buys {c} more {t}. How many {t} does {x} have?
    a * b, _ + c; a 2-6, b 2-6, c 2-12
{x} buys {a} packs of {b} {t} and gives {c} {t} to {y}. How many {t} does {x} keep?
    a * b, _ - c; a 2-6, b 2-9, c 2-9
There are {a} {t} in a box. {x} takes out {b}, and {y} puts in {c}. How many {t} are in the box?
    a - b, _ + c; a 8-30, b 2-9, c 2-9
{x} reads {a} pages on Monday, {b} on Tuesday and {c} on Wednesday. How many pages is that in all?
    a + b, _ + c; a 2-12, b 2-12, c 2-9
{x} has {a} {t}. {y} has {b} more than {x}. How many {t} do they have together?
    a + b, _ + a; a 2-13, b 2-9
{x} has {a} {t}. {y} has {b} times as many. How many {t} do they have together?
    a * b, _ + a; a 2-10, b 2-6
{x} and {y} put {a} and {b} {t} together and share them equally among {c} friends. How many does each get?
    a + b, _ / c; a 2-18, b 2-18, c 2-9
A ticket costs {a} dollars. {x} buys {b} and pays with {c} dollars. How many dollars does {x} get back?
    a * b, c - _; a 2-6, b 2-9, c 10-30
{x} earns {a} dollars an hour and works {b} hours. Then {x} shares the money equally with {y}. How many dollars does \
each of them get?
    a * b, _ / two; a 2-12, b 2-9, two 2-2
"""
TEMPLATES = tuple(
    Template(
        story, steps, {name: (int(low), int(high)) for name, low, high in re.findall(r"(\w+) (\d+)-(\d+)", ranges)}
    )
    for story, steps, ranges in re.findall(r"(\S.*)\n +(.*); (.*)", _TEMPLATES)
)


class Problem(NamedTuple):
    """A problem. ``steps`` are (left, operator, right, result), with each number that the solution states."""

    template: int
    numbers: tuple[int, ...]
    question: str
    steps: tuple[tuple[int, str, int, int], ...]

    @property
    def answer(self) -> int:
        return self.steps[-1][-1]


Writer = Callable[[Problem], str]
"""A function that words a solution."""


def solution(problem: Problem) -> str:
    """The steps in a few words, and the answer after ``####``."""
    lines = [
        f"{'Then' if index else 'We get'} {left} {operator} {right} = {result}."
        for index, (left, operator, right, result) in enumerate(problem.steps)
    ]
    return "\n\n".join([*lines, f"#### {problem.answer}"])


def terse_solution(problem: Problem) -> str:
    """The steps in shorthand, and the answer after ``####``."""
    lines = [f"{left}{SHORTHAND[operator]}{right}{YIELDS}{result}" for left, operator, right, result in problem.steps]
    return "\n\n".join([*lines, f"#### {problem.answer}"])


def uses_shorthand(text: str) -> bool:
    """Whether a text has a step in shorthand."""
    return YIELDS in text


PAIRS: dict[str, Writer] = {"word_problems": solution, "word_problems_terse": terse_solution}
"""How the solutions of a pair's rows are worded, which the senior of the pair learns to write."""


def draw(rng: random.Random) -> Problem:
    """A random problem: all of its results are whole numbers from 0 to ``MAX_VALUE``."""
    while True:
        index = rng.randrange(len(TEMPLATES))
        story, program, ranges = TEMPLATES[index]
        values = {letter: rng.randint(low, high) for letter, (low, high) in ranges.items()}
        if (steps := _solve(program, values)) is not None:
            x, y = rng.sample(NAMES, 2)
            question = story.format(x=x, y=y, t=rng.choice(THINGS), **values)
            return Problem(index, tuple(values.values()), question, steps)


def split_of(problem: Problem) -> Split:
    """The split that a problem belongs to, by a hash of its template and numbers."""
    return split_by_hash((problem.template, problem.numbers))


def problems(split: Split, rng: random.Random) -> Iterator[Problem]:
    """Yield random problems of a split without end."""
    while True:
        if split_of(problem := draw(rng)) == split:
            yield problem


def generate(pair: str, split: Split, count: int, seed: int) -> list[Row]:
    """``count`` rows of a split.

    No question is there twice; some differ in names and things alone. Equal arguments give equal rows, and every pair
    gets the same problems.

    Raises:
        DataError: ``count`` is greater than ``MOST``.
    """
    if count > MOST[split]:
        raise DataError(f"synthetic:{pair}:{split} has up to {MOST[split]} problems; asked for {count}")
    rows: dict[str, Row] = {}
    drawn = problems(split, random.Random(f"rows/word_problems/{split}/{seed}"))
    while len(rows) < count:
        if (problem := next(drawn)).question not in rows:
            extra: dict[str, Any] = {"steps": len(problem.steps), SOLUTION: PAIRS[pair](problem)}
            row = generated_row(pair, split, len(rows), problem.question, str(problem.answer), **extra)
            rows[problem.question] = row
    return list(rows.values())


# --------------------------------------------------------------------------------------------------------------------


def _solve(program: str, values: dict[str, int]) -> tuple[tuple[int, str, int, int], ...] | None:
    """The steps with their numbers, or None if a result is not a whole number from 0 to ``MAX_VALUE``."""
    known, steps = dict(values), []
    for step in program.split(", "):
        a, operator, b = step.split()
        left, right = known[a], known[b]
        if operator == "/" and (left % right or left == right):
            return None
        result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]
        if not 0 <= result <= MAX_VALUE:
            return None
        steps.append((left, operator, right, result))
        known["_"] = result
    return tuple(steps)
