"""Reward functions in verl's form, ``compute_score(data_source, solution_str, ground_truth, extra_info)``."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tandemrl.config import RewardConfig
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import Row
from tandemrl.rewards.functions import by_name
from tandemrl.rewards.protocol import GraderError, Score
from tandemrl.rewards.scoring import Scorer

SEVEN = Row("r", (), "mine", "7", {"index": 3, "question": "?"})


def scored(function: Any, row: Row = SEVEN, text: str = "7") -> Score:
    with Scorer(RewardConfig(), functions=by_name({"mine_own": function})) as scorer:
        [score] = scorer.score([(row, text)])
    return score


def test_it_is_told_what_it_asks_for_by_name() -> None:
    def whole(data_source, solution_str, ground_truth, extra_info=None, **rest):
        assert (data_source, solution_str, ground_truth, extra_info) == ("mine", "7", "7", SEVEN.extra_info)
        assert not rest
        extra_info["index"] = -1  # a copy
        return 0.5

    def bare(solution_str, ground_truth, method="strict"):
        return 1 if solution_str == ground_truth and method == "strict" else 0

    def open_to_all(solution_str, ground_truth, **rest):
        return sorted(rest) == ["data_source", "extra_info"]

    assert scored(whole) == Score(0.5, {"acc": 0.0}, None)
    assert SEVEN.extra_info["index"] == 3
    for function in (bare, open_to_all, functools.partial(bare, method="strict")):
        assert scored(function) == Score(1.0, {"acc": 1.0}, None)
    with pytest.raises(GraderError, match=r"threshold.*or verl's \(data_source, solution_str"):
        by_name({"strict": lambda solution_str, ground_truth, threshold: 0.0})


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        ({"score": -1.0, "acc": False, "pred": 8}, Score(-1.0, {"acc": 0.0}, "8")),
        (
            {"score": 1, "length": 4, "chars": 3, "why": "equal"},
            Score(1.0, {"acc": 1.0, "verl_length": 4.0, "chars": 3.0}, None),
        ),
        ((0.25, {"not": "read"}), Score(0.25, {"acc": 0.0}, None)),
        (Score(2.0, {"acc": 1.0}, "7"), Score(2.0, {"acc": 1.0}, "7")),
    ],
)
def test_what_it_may_return(returned: Any, score: Score) -> None:
    assert scored(lambda solution_str, ground_truth: returned) == score


@pytest.mark.parametrize("returned", [{"acc": 1.0}, {"score": "1"}, {"score": float("nan")}, (), None, "1"])
def test_anything_else_is_an_error(returned: Any) -> None:
    with pytest.raises(GraderError, match="reward mine_own, row r: expected a finite number"):
        scored(lambda solution_str, ground_truth: returned)


def test_by_import_path_with_the_ground_truth_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("of_verl.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if isinstance(ground_truth, dict):\n"
        "        right = int(solution_str) == ground_truth['target']\n"
        "        return {'score': float(right), 'of': len(ground_truth['numbers'])}\n"
        "    return {'score': float(solution_str == ground_truth), 'of': extra_info['index']}\n"
    )
    truths = [{"target": 7, "numbers": [3, 4]}, '{"target": 7}']
    rows = [
        {
            "data_source": "mine",
            "ability": "math",
            "prompt": [{"role": "user", "content": "?"}],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": 5 + i},
        }
        for i, truth in enumerate(truths)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    structure, text = load_rows([str(file)])
    with Scorer(RewardConfig(scorers={"ability:math": "of_verl:compute_score"})) as scorer:
        scorer.check([structure, text])
        scores = scorer.score([(structure, "7"), (structure, "8"), (text, '{"target": 7}')])
    assert [(score.value, score.parts) for score in scores] == [
        (1.0, {"acc": 1.0, "of": 2.0}),
        (0.0, {"acc": 0.0, "of": 2.0}),
        (1.0, {"acc": 1.0, "of": 6.0}),
    ]
