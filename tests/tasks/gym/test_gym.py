"""reasoning-gym: every generator makes rows, and its own answer scores 1."""

import json

import pytest

from tandemrl.config import RewardConfig
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import DataError
from tandemrl.rewards.protocol import Lost
from tandemrl.rewards.scoring import Scorer
from tandemrl.tasks.gym.grader import gym, score
from tandemrl.tasks.gym.rows import HASHED

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs the gym extra")

SLOW = {"knight_swap", "arc_agi", "quantum_lock", "zebra_puzzles", "group_anagrams", "futoshiki"}
NONE = {"boxnet", "rush_hour"}
"""Generators that give no answer of their own."""
NAMES = sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"} - SLOW)


@pytest.mark.parametrize("name", NAMES)
def test_its_own_answer_scores_1(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # this process alone
    [row] = load_rows([f"gym:{name}:heldout:1"])
    assert (row.data_source, bool(row.ground_truth)) == (f"gym/{name}", name not in NONE)
    deferred = gym(row, f"So: <answer>no</answer> <answer>{row.ground_truth}</answer>", RewardConfig())
    value = score(*deferred.payload[1:])
    assert value == (name not in NONE)
    assert deferred.then(value).parts["acc"] == value


def test_responses_are_graded_in_processes_that_may_be_killed() -> None:
    rows = load_rows(["gym:basic_arithmetic:train:2", "gym:graph_color:heldout:1", "gym:prime_factorization:train:1"])
    right = [f"<answer>{row.ground_truth}</answer>" for row in rows]
    wrong = ["<answer>x</answer>", "no answer"]
    with Scorer(RewardConfig(workers=1, timeout_s=60.0)) as scorer:
        scored = scorer.score([*zip(rows, right, strict=True), *((rows[0], text) for text in wrong)])
    assert [each.parts["acc"] for each in scored] == [1, 1, 1, 1, 0, 0]
    assert [each.parts["answer_present"] for each in scored] == [1, 1, 1, 1, 1, 0]
    lost = gym(rows[0], right[0], RewardConfig()).then(Lost("timeout"))
    assert (lost.value, lost.parts["timeout"]) == (0.0, 1.0)


def test_equal_sources_have_equal_rows_and_splits_are_apart() -> None:
    first, again = load_rows(["gym:list_functions:train:2"]), load_rows(["gym:list_functions:train:2"])
    assert first == again
    assert json.dumps(first[0].extra_info)
    held = load_rows(["gym:base_conversion:heldout:8"])
    train = load_rows(["gym:base_conversion:train:64"])
    assert not {row.messages[-1]["content"] for row in held} & {row.messages[-1]["content"] for row in train}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gym:base_conversion:train", "expected gym:NAME:SPLIT:N"),
        ("gym:base_conversion:test:4", "expected gym:NAME:SPLIT:N"),
        ("gym:composite:train:4", "no generator 'composite' without arguments; known: ab, acre"),
        (f"gym:{HASHED[0]}:train:4", "start with PYTHONHASHSEED=0"),
    ],
)
def test_a_source_that_cannot_be_is_refused(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(DataError, match=message):
        load_rows([source])
