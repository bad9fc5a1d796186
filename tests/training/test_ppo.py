"""PPO as a whole: advantages of the critic, who learns when, dynamic sampling, resume; and that it learns."""

import shutil
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import runs
from runs import timeless as metrics
from runs import weights
from tandemrl.config import Config
from tandemrl.data.sampler import Sampler
from tandemrl.losses import adapt_kl_coef
from tandemrl.models.critic import value_head
from tandemrl.rollout.collect import CompletionBatch
from tandemrl.rollout.engine import Draws, Passes
from tandemrl.training import rollouts as rollouts_module
from tandemrl.training.build import build
from tandemrl.training.checkpoint import restore
from tandemrl.training.experience import add_gae_advantages, add_scores, make_experience, pack_mini_batches
from tandemrl.training.loop import train
from tandemrl.training.rollouts import resample
from tandemrl.training.state import Progress, Run
from tandemrl.types import Author, Group, Rollout

REFERENCE = run_path(str(Path(__file__).parents[1] / "golden" / "losses.py"))
PPO = ["loss.recipe=ppo", "train.critic_lr=1e-3", "train.eval_every=0", "train.save_every=20"]


def config(pair: Path, out: Path, *extra: str) -> Config:
    return runs.config(pair, out, *PPO, *extra)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------------------------------------------- advantages


def rollouts_of(run: Run, senior: float, seed: int = 0) -> list[Rollout]:
    """Two prompts of two random responses each, the longer ones with a tool's reply in the middle; tokens are the
    senior's with probability ``senior``."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(4):
        prompt, size = list(run.setup.prompts[i // 2].tokens), 4 + 3 * i
        response = (rng.random(size) < senior).astype(int)
        response[4:7] = Author.CONTEXT
        tokens = np.array(prompt + rng.integers(3, 60, size).tolist())
        author = np.array([Author.CONTEXT] * len(prompt) + response.tolist())
        made.append(Rollout(str(i // 2), i // 2, i % 2, i, tokens, author, np.zeros(len(tokens)), float(i % 3)))
    return made


def direct(model: Any, tokens: np.ndarray) -> torch.Tensor:
    return model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]


@torch.no_grad()
@pytest.mark.parametrize("junior_weight", [0.0, 0.5])
def test_advantages_and_returns_are_those_of_a_loop_over_sequences(junior_weight, tiny_pair, tmp_path):
    """Against stock transformers, the golden GAE and NumPy's mean and variance; KL in the reward, two mini-batches."""
    knobs = ["loss.kl_coef=0.3", "loss.kl_in_reward=true", "loss.gamma=0.9", "loss.lam=0.8"]
    knobs += ["train.prompts_per_step=2", "train.mini_batch_prompts=1"]
    run = build(config(tiny_pair, tmp_path, *knobs, f"loss.junior_weight={junior_weight}"))
    setup, models, progress = run
    assert models.critic is not None
    generator = torch.Generator().manual_seed(1)
    for parameter in models.policy.parameters():  # away from the reference
        parameter += (0.02 if parameter.ndim > 1 else 0.0) * torch.randn(parameter.shape, generator=generator)
    head = value_head(models.critic.module)[1]
    head.weight.copy_(0.3 * torch.randn(head.weight.shape, generator=generator))
    made = rollouts_of(run, senior=0.5)
    experience = make_experience(setup, [Group(str(i), tuple(made[2 * i : 2 * i + 2])) for i in (0, 1)])
    mini_batches = add_scores(setup, models, pack_mini_batches(setup, experience))
    filled, measured = add_gae_advantages(setup, mini_batches, experience, progress.kl_coef)

    models.policy.save_pretrained(tmp_path / "policy")
    models.critic.module.save_pretrained(tmp_path / "critic")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    reference = AutoModelForCausalLM.from_pretrained(tiny_pair / "senior")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    expected_advantages, returns, values, counts = [], [], [], []
    for rollout in made:
        w = np.where(rollout.author == 1, 1.0, np.where(rollout.author == 0, junior_weight, 0.0))
        at = (np.arange(len(w) - 1), rollout.tokens[1:])
        old, ref = (direct(m, rollout.tokens).log_softmax(-1).double().numpy()[at] for m in (policy, reference))
        earned = -0.3 * w * np.concatenate([[0.0], old - ref])
        earned[-1] += rollout.reward
        v = np.concatenate([[0.0], direct(critic, rollout.tokens)[:-1, 0].double().numpy()])
        a = np.array(REFERENCE["gae"](earned, v, w > 0, 0.9, 0.8))
        expected_advantages.append(a)
        returns.append(a + v)
        values.append(v)
        counts.append(w)
    w, r, v = (np.concatenate(x) for x in (counts, returns, values))
    on = w > 0
    mean = (w * np.concatenate(expected_advantages)).sum() / w.sum()
    variance = (w * (np.concatenate(expected_advantages) - mean) ** 2).sum() / (w.sum() - 1)
    for i, batch in enumerate(m.batch for mini in filled for m in mini.micro):
        pair = slice(2 * i, 2 * i + 2)
        trained = np.concatenate(counts[pair]) > 0
        white = (np.concatenate(expected_advantages[pair]) - mean) / np.sqrt(variance + 1e-8)
        assert batch.advantages is not None
        assert batch.returns is not None
        np.testing.assert_allclose(batch.advantages.numpy(), np.where(trained, white, 0.0), atol=2e-4)
        np.testing.assert_allclose(batch.returns.numpy()[trained], np.concatenate(returns[pair])[trained], atol=2e-4)

    def weighted_variance(x: np.ndarray) -> float:
        return float((w[on] * (x[on] - np.average(x[on], weights=w[on])) ** 2).sum())

    explained = 1 - weighted_variance(r - v) / weighted_variance(r)
    assert measured["value/explained_variance"] == pytest.approx(explained, abs=1e-3)


