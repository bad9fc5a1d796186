"""Rollouts that cannot change the loss are not computed, and nothing that is trained changes by it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandemrl import losses
from tandemrl.config import load
from tandemrl.models.attention import PackedLayout
from tandemrl.models.forward import packed_logits
from tandemrl.models.loading import load_model
from tandemrl.training import update as update_module
from tandemrl.training.build import build
from tandemrl.training.experience import add_group_advantages, add_scores, make_experience, pack_mini_batches
from tandemrl.training.gates import TrainError
from tandemrl.training.profiling import Clock
from tandemrl.training.state import Run
from tandemrl.types import Author, Group, Rollout

REWARDS = [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.5, 0.0, 1.0]]
"""Of four prompts. In the last one the first reward is the mean, so that its advantage is 0, too."""
BOTH = ["selection.strategy=chunk", "loss.junior_weight=0.5"]
"""Junior tokens are learnt from, too."""


def groups_of(run: Run, rewards: Sequence[Sequence[float]]) -> list[Group]:
    """Groups whose behaviour log-probs are the policy's own, so that the gate lets them pass."""
    rng = np.random.default_rng(0)
    groups = []
    for number, row in enumerate(rewards):
        prompt, rollouts = rng.integers(3, 60, 40), []
        for index, reward in enumerate(row):
            size = int(rng.integers(4, 12))
            tokens = np.concatenate([prompt, rng.integers(3, 60, size)])
            with torch.no_grad():
                logits = logits_of(run.models.policy, tokens)
            own = logits.log_softmax(-1)[np.arange(len(tokens) - 1), tokens[1:]].numpy()
            author = np.concatenate([np.full(40, Author.CONTEXT), [1], rng.integers(0, 2, size - 1)])
            behaviour = np.where(author >= 0, np.concatenate([[0.0], own]), 0.0)
            rollouts.append(Rollout(str(number), number, index, index, tokens, author, behaviour, reward))
        groups.append(Group(str(number), tuple(rollouts)))
    return groups


def logits_of(model: Any, tokens: np.ndarray) -> torch.Tensor:
    places = np.arange(len(tokens))
    given = torch.from_numpy(tokens), torch.from_numpy(places), PackedLayout([places])
    return packed_logits(model, model.get_output_embeddings(), *given)


