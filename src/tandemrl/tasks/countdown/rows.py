"""Countdown (TinyZero, RL-GRPO), published or generated, and sums and products of long numbers, as files. No torch.

A Countdown problem is made backwards, from an expression, so it has a solution. Problems are distinct by content, not
by wording: no two have the same target and the same numbers in any order. So splits that are drawn together share no
problem.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandemrl.data.parquet import write_splits
from tandemrl.data.rows import RENDERED, DataError, messages_of, record_of
from tandemrl.data.sources import Origin, Record, flattened, provenance, read

Template = Literal["base", "instruct", "chat"]

COUNTDOWN = Origin("Jiayi-Pan/Countdown-Tasks-3to4", "train")
COUNTDOWN_ROWS: Mapping[str, int] = {"train": 327_680, "test": 1024}
"""How many of the first rows of the published set are for training, and how many of the next ones for testing."""
CALCULATION_ROWS: Mapping[str, int] = {"train": 32_768, "test": 4096}
SIZES = (3, 4)
"""How many numbers a generated Countdown problem may have, as in TinyZero's published set."""
MAX_NUMBER = 99
TARGETS = (10, 100)
"""The smallest and the largest generated target."""
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
    question = (
        f"Using the numbers {list(numbers)}, create an equation that equals {target}. You can use basic arithmetic "
        "operations (+, -, *, /) and each number can only be used once."
    )
    truth = {"target": target, "numbers": list(numbers)}
    return Puzzle("countdown", question, "(1 + 2) / 3", truth, (target, *sorted(numbers)), solution)


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
        turns = (
            f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n {asked}<|im_end|>\n<|im_start|>assistant\n"
        )
        return [{"role": "user", "content": turns + _OPENING}]
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]


def record_of_puzzle(
    puzzle: Puzzle, template: Template, *, split: str, index: int, messages: Sequence[Mapping[str, str]] | None = None
) -> dict[str, Any]:
    """A puzzle in verl's row schema.

    Args:
        messages: the prompt, for a data set that has its own. It is used with ``chat``.
    """
    extra: dict[str, Any] = {"split": split, "index": index, RENDERED: template != "chat"}
    extra |= {} if puzzle.solution is None else {"solution": puzzle.solution}
    own = messages if template == "chat" else None
    asked = [{"role": m["role"], "content": m["content"]} for m in own or prompt(puzzle, template)]
    return record_of(puzzle.data_source, asked, "math", puzzle.ground_truth, extra)


def countdowns(
    seed: int, *, sizes: Sequence[int] = SIZES, max_number: int = MAX_NUMBER, targets: tuple[int, int] = TARGETS
) -> Iterator[Puzzle]:
    """Countdown puzzles without end, each with a solution. They may repeat: see `distinct`. ``examples/countdown.py``
    draws smaller ones.

    Args:
        sizes: how many numbers a puzzle may have.
        targets: the smallest and the largest target.
    """
    rng = random.Random(f"countdown/{seed}")
    while True:
        numbers = [rng.randint(1, max_number) for _ in range(rng.choice(sizes))]
        target, solution = _combine([(number, str(number)) for number in numbers], rng)
        if targets[0] <= target <= targets[1]:
            yield countdown(numbers, target, solution)


def calculations(data_source: str, operations: str, digits: int, seed: int) -> Iterator[Puzzle]:
    """Calculations with two numbers of ``digits`` digits, without end. They may repeat: see `distinct`."""
    rng = random.Random(f"{data_source}/{digits}/{seed}")
    low, high = 10 ** (digits - 1), 10**digits - 1
    while True:
        a, sign, b = rng.randint(low, high), rng.choice(operations), rng.randint(low, high)
        answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
        yield Puzzle(data_source, f"What is {a} {sign} {b}?", "42", str(answer), (sign, *sorted((a, b))))


def distinct(puzzles: Iterator[Puzzle], counts: Mapping[str, int]) -> dict[str, list[Puzzle]]:
    """Splits of the given sizes, filled in order, in which no puzzle occurs twice.

    Raises:
        DataError: there are not enough different puzzles.
    """
    seen: dict[tuple[Any, ...], Puzzle] = {}
    splits: dict[str, list[Puzzle]] = {}
    for split, count in counts.items():
        before, tries = len(seen), 0
        while len(seen) < before + count:
            puzzle = next(puzzles)
            tries = 0 if seen.setdefault(puzzle.content, puzzle) is puzzle else tries + 1
            if tries == TRIES:
                raise DataError(
                    f"{split}: {len(seen) - before} of {count} rows, then {TRIES} draws in a row gave duplicates; ask "
                    "for fewer rows"
                )
        splits[split] = [*seen.values()][before:]
    return splits


