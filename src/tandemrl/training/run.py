"""What a training run is made of, built from its config, and how it is saved, restored and held to its word."""

import copy
import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import Config, ConfigError, to_yaml
from tandemrl.data.rows import Prompt
from tandemrl.data.sampler import Sampler
from tandemrl.distributed.watchdog import stamp
from tandemrl.distributed.world import World
from tandemrl.evals import profile_of
from tandemrl.files import write_text
from tandemrl.losses import RECIPES, Recipe
from tandemrl.models.compile import compile_layers, use_liger
from tandemrl.models.critic import load_critic, packed_values, token_values
from tandemrl.models.forward import token_logprobs
from tandemrl.models.head import ForwardOptions
from tandemrl.models.loading import load_model, resolve_device
from tandemrl.models.lora import attach, base_parameters
from tandemrl.models.sampling import Truncation
from tandemrl.models.sharding import full_parameters, parameter_groups, shard
from tandemrl.rewards.code.scorer import score_code
from tandemrl.rewards.functions import RewardFunction, imported
from tandemrl.rewards.judge.in_process import make_judge
from tandemrl.rewards.judge.rubric import JudgePool
from tandemrl.rewards.routing import reward_names
from tandemrl.rewards.scoring import Scorer
from tandemrl.rewards.spread import SpreadScorer
from tandemrl.rollout.engine import Draws, Engine, Sampling
from tandemrl.rollout.factory import ModelSource, make_engine
from tandemrl.rollout.schedule import Schedule, schedule_of
from tandemrl.rollout.spread import SpreadEngine
from tandemrl.rollout.sync import fingerprint
from tandemrl.selection import Strategy
from tandemrl.training import checkpoint, coverage
from tandemrl.training.checkpoint import DamagedError, Trained
from tandemrl.training.coverage import Coverage
from tandemrl.training.functions import signature, with_records
from tandemrl.training.preflight import Preflight
from tandemrl.training.profiling import Clock
from tandemrl.types import Batch

SIGMAS = 6.0
"""How far the share of senior draws may stray from prob_senior: one false alarm in 10⁹ checks."""
MISMATCH = {"float32": 1e-3, "bfloat16": 2e-2}
"""Defaults of train.max_logprob_mismatch: mean |trainer - engine| log-prob of senior tokens, nats."""


class TrainError(RuntimeError):
    """A gate closed: going on would train something else than what was asked for. The message gives the reason."""


