"""Responses that a judge gave no score: nothing is learnt from them, and too many stop a run or an evaluation."""

import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fake_judge import Scripted
from tandemrl.config import JudgeConfig, RewardConfig, load
from tandemrl.data.rows import Row
from tandemrl.evals.measures import Sample, graded
from tandemrl.evals.protocol import grade
from tandemrl.processes.world import World
from tandemrl.rewards.protocol import GraderError, Score
from tandemrl.rewards.scoring import Scorer
from tandemrl.rollout.collect import CompletionBatch
from tandemrl.rollout.engine import Draws
from tandemrl.tasks.rubric.judge import JudgeError, JudgePool
from tandemrl.training import update as update_module
from tandemrl.training.build import build
from tandemrl.training.experience import (
    MiniBatch,
    add_gae_advantages,
    add_group_advantages,
    add_scores,
    make_experience,
    pack_mini_batches,
)
from tandemrl.training.profiling import Clock
from tandemrl.training.rollouts import rollout_metrics
from tandemrl.training.state import Run
from tandemrl.types import Author, Group, Rollout

REWARDS: list[list[float | None]] = [[1.0, 0.0, None, 1.0], [None, 0.5, None, None], [0.0, None, 1.0, 0.25], [1.0] * 4]
"""Of four prompts; None is unscored. The second has one scored rollout left, which has no baseline."""


def group_of(number: int, rewards: Sequence[float | None]) -> Group:
    rng = np.random.default_rng(number)
    rollouts = []
    for index, reward in enumerate(rewards):
        size = 3 + index
        author = np.array([Author.CONTEXT] * 5 + [Author.SENIOR] * size)
        given = rng.integers(3, 60, 5 + size), author, np.zeros(5 + size)
        value, parts = (99.0, {"unscored": 1.0}) if reward is None else (reward, {"acc": reward})  # 99 means nothing
        rollouts.append(Rollout(str(number), number, index, index, *given, value, parts))
    return Group(str(number), tuple(rollouts))


GROUPS = [group_of(i, rewards) for i, rewards in enumerate(REWARDS)]
WITHOUT = [
    Group(g.example_id, tuple(r for r in g.rollouts if r.reward != 99.0) if g.example_id != "1" else ()) for g in GROUPS
]


def trained(run: Run, groups: Sequence[Group], monkeypatch: pytest.MonkeyPatch) -> tuple[dict[Any, list[float]], Any]:
    """The advantages that the optimiser gets, by the tokens of the rollout, and the metrics."""
    advantages: dict[Any, list[float]] = {}
    setup, models, _ = run

    def update_policy(_: Any, models: Any, mini: MiniBatch, *args: Any, **options: Any) -> dict[str, float]:
        for _, batch, _ in mini.micro:
            for i in range(batch.num_sequences):
                mask = batch.sequence_ids == i
                written = mask & (batch.author >= 0)
                advantages[tuple(batch.tokens[mask].tolist())] = batch.advantages[written].tolist()
        return {"loss": 0.0, "grad_norm": 0.0}

    monkeypatch.setattr(update_module, "update_policy", update_policy)
    monkeypatch.setattr(update_module, "update_critic", lambda *args: {})
    experience = make_experience(setup, groups)
    mini_batches = add_scores(setup, models, pack_mini_batches(setup, experience))
    if models.critic is not None:
        mini_batches, _ = add_gae_advantages(setup, mini_batches, experience, 0.0)
    else:
        mini_batches = add_group_advantages(setup, mini_batches, experience, 0.0)
    return advantages, experience.metrics | update_module.update(setup, models, mini_batches, 1, Clock())


