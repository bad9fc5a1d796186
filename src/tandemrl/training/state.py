"""What a training run consists of: what is fixed, which models take part, and how far it has come.

``build`` makes all three from a config; ``checkpoint`` saves and restores what changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import Config
from tandemrl.config.schema import RolloutConfig
from tandemrl.data.rows import Prompt
from tandemrl.data.sampler import Sampler
from tandemrl.losses import Coefficients, Recipe
from tandemrl.models.critic import token_values
from tandemrl.models.forward import Scores, token_scores
from tandemrl.models.head import ForwardOptions
from tandemrl.models.sampling import Truncation
from tandemrl.processes.world import World
from tandemrl.rewards.scoring import Scorer
from tandemrl.rollout.engine import Engine, Sampling
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.rollout.schedule import Schedule
from tandemrl.training.preflight import Preflight
from tandemrl.types import Batch, Metrics


class Trained(NamedTuple):
    """A model in training and its optimiser: what a checkpoint holds of a policy or a critic."""

    module: PreTrainedModel
    optimizer: torch.optim.Optimizer


def move_state(optimizer: torch.optim.Optimizer, *, to_host: bool) -> None:
    """Move an optimiser's state, such as Adam's moments, to host memory or back to its parameters' device, in place."""
    for parameter, state in optimizer.state.items():
        device = torch.device("cpu") if to_host else parameter.device
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device)


def sampling_of(rollout: RolloutConfig) -> Sampling:
    """How the rollouts of training are sampled."""
    return Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)


def forward_options(config: Config, sampling: Sampling, vocabulary: int, world: World) -> ForwardOptions:
    """The options with which a trainer of ``config`` scores tokens that were drawn by ``sampling`` among ``vocabulary``
    ids."""
    model = config.model
    return ForwardOptions(
        temperature=sampling.temperature,
        truncation=Truncation(sampling.top_k, sampling.top_p, sampling.min_p) if sampling.truncated else None,
        vocabulary=vocabulary,
        autocast=torch.bfloat16 if model.dtype == "bfloat16" and world.size == 1 else None,
        activation_offload=model.activation_offload,
    )


@dataclass(frozen=True, eq=False)
class RunSetup:
    """What is fixed for a run. It is the same in every process, except for the place in the ``world``."""

    config: Config
    recipe: Recipe
    """``loss.recipe`` with the choices that ``loss.*`` overrides."""
    schedule: Schedule
    """Who writes in each training step."""
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    preflight: Preflight
    """What was read before the weights: ``heldout``, the problems of the evaluations that choose ``hf/best``,
    ``monitored``, those that are evaluated beside them and decide nothing, and ``environment_id``."""
    sampling: Sampling
    options: ForwardOptions
    """The options for scoring tokens under the sampling distribution of the rollouts. ``starts`` and ``removed`` are
    those of the strategy, the same in every step."""
    scorer: Scorer
    episode_runner: EpisodeRunner | None
    """Where the authors take turns with an environment. None if a response is a single turn."""
    judge: str | None
    """The name of the model that judges responses. None without a judge."""
    mismatch_limit: float
    """Above this mean difference of trainer and engine, in nats per senior token, the run stops (see ``gates``)."""
    device: torch.device
    world: World

    @property
    def coefficients(self) -> Coefficients:
        """The terms of the policy's loss beside the recipe's own. A KL in the reward is none of them."""
        loss = self.config.loss
        return Coefficients(
            entropy_coef=loss.entropy_coef,
            kl_coef=loss.loss_kl_coef,
            kl_kind=loss.kl_kind,
            junior_kl_coef=loss.junior_kl_coef,
            normalise_by=loss.normalise_by,
            constant=float(self.config.rollout.max_tokens),
        )

    def scores(self, model: PreTrainedModel, batch: Batch, select: Tensor) -> Scores:
        """Log-probs and entropy of the selected tokens under the sampling distribution of the rollouts."""
        return token_scores(model, batch, select=select, options=self.options, shards=self.world.shards)

    def values(self, critic: Trained, batch: Batch, select: Tensor) -> Tensor:
        """The critic's value of the state in which each selected token was chosen."""
        return token_values(critic.module, batch, select=select, options=self.options, shards=self.world.shards)


@dataclass(frozen=True, eq=False)
class Models:
    """The models of a run. In a world of several processes, all but the engine's are sharded."""

    policy: PreTrainedModel
    optimizer: torch.optim.Optimizer
    critic: Trained | None
    reference: PreTrainedModel | None
    """The frozen reference model of the KL. A policy with adapters is its own reference, without them."""
    junior: PreTrainedModel | None
    """The frozen junior, for the KL on junior tokens."""
    engine: Engine
    """The engine, which writes the rollouts with copies of its own."""

    @property
    def trained(self) -> dict[str, Trained]:
        """The models that are trained, with their optimisers, by their names in a checkpoint."""
        policy = {"policy": Trained(self.policy, self.optimizer)}
        return policy if self.critic is None else policy | {"critic": self.critic}


class Best(NamedTuple):
    """The policy in ``hf/best``: after which step, by which metric it was chosen, its held-out metrics, and the least
    reward of its correct and of its wrong responses, by source."""

    step: int
    by: str
    values: Metrics
    rewards: dict[str, float]

    def __str__(self) -> str:
        return f"step {self.step}, by held-out {self.by} {self.values[self.by]:.4f}"


@dataclass(eq=False)
class Progress:
    """How far a run has come. A checkpoint stores it beside the models."""

    sampler: Sampler
    kl_coef: float
    """The KL coefficient of the next step, which changes if it is adaptive."""
    step: int = 0
    """The last finished step; 0 for a fresh run."""
    best: Best | None = None
    """The policy in ``hf/best``; None if there is none."""
    accepted: list[str] = field(default_factory=list)
    """Whose code has changed within the run, and after which step (``--accept-changed``)."""
    written: dict[str, int] = field(default_factory=dict)
    """How many bytes metrics.jsonl and samples.jsonl had after that step, on rank 0 only."""
    rollouts_in_flight: list[dict[str, Any]] = field(default_factory=list)
    """Rollouts that wait for their step (see ``AsyncRollouts.state_dict``)."""
    identity: Mapping[str, str] | None = None
    """See ``checkpoint.runs.identity``; None before it is computed."""


class Run(NamedTuple):
    """One training run: what is fixed for it, its models, and how far it has come."""

    setup: RunSetup
    models: Models
    progress: Progress
