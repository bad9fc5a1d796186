import ast
import itertools
from collections import Counter
from fractions import Fraction

import pytest

from tandemrl.tasks.countdown.rows import countdown, countdowns, distinct, prompt, record_of_puzzle

# Word for word what RL-GRPO shows.
INSTRUCT = (
    "<|im_start|>system\nYou are a helpful assistant. You first thinks about the reasoning process in the mind and "
    "then provides the user with the answer.<|im_end|>\n<|im_start|>user\n Using the numbers [1, 4, 42, 19], create an "
    "equation that equals 64. You can use basic arithmetic operations (+, -, *, /) and each number can only be used "
    "once. Show your work in <think> </think> tags. And return the final answer in <answer> </answer> tags, for "
    "example <answer> (1 + 2) / 3 </answer>.<|im_end|>\n<|im_start|>assistant\nLet me solve this step by step.\n<think>"
)
BASE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer.\nUser: Using the "
    "numbers [1, 4, 42, 19], create an equation that equals 64. You can use basic arithmetic operations (+, -, *, /) "
    "and each number can only be used once. Show your work in <think> </think> tags. And return the final answer in "
    "<answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.\n"
    "Assistant: Let me solve this step by step.\n<think>"
)


def value(node):
    """An independent, exact evaluator."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    a, b = value(node.left), value(node.right)
    if isinstance(node.op, ast.Div):
        return a / b
    return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}[type(node.op)]


def numbers_of(expression):
    return [node.value for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Constant)]


def test_the_rendered_prompts_are_the_published_ones():
    puzzle = countdown([1, 4, 42, 19], 64)
    assert prompt(puzzle, "instruct") == [{"role": "user", "content": INSTRUCT}]
    assert prompt(puzzle, "base") == [{"role": "user", "content": BASE}]


@pytest.mark.parametrize("template", ["base", "instruct", "chat"])
def test_a_record_says_whether_its_prompt_is_rendered(template):
    row = record_of_puzzle(countdown([3, 5], 8, "3 + 5"), template, split="train", index=4)
    assert row["data_source"] == "countdown"
    assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": 8, "numbers": [3, 5]}}
    assert row["extra_info"] == {"split": "train", "index": 4, "rendered": template != "chat", "solution": "3 + 5"}


def test_every_generated_countdown_has_the_solution_it_comes_with():
    (puzzles,) = distinct(countdowns(1), {"train": 3000}).values()
    sizes, operators = Counter(), Counter()
    for puzzle in puzzles:
        numbers, target = puzzle.ground_truth["numbers"], puzzle.ground_truth["target"]
        assert value(ast.parse(puzzle.solution, mode="eval").body) == target
        assert sorted(numbers_of(puzzle.solution)) == sorted(numbers)
        assert 10 <= target <= 100
        assert all(1 <= number <= 99 for number in numbers)
        assert f"numbers {numbers}, create an equation that equals {target}." in puzzle.question
        sizes[len(numbers)] += 1
        operators.update(set("+-*/") & set(puzzle.solution))
    assert set(sizes) == {3, 4}
    assert min(sizes.values()) > 600
    assert min(operators[operator] for operator in "+-*/") > 100


def test_no_countdown_comes_twice_in_any_order_of_its_numbers():
    splits = distinct(countdowns(2), {"test": 500, "train": 2000})
    contents = [
        (p.ground_truth["target"], tuple(sorted(p.ground_truth["numbers"]))) for p in itertools.chain(*splits.values())
    ]
    assert len(set(contents)) == len(contents) == 2500


def test_the_generator_is_stable():
    """A change of these is a change of every data set that was ever generated."""
    puzzles = distinct(countdowns(0), {"test": 3})["test"]
    assert [(p.ground_truth["numbers"], p.ground_truth["target"]) for p in puzzles] == [
        ([80, 48, 27], 59),
        ([7, 87, 46], 19),
        ([39, 8, 36, 90], 95),
    ]