def updated(run: Run, groups: Sequence[Group], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One update: its gradients per optimiser step, its metrics, and how many rollouts were read."""
    setup, models, _ = run
    gradients: list[dict[str, torch.Tensor | None]] = []

    def optimizer_step(*arguments: Any) -> float:
        grads = {name: p.grad for name, p in models.policy.named_parameters()}
        gradients.append({name: None if g is None else g.clone() for name, g in grads.items()})
        models.optimizer.zero_grad(set_to_none=True)
        return 0.0

    monkeypatch.setattr(update_module, "optimizer_step", optimizer_step)
    experience = make_experience(setup, groups)
    mini_batches = add_scores(setup, models, pack_mini_batches(setup, experience))
    mini_batches = add_group_advantages(setup, mini_batches, experience, 0.0)
    metrics = update_module.update(setup, models, mini_batches, 1, Clock())
    read = sorted(row for mini in mini_batches for m in mini.micro for row in m.rows.tolist())
    return {"gradients": gradients, "metrics": experience.metrics | metrics, "read": read}


def run_of(pair: Path, out: Path, *extra: str) -> Run:
    settings = [f"model.senior={pair}/senior", "data.train=synthetic:plain:train:8", "train.prompts_per_step=4"]
    settings += ["rollout.group_size=3", "rollout.max_tokens=16", "train.eval_every=0", "selection.strategy=solo"]
    return build(load(None, [*settings, "data.max_prompt_tokens=128", f"output_dir={out}", *extra]))


def no_idle(recipe: Any, advantages: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros_like(advantages, dtype=torch.bool)


def same_gradients(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> None:
    for left, right in zip(one, other, strict=True):
        for name in left:
            assert left[name] is not None, name
            assert (left[name] - right[name]).abs().max() <= 1e-5 * right[name].abs().max(), name


@pytest.mark.parametrize(
    ("knobs", "read"),
    [
        ([], [3, 4, 5, 10, 11]),  # advantages are 0 where a group's rewards are equal, and at the mean
        (["loss.importance=sequence", "loss.junior_weight=0.5", "selection.strategy=chunk"], [3, 4, 5, 10, 11]),
        (["loss.recipe=gspo", "loss.normalise_by=response"], [3, 4, 5, 10, 11]),
        (["loss.recipe=dr_grpo", "train.tokens_per_micro_batch=144"], [3, 4, 5, 10, 11]),
        (["loss.recipe=reinforce_pp"], [*range(12)]),  # whitened: no advantage is 0
        (["loss.entropy_coef=0.01"], [*range(12)]),
        (["train.mini_batch_prompts=1"], [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11]),  # a whole group where nothing is left
    ],
)
def test_the_gradient_is_that_of_all_rollouts(knobs, read, tiny_pair, tmp_path, monkeypatch):
    run = run_of(tiny_pair, tmp_path, *knobs)
    groups = groups_of(run, REWARDS)
    skipping = updated(run, groups, monkeypatch)
    assert skipping["read"] == read
    assert skipping["metrics"]["groups/skipped"] == pytest.approx(1 - len(read) / 12)
    monkeypatch.setattr(losses, "idle", no_idle)
    everything = updated(run, groups, monkeypatch)
    assert everything["read"] == [*range(12)]
    same_gradients(skipping["gradients"], everything["gradients"])
    for name in ("loss", "updates", "ratio", "clip_fraction", "approx_kl", "groups/zero_variance"):
        assert skipping["metrics"][name] == pytest.approx(everything["metrics"][name], rel=1e-4, abs=1e-6), name


def test_where_all_groups_are_equal_the_gradient_is_0(tiny_pair, tmp_path, monkeypatch):
    """The optimiser gets zeros, not None: its moments and its weight decay go on as if all had been computed."""
    run = run_of(tiny_pair, tmp_path)
    groups = groups_of(run, [[1.0] * 3] * 4)
    found = updated(run, groups, monkeypatch)
    assert found["read"] == [0, 1, 2]
    assert found["metrics"]["mismatch/mean_abs"] < 1e-4
    (gradients,) = found["gradients"]
    assert all(g is not None and not g.any() for g in gradients.values())
    stale = [
        g._replace(rollouts=tuple(replace(r, behaviour_logprobs=r.behaviour_logprobs - 1.0) for r in g.rollouts))
        for g in groups
    ]
    with pytest.raises(TrainError, match="nats"):
        updated(run, stale, monkeypatch)


def by_juniors(groups: Sequence[Group], numbers: Sequence[int], shift: float) -> list[Group]:
    """Groups of which some have no token of the senior, and all others log-probs that are off by ``shift``."""
    return [
        g._replace(
            rollouts=tuple(
                replace(r, author=np.where(r.author == 1, 0, r.author))
                if g.rollouts[0].group in numbers
                else replace(r, behaviour_logprobs=r.behaviour_logprobs - shift)
                for r in g.rollouts
            )
        )
        for g in groups
    ]


@pytest.mark.parametrize(
    ("knobs", "juniors", "rewards"),
    [
        (["train.mini_batch_prompts=1"], [0], REWARDS),
        ([*BOTH, "train.mini_batch_prompts=2"], [0, 1, 2], REWARDS),
        (BOTH, [1, 3], REWARDS),  # what is learnt from is the junior's alone
        (["train.mini_batch_prompts=1"], [0, 1, 3], [[1.0] * 3] * 4),
    ],
)
def test_the_gate_judges_the_first_mini_batch_with_tokens_of_the_senior(
    knobs: list[str],
    juniors: list[int],
    rewards: list[list[float]],
    tiny_pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(tiny_pair, tmp_path, *knobs)
    groups = groups_of(run, rewards)
    found = updated(run, by_juniors(groups, juniors, 0.0), monkeypatch)
    assert found["metrics"]["mismatch/mean_abs"] < 1e-4
    with pytest.raises(TrainError, match=r"differ by 1 nats"):
        updated(run, by_juniors(groups, juniors, 1.0), monkeypatch)
    nothing_to_see = updated(run, by_juniors(groups, range(4), 1.0), monkeypatch)
    assert "mismatch/mean_abs" not in nothing_to_see["metrics"]


def test_the_gate_sees_a_group_with_tokens_of_the_senior(tiny_pair: Path, tmp_path: Path) -> None:
    run = run_of(tiny_pair, tmp_path, "loss.junior_weight=1", "selection.strategy=chunk")
    first, *others = groups_of(run, [[1.0] * 3] * 4)
    junior_alone = tuple(replace(r, author=np.minimum(r.author, Author.JUNIOR)) for r in first.rollouts)
    experience = make_experience(run.setup, [first._replace(rollouts=junior_alone), *others])
    assert experience.forwarded.nonzero().flatten().tolist() == [3, 4, 5]


def test_rollouts_that_were_cut_off_are_left_out_of_the_loss_and_not_of_the_baselines(tiny_pair, tmp_path):
    run = run_of(tiny_pair, tmp_path, "loss.filter_truncated=true")
    plain = run_of(tiny_pair, tmp_path / "plain")
    groups = groups_of(run, REWARDS)
    cut = [replace(r, stop_reason="length") if r.index == 0 else r for r in groups[1].rollouts]
    groups[1] = Group("1", tuple(cut))
    experience, whole = (make_experience(each.setup, groups) for each in (run, plain))
    assert experience.used.tolist() == [True] * 3 + [False, True, True] + [True] * 6
    assert (experience.weights[3], bool(experience.forwarded[3])) == (0, False)
    assert bool(whole.used.all())
    assert experience.advantages is not None
    assert whole.advantages is not None
    assert torch.equal(experience.advantages, whole.advantages)


def test_the_kl_is_to_the_junior_if_asked_for(tiny_pair: Path, tmp_path: Path) -> None:
    """On all tokens of a senior that writes alone: the reference channel is what the junior gives them."""
    junior = f"model.junior={tiny_pair}/junior"
    run = run_of(tiny_pair, tmp_path, junior, "loss.kl_coef=0.1", "loss.kl_to=junior", "loss.kl_kind=k2")
    groups = groups_of(run, REWARDS)
    experience = make_experience(run.setup, groups)
    model = load_model(str(tiny_pair / "junior"))
    for mini in add_scores(run.setup, run.models, pack_mini_batches(run.setup, experience)):
        for m in mini.micro:
            for place, row in enumerate(m.rows.tolist()):
                rollout = experience.rollouts[row]
                with torch.no_grad():
                    logprobs = logits_of(model, rollout.tokens).log_softmax(-1)
                own = torch.from_numpy(rollout.tokens[1:]).long()
                expected = logprobs[:-1].gather(1, own[:, None])[39:, 0]
                here = (m.batch.sequence_ids == place) & (m.batch.author >= 0)
                assert m.batch.ref_logprobs is not None
                assert torch.allclose(m.batch.ref_logprobs[here], expected, atol=1e-4)


def test_k2_to_the_junior_is_on_policy_distillation() -> None:
    """Its gradient is that of REINFORCE with each token's reverse KL as its advantage, negated."""
    logprobs = torch.tensor([-0.3, -2.0, -5.0], requires_grad=True)
    junior = torch.tensor([-0.5, -1.0, -9.0])
    (by_kl,) = torch.autograd.grad(losses.kl(logprobs, junior, kind="k2").sum(), logprobs)
    advantages = -(logprobs - junior).detach()
    (by_advantage,) = torch.autograd.grad(-(advantages * logprobs).sum(), logprobs)
    assert torch.allclose(by_kl, by_advantage)
