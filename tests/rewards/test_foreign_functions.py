"""Reward functions in the forms of TRL, verifiers and verl, ``async`` ones, and what a function may return."""

import functools
from pathlib import Path
from typing import Any

import pytest

from runs import put
from tandemrl.config import RewardConfig
from tandemrl.data.loading import load_rows
from tandemrl.data.messages import Transcript
from tandemrl.data.rows import Row
from tandemrl.rewards.functions import by_name
from tandemrl.rewards.protocol import GraderError, Score
from tandemrl.rewards.scoring import Scorer

pytestmark = pytest.mark.usefixtures("without_math")
ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"})
SEVEN = Row("r", ASKED, "mine", "7", {"index": 3, "level": "easy"}, ability="math")


def scored(function: Any, text: str = "7", row: Row = SEVEN, transcript: Transcript | None = None) -> Score:
    with Scorer(RewardConfig(), functions=by_name({"mine_own": function})) as scorer:
        [score] = scorer.score([(row, text)], [transcript])
    return score


def test_parameters_of_a_function_stand_before_fields_of_the_row(tmp_path, monkeypatch):
    code = "def score(completions, level, **_):\n    return [float(level == 'mine') for _ in completions]\n"
    code += "def broken(completion, answer):\n    raise KeyError('boo')\n"
    (tmp_path / "own_level.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = RewardConfig(scorers={"mine": "own_level:score"}, parameters={"score": {"level": "mine"}})
    with Scorer(config) as scorer:
        assert scorer.score([(SEVEN, "7")])[0].value == 1.0
    said = r"'boo'.* \(called in verifiers' form because of its parameters completion, answer; name the first one `row`"
    with Scorer(RewardConfig(scorers={"mine": "own_level:broken"})) as scorer, pytest.raises(GraderError, match=said):
        scorer.score([(SEVEN, "7")])


# ----------------------------------------------------------------------------------------- TRL: as in its documentation


def reward_func(completions, ground_truth, **kwargs):
    return [1.0 if content == gt else 0.0 for content, gt in zip(completions, ground_truth, strict=True)]


def format_reward(completions, **kwargs):
    """As in TRL's documentation, for conversations."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if content.isdigit() else 0.0 for content in contents]


def whole(prompts, completions, level, **kwargs):
    assert (prompts, completions, level) == (["Be brief.\n\n3 + 4?"], ["7"], ["easy"])
    logs = {kwargs.pop("log_metric"), kwargs.pop("log_extra")}
    assert all(map(callable, logs))
    assert kwargs == {
        "data_source": ["mine"], "ability": ["math"], "ground_truth": ["7"], "answer": ["7"], "solution": ["7"],
        "index": [3],
    }  # fmt: skip
    return [0.5]


def of_messages(prompts: list[list[dict[str, str]]], completions: list[list[dict[str, str]]]) -> list[float]:
    assert prompts == [list(ASKED)]
    return [float([*completion] == [{"role": "assistant", "content": "7"}]) for completion in completions]


async def later(completions, solution, strict=True, **kwargs):
    return [float(a == b) for a, b in zip(completions, solution, strict=strict)]


@pytest.mark.parametrize("function", [reward_func, format_reward, of_messages, later])
def test_a_function_of_trl_s_works_as_it_is(function: Any) -> None:
    assert scored(function) == Score(1.0, {"acc": 1.0}, None)


def test_a_function_of_trl_s_gets_the_fields_of_the_row_as_lists_of_one() -> None:
    assert scored(whole).value == 0.5
    with pytest.raises(
        GraderError, match=r"row r: it takes difficulty, which is no field of the row; .* level, prompts"
    ):
        scored(lambda completions, difficulty: [1.0])
    assert scored(lambda completions, difficulty=1.0: [difficulty]).value == 1.0
    with pytest.raises(GraderError, match=r"found \[1\.0, 0\.0\]$"):
        scored(lambda completions, **kwargs: [1.0, 0.0])


# ------------------------------------------------------------------------------------------------------------ verifiers


def exact(completion, answer):
    return 1.0 if completion == answer else 0.0


async def chat(prompt, completion, answer, state, info, **kwargs) -> float:
    right = completion[-1]["content"] == answer
    assert (prompt, info, kwargs) == ([*ASKED], {"index": 3, "level": "easy"}, {"task": "mine"})
    assert state["answer"] == answer == "7"
    return 1.0 if right else 0.0


@pytest.mark.parametrize("function", [exact, chat, functools.partial(exact, answer="7")])
def test_a_function_of_verifiers_works_as_it_is(function: Any) -> None:
    assert scored(function) == Score(1.0, {"acc": 1.0}, None)
    assert scored(function, "8").value == 0.0


def test_a_function_of_verifiers_reads_messages_and_state() -> None:
    said = ({"role": "assistant", "content": "?"}, {"role": "tool", "content": "7"})

    def calls(completion, state):
        return sum(message["role"] == "tool" for message in completion) * state["used"]

    assert scored(calls, transcript=Transcript(said, {"used": 2})).value == 2.0


def test_an_error_of_the_function_itself_is_not_tried_again() -> None:
    with pytest.raises(GraderError, match=r"TypeError: 'in <string>' requires string"):
        scored(lambda completion, answer: float(int(answer) in completion))
    with pytest.raises(GraderError, match=r"KeyError: 'level of detail'"):
        scored(lambda completions, **kwargs: [kwargs["level of detail"]])


# ----------------------------------------------------------------------------------------------------------------- verl


def test_it_is_told_what_it_asks_for_by_name() -> None:
    def all_of_it(data_source, solution_str, ground_truth, extra_info=None, **rest):
        assert (data_source, solution_str, ground_truth, extra_info) == ("mine", "7", "7", SEVEN.extra_info)
        assert not rest
        extra_info["index"] = -1  # a copy
        return 0.5

    def bare(solution_str, ground_truth, method="strict"):
        return 1 if solution_str == ground_truth and method == "strict" else 0

    def open_to_all(solution_str, ground_truth, **rest):
        return sorted(rest) == ["data_source", "extra_info"]

    assert scored(all_of_it) == Score(0.5, {"acc": 0.0}, None)
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


@pytest.mark.parametrize("returned", [{"acc": 1.0}, {"score": "1"}, {"score": float("nan")}, ()])
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
    monkeypatch.chdir(tmp_path)
    structure, text = load_rows([str(put(tmp_path / "rows.jsonl", *rows))])
    with Scorer(RewardConfig(scorers={"ability:math": "of_verl:compute_score"})) as scorer:
        scorer.check([structure, text])
        scores = scorer.score([(structure, "7"), (structure, "8"), (text, '{"target": 7}')])
    assert [(score.value, score.parts) for score in scores] == [
        (1.0, {"acc": 1.0, "of": 2.0}),
        (0.0, {"acc": 0.0, "of": 2.0}),
        (1.0, {"acc": 1.0, "of": 6.0}),
    ]


# ----------------------------------------------------------------------------------------------------------------- ours


async def awaited(row: Row, text: str) -> float:
    return float(text == row.ground_truth)


def second_is_called_completion(row, completion):
    return row.example_id == "r" and completion == "7"


@pytest.mark.parametrize(
    "function",
    [
        awaited,
        second_is_called_completion,
        lambda problem, completion: completion == "7",
        lambda task, completion: task.ground_truth == completion,
        lambda answer, completion: answer.ground_truth == completion,
    ],
)
def test_functions_of_ours_stay_ours(function: Any) -> None:
    assert scored(function) == Score(1.0, {"acc": 1.0}, None)


def test_an_async_function_works_where_an_event_loop_runs_already() -> None:
    import asyncio

    async def notebook() -> Score:
        return scored(awaited)

    assert asyncio.run(notebook()).value == 1.0
