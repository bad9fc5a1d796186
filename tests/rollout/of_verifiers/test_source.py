"""Training on tasksets of the real verifiers package."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="needs verifiers: make agents-check")

from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.config import ConfigError, load
from tandemrl.data.rows import DataError, Row
from tandemrl.rollout.gateway.verifiers_source import verifiers
from tandemrl.tasks.verifiers.rows import rows
from tandemrl.training.loop import train

RENDERER = {"name": "custom", "import_path": "tandemrl.rollout.gateway.verifiers_parts:ChatRenderer"}
SMALL = [
    *("model.device=cpu", "train.threads=1", "train.prompts_per_step=2", "rollout.group_size=4", "train.eval_every=0"),
    *("rollout.max_tokens=64", "rollout.observation_tokens=64", "rollout.max_turns=4", "data.max_prompt_tokens=96"),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("pairs")
    for pair in ("plain", "calculator"):
        build_tiny_pair(folder / pair, pair=pair)
    return folder


def trained(pair: Path, taskset: str, out: Path, *overrides: str, **how: Any) -> list[dict[str, Any]]:
    """The rollouts of a run."""
    about = [f"model.senior={pair}/senior", f"model.junior={pair}/junior", f"output_dir={out}"]
    config = load(None, [*SMALL, *about, f"data.train=[verifiers:{taskset}:16]", *overrides])
    train(config, quiet=True, **how)
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def test_a_run_earns_the_rewards_of_the_taskset(pairs: Path, tmp_path: Path) -> None:
    named = ["rollout.environment=tandemrl:verifiers", "rollout.environment_parameters={taskset: vf_sums}"]
    lines = trained(pairs / "plain", "vf_sums", tmp_path, "train.steps=2", "selection.strategy=word", *named)
    assert len(lines) == 16
    assert {who for line in lines for who in line["author"]} == {-1, 0, 1}
    answers = {row.example_id: row.ground_truth for row in rows("verifiers:vf_sums:16", ["vf_sums", "16"])}
    for line in lines:
        correct = float(f"\\boxed{{{answers[line['example_id']]}}}" in line["text"])
        assert line["reward"] == pytest.approx(
            correct + 0.1 / (1 + len(line["plain"] if "plain" in line else line["text"]))
        )
        assert line["reward_parts"]["correct"] == correct


def test_who_is_not_to_be_trained_needs_another_model(pairs, tmp_path, monkeypatch):
    async def setup(env: Any, agents: Any) -> None:
        agents.agent.trainable = False

    source = verifiers("vf_sums")
    monkeypatch.setattr(type(source.env), "setup", setup)
    with pytest.raises(ConfigError, match=r"agent is not to be trained.*\{agent: \{model: junior\}"):
        trained(pairs / "plain", "vf_sums", tmp_path / "one", "train.steps=1", rollouts=source)
    source = verifiers("vf_sums", parameters={"agent": {"model": "junior"}})
    lines = trained(pairs / "plain", "vf_sums", tmp_path / "two", "train.steps=1", rollouts=source)
    assert {who for line in lines for who in line["author"]} == {-1, 0}


def test_finalize_sees_the_group(pairs: Path, tmp_path: Path) -> None:
    source = verifiers("vf_race", renderer=RENDERER)
    lines = trained(pairs / "plain", "vf_race", tmp_path, "train.steps=1", rollouts=source)
    groups = defaultdict[int, list[dict[str, Any]]](list)
    for line in lines:
        groups[line["group"]].append(line)
    for group in groups.values():
        lengths = [len(line["text"].strip()) for line in group]
        assert [line["reward"] for line in group] == [float(length == min(lengths)) for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["turn", "solo"])
def test_ten_steps_with_tools(strategy: str, pairs: Path, tmp_path: Path) -> None:
    how = ["train.steps=10", f"selection.strategy={strategy}", "rollout.turn_tokens=48"]
    lines = trained(pairs / "calculator", "vf_calculator", tmp_path, *how, rollouts=verifiers("vf_calculator"))
    assert len(lines) == 80
    assert max(line["turns"] for line in lines) > 1
    for line in lines:
        asked = sum(message["role"] == "tool" for message in line["transcript"]["messages"])
        assert line["reward_parts"]["asked"] == asked
    own = {who for line in lines for who in line["author"] if who >= 0}
    assert own == ({0, 1} if strategy == "turn" else {1})


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verifiers\('vf_none'\): .*vf_none"):
        verifiers("vf_none")
    with pytest.raises(DataError, match="no taskset 'vf_none'"):
        rows("verifiers:vf_none:4", ["vf_none", "4"])
    with pytest.raises(DataError, match="has 64 tasks; ask for fewer"):
        rows("verifiers:vf_sums:4:62", ["vf_sums", "4", "62"])
    row = Row("r", ({"role": "user", "content": "?"},), "mine", "", {})
    with pytest.raises(
        ConfigError, match=r"row r: no task of vf_sums: .*use data.train and data.eval=\[verifiers:vf_sums"
    ):
        verifiers("vf_sums").start(row)
