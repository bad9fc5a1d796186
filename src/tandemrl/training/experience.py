"""Turns scored rollouts into the mini-batches of an update, with log-probs, values and advantages.

Every process has all rollouts. Each data rank packs its share of them; what depends on all of them (KL in the reward,
explained variance, whitening) is summed over the ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandemrl import losses
from tandemrl.config import Config
from tandemrl.models.batching import micro_batches, pack, pack_tokens
from tandemrl.models.lora import adapter_free
from tandemrl.training.state import Models, RunSetup
from tandemrl.types import Author, Batch, Group, Metrics, Rollout, Totals


class Experience(NamedTuple):
    """The scored rollouts of a step (`Group.scored`), with one entry in each tensor per text: an episode may have
    several (`Rollout.sequences`), which have its reward and advantage."""

    rollouts: list[Rollout]
    episodes: Tensor
    """The number of each text's episode."""
    group_ids: Tensor
    rewards: Tensor
    """The reward of each rollout, including the penalty for overlong responses."""
    zero_variance: Tensor
    """Whether all rewards of the rollout's group are the same, before that penalty."""
    used: Tensor
    """Whether the rollout is used in the update."""
    forwarded: Tensor
    """Whether the models read the rollout: it is used, and can change the loss (``losses.idle``)."""
    weights: Tensor
    """The sum of the rollout's token weights; 0 if it is not used."""
    response_tokens: Tensor
    """How many tokens the authors wrote."""
    dropped: int
    """How many groups were left out since too few of their rollouts are scored."""
    advantages: Tensor | None
    """The advantage of each rollout; None if it comes from a critic or depends on the KL, which is not known yet."""
    kl: Tensor | None = None
    """The sum of w·k1 of the policy against the reference, if the KL is subtracted from the reward."""

    @property
    def firsts(self) -> Tensor:
        """The first text of each episode."""
        return (self.episodes.diff(prepend=self.episodes.new_tensor([-1])) > 0).nonzero().squeeze(1)

    def summed(self, values: Tensor) -> Tensor:
        """The sum of values of texts over each episode."""
        return values.new_zeros(len(self.firsts)).index_add(0, self.episodes, values)

    def shares(self, values: Tensor) -> Tensor | None:
        """The share of each text in the sum of its episode; None where each has one text."""
        if len(self.firsts) == len(self.rollouts):
            return None
        return values / self.summed(values)[self.episodes].clamp(min=1e-9)

    @property
    def metrics(self) -> Metrics:
        return {
            "groups/zero_variance": self.zero_variance[self.firsts].float().mean().item() if self.rollouts else 0.0,
            "groups/skipped": (self.used & ~self.forwarded).float().mean().item() if self.rollouts else 0.0,
            "groups/dropped": float(self.dropped),
        }

    @property
    def kl_per_token(self) -> float:
        assert self.kl is not None
        return (self.kl.sum() / self.weights.sum().clamp(min=1)).item()


class MicroBatch(NamedTuple):
    """Some rollouts of the step, by their numbers, the batch that they are packed into, and the weight of every token
    in the loss."""

    rows: Tensor
    batch: Batch
    weights: Tensor


class MiniBatch(NamedTuple):
    """What one optimiser step reads."""

    micro: list[MicroBatch]
    """The micro-batches of this data rank; empty if no rollout is used."""
    totals: Totals
    """The denominators of the loss: of all used rollouts of the optimiser step, over all data ranks."""
    forwarded: Totals
    """The denominators of metrics: of those that are forwarded."""


MiniBatches = list[MiniBatch]


def make_experience(setup: RunSetup, groups: Sequence[Group]) -> Experience:
    """The experience of a training step, from the groups of its rollouts."""
    config, recipe = setup.config, setup.recipe
    scored = [group.scored for group in groups]
    whole = [r for group in scored for r in group.rollouts]
    rollouts = [each for r in whole for each in r.sequences]
    episodes = torch.tensor([i for i, r in enumerate(whole) for _ in r.sequences], dtype=torch.int64)
    group_ids = torch.tensor([whole[i].group for i in episodes.tolist()], dtype=torch.int64)
    rewards = torch.tensor([whole[i].reward for i in episodes.tolist()], dtype=torch.float32)
    flat = losses.zero_variance_groups(rewards, group_ids)  # on the verifier's outcomes, before any shaping
    used = ~flat if recipe.filter_zero_variance else torch.ones_like(flat)
    if config.loss.filter_truncated:
        used &= torch.tensor([whole[i].stop_reason != "length" for i in episodes.tolist()], dtype=torch.bool)
    if buffer := round(recipe.overlong_share * setup.sampling.max_tokens):
        lengths = torch.tensor([sum(each.response_tokens for each in whole[i].sequences) for i in episodes.tolist()])
        rewards += losses.overlong_penalty(lengths, max_tokens=setup.sampling.max_tokens, buffer=buffer)
    senior, junior = (
        torch.tensor([float((r.author == who).sum()) for r in rollouts]) for who in (Author.SENIOR, Author.JUNIOR)
    )
    ends = torch.tensor([float(r.word_ends if config.loss.word_ends else 0) for r in rollouts])
    weights = losses.sequence_weights(senior, junior, ends, junior_weight=config.loss.junior_weight) * used
    found = Experience(
        rollouts=rollouts,
        episodes=episodes,
        group_ids=group_ids,
        rewards=rewards,
        zero_variance=flat,
        used=used,
        forwarded=used,
        weights=weights,
        response_tokens=senior + junior,
        dropped=sum(not group.rollouts for group in scored),
        advantages=None,
    )
    idle = torch.zeros_like(used)
    if recipe.advantage is not None and not config.loss.kl_in_reward:
        advantages = _advantages(setup, found, rewards)
        found = found._replace(advantages=advantages)
        idle = losses.idle(recipe, advantages, weights, setup.coefficients)
    samples = _samples(config, group_ids, used, used & ~idle, senior > 0)
    return found._replace(forwarded=used & ~idle | samples)


