"""Values and every gradient of the critic on meshes of two processes are those of a single process, and so is PPO."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import VOCABULARY, qwen3
from processes import MESHES_OF_TWO, gradients_of, on_every_mesh, run
from runs import metrics
from tandemrl.config import load
from tandemrl.losses import adapt_kl_coef, value_loss
from tandemrl.models.batching import pack_tokens
from tandemrl.models.critic import load_critic, packed_values, token_values, value_head
from tandemrl.models.sharding import shard
from tandemrl.processes.world import World
from tandemrl.training.loop import train

LENGTHS = [9, 5, 12, 3]


def one_pass(world: World, folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Values of this data rank's sequences, and the gradients of everybody's loss."""
    critic = shard(load_critic(folder), world, dtype=torch.float32, forward=packed_values)
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]
    batch = pack_tokens(sequences[world.data_rank :: world.data_size])
    values = token_values(critic, batch, select=batch.positions >= 0, shards=world.shards)
    returns = 2 * torch.sin(batch.tokens + 0.3 * batch.positions)
    value_loss(values, returns + 1, returns).sum().backward()
    return list(values.detach().split(batch.lengths.tolist())), gradients_of(critic)


def test_any_mesh_of_two_gives_the_values_and_gradients_of_one(tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path / "lm")
    critic = load_critic(tmp_path / "lm")
    _, head = value_head(critic)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
    critic.save_pretrained(tmp_path / "critic")

    values, gradients = one_pass(World(), tmp_path / "critic")
    assert gradients.keys() == dict(critic.named_parameters()).keys()
    for meshes in run(on_every_mesh, 2, one_pass, tmp_path / "critic"):
        for axes, ((rank, size), (results, theirs)) in zip(MESHES_OF_TWO, meshes, strict=True):
            for mine, expected in zip(results, values[rank::size], strict=True):
                torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5, msg=str(axes))
            assert theirs.keys() == gradients.keys()
            for name, expected in gradients.items():
                scale = max(1.0, float(expected.abs().max()))
                torch.testing.assert_close(
                    theirs[name] / scale, expected / scale, rtol=0, atol=1e-5, msg=f"{axes} {name}"
                )


def ppo(pair: Path, out: Path, *overrides: str) -> None:
    small = ["rollout.group_size=4", "rollout.max_tokens=48", "data.max_prompt_tokens=128", "train.eval_every=0"]
    rates = ["train.prompts_per_step=4", "train.lr=3e-4", "train.critic_lr=1e-3", "train.threads=1"]
    kl = ["loss.kl_coef=0.1", "loss.kl_in_reward=true", "loss.kl_target=0.01", "train.tokens_per_micro_batch=400"]
    paths = [f"model.senior={pair}/senior", f"model.junior={pair}/junior", f"output_dir={out}"]
    data = "data.train=synthetic:plain:train:64"
    train(load(None, ["loss.recipe=ppo", data, *small, *rates, *kl, *paths, *overrides]), quiet=True)


def test_ppo_on_two_processes_is_ppo_on_one_and_resumes_there(tiny_pair: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ppo(tiny_pair, one, "train.steps=1")
    run(ppo, 2, tiny_pair, two, "train.steps=2")
    measured = ["loss", "grad_norm", "value/loss", "value/grad_norm", "value/explained_variance", "reward/mean"]
    results, expected = metrics(two)[0], metrics(one)[0]
    assert min(expected["grad_norm"], expected["value/grad_norm"], expected["reward/mean"]) > 0
    assert {name: results[name] for name in measured} == pytest.approx({n: expected[n] for n in measured}, abs=1e-4)
    ppo(tiny_pair, two, "train.steps=3")
    lines = metrics(two)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["value/explained_variance"] == pytest.approx(0, abs=1e-5)  # a critic that starts knows nothing
    assert abs(lines[2]["value/explained_variance"]) > 1e-4
    assert [line["kl/coef"] for line in lines[1:]] == pytest.approx(
        [adapt_kl_coef(line["kl/coef"], line["kl/per_token"], target=0.01) for line in lines[:2]], rel=1e-6
    )