def build_countdown(
    source: Path | None, out: Path, *, template: Template, counts: Mapping[str, int] = COUNTDOWN_ROWS
) -> dict[str, Any]:
    """Write the published Countdown problems as ``train`` and ``test`` into ``out``, and return the manifest.

    The first ``counts["train"]`` rows are the training split, the next ``counts["test"]`` the test split.

    Args:
        source: a file with ``target`` and ``nums`` or ``numbers`` (and ``messages``, which ``template="chat"`` then
            uses), or with verl's ``reward_model.ground_truth`` of these two, or a folder with one; None = the hub.
        template: see `prompt`.

    Raises:
        DataError: the data is missing, malformed, or has too few rows.
    """
    records = read(COUNTDOWN, source)  # one stream: each split goes on where the one before it ended

    def rows(split: str, count: int) -> Iterator[dict[str, Any]]:
        number = 0
        for number, record in enumerate(itertools.islice(records, count), 1):
            yield _countdown(record, template, split, number - 1)
        if number < count:
            raise DataError(
                f"{source or COUNTDOWN.repo}, split {split}: {number} rows are left, expected {count}; give a complete "
                "source, or ask for fewer with --train and --test"
            )

    splits = {split: rows(split, count) for split, count in counts.items()}
    return write_splits(out, "countdown", splits, provenance([COUNTDOWN], source) | {"template": template})


def generate_countdown(
    out: Path, *, template: Template, counts: Mapping[str, int] = COUNTDOWN_ROWS, seed: int = 0
) -> dict[str, Any]:
    """Generate Countdown problems that have a solution as ``train`` and ``test`` in ``out``, and return the manifest.

    No problem occurs twice, whatever the order of its numbers. The test split depends on its own size and the seed
    only. ``extra_info.solution`` is a right expression.

    Raises:
        DataError: a split is empty, or there are not enough different problems.
    """
    return _generate(out, "countdown", countdowns(seed), counts, template=template, seed=seed)


def generate_calculations(
    out: Path,
    *,
    data_source: Literal["multiply", "arithmetic"],
    template: Template,
    digits: int = 3,
    counts: Mapping[str, int] = CALCULATION_ROWS,
    seed: int = 0,
) -> dict[str, Any]:
    """Generate calculations with two numbers of ``digits`` digits as ``train`` and ``test`` in ``out``, and return the
    manifest.

    They are products for ``multiply``, and sums, differences and products for ``arithmetic``. No two problems have the
    same numbers and operation.

    Raises:
        DataError: a split is empty, or there are not enough different problems.
    """
    puzzles = calculations(data_source, "*" if data_source == "multiply" else "+-*", digits, seed)
    return _generate(out, data_source, puzzles, counts, template=template, digits=digits, seed=seed)


# --------------------------------------------------------------------------------------------------------------------


def _combine(terms: list[tuple[int, str]], rng: random.Random) -> tuple[int, str]:
    """Join terms two at a time by random operations, using each term once, and return (value, expression).

    Divisions leave no remainder.
    """
    while len(terms) > 1:
        a, text_a = terms.pop(rng.randrange(len(terms)))
        b, text_b = terms.pop(rng.randrange(len(terms)))
        operation = rng.choice("+-*/" if b != 0 and a % b == 0 else "+-*")
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operation]
        expression = f"{text_a} {operation} {text_b}"
        terms.append((value, f"({expression})" if terms else expression))
    return terms[0]


def _countdown(record: Record, template: Template, split: str, index: int) -> dict[str, Any]:
    fields = flattened(record.fields)
    truth = fields.get("ground_truth")
    fields = {**fields, **truth} if isinstance(truth, Mapping) else fields
    numbers, target, messages = fields.get("nums", fields.get("numbers")), fields.get("target"), fields.get("messages")
    if not isinstance(target, int):
        raise DataError(f"{record.where}, field 'target': expected a whole number, found {target!r}")
    if not isinstance(numbers, Sequence) or not numbers or not all(isinstance(number, int) for number in numbers):
        raise DataError(f"{record.where}, field 'nums': expected whole numbers, found {numbers!r}")
    if messages and template == "chat":
        messages = messages_of(messages, f"{record.where}, field 'messages'")
    return record_of_puzzle(countdown(numbers, target), template, split=split, index=index, messages=messages)


def _generate(
    out: Path, data_source: str, puzzles: Iterator[Puzzle], counts: Mapping[str, int], **settings: Any
) -> dict[str, Any]:
    if empty := [split for split, count in counts.items() if count < 1]:
        raise DataError(f"{data_source}: {', '.join(empty)} with no rows; ask for at least 1")
    found = distinct(puzzles, dict(sorted(counts.items())))  # test first

    def rows(split: str) -> Iterator[dict[str, Any]]:
        for index, puzzle in enumerate(found[split]):
            yield record_of_puzzle(puzzle, settings["template"], split=split, index=index)

    return write_splits(out, data_source, {split: rows(split) for split in counts}, {"generated": True, **settings})