@pytest.mark.parametrize("recipe", ["grpo", "rloo", "reinforce_pp", "dapo", "ppo"])
def test_training_goes_as_if_unscored_rollouts_had_never_been_written(recipe, tiny_pair, tmp_path, monkeypatch):
    settings = [f"loss.recipe={recipe}", f"model.senior={tiny_pair}/senior", "data.train=synthetic:plain:train:8"]
    settings += ["train.prompts_per_step=4", "rollout.group_size=4", "rollout.max_tokens=16", "train.eval_every=0"]
    settings += ["data.max_prompt_tokens=128", "loss.overlong_buffer=0", "selection.strategy=solo"]
    run = build(load(None, [*settings, f"output_dir={tmp_path}"]))
    with_them, metrics = trained(run, GROUPS, monkeypatch)
    assert metrics["groups/dropped"] == 1
    without, _ = trained(run, WITHOUT, monkeypatch)
    assert with_them == without
    scored = [r for g in WITHOUT for r in g.rollouts if g.example_id != "3" or recipe in ("ppo", "reinforce_pp")]
    assert set(with_them) >= {tuple(r.tokens.tolist()) for r in scored}
    if recipe == "grpo":  # (R - mean) / (std + 1e-6) of 1, 0, 1
        mean, std = 2 / 3, math.sqrt((2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 2)
        for rollout, reward in ((GROUPS[0].rollouts[0], 1.0), (GROUPS[0].rollouts[1], 0.0)):
            value = (reward - mean) / (std + 1e-6)
            assert with_them[tuple(rollout.tokens.tolist())] == pytest.approx(
                [value] * rollout.response_tokens, rel=1e-5
            )
    nothing, metrics = trained(run, [group_of(i, [None] * 4) for i in range(4)], monkeypatch)
    assert not nothing
    assert (metrics["groups/dropped"], metrics["updates"]) == (4, 0)


def test_unscored_rollouts_are_counted_and_are_no_part_of_the_means() -> None:
    metrics = rollout_metrics(CompletionBatch([], [], Draws(0, 0)), GROUPS, 1)
    assert not any(name.startswith(("passes/", "draft/")) for name in metrics)  # nobody counted
    scored = [reward for rewards in REWARDS for reward in rewards if reward is not None]
    assert metrics["reward/unscored"] == pytest.approx(1 - len(scored) / 16)
    assert metrics["reward/mean"] == pytest.approx(np.mean(scored))
    assert metrics["reward/acc"] == pytest.approx(np.mean(scored))


# ------------------------------------------------------------------------------------------------------------- the rate


JUDGE = Scripted(lambda prompt: "hm" if "unmarkable" in prompt else "Total Score: 6/10")


def items(total: int, failing: Sequence[int]) -> list[tuple[Row, str]]:
    row = Row("polaris_tinyv/0", ({"role": "user", "content": "2 + 2?"},), "polaris_tinyv", "4", {"criteria": "sums"})
    return [(row, f"response {i}" + (" unmarkable" if i in failing else "")) for i in range(total)]


@pytest.fixture
def rules_that_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of PRIME's grader, which would start processes."""
    score = Score(0.0, {"acc": 0.0, "answer_present": 0.0}, None)
    monkeypatch.setattr("tandemrl.tasks.rubric.judge.prime", lambda row, text, options: score)


def spread(total: int, failing: Sequence[int], *, reward: Any = None, **config: Any) -> list[list[Any]]:
    """What both of two processes, here threads, make of a batch: the result of ``score``, by a judge or a reward."""
    meeting, values = Barrier(2, timeout=60), [None, None]

    def process(rank: int) -> list[Any]:
        class Meeting(World):
            def gather(self, value: Any, group: Any = None) -> list[Any]:
                values[rank] = value
                meeting.wait()
                return list(values)

        judge = JudgePool(JUDGE, JudgeConfig(**config)) if reward is None else None
        rewards = RewardConfig(workers=1, scorers={} if reward is None else {"*": reward})
        with Scorer(rewards, judge=judge, world=Meeting(rank, 2)) as scorer:
            return scorer.score(items(total, failing))

    with ThreadPoolExecutor(2) as threads:
        return [future.result() for future in [threads.submit(process, rank) for rank in range(2)]]


@pytest.mark.usefixtures("rules_that_find_nothing")
def test_the_rate_is_that_of_all_processes() -> None:
    failing = (0, 2)  # both of process 0, whose share is 8 of 16; 1 in 8 of all
    one, other = spread(16, failing, max_failure_rate=0.125)
    assert one == other
    assert [i for i, score in enumerate(one) if "unscored" in score.parts] == list(failing)
    with pytest.raises(JudgeError, match=r"no score to 2 of the 16 .*judge\.max_failure_rate=0\.1\b"):
        spread(16, failing)


@pytest.mark.usefixtures("without_math")
def test_all_are_lost_only_if_they_are_in_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_fragile.py").write_text(
        "import os\ndef fragile(row, text):\n    return os._exit(1) if 'unmarkable' in text else 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    one, other = spread(4, (0, 2), reward="my_fragile:fragile")  # both of process 0, none of process 1
    assert [score.value for score in one] == [score.value for score in other] == [0.0, 1.0, 0.0, 1.0]
    with pytest.raises(GraderError, match="none of 2 responses could be scored"):  # one of each
        spread(2, (0, 1), reward="my_fragile:fragile")


@pytest.mark.usefixtures("rules_that_find_nothing")
def test_an_evaluation_reports_unscored_samples_and_stops_above_the_rate() -> None:
    prompts: Any = [SimpleNamespace(row=items(1, ())[0][0])]

    def sample(i: int, failing: Sequence[int]) -> Sample:
        return Sample(0, "a", "s", "solo", i, 0, items(16, failing)[i][1], [1], 1, "S1", 1, 1.0, "eos")

    with Scorer(RewardConfig(workers=1), judge=JudgePool(JUDGE, JudgeConfig())) as scorer:
        marked = grade([sample(i, (3,)) for i in range(16)], prompts, scorer)
        rates, counts = graded(marked, (1,))
        assert counts["unscored"] == 1
        assert rates["score"] == pytest.approx(0.6 * 15 / 16)
        with pytest.raises(JudgeError, match="no score to 14 of the 16"):
            grade([sample(i, range(14)) for i in range(16)], prompts, scorer)