# ------------------------------------------------------------------------------------------------------------- training


def test_the_critic_warms_up_alone_and_micro_batches_change_no_step(tiny_pair: Path, tmp_path: Path) -> None:
    knobs = ["train.steps=2", "train.critic_warmup_steps=1", "loss.kl_coef=0.1", "loss.kl_in_reward=true"]
    knobs += ["train.save_every=1"]
    out, other = (
        train(config(tiny_pair, tmp_path / n, *knobs, f"train.tokens_per_micro_batch={n}"), quiet=True)
        for n in ("8192", "192")
    )
    first, second = metrics(out)
    assert same(weights(out, 1), load_file(tiny_pair / "senior" / "model.safetensors"))
    assert not same(weights(out, 2), weights(out, 1))
    assert first["grad_norm"] == 0
    assert second["grad_norm"] > 0
    for line in (first, second):
        assert line["value/loss"] > 0
        assert line["value/grad_norm"] > 0
        assert line["mismatch/mean_abs"] < 1e-5
    assert first["value/explained_variance"] == pytest.approx(0, abs=1e-5)  # a head of zeros
    assert second["value/explained_variance"] != pytest.approx(0, abs=1e-5)
    names = ["loss", "grad_norm", "value/loss", "value/grad_norm", "value/explained_variance", "kl/per_token"]
    for a, b in zip((first, second), metrics(other), strict=True):
        assert {name: a[name] for name in names} == pytest.approx({name: b[name] for name in names}, abs=1e-4)


EVERYTHING = ["loss.kl_coef=0.05", "loss.kl_in_reward=true", "loss.kl_target=0.01", "train.critic_warmup_steps=1"]
EVERYTHING += ["train.warmup_steps=2", "train.mini_batch_prompts=2", "train.max_resamples=2", "train.save_every=2"]


def test_resume_is_bitwise_with_critic_adaptive_kl_and_resampling(tiny_pair: Path, tmp_path: Path) -> None:
    whole = train(config(tiny_pair, tmp_path / "whole", "train.steps=3", *EVERYTHING), quiet=True)
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    step_2 = str(resumed / "checkpoints" / "step_2")
    shutil.rmtree(resumed / "checkpoints" / "step_3")  # which is to be made again
    train(config(tiny_pair, resumed, "train.steps=3", *EVERYTHING), quiet=True, resume=step_2)
    assert metrics(whole) == metrics(resumed)
    assert (whole / "samples.jsonl").read_text() == (resumed / "samples.jsonl").read_text()
    runs = [build(config(tiny_pair, out, "train.steps=3", *EVERYTHING)) for out in (whole, resumed)]
    for run in runs:
        restore(run, "auto")
        assert run.progress.step == 3
    a, b = (run.models.critic for run in runs)
    assert a is not None
    assert b is not None
    assert same(a.module.state_dict(), b.module.state_dict())
    assert value_head(a.module)[1].weight.abs().sum() > 0
    moments = [[s["exp_avg_sq"] for s in part.optimizer.state.values()] for part in (a, b)]
    assert moments[0]
    assert all(torch.equal(x, y) for x, y in zip(*moments, strict=True))

    lines = metrics(whole)
    assert any(line["groups/resampled"] > 0 for line in lines)
    coefs = [line["kl/coef"] for line in lines] + [runs[0].progress.kl_coef]
    expected = [0.05, 0.05]  # the critic's warm-up says nothing about the KL
    for line in lines[1:]:
        expected.append(adapt_kl_coef(expected[-1], line["kl/per_token"], target=0.01))
    assert coefs == pytest.approx(expected, rel=1e-12)
    assert runs[0].progress.kl_coef == runs[1].progress.kl_coef


