"""Training with environments: turns, tools and transcripts from the first prompt to a resumed run."""

import dataclasses
import re
import uuid
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import small_world
from agents import TOOLS, assert_same_episodes, config, overrides
from helpers import agent_tokenizer
from runs import kill, lines, metrics, samples
from tandemrl.apps.score import score_file
from tandemrl.config import ConfigError, load
from tandemrl.data.rows import DataError
from tandemrl.rewards.protocol import GraderError
from tandemrl.rollout.engine import EngineError
from tandemrl.training.checkpoint import CheckpointError
from tandemrl.training.loop import train
from tandemrl.training.preflight import Preflight

EVALUATED = ["train.eval_every=2", "eval.profile=custom", "eval.max_tokens=24", "eval.k=[1]", "eval.train_samples=2"]
EVALUATED += ["eval.bootstrap=10"]


@pytest.fixture(scope="module")
def whole(agents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of three steps, in tandem by words."""
    return train(config(agents, tmp_path_factory.mktemp("run") / "whole", *TOOLS, *EVALUATED), quiet=True)


def turns_of(line: dict[str, Any]) -> list[list[int]]:
    """Own tokens of each turn of a line of samples.jsonl."""
    runs = groupby(zip(line["author"], line["tokens"], strict=True), key=lambda each: each[0] >= 0)
    return [[token for _, token in run] for own, run in runs if own]


def test_a_run_plays_episodes_and_its_record_says_what_happened(agents: Path, whole: Path) -> None:
    tokenizer = agent_tokenizer(small_world.CALLS)
    played = samples(whole)
    by_step = {step: list(group) for step, group in groupby(played, key=lambda line: line["step"])}
    assert [line["step"] for line in metrics(whole)] == list(by_step) == [1, 2, 3]
    assert {line["turns"] for line in played} == {1, 2, 3}
    assert {line["stop_reason"] for line in played} >= {"length", "turns"}
    for line in played:
        turns = turns_of(line)
        written = [m for m in line["transcript"]["messages"] if m["role"] == "assistant"]
        assert len(turns) == len(written) == line["turns"]
        assert sum(map(len, turns)) <= 30
        assert max(map(len, turns)) <= 12
        whole_turns = [tokenizer.decode(turn) for turn in turns]
        end = f"(?:{re.escape(tokenizer.eos_token)}|{re.escape(tokenizer.pad_token)})+$"
        assert line["text"] == "\n".join(re.sub(end, "", turn) for turn in whole_turns)
        context = [p for p, author in zip(line["behaviour_logprobs"], line["author"], strict=True) if author < 0]
        assert not any(context)
        text = line["text"]
        sums = (line["transcript"]["state"] or {}).get("sums", [])
        assert line["reward"] == pytest.approx(len(sums) - len(text) / 100)
    for record, group in zip(metrics(whole), by_step.values(), strict=True):
        assert record["mismatch/mean_abs"] < 1e-5
        assert record["env/turns"] == np.mean([line["turns"] for line in group])
        calls = [sum(len(m.get("tool_calls", ())) for m in line["transcript"]["messages"]) for line in group]
        invalid = [sum(len(m.get("invalid_calls", ())) for m in line["transcript"]["messages"]) for line in group]
        assert record["env/tool_calls"] == np.mean(calls) > 0
        assert record["env/invalid_calls"] == np.mean(invalid) > 0
        assert record["response/stopped_turns"] == np.mean([line["stop_reason"] == "turns" for line in group])
        own = sum(len(turn) for line in group for turn in turns_of(line))
        assert record["tokens/response"] == own
    assert any(record["env/tool_errors"] > 0 for record in metrics(whole))
    assert metrics(whole)[1].keys() >= {"eval/pass@1", "eval/f1"}
    assert "eval/em" not in metrics(whole)[1]
    scores = whole.parent / "scores.jsonl"
    score_file(load(None, TOOLS), [str(agents / "rows.jsonl")], whole / "samples.jsonl", out=scores)
    again = [line["score"] for line in lines(scores)]
    assert again == pytest.approx([line["reward"] for line in played])


def test_killed_in_an_episode_it_resumes_as_if_nothing_had_happened(agents: Path, whole: Path, tmp_path: Path) -> None:
    """In the second step, when some turns are answered and others are awaited."""
    first = sum(line["turns"] for line in samples(whole) if line["step"] == 1)
    out = tmp_path / "killed"
    (tmp_path / "empty.yaml").write_text("train: {}\n")
    command = ["train", "--config", f"{tmp_path}/empty.yaml", *overrides(agents, out, *TOOLS, *EVALUATED)]
    kill(command, "tandemrl.rollout.envs.episodes:Episodes.submit", first + 8)
    assert [line["step"] for line in metrics(out)] == [1]
    train(config(agents, out, *TOOLS, *EVALUATED), quiet=True)
    assert_same_episodes(whole, out)


ASYNC = ["selection.strategy=turn", "train.async_steps=1", "loss.importance=none"]
ASYNC += ["loss.recipe=dapo", "loss.overlong_buffer=8"]


def test_an_environment_of_ones_own_with_rollouts_in_flight(agents: Path, tmp_path: Path) -> None:
    """Whole turns of either author, rewarded by the environment; from a checkpoint that holds half of an update."""
    out, other = tmp_path / "whole", tmp_path / "other"
    used = small_world.Talk()
    train(config(agents, out, *ASYNC), environment=used, quiet=True)
    assert used.index
    assert used.longest
    for line in samples(out):
        heard = line["transcript"]["state"]["heard"]
        assert line["reward"] == sum(heard) % 5 / 5
        assert line["transcript"]["counts"]["said"] == len(heard) == line["turns"]
        for _, run in groupby(line["author"], key=lambda author: author >= 0):
            assert len(set(run)) == 1  # one author a turn
    authors = [set(line["author"]) for line in samples(out)]
    assert {-1, 0, 1} in authors
    assert [line["weights/version_lag"] for line in metrics(out)] == [0, 1, 1]

    step_1 = str(out / "checkpoints" / "step_1")
    train(config(agents, other, *ASYNC), environment=small_world.Talk(), quiet=True, resume=step_1)  # one that is fresh
    assert_same_episodes(other, out, after=1)
    train(load(out / "config.yaml"), environment=used, quiet=True)  # and one that is not; the run is done

    class Other(small_world.Talk):
        system = "ab"

    with pytest.raises(ConfigError, match=r"functions\.environment: .* small_world\.Talk .* passed is .*Other"):
        train(load(out / "config.yaml"), environment=Other(), quiet=True)
    with pytest.raises(CheckpointError, match=r"functions\.environment\.signature"):
        train(config(agents, out, *ASYNC), environment=Other(), quiet=True)


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(["selection.strategy=solo"], marks=pytest.mark.slow),
        ["selection.strategy=alternating_turns", "loss.recipe=ppo", "loss.importance=token", "loss.junior_weight=0.5"],
    ],
    ids=lambda extra: extra[0],
)
def test_alone_and_by_turns(extra: list[str], agents: Path, tmp_path: Path) -> None:
    out = train(config(agents, tmp_path / "run", *TOOLS, "train.steps=1", *extra), quiet=True)
    [line] = metrics(out)
    assert line["grad_norm"] > 0
    assert line["mismatch/mean_abs"] < 1e-5
    assert (line["tandem/senior_frac"] == 1) is ("solo" in extra[0])


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_resume_is_refused_where_rows_say_something_else(agents: Path, whole: Path, tmp_path: Path) -> None:
    rows = agents / "rows.jsonl"
    before = rows.read_text()
    try:
        rows.write_text(before.replace('"prompt"', '"extra_info": {"docs": ["another"]}, "prompt"'))
        with pytest.raises(CheckpointError, match=r"written with another data\.train; a resume would mix runs"):
            train(
                config(agents, tmp_path, *TOOLS, *EVALUATED), quiet=True, resume=str(whole / "checkpoints" / "step_1")
            )
    finally:
        rows.write_text(before)


def test_what_is_searched_is_part_of_a_run(agents: Path, tmp_path: Path) -> None:
    def searched() -> dict[str, str]:
        settings = config(agents, tmp_path, f"retrieval.index={tmp_path}")
        return Preflight(settings, environment=small_world.Talk()).environment_id

    (tmp_path / "documents.jsonl").write_text("one")
    before = searched()
    assert searched() == before
    (tmp_path / "documents.jsonl").write_text("two")
    assert [name for name, value in searched().items() if value != before[name]] == ["retrieval"]


class Opened(small_world.Talk):
    def tool_schemas(self) -> list[dict[str, Any]]:
        self.opened = str(uuid.uuid4())
        return super().tool_schemas()


def test_what_an_environment_keeps_when_it_is_used_makes_it_no_other_one(agents: Path, tmp_path: Path) -> None:
    found = [Preflight(config(agents, tmp_path), environment=Opened()).environment_id for _ in range(2)]
    assert found[0] == found[1]


def test_a_world_that_never_answers_is_not_trained_on(agents: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"environment Deaf: none of \d+ turns was answered: .* more than 0\.1 s"):
        train(config(agents, tmp_path, "rollout.tool_timeout_s=0.1"), environment=small_world.Deaf(), quiet=True)


def checked(agents: Path, out: Path, *extra: str, **passed: Any) -> None:
    Preflight(dataclasses.replace(config(agents, out, *extra)), **passed).require()


def test_what_does_not_go_together_is_refused_before_weights_are_loaded(agents: Path, tmp_path: Path) -> None:
    room, one_turn = "train.tokens_per_micro_batch=101", ["rollout.max_turns=10", "rollout.turn_tokens=null"]
    for extra, passed, message in (
        (["selection.strategy=turn"], {}, "selection.strategy=turn: must be another, such as solo, with rollout"),
        (["rollout.tools=[small_world:add]"], {}, "rollout.tools=.*: must be empty with rollout.environment=single"),
        (["rollout.environment=tools"], {}, "rollout.tools=.*: must be at least one"),
        (["rollout.turn_tokens=31"], {}, r"rollout.turn_tokens=31: must be null, or at most rollout.max_tokens \(30\)"),
        ([*TOOLS, room], {}, r"at least 102: data.max_prompt_tokens \+ rollout.max_tokens \+ rollout.observation_tok"),
        ([*TOOLS, "rollout.observation_tokens=999", room + "00"], {}, "or rollout.observation_tokens"),
        ([*TOOLS], {"environment": small_world.Talk()}, "another environment was passed to train"),
        ([*TOOLS[:1], "rollout.tools=[small_world:sub]"], {}, "small_world:sub"),
        ([*TOOLS[:2]], {}, "no scorer for data_source 'own'"),
        ([*TOOLS[2:], *one_turn], {}, "small_world:sums_for_letters, row .* it reads the transcript of an episode"),
    ):
        with pytest.raises((ConfigError, DataError, GraderError), match=message):
            checked(agents, tmp_path, *extra, **passed)
