"""Rows of reasoning-gym's generators (arXiv:2505.24760), as ``gym:NAME:SPLIT:N``. Without torch.

The messages are those of the package: its system prompt, which asks for ``<answer>``, and the question. The ground
truth is the answer of the generator; ``extra_info.metadata`` is what its own grader reads.
"""

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tandemrl.config.hints import pip_install
from tandemrl.data.rows import DataError, Row

SEEDS = {"train": 0, "heldout": 1 << 30}
"""The seed of each split. Problem i of a seed is problem 0 of seed + i, so they are far apart."""
HASHED = ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Generators whose problems depend on the order of Python's sets."""
OTHERWISE: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
    "propositional_logic": lambda metadata: metadata["example_answer"],
}
"""An answer of generators that say none, since there are many."""


def rows(source: str, parts: list[str]) -> Iterator[Row]:
    """The rows of a source ``gym:NAME:SPLIT:N``, given in parts. Equal sources have equal rows.

    Raises:
        DataError: it is not of this form, there is no such generator, or the package is missing.
    """
    if len(parts) != 3 or parts[1] not in SEEDS or not parts[2].isdigit() or parts[2] == "0":
        raise DataError(
            f"{source}: expected gym:NAME:SPLIT:N with SPLIT train or heldout, e.g. gym:basic_arithmetic:train:512"
        )
    name, split, count = parts[0], parts[1], int(parts[2])
    if name in HASHED and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise DataError(f"{source}: its problems differ from process to process; start with PYTHONHASHSEED=0")
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(f"{source}: {error.name} is missing; {pip_install('gym')}") from None
    if name not in reasoning_gym.factory.DATASETS or name == "composite":
        known = ", ".join(sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"}))
        raise DataError(f"{source}: reasoning-gym has no generator {name!r} without arguments; known: {known}")
    drawn = random.getstate()
    try:  # some draw from the random numbers of the process
        random.seed(SEEDS[split])
        problems = reasoning_gym.create_dataset(name, size=count, seed=SEEDS[split])
        found = [_row(name, split, index, problems[index]) for index in range(count)]
    finally:
        random.setstate(drawn)
    return iter(found)


def _row(name: str, split: str, index: int, problem: Mapping[str, Any]) -> Row:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    metadata, answer = problem["metadata"], problem["answer"]
    if answer is None and name in OTHERWISE:
        answer = OTHERWISE[name](metadata)
    return Row(
        example_id=f"gym/{name}/{split}/{index}",
        messages=(
            {"role": "system", "content": SYSTEM_PROMPTS["default"]},
            {"role": "user", "content": problem["question"]},
        ),
        data_source=f"gym/{name}",
        ground_truth="" if answer is None else str(answer),
        extra_info={"split": split, "index": index, "question": problem["question"], "metadata": metadata},
        raw_ground_truth=problem["answer"],
    )
