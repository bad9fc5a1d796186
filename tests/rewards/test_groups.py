"""Reward functions that get all responses to a prompt, as TRL and verifiers call them."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from tandemrl.config import RewardConfig
from tandemrl.data.messages import Response, Transcript
from tandemrl.data.rows import Row
from tandemrl.processes.world import World
from tandemrl.rewards.functions import by_name, with_environment
from tandemrl.rewards.protocol import GraderError, TrainerState
from tandemrl.rewards.scoring import Scorer

pytestmark = pytest.mark.usefixtures("without_math")
ROWS = [Row(f"r{i}", ({"role": "user", "content": f"{i}?"},), "mine/x", str(i), {"level": i}) for i in range(3)]
STATE = TrainerState(3, 10, 0.5, 2)


def centred(completions: list[str], **_: Any) -> list[float]:
    lengths = [len(text) for text in completions]
    return [length - statistics.mean(lengths) for length in lengths]


async def told(completions, completion_ids, level, trainer_state, log_metric, log_extra, **rest):
    log_metric("ids", sum(map(len, completion_ids)))
    log_extra("level", [f"level {each}" for each in level])
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]


def some(completions, **_):
    return [None if text == "x" else 2.0 for text in completions]


def plural(completions, answers, states, infos):
    assert [state["answer"] for state in states] == answers
    return [float(info["level"]) for info in infos]


def ranked(row, texts, options, opened, transcripts=None, written=None):
    assert (len(opened), written) == (len(texts), None)  # that the library's scorers get `written` concerns no other
    return [None if text == "x" else sorted(texts, key=len).index(text) / len(texts) for text in texts]


class Dealt(World):
    """Deals out work as if there were three processes, and does all of it."""

    def scatter_gather(self, items, compute, group=None):
        parts = [compute(items[rank::3]) for rank in range(3)]
        return [parts[i % 3][i // 3] for i in range(len(items))]


def in_child(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardConfig:
    (tmp_path / "of_groups.py").write_text(Path(__file__).read_text())
    monkeypatch.chdir(tmp_path)
    return RewardConfig(scorers={"mine/*": f"of_groups:{name}"}, timeout_s=30.0, workers=1)


@pytest.mark.parametrize(("child", "spread"), [(False, False), (False, True), (True, False)])
def test_a_function_compares_the_responses_to_a_prompt(child, spread, tmp_path, monkeypatch):
    config = in_child("centred", tmp_path, monkeypatch) if child else RewardConfig()
    functions = {} if child else {"centred": centred}
    made = Scorer(config, functions=functions, world=Dealt() if spread else None)
    items = [(ROWS[0], "abcd"), (ROWS[1], "a"), (ROWS[0], "ab"), (ROWS[1], "abc"), (ROWS[0], "abcdef")]
    with made as scorer:
        assert [score.value for score in scorer.score(items)] == [0.0, -1.0, -2.0, 1.0, 2.0]
        apart = scorer.score(items, groups=[0, 1, 2, 1, 0])  # the same row, drawn twice in a step
        assert [score.value for score in apart] == [-1.0, -1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("child", [False, True])
def test_a_function_of_texts_gets_all_to_a_prompt(child: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = in_child("ranked", tmp_path, monkeypatch) if child else RewardConfig()
    with Scorer(config, functions={} if child else {"ranked": ranked}, world=Dealt()) as scorer:
        found = scorer.score([(ROWS[0], "abc"), (ROWS[1], "a"), (ROWS[0], "ab"), (ROWS[0], "x"), (ROWS[0], "abcd")])
    assert [score.value for score in found if score.scored] == [0.5, 0.0, 0.25, 0.75]
    assert not found[3].scored


def test_a_function_of_texts_cannot_ask_for_one_transcript() -> None:
    with pytest.raises(
        GraderError, match="reward best: it gets all responses to a prompt; name its parameter transcripts"
    ):
        by_name({"best": lambda row, texts, transcript: [0.0]})


def test_an_environment_compares_the_episodes_of_a_row() -> None:
    class Race:
        def score(self, row: Row, transcript: Transcript) -> float:
            raise AssertionError("score_group takes its place")

        def score_group(self, row: Row, transcripts: list[Transcript]) -> list[float]:
            return [float(each.state == max(other.state for other in transcripts)) for each in transcripts]

    items, states = [(row, "") for row in (ROWS[0], ROWS[0], ROWS[1], ROWS[0])], (3, 5, 1, 5)
    with Scorer(RewardConfig(), functions=with_environment({}, Race())) as scorer:
        scorer.check(ROWS, episodes=True)
        found = scorer.score(items, [Transcript((), state) for state in states])
        assert [score.value for score in found] == [0.0, 1.0, 1.0, 1.0]
        with pytest.raises(GraderError, match="reads the transcript of an episode"):
            scorer.score(items)


@pytest.mark.parametrize("child", [False, True])
def test_a_function_gets_what_trl_passes_and_logs(child: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = in_child("told", tmp_path, monkeypatch) if child else RewardConfig()
    items = [(ROWS[2], Response("a", "a", ids=(1, 2))), (ROWS[2], Response("b", "b", ids=(3,)))]
    with Scorer(config, functions={} if child else {"told": told}) as scorer:
        first, second = scorer.graded(items, state=STATE)
        assert (first.score.value, first.extra, first.metrics) == (0.3, {"level": "level 2"}, {"ids": [3.0]})
        assert (second.score.value, second.extra, second.metrics) == (0.3, {"level": "level 2"}, {})
        with pytest.raises(GraderError, match="row r2: it takes trainer_state, which only a training run has"):
            scorer.score(items)
        with pytest.raises(GraderError, match="row r2: it takes completion_ids, and the ids of a text alone"):
            scorer.score([(ROWS[2], "a")], state=STATE)


def test_none_leaves_the_other_terms_of_a_sum() -> None:
    config = RewardConfig(scorers={"mine/*": "some + centred"}, weights={"some": 10.0})
    with Scorer(config, functions={"some": some, "centred": centred}) as scorer:
        first, second = scorer.score([(ROWS[0], "x"), (ROWS[0], "abc")])
    assert (first.value, first.parts) == (-1.0, {"acc": 0.0, "some/none": 1.0, "centred": -1.0})
    assert (second.value, second.parts) == (21.0, {"acc": 1.0, "some": 2.0, "centred": 1.0})
    with Scorer(RewardConfig(), functions={"some": some}) as scorer:
        assert scorer.score([(ROWS[0], "x")])[0].parts == {"acc": 0.0, "unscored": 1.0}


def test_names_in_the_plural_are_those_of_verifiers() -> None:
    with Scorer(RewardConfig(), functions={"plural": plural}) as scorer:
        assert [score.value for score in scorer.score([(ROWS[2], "a"), (ROWS[2], "b"), (ROWS[1], "c")])] == [2, 2, 1]


@pytest.mark.parametrize(
    ("result", "found"),
    [([1.0], r"\[1.0\]"), (1.0, "1.0"), (None, "None"), ([1.0, float("nan")], "nan"), (["1", 1.0], "'1'")],
)
def test_a_wrong_result_names_the_function(result: Any, found: str) -> None:
    def wrong(completions, **_):
        return result

    with Scorer(RewardConfig(), functions={"wrong": wrong}) as scorer, pytest.raises(GraderError) as told:
        scorer.score([(ROWS[0], "a"), (ROWS[0], "b")])
    assert str(told.value).startswith("reward wrong, row r0: ")
    assert told.match(found)


@pytest.mark.parametrize("child", [False, True])
def test_an_error_has_the_place_in_the_function(child: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import json\n\ndef fails(row, text):\n    return inner(text)\n\n"
    source += "def inner(text):\n    return json.loads(text)\n"
    (tmp_path / "failing.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = RewardConfig(scorers={"mine/*": "failing:fails"}, timeout_s=30.0, workers=1) if child else RewardConfig()
    functions = {}
    if not child:
        import failing  # type: ignore[import-not-found]

        functions = {"fails": failing.fails}
    with Scorer(config, functions=functions) as scorer, pytest.raises(GraderError) as told:
        scorer.score([(ROWS[0], "{")])
    assert told.match(rf"fails, row r0: JSONDecodeError: .* \({tmp_path}/failing.py, line 7\)")