def _advantages(setup: RunSetup, experience: Experience, rewards: Tensor) -> Tensor:
    """The advantage of each text, by the rewards of the texts: those of its episode, which counts once."""
    firsts, weights = experience.firsts, experience.summed(experience.weights)
    groups = experience.group_ids[firsts]
    return losses.compute_advantages(setup.recipe, rewards[firsts], groups, weights)[experience.episodes]


def _samples(config: Config, group_ids: Tensor, used: Tensor, forwarded: Tensor, has_senior: Tensor) -> Tensor:
    """One group of each mini-batch of which nothing, or no token of the senior, would be computed although it is used.

    So the log-probs of trainer and engine are compared in every step, and the optimiser gets a gradient of 0 as if
    everything had been computed, not none. A group with tokens of the senior is preferred: they alone are compared.
    """
    mini_batch_ids = group_ids // _prompts(config)
    sample = torch.zeros_like(used)
    for i in mini_batch_ids.unique():
        here = used & (mini_batch_ids == i)
        compared = here & has_senior
        if any(each.any() and not (each & forwarded).any() for each in (here, compared)):
            sample |= here & (group_ids == group_ids[compared if compared.any() else here][0])
    return sample


def _prompts(config: Config) -> int:
    return config.train.mini_batch_prompts or config.train.prompts_per_step


