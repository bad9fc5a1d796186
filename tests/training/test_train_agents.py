"""Training with programs that ask the models themselves: what is the same as with an environment, and what a fork
weighs."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents import assert_same_episodes, config, overrides
from runs import kill, metrics, samples, weights
from small_world import Talk
from tandemrl import losses
from tandemrl.config import ConfigError
from tandemrl.data.rows import Row
from tandemrl.evals import evaluate
from tandemrl.files import read_json_lines
from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.gateway.source import openai_agent
from tandemrl.training.experience import make_experience, pack_mini_batches
from tandemrl.training.loop import train
from tandemrl.types import Group, Rollout

MORE = ["rollout.keep_turns=true", "rollout.max_tokens=40", "rollout.turn_tokens=10"]
EVALUATED = [
    "train.steps=2",
    "train.eval_every=2",
    "eval.profile=custom",
    "eval.max_tokens=24",
    "eval.k=[1]",
    "eval.train_samples=2",
]
EVALUATED += ["eval.bootstrap=10", "train.eval_first=false"]


async def talk(row: Row, client: Any) -> float:
    """What the environment ``Talk`` does, as a program."""
    messages, heard = [*row.messages], list[int]()
    from openai import BadRequestError

    while len(heard) < 3:
        try:
            whole = {"skip_special_tokens": False}
            answer = await client.chat.completions.create(model="any", messages=messages, extra_body=whole)
        except BadRequestError:  # the tokens are used up
            break
        content = answer.choices[0].message.content
        heard.append(len(content.strip()))
        messages += [{"role": "assistant", "content": content}]
        messages += [{"role": "user", "content": f"{heard[-1]} {row.ground_truth}"}]
    return sum(heard) % 5 / 5


@pytest.mark.parametrize("extra", [[], ["selection.strategy=turn", "train.async_steps=1"]], ids=["word", "turn, async"])
def test_an_outside_program_trains_as_the_environment_does(agents: Path, tmp_path: Path, extra: list[str]) -> None:
    """Same tokens, authors, rewards and weights, in two steps and an evaluation."""
    one, other = tmp_path / "environment", tmp_path / "agent"
    how = [*MORE, *EVALUATED, "loss.importance=none", *extra]
    train(config(agents, one, *how), environment=Talk(), quiet=True)
    train(config(agents, other, *how), rollouts=openai_agent(talk, scores=True), quiet=True)
    first, second = samples(one), samples(other)
    assert len(first) == len(second) == 12
    for a, b in zip(first, second, strict=True):
        for name in ("example_id", "seed", "tokens", "author", "reward", "stop_reason", "turns"):
            assert a[name] == b[name], name
        np.testing.assert_allclose(a["behaviour_logprobs"], b["behaviour_logprobs"], atol=1e-4)
    left, right = weights(one, 2), weights(other, 2)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert len({line["reward"] for line in first}) > 2
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert b["agent/forks"] == b["agent/failed"] == 0
        assert b["agent/requests"] == a["env/turns"]
        assert {**a, **b}["reward/mean"] == a["reward/mean"]
        assert b.get("eval/reward") == a.get("eval/reward")


def test_evaluations_and_handoffs_run_over_agents(agents: Path, tmp_path: Path) -> None:
    """As they do over the environment."""
    how = [*MORE, "eval.profile=custom", "eval.max_tokens=24", "eval.k=[1]", "eval.samples=2", "eval.bootstrap=10"]
    how += [f"model.junior={agents}/junior", "selection.strategy=turn"]
    told = []
    for name, acted_in in (("environment", Talk()), ("agent", openai_agent(talk, scores=True))):
        settings = config(agents, tmp_path / name, *how)
        phases, out = ("pass-at-k", "tandem", "handoff"), tmp_path / name
        found = evaluate(settings, model=f"{agents}/senior", out=out, phases=phases, limit=2, environment=acted_in)
        lines = [line for phase in phases for line in read_json_lines(out / f"{phase}.samples.jsonl")]
        told.append(([line["tokens"] for _, line in lines], [line["score"] for _, line in lines], found.keys()))
    assert told[0] == told[1]


async def forks(row: Row, client: Any) -> float:
    """A summary, and an answer to it; every fourth crashes."""
    asking = client.chat.completions
    first = await asking.create(model="any", messages=row.messages)
    assert len(first.choices[0].message.content) % 4 != 3
    short = [{"role": "user", "content": first.choices[0].message.content[:5] + "."}]
    second = await asking.create(model="any", messages=short)
    await asking.create(model="junior", messages=[*short, second.choices[0].message, *row.messages])
    return len(second.choices[0].message.content) / 10


def test_forks_are_trained_and_failures_are_left_out(agents: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    how = [*MORE, "train.seed=1", "rollout.agent.max_failed=0.9", "rollout.group_size=4", "loss.recipe=gspo"]
    train(config(agents, out, *how), rollouts=openai_agent(forks, scores=True), quiet=True)
    lines = samples(out)
    lost = [line for line in lines if line["stop_reason"] == "failed"]
    assert 0 < len(lost) < len(lines)
    assert all(line["reward_parts"].get("unscored") for line in lost)
    assert all(len(line["branches"]) == 1 for line in lines if line not in lost)
    for record in metrics(out):
        here = [line for line in lines if line["step"] == record["step"]]
        assert record["reward/unscored"] == pytest.approx(np.mean([line in lost for line in here]))
        own = [
            sum(author >= 0 for author in each["author"]) for line in here for each in (line, *line.get("branches", ()))
        ]
        assert record["tokens/response"] == sum(own)
        assert record["mismatch/mean_abs"] < 1e-5
    assert any(record["grad_norm"] > 0 for record in metrics(out))


async def drafts(row: Row, client: Any) -> float:
    """Three at once, told apart by their seeds, and what is made of them."""

    async def ask(text: str, **more: Any) -> str:
        asked = {"model": "any", "messages": [{"role": "user", "content": text}], **more}
        return (await client.chat.completions.create(**asked)).choices[0].message.content

    said = await asyncio.gather(*(ask(row.messages[0]["content"], seed=seed) for seed in range(3)))
    return sum(map(len, said)) / 20 + len(await ask(" ".join(map(str.strip, said))[:8])) / 10


def test_killed_while_programs_ask_it_resumes_as_if_nothing_had_happened(agents: Path, tmp_path: Path) -> None:
    """In the second step: four requests of each of six episodes were begun in the first."""
    how = [*MORE, "rollout.environment=agent", "rollout.agent.run=[test_train_agents:drafts]"]
    how += ["rollout.agent.scores=true", "rollout.max_turns=4"]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    train(config(agents, whole, *how), quiet=True)
    assert {len(line["branches"]) for line in samples(whole)} == {3}
    (tmp_path / "empty.yaml").write_text("train: {}\n")
    command = ["train", "--config", f"{tmp_path}/empty.yaml", *overrides(agents, out, *how)]
    kill(command, "tandemrl.rollout.gateway.sessions:Session.begin", 6 * 4 + 10)
    assert [line["step"] for line in metrics(out)] == [1]
    train(config(agents, out, *how), quiet=True)
    assert_same_episodes(whole, out)


def test_a_command_in_the_config_and_a_run_in_which_all_fail(agents: Path, tmp_path: Path) -> None:
    program = str(Path(__file__).parents[1] / "rollout" / "gateway" / "program.py")
    run = f"rollout.agent.run=[{sys.executable},{program},%s]"
    how = [*MORE, "train.steps=1", "rollout.environment=agent", "rollout.agent.scores=true"]
    train(config(agents, tmp_path / "one", *how, run % "good"), quiet=True)
    assert {line["reward"] for line in samples(tmp_path / "one")} == {0.5}
    with pytest.raises(EngineError, match=r"6 of 6 episodes failed.*exit status 1: RuntimeError: no luck"):
        train(config(agents, tmp_path / "two", *how, run % "crash"), quiet=True)
    assert "no luck" in json.loads((tmp_path / "two" / "stopped.json").read_text())["reason"]
    with pytest.raises(ConfigError, match="pass a Source"):
        train(config(agents, tmp_path / "three", *MORE), rollouts=talk, quiet=True)


def rollout(index: int, tokens: str, reward: float, *branches: Rollout) -> Rollout:
    """``c``, ``j`` and ``s`` say who wrote each token."""
    author = np.array(["cjs".index(each) - 1 for each in tokens])
    values = np.where(author >= 0, -0.5 - index, 0.0)
    return Rollout("r", 0, index, index, np.arange(len(tokens)), author, values, reward, branches=branches)


def test_an_episode_with_branches_is_left_out_moved_and_counted_as_a_whole(agents: Path) -> None:
    cut = dataclasses.replace(rollout(0, "ccss", 1.0, rollout(0, "cccss", 1.0)), stop_reason="length")
    flat = [rollout(i, "ccss", 0.5).in_group(1) for i in range(2)]
    groups = [Group("r", (cut, rollout(1, "ccjs", 0.0))), Group("r", tuple(flat))]
    setup = Setup(agents, "loss.filter_truncated=true", "train.prompts_per_step=2")
    found = make_experience(setup, groups)  # type: ignore[arg-type]
    assert found.used.tolist()[:3] == [False, False, True]
    assert found.metrics["groups/zero_variance"] == 0.5  # 2 of 4 episodes, of 5 texts
    assert [each.group for each in cut.in_group(7).sequences] == [7, 7]


class Setup:
    """What `make_experience` reads of a run."""

    def __init__(self, agents: Path, *extra: str) -> None:
        from tandemrl.processes.world import World
        from tandemrl.training.arguments import named_recipe, resolve_recipe
        from tandemrl.training.state import RunSetup, sampling_of

        self.config = config(agents, Path("none"), "train.prompts_per_step=1", *extra)
        self.recipe = resolve_recipe(named_recipe(self.config.loss), self.config)
        self.sampling, self.world, self.device = sampling_of(self.config.rollout), World(), torch.device("cpu")
        self.coefficients = RunSetup.coefficients.fget(self)  # type: ignore[attr-defined]


REDUCTIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("normalise_by", ["weight", "response"])
def test_an_episode_weighs_the_same_in_one_text_or_in_branches(agents: Path, reduction: str, normalise_by: str) -> None:
    """Its tokens, cut into branches with all that is before as context, give the same loss, advantages and counts."""
    if normalise_by == "response" and reduction not in REDUCTIONS[:2]:
        pytest.skip("not a choice")
    setup = Setup(agents, f"loss.reduction={reduction}", f"loss.normalise_by={normalise_by}")
    whole = [rollout(0, "ccssjsssjc" + "ss", 1.0), rollout(1, "ccjs", 0.0), rollout(2, "ccsss", 0.5)]
    cut = [rollout(0, "ccssj", 1.0, rollout(0, "cccccsssj", 9.0), rollout(0, "cccccccccc" + "ss", 9.0)), *whole[1:]]
    found = []
    for group in (whole, cut):
        experience = make_experience(setup, [Group("r", tuple(group))])  # type: ignore[arg-type]
        [mini] = pack_mini_batches(setup, experience)  # type: ignore[arg-type]
        total = torch.zeros(())
        for rows, batch, token_weights in mini.micro:
            assert experience.advantages is not None
            x = experience.advantages[rows][batch.sequence_ids] * (batch.tokens + 1)  # a loss by the token's place
            total = total + losses.reduce(
                x,
                token_weights,
                batch.author,
                batch.sequence_ids,
                num_sequences=batch.num_sequences,
                totals=mini.totals,
                reduction=reduction,
                normalise_by=normalise_by,
                constant=20.0,
                shares=batch.shares,
            )
        found.append((float(total), *map(float, mini.totals), experience.advantages[experience.firsts].tolist()))
        assert (experience.metrics["groups/dropped"], len(experience.firsts)) == (0, 3)
    (loss, *counts), (same, *again) = found
    assert counts == again
    assert same == pytest.approx(loss, rel=1e-5)
    assert loss != 0
