"""Arithmetic puzzles with an exact answer: Countdown (TinyZero, RL-GRPO), and sums and products of long numbers.

A Countdown problem is made backwards, from an expression, so it has a solution. Problems are distinct by content, not
by wording: no two have the same target and the same numbers in any order. So splits that are drawn together share no
problem.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tandemrl.data.rows import RENDERED, DataError, record_of

Template = Literal["base", "instruct", "chat"]

SIZES = (3, 4)
"""How many numbers a Countdown problem may have, as in TinyZero's published set."""
MAX_NUMBER = 99
TARGETS = (10, 100)
"""The smallest and the largest target."""
OPERATIONS = ("+", "-", "*")
TRIES = 100_000
"""After how many draws in a row without a new puzzle `distinct` gives up."""

_PREAMBLE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer."
)
_SYSTEM = (
    "You are a helpful assistant. You first thinks about the reasoning process in the mind and then provides the user "
    "with the answer."
)
_OPENING = "Let me solve this step by step.\n<think>"
_WORK = "Show your work in <think> </think> tags."


class Puzzle(NamedTuple):
    """A puzzle. Two puzzles with equal ``content`` are the same. ``solution`` is a right expression, if known."""

    data_source: str
    question: str
    example: str
    ground_truth: Any
    content: tuple[Any, ...]
    solution: str | None = None


def countdown(numbers: Sequence[int], target: int, solution: str | None = None) -> Puzzle:
    """The puzzle to reach ``target`` with each of ``numbers`` once and + - * /."""
    return Puzzle(
        data_source="countdown",
        question=(
            f"Using the numbers {list(numbers)}, create an equation that equals {target}. You can use basic arithmetic "
            "operations (+, -, *, /) and each number can only be used once."
        ),
        example="(1 + 2) / 3",
        ground_truth={"target": target, "numbers": list(numbers)},
        content=("countdown", target, *sorted(numbers)),
        solution=solution,
    )


def calculation(data_source: str, a: int, operation: str, b: int) -> Puzzle:
    """The puzzle to compute ``a`` + - * ``b``. ``data_source`` is "multiply" or "arithmetic"."""
    answer = {"+": a + b, "-": a - b, "*": a * b}[operation]
    return Puzzle(
        data_source=data_source,
        question=f"What is {a} {operation} {b}?",
        example="42",
        ground_truth=str(answer),
        content=(operation, *sorted((a, b))),
    )


def prompt(puzzle: Puzzle, template: Template) -> list[dict[str, str]]:
    """The puzzle as messages.

    ``base`` and ``instruct`` are TinyZero's rendered prompts (its ``base`` and ``qwen-instruct``), for base models and
    for Qwen's chat models; RL-GRPO has the second, too. They are one message with the whole text, up to an assistant
    turn that has begun to think. ``chat`` is a system and a user message for the model's own chat template.
    """
    answer = f"And return the final answer in <answer> </answer> tags, for example <answer> {puzzle.example} </answer>."
    asked = f"{puzzle.question} {_WORK} {answer}"
    if template == "base":
        return [{"role": "user", "content": f"{_PREAMBLE}\nUser: {asked}\nAssistant: {_OPENING}"}]
    if template == "instruct":  # the blank before the question is theirs
        text = (
            f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n {asked}<|im_end|>\n<|im_start|>assistant\n"
            f"{_OPENING}"
        )
        return [{"role": "user", "content": text}]
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]


def record(
    puzzle: Puzzle, template: Template, *, split: str, index: int, messages: Sequence[Mapping[str, str]] | None = None
) -> dict[str, Any]:
    """A puzzle in verl's row schema.

    Args:
        messages: the prompt, for a data set that has its own. It is used with ``chat``.
    """
    extra: dict[str, Any] = {"split": split, "index": index, RENDERED: template != "chat"}
    if puzzle.solution is not None:
        extra["solution"] = puzzle.solution
    own = messages if template == "chat" else None
    asked = [{"role": m["role"], "content": m["content"]} for m in own or prompt(puzzle, template)]
    return record_of(puzzle.data_source, asked, "math", puzzle.ground_truth, extra)


def countdowns(
    seed: int, *, sizes: Sequence[int] = SIZES, max_number: int = MAX_NUMBER, targets: tuple[int, int] = TARGETS
) -> Callable[[], Puzzle]:
    """A source of Countdown puzzles, each with a solution. They may repeat: see `distinct`.

    Args:
        sizes: how many numbers a puzzle may have.
        targets: the smallest and the largest target.
    """
    rng = random.Random(f"countdown/{seed}")

    def draw() -> Puzzle:
        while True:
            numbers = [rng.randint(1, max_number) for _ in range(rng.choice(sizes))]
            target, solution = _combine([(number, str(number)) for number in numbers], rng)
            if targets[0] <= target <= targets[1]:
                return countdown(numbers, target, solution)

    return draw


def calculations(data_source: str, operations: Sequence[str], digits: int, seed: int) -> Callable[[], Puzzle]:
    """A source of calculations with two numbers of ``digits`` digits. They may repeat: see `distinct`."""
    rng = random.Random(f"{data_source}/{digits}/{seed}")
    low, high = 10 ** (digits - 1), 10**digits - 1

    def draw() -> Puzzle:
        return calculation(data_source, rng.randint(low, high), rng.choice(operations), rng.randint(low, high))

    return draw


def distinct(draw: Callable[[], Puzzle], counts: Mapping[str, int]) -> dict[str, list[Puzzle]]:
    """Splits of the given sizes, filled in order, in which no puzzle occurs twice.

    Raises:
        DataError: there are not enough different puzzles.
    """
    seen: set[tuple[Any, ...]] = set()
    return {split: list(_unseen(draw, count, seen, split)) for split, count in counts.items()}


# --------------------------------------------------------------------------------------------------------------------


def _unseen(draw: Callable[[], Puzzle], count: int, seen: set[tuple[Any, ...]], split: str) -> Iterator[Puzzle]:
    for made in range(count):
        for _ in range(TRIES):
            puzzle = draw()
            if puzzle.content not in seen:
                break
        else:
            raise DataError(
                f"{split}: {made} of {count} rows, then {TRIES} draws in a row gave duplicates; ask for fewer rows"
            )
        seen.add(puzzle.content)
        yield puzzle


def _combine(terms: list[tuple[int, str]], rng: random.Random) -> tuple[int, str]:
    """Join terms two at a time by random operations, using each term once, and return (value, expression).

    Divisions leave no remainder.
    """
    while len(terms) > 1:
        a, text_a = terms.pop(rng.randrange(len(terms)))
        b, text_b = terms.pop(rng.randrange(len(terms)))
        operation = rng.choice("+-*/" if b != 0 and a % b == 0 else "+-*")
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operation]
        last = not terms
        expression = f"{text_a} {operation} {text_b}"
        terms.append((value, expression if last else f"({expression})"))
    return terms[0]