@dataclass(eq=False)
class Run:
    """The parts of one training run. ``dropped``: training rows that were too long. ``judge``: the model that marks
    responses. ``best``: the held-out score behind ``hf/best``. ``ahead``: of a checkpoint, rollouts that wait for their
    step (see ``Ahead``). ``kl_coef``: of the step to come, where it adapts. ``clock``: of the current step.
    ``records``: the lines of metrics.jsonl and samples.jsonl that are covered by a checkpoint; of rank 0 only.

    Of a ``world`` of several processes each has its own ``Run``; ``policy``, ``reference``, ``junior`` and ``critic``
    are then sharded. A policy with adapters is its own ``reference``, without them."""

    config: Config
    recipe: Recipe
    schedule: Schedule
    tokenizer: PreTrainedTokenizerBase
    policy: PreTrainedModel
    reference: PreTrainedModel | None
    junior: PreTrainedModel | None
    engine: Engine
    optimizer: torch.optim.Optimizer
    scorer: Scorer
    prompts: list[Prompt]
    dropped: int
    heldout: list[Prompt]
    sampler: Sampler
    sampling: Sampling
    device: torch.device
    world: World = field(default_factory=World)
    custom_strategy: Callable[[int], Strategy] | None = None
    judge: str | None = None
    best: float = -math.inf
    ahead: dict[str, Any] | None = None
    critic: Trained | None = None
    kl_coef: float = 0.0
    clock: Clock = field(default_factory=Clock)
    records: tuple[Coverage, ...] = ()

    @property
    def parts(self) -> dict[str, Trained]:
        """What is trained, as a checkpoint names it."""
        policy = {"policy": Trained(self.policy, self.optimizer)}
        return policy if self.critic is None else policy | {"critic": self.critic}

    @property
    def forward_options(self) -> ForwardOptions:
        """The sampling distribution of the rollouts. A sharded model is gathered in the compute dtype."""
        s, model = self.sampling, self.config.model
        return ForwardOptions(
            temperature=s.temperature,
            truncation=Truncation(s.top_k, s.top_p, s.min_p) if s.truncated else None,
            vocabulary=self.engine.vocabulary,
            autocast=torch.bfloat16 if model.dtype == "bfloat16" and self.world.size == 1 else None,
            activation_offload=model.activation_offload,
        )

    def logprobs(self, model: PreTrainedModel, batch: Batch, select: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy of the selected tokens under the sampling distribution of the rollouts."""
        stamp()
        return token_logprobs(model, batch, select=select, options=self.forward_options, shards=self.world.shards)

    def values(self, batch: Batch, select: Tensor) -> Tensor:
        """The critic's value of the state in which each selected token was chosen."""
        assert self.critic is not None
        stamp()
        critic: Any = self.critic.module  # load_critic made it
        return token_values(critic, batch, select=select, options=self.forward_options, shards=self.world.shards)


def build(
    config: Config,
    recipe: Recipe | None = None,
    strategy: Callable[[int], Strategy] | None = None,
    world: World | None = None,
    reward: Mapping[str, RewardFunction] | None = None,
) -> Run:
    """Load models and data and start the engine; writes nothing. The run's config has a record of the functions.

    Args:
        reward: reward functions by name (see ``rewards.by_name``).

    Raises:
        ConfigError, DataError, ModelError: something named in the config is missing or does not fit.
        GraderError: responses cannot be scored: no sandbox, no judge, a judge that is down.
    """
    own = None if recipe == RECIPES[config.loss.recipe] else recipe
    config = with_records(config, recipe=own, strategy=strategy, reward=reward or None)
    model, world = config.model, world or World()
    if config.parallel.offload and (world.size == 1 or resolve_device(model.device).type != "cuda"):
        raise ConfigError("parallel.offload=true: only sharded models on CUDA can; start several processes there")
    ready = Preflight(config, functions=reward).require()
    tokenizer, heldout = ready.tokenizer, ready.heldout
    prompts, dropped = ready.prompts

    judge = ready.judge or make_judge(config)
    scorer = (Scorer if world.size == 1 else partial(SpreadScorer, world))(
        config.reward,
        code=partial(score_code, sandbox=config.sandbox, credit=config.reward.code_credit),
        judge=None if judge is None else JudgePool(judge, config.judge),
        functions=reward,
    )

    policy = load_model(model.senior, device=model.device)
    if model.liger:
        use_liger(policy, name=model.senior)
    if model.gradient_checkpointing:
        checkpoint_gradients(policy)
    vocabulary = policy.get_output_embeddings().weight.shape[0]
    schedule = schedule_of(config.selection, tokenizer, vocabulary)
    if strategy is not None:
        schedule = Schedule(strategy, lambda step: None)

    compute = getattr(torch, model.dtype)
    frozen: dict[tuple[str, str, bool], PreTrainedModel] = {}  # a self-paired junior and the reference can be one model

    def freeze(path: str, dtype: str, *, split: bool) -> PreTrainedModel:
        """``split``: to score with, sharded like the policy; else whole, to decode with."""
        name = path, dtype, split and world.size > 1
        if name not in frozen:
            loaded = load_model(path, dtype=dtype, device=model.device).requires_grad_(False)
            if model.compile:  # the same arithmetic as the policy's
                compile_layers(loaded)
            frozen[name] = shard(loaded, world, dtype=compute) if split else loaded
        return frozen[name]

    tandem = strategy is not None or schedule.strategy(1).writers != "senior"
    partner = model.junior or model.senior
    junior = freeze(partner, model.dtype, split=True) if config.loss.junior_kl_coef > 0 else None
    writer = ModelSource(partner, partial(freeze, partner, model.dtype, split=False)) if tandem else None
    engine = engine_of(config, policy, writer, tokenizer)
    reference = None
    if model.lora.rank:
        attach(policy, model.lora, config.train.seed)
    if config.loss.kl_coef > 0:
        # float32 like the policy, so that both go through the same arithmetic and the KL starts at exactly 0.
        reference = policy if model.lora.rank else freeze(model.senior, "float32", split=True)
    if model.compile:
        compile_layers(policy)
    shard(policy, world, dtype=compute, offload=config.parallel.offload)
    recipe = resolve_recipe(recipe or RECIPES[config.loss.recipe], config)

    rollout = config.rollout
    return Run(
        config=config,
        recipe=recipe,
        schedule=schedule,
        tokenizer=tokenizer,
        policy=policy,
        reference=reference,
        junior=junior,
        engine=engine if world.size == 1 else SpreadEngine(engine, world),
        optimizer=optimizer_of(policy, config, config.train.lr),
        critic=build_critic(config, world) if recipe.advantage is None else None,
        kl_coef=config.loss.kl_coef,
        scorer=scorer,
        judge=None if judge is None else judge.model,
        prompts=prompts,
        dropped=dropped,
        heldout=heldout,
        sampler=Sampler(len(prompts), seed=config.train.seed),
        device=resolve_device(model.device),
        world=world,
        custom_strategy=strategy,
        sampling=Sampling(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
        ),
    )


def build_critic(config: Config, world: World) -> Trained:
    """The value model, sharded and checkpointed like the policy, and its own optimiser.

    Raises:
        ModelError: not loadable as a critic.
    """
    model = config.model
    critic = load_critic(model.critic or model.senior, device=model.device)
    if model.compile:
        compile_layers(critic)
    if model.gradient_checkpointing:
        checkpoint_gradients(critic)
    dtype = getattr(torch, model.dtype)
    shard(critic, world, dtype=dtype, forward=packed_values, offload=config.parallel.offload)
    return Trained(critic, optimizer_of(critic, config, config.train.critic_lr))


def checkpoint_gradients(model: PreTrainedModel) -> None:
    """Recompute activations in backward.

    Raises:
        ConfigError: the model has dropout.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only
    if any(module.p > 0 for module in model.modules() if isinstance(module, torch.nn.Dropout)):
        raise ConfigError("model.gradient_checkpointing=true: this model has dropout; its log-probs would be random")


def optimizer_of(model: PreTrainedModel, config: Config, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameter_groups(model.parameters()),
        lr=lr,
        betas=config.train.betas,
        weight_decay=config.train.weight_decay,
        fused=True,
    )


def resolve_recipe(recipe: Recipe, config: Config) -> Recipe:
    """The recipe with what ``loss.*`` says otherwise; null there leaves the recipe alone. Rollouts of older weights are
    corrected for per token unless ``loss.importance`` is said."""
    c = config.loss
    said: dict[str, Any] = {
        "clip_low": c.clip_low,
        "clip_high": c.clip_high,
        "dual_clip": c.dual_clip,
        "importance": c.importance,
        "importance_cap": c.importance_cap,
        "filter_zero_variance": c.filter_zero_variance,
        "overlong_share": None if c.overlong_buffer is None else c.overlong_buffer / config.rollout.max_tokens,
    }
    recipe = recipe._replace(**{name: value for name, value in said.items() if value is not None})
    if config.train.async_steps and c.importance is None and recipe.importance == "none":
        recipe = recipe._replace(importance="token")
    return recipe._replace(dual_clip=None) if recipe.dual_clip == 0 else recipe


def engine_of(
    config: Config,
    policy: PreTrainedModel,
    junior: ModelSource | None,
    tokenizer: PreTrainedTokenizerBase,
) -> Engine:
    """The rollout engine, with a copy of the senior of its own, in the compute dtype. No junior: the senior writes
    alone."""
    model = config.model
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    if config.data.eval:
        longest = max(longest, profile_of(config.eval).longest(config.data.max_prompt_tokens))

    def copied() -> PreTrainedModel:
        return copy.deepcopy(policy).to(getattr(torch, model.dtype)).requires_grad_(False).eval()

    senior = ModelSource(model.senior, copied)
    return make_engine(
        config.rollout, senior, junior, tokenizer, dtype=model.dtype, device=model.device, longest=longest
    )


def learning_rate(config: Config, step: int, peak: float | None = None) -> float:
    """Linear warm-up over ``train.warmup_steps``, then constant, or a cosine down to 0. Steps count from 1.

    Args:
        peak: None = ``train.lr``.
    """
    t = config.train
    peak = t.lr if peak is None else peak
    if step <= t.warmup_steps:
        return peak * step / t.warmup_steps
    if t.schedule == "constant":
        return peak
    return peak * 0.5 * (1 + math.cos(math.pi * (step - t.warmup_steps - 1) / max(1, t.steps - t.warmup_steps)))


# --------------------------------------------------------------------------------------------------------------- gates


def check_draws(draws: Draws, prob_senior: float | None) -> None:
    """The senior's share of all author draws lies within 6σ of prob_senior, or the run stops.

    Draws, not tokens: how long a segment gets depends on who writes it.

    Raises:
        TrainError: it does not.
    """
    if prob_senior is None or draws.total == 0:
        return
    sigma = math.sqrt(prob_senior * (1 - prob_senior) / draws.total)
    share = draws.senior / draws.total
    if abs(share - prob_senior) > SIGMAS * sigma + 1e-12:
        raise TrainError(
            f"{draws.senior} of {draws.total} author draws fell to the senior ({share:.4f}); selection.prob_senior is "
            f"{prob_senior} (6σ = {SIGMAS * sigma:.4f}). Authors are not drawn as configured."
        )


def check_mismatch(config: Config, mean_abs: float) -> None:
    """Trainer and engine agree on the log-probs of senior tokens.

    Raises:
        TrainError: mean |difference| is above train.max_logprob_mismatch, or not a number.
    """
    limit = config.train.max_logprob_mismatch
    limit = MISMATCH[config.model.dtype] if limit is None else limit
    if not mean_abs <= limit:
        raise TrainError(
            f"trainer and engine differ by {mean_abs:.3g} nats per senior token on average (limit {limit:g}): stale "
            "weights, another temperature or truncation, or a numerical fault. Raise train.max_logprob_mismatch only "
            "if the difference is understood."
        )


# ----------------------------------------------------------------------------------------------------- save and restore


def save(run: Run, step: int) -> None:
    """HF export first, then the checkpoint: a checkpoint that exists implies its export."""
    output = Path(run.config.output_dir)
    export(run, f"step_{step}")
    for record in run.records:
        record.extend(step)
    state = {
        "step": step,
        "sampler": run.sampler.state_dict(),
        "best": run.best,
        "ahead": run.ahead,
        "kl_coef": run.kl_coef,
        "identity": identity(run),
        "records": {record.file.name: record.to_plain() for record in run.records},
        "rng": checkpoint.rng_state(),
    }
    train = run.config.train
    checkpoint.save(
        output,
        step,
        state,
        run.config,
        train.keep_checkpoints,
        parts=run.parts,
        world=run.world,
        background=train.async_save,
    )


def export(run: Run, name: str) -> None:
    """The policy as ``hf/NAME``, in the compute dtype."""
    folder = Path(run.config.output_dir, "hf", name)
    checkpoint.export_hf(run.policy, run.tokenizer, folder, run.config.model.dtype, world=run.world)


def identity(run: Run) -> dict[str, str]:
    """What a resumed run must share with its past beyond the config: recipe, data, frozen models, judge and scorers."""
    fields = {k: signature(v) for k, v in run.recipe._asdict().items()}
    prompts = hashlib.sha256(repr([p.tokens for p in run.prompts]).encode()).hexdigest()
    frozen = {
        name: "none" if model is None else f"{fingerprint(full_parameters(model)):#x}"
        for name, model in (("junior", run.junior), ("reference", run.reference))
    }
    if run.config.model.lora.rank:  # of what the adapters, and without them the reference, stand on
        frozen["reference"] = f"{fingerprint(base_parameters(run.policy)):#x}"
    if run.junior is None and run.engine.has_junior:
        frozen["junior"] = f"{run.engine.fingerprint('junior'):#x}"
    custom = "none" if run.custom_strategy is None else signature(run.custom_strategy)
    judge = {} if run.judge is None else {"judge": run.judge}
    scorers = {name: signature(imported(name)) for name in reward_names(run.config.reward) if ":" in name}
    reward = {"reward": signature(run.scorer.functions)} if run.scorer.functions else {}
    return {"recipe": str(fields), "strategy": custom, "data.train": prompts, **frozen, **judge, **scorers, **reward}


def restore(run: Run, resume: str) -> int:
    """Bring the run to the state of a checkpoint; returns the step it was taken after, 0 for a fresh run.

    Args:
        resume: ``auto``: the newest checkpoint in output_dir, if any; ``never``: output_dir must be fresh; or a path.

    Raises:
        CheckpointError: the checkpoint was written under another config, or output_dir is not fresh.
        DamagedError: the checkpoint, or the lines that it covers of metrics.jsonl and samples.jsonl, are not as they
            were written; names an older checkpoint that is.
    """
    output = Path(run.config.output_dir)
    path = checkpoint.latest(output) if resume in ("auto", "never") else Path(resume)
    record = output / "metrics.jsonl"
    started = path is not None or (record.is_file() and record.stat().st_size > 0)
    if resume == "never" and started:
        raise checkpoint.CheckpointError(
            f"{output} already holds a run; resume it (--resume auto), or choose another output_dir or remove it"
        )
    step = 0
    run.records = tuple(Coverage(output / name) for name in coverage.FILES) if run.world.main else ()
    if path is None and started:  # a run that died before its first checkpoint
        checkpoint.check_resume(checkpoint.load_config(output), run.config)
    if path is not None:
        try:
            step = _restore_from(run, path)
        except DamagedError as error:
            advice = run.world.agreed(_older_whole(path, output) if run.world.main else "")
            raise DamagedError(f"{error}. {advice}") from None
    if run.world.main:
        checkpoint.discard_after(output, step)
        for covered in run.records:
            covered.drop_rest()
        write_text(output / "config.yaml", to_yaml(run.config))
    run.world.barrier()
    return step


def _restore_from(run: Run, path: Path) -> int:
    """Fill a run from a checkpoint; returns its step. Every process calls it, and where one fails, all raise."""
    output, world = Path(run.config.output_dir), run.world
    stored = checkpoint.in_every_process(lambda: checkpoint.load_config(path), path, world)
    checkpoint.check_resume(stored, run.config)
    state = checkpoint.load(path, world)
    run.records = checkpoint.in_every_process(
        lambda: _covered(path, state, output, warn=True) if world.main else (), path, world
    )
    now = identity(run)
    if changed := [name for name, value in now.items() if state["identity"].get(name) != value]:
        raise checkpoint.CheckpointError(f"{path}: written with another {', '.join(changed)}; a resume would mix runs")
    checkpoint.load_parts(path, run.parts, world)
    run.sampler.load_state_dict(state["sampler"])
    run.best = state["best"] if (output / "hf" / "best").is_dir() else -math.inf
    run.ahead = state["ahead"]
    run.kl_coef = state["kl_coef"]
    checkpoint.restore_rng(state["rng"])
    return int(state["step"])


def _covered(path: Path, state: Mapping[str, Any], output: Path, *, warn: bool = False) -> tuple[Coverage, ...]:
    """The lines of metrics.jsonl and samples.jsonl that a checkpoint covers, once they are known to be there.

    A run that goes on in another folder than its checkpoint's begins new files there, unless they were copied along.

    Raises:
        DamagedError: a line is missing, torn or changed.
    """
    stored, step = state.get("records", {}), state["step"]
    if warn and not stored:
        warnings.warn(
            f"{path} was written by an earlier version: damage to it, to metrics.jsonl or samples.jsonl may go unseen",
            stacklevel=2,
        )
    moved = path.resolve().parent.parent != output.resolve()
    found = []
    for name in coverage.FILES:
        file = output / name
        if moved and coverage.begins_after(file, step):
            found.append(Coverage(file))
            continue
        try:
            known = name in stored
            found.append(coverage.restored(file, stored[name], step) if known else coverage.of_step(file, step))
        except DamagedError as error:
            raise DamagedError(
                f"{error}. {path} covers these lines: put {file.name} back from a copy, or go on without them in "
                f"another folder (output_dir=OTHER --resume {path})"
            ) from None
    return tuple(found)


def _older_whole(path: Path, output: Path) -> str:
    """What to do about a damaged checkpoint, in words: the newest older one that is whole, with its lines."""
    for other in checkpoint.older(path):
        try:
            checkpoint.verify(other)
            _covered(other, checkpoint.load(other), output)
        except (checkpoint.CheckpointError, OSError):
            continue
        return (
            f"{other} is whole: resume from it (--resume {other}), and the steps after {checkpoint.step_of(other)} are "
            "trained again"
        )
    return (
        f"No older checkpoint in {path.parent} is whole: start again in another output_dir, or from an export "
        "(hf/step_N as model.senior)"
    )