def test_adaptive_kl_without_a_critic(tiny_pair: Path, tmp_path: Path) -> None:
    knobs = ["loss.recipe=grpo", "train.critic_lr=1e-5", *EVERYTHING[:3], "train.steps=2"]
    out = train(config(tiny_pair, tmp_path, *knobs), quiet=True)
    first, second = metrics(out)
    assert first["kl/coef"] == 0.05
    assert second["kl/coef"] == pytest.approx(adapt_kl_coef(0.05, first["kl/per_token"], target=0.01))


# ----------------------------------------------------------------------------------------------------- dynamic sampling


def group(example: int, rewards: list[float], place: int) -> Group:
    author, zeros = np.array([-1, 1]), np.zeros(2)
    made = [Rollout(str(example), place, i, 0, zeros, author, zeros, reward) for i, reward in enumerate(rewards)]
    return Group(str(example), tuple(made))


def resampled(monkeypatch: pytest.MonkeyPatch, good: set[int], rounds: int) -> tuple[Any, list[int]]:
    """``resample`` of four groups of which 0 and 2 are flat; further examples have a signal if in ``good``."""
    counts: list[int] = []

    def generate(step: int, examples: Any, *, drawn: int) -> CompletionBatch:
        counts.append(drawn)
        return CompletionBatch(examples, [], Draws(10, 5), Passes(20, 6, 9, 4, 3))

    def score(setup: Any, batch: Any, step: int) -> list[Group]:
        return [group(e, [0.0, 1.0 if e in good else 0.0], i) for i, e in enumerate(batch.prompts)]

    monkeypatch.setattr(rollouts_module, "score", score)
    sampler = Sampler(100, seed=0)
    sampler.next(4)
    settings = SimpleNamespace(train=SimpleNamespace(max_resamples=rounds))
    setup: Any = SimpleNamespace(config=settings, scorer=None, tokenizer=None)
    nothing: Any = None
    run = Run(setup, nothing, Progress(sampler, 0.0))
    first = [group(900 + i, [1.0, 1.0] if i in (0, 2) else [0.0, 1.0], i) for i in range(4)]
    return resample(run, generate, 1, CompletionBatch([], [], Draws(100, 50), Passes(200, 60)), first), counts


def test_flat_groups_give_way_to_the_next_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(100, seed=0)
    sampler.next(4)
    _, b, _, d, *_ = sampler.next(10)
    (written, groups, count), drawn = resampled(monkeypatch, good={b, d}, rounds=5)
    # round 1 puts a and b in the places 0 and 2; a is flat, so c comes, is flat, and d stays
    assert [g.example_id for g in groups] == [str(d), "901", str(b), "903"]
    assert [[r.group for r in g.rollouts] for g in groups] == [[i, i] for i in range(4)]
    assert count == 4
    assert drawn == [4, 6, 7]  # prompts of the step before each round: fresh keys
    assert written.draws == Draws(130, 65)
    assert written.passes == Passes(260, 78, 27, 12, 9)


def test_resampling_leaves_fewer_flat_groups_and_never_repeats_a_key(tiny_pair: Path, tmp_path: Path) -> None:
    """Eight rows only, so that examples come again within a step."""
    knobs = ["loss.recipe=dapo", "train.critic_lr=1e-5", "data.train=synthetic:plain:train:8"]
    knobs += ["train.steps=2", "rollout.group_size=2"]
    without = train(config(tiny_pair, tmp_path / "a", *knobs, "train.steps=1"), quiet=True)
    out = train(config(tiny_pair, tmp_path / "b", *knobs, "train.max_resamples=4"), quiet=True)
    a, b = metrics(without)[0], metrics(out)[0]
    assert b["groups/resampled"] > 0
    assert b["groups/zero_variance"] < a["groups/zero_variance"]
    samples = runs.samples(out)
    keys = [line["seed"] for line in samples]
    assert len(keys) == 2 * 8
    assert len(set(keys)) == len(keys)
    assert [line["group"] for line in samples] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