def pack_mini_batches(setup: RunSetup, experience: Experience) -> MiniBatches:
    """Pack the rollouts to compute into mini-batches of ``train.mini_batch_prompts`` prompts.

    Every data rank gets equally many micro-batches, within the token budget.
    """
    prompts, train, world = _prompts(setup.config), setup.config.train, setup.world
    by_weight = setup.config.loss.normalise_by == "weight"
    shares = experience.shares(experience.weights if by_weight else experience.response_tokens)
    mini_batches = []
    for i in range(train.prompts_per_step // prompts):
        here = experience.group_ids // prompts == i
        forwarded = experience.forwarded & here
        rows = forwarded.nonzero().squeeze(1)
        chosen = [experience.rollouts[row] for row in rows.tolist()]
        lengths, groups = [len(r.tokens) for r in chosen], [r.group for r in chosen]
        bins = micro_batches(lengths, train.tokens_per_micro_batch, parts=world.data_size, groups=groups)
        micro = []
        for own in bins[world.data_rank :: world.data_size]:
            # a rank without work still joins the collectives
            batch = pack([chosen[k] for k in own], setup.device) if own else pack_tokens([[0]], setup.device)
            batch = batch if setup.config.loss.word_ends else replace(batch, word_ends=None)
            if shares is not None:
                batch = replace(batch, shares=shares[rows[own or [0]]].to(setup.device))
            weights = losses.token_weights(batch.author, junior_weight=setup.config.loss.junior_weight)
            micro.append(MicroBatch(rows[own or [0]], batch, weights))
        # Every process has all rollouts, so that nothing needs to be added up over them.
        counts = (
            losses.totals(*(experience.summed(x * used) for x in (experience.weights, experience.response_tokens)))
            for used in (experience.used & here, forwarded)
        )
        mini_batches.append(MiniBatch(micro, *counts))
    return mini_batches


def fill_channels(mini_batches: MiniBatches, channels: Callable[[MicroBatch], dict[str, Any]]) -> MiniBatches:
    """The mini-batches with new or replaced channels in each batch, which ``channels`` computes."""
    return [
        mini._replace(micro=[m._replace(batch=replace(m.batch, **channels(m))) for m in mini.micro])
        for mini in mini_batches
    ]


@torch.no_grad()
def add_scores(setup: RunSetup, models: Models, mini_batches: MiniBatches) -> MiniBatches:
    """Fill the channels of the mini-batches that the run needs: log-probs of all response tokens, which are those of
    the policy before its first update, of the reference and of the junior, and ``old_values``, the critic's values of
    all trained tokens before its first update."""
    config, critic = setup.config, models.critic
    # Else the log-probs of the one forward pass of the update are also those before it.
    again = len(mini_batches) > 1 or config.loss.kl_in_reward or config.model.lora.dropout > 0
    readers = {
        "old_logprobs": models.policy if again else None,
        "ref_logprobs": models.reference,
        "junior_logprobs": models.junior,
    }
    for channel, model in readers.items():
        if channel == "junior_logprobs" and model is not None and model is models.reference:
            mini_batches = fill_channels(mini_batches, lambda m: {"junior_logprobs": m.batch.ref_logprobs})
        elif model is not None:
            bare = channel == "ref_logprobs" and model is models.policy
            with adapter_free(model) if bare else nullcontext():
                mini_batches = fill_channels(mini_batches, partial(_logprobs, setup, model, channel))
    if critic is None:
        return mini_batches
    return fill_channels(mini_batches, lambda m: {"old_values": setup.values(critic, m.batch, m.weights > 0)})


def _logprobs(setup: RunSetup, model: PreTrainedModel, channel: str, m: MicroBatch) -> dict[str, Any]:
    scores = setup.scores(model, m.batch, m.batch.author >= 0)
    if m.batch.word_ends is None or channel == "junior_logprobs":
        return {channel: scores.logprobs}
    return {channel: scores.logprobs, "word_ends": replace(m.batch.word_ends, **{channel: scores.end_logprobs})}


def add_reward_kl(setup: RunSetup, mini_batches: MiniBatches, experience: Experience) -> Experience:
    """The experience with the KL of every rollout, gathered from all data ranks."""
    kl = torch.zeros(len(experience.rollouts), device=setup.device)
    for m in (m for mini in mini_batches for m in mini.micro):
        kl[m.rows] += losses.sequence_sum(*token_kl(m), num_sequences=m.batch.num_sequences)
    return experience._replace(kl=setup.world.data_sum(kl).cpu())


def token_kl(m: MicroBatch) -> tuple[Tensor, Tensor]:
    """w·k1 of every token and every end of a word, the KL penalty before its coefficient; and their sequences."""
    batch, weights, _ = losses.with_word_ends(m.batch, m.weights)
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    return losses.kl_penalty(batch.old_logprobs, batch.ref_logprobs, weights), batch.sequence_ids


def add_group_advantages(
    setup: RunSetup, mini_batches: MiniBatches, experience: Experience, kl_coef: float
) -> MiniBatches:
    """Fill ``advantages`` of the mini-batches for a recipe with a group estimator.

    All response tokens of a rollout get the advantage of the whole rollout.
    """
    advantages = experience.advantages
    if advantages is None:
        assert experience.kl is not None
        kl = experience.summed(experience.kl)[experience.episodes]
        advantages = _advantages(setup, experience, experience.rewards - kl_coef * kl)

    def per_token(m: MicroBatch) -> Tensor:
        spread = advantages[m.rows].to(setup.device)[m.batch.sequence_ids]
        return torch.where(m.batch.author >= 0, spread, 0.0)

    return fill_channels(mini_batches, lambda m: {"advantages": per_token(m)})


@torch.no_grad()
def add_gae_advantages(
    setup: RunSetup, mini_batches: MiniBatches, experience: Experience, kl_coef: float
) -> tuple[MiniBatches, Metrics]:
    """Fill ``advantages`` and ``returns`` of every trained token for a recipe with a critic, by ``gae``.

    If the recipe whitens, the advantages are whitened over the whole step and all data ranks.
    """
    loss, flat = setup.config.loss, [m for mini in mini_batches for m in mini.micro]
    if not flat:
        return mini_batches, {}
    parts = []
    for m in flat:
        rows, b, weight = m
        assert b.old_values is not None
        penalty = kl_coef * token_kl(m)[0] if loss.kl_in_reward else None
        outcomes = experience.rewards[rows].to(setup.device)
        earned = losses.token_rewards(outcomes, b.author, b.sequence_ids, penalty=penalty)
        advantage, target = losses.gae(earned, b.old_values, weight > 0, b.sequence_ids, gamma=loss.gamma, lam=loss.lam)
        parts.append((advantage, target, b.old_values, weight))
    advantages, returns, values, weight = (torch.cat(channel) for channel in zip(*parts, strict=True))
    explained = losses.explained_variance(values, returns, weight, total=setup.world.data_sum).item()
    if setup.recipe.whiten:
        advantages = losses.whiten(advantages, weight, total=setup.world.data_sum)
    sizes = [len(m.batch.tokens) for m in flat]
    channels = zip(advantages.split(sizes), returns.split(sizes), strict=True)
    filled = fill_channels(mini_batches, lambda m: dict(zip(("advantages", "returns"), next(channels), strict=True)))
    return filled, {"value/explained_variance": explained}
