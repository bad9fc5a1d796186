"""Builds a run from a config: data, models, engine and scorer."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import Config
from tandemrl.config.compatibility import Facts, check
from tandemrl.config.schema import LoraConfig
from tandemrl.data.documents import hops
from tandemrl.data.sampler import Sampler
from tandemrl.evals import profile_of
from tandemrl.losses import RECIPES, Recipe
from tandemrl.models.loading import load_configuration, load_model, resolve_device
from tandemrl.models.lora import adapted_alias, adapter_plan, alias, attach
from tandemrl.models.sharded_loading import load_sharded, meta_model
from tandemrl.models.trainable import load_trained, make_optimizer, self_paired
from tandemrl.processes.world import World
from tandemrl.rewards.functions import RewardFunction
from tandemrl.rewards.scoring import Scorer
from tandemrl.rewards.services import code_scorer, judges
from tandemrl.rollout.engine import Engine
from tandemrl.rollout.envs.environment import Environment, check_instance
from tandemrl.rollout.factory import EngineFactory, ModelSource, load_frozen, make_engine
from tandemrl.rollout.fleet.ray_workers import Acting
from tandemrl.rollout.schedule import Schedule, schedule_of
from tandemrl.selection import Strategy
from tandemrl.training.arguments import StrategyFunction, resolve_arguments, strategy_at, with_records
from tandemrl.training.gates import mismatch_limit, self_difference
from tandemrl.training.host_memory import keep_freed_memory
from tandemrl.training.preflight import Preflight
from tandemrl.training.state import Models, Progress, Run, RunSetup, Trained, forward_options, sampling_of


def build(
    config: Config,
    recipe: Recipe | str | None = None,
    strategy: StrategyFunction | Strategy | str | None = None,
    world: World | None = None,
    reward: Mapping[str, RewardFunction] | None = None,
    environment: Environment | None = None,
    engine: EngineFactory | str | None = None,
    stated: Collection[str] = (),
    accepted: Collection[str] = (),
) -> Run:
    """Load models and data and start the engine, without writing a file.

    The config of the run gets a record of the functions that are passed.

    Args:
        recipe: used instead of ``loss.recipe``; or its name.
        strategy: gives the strategy of a training step; used instead of ``selection.*``. A strategy is that of every
            step, and a name is set in the config.
        world: the processes of the run.
        reward: reward functions by name (see ``rewards.by_name``).
        environment: used instead of ``rollout.environment``.
        engine: makes the engine; used instead of ``rollout.engine``. Or its name.
        stated: see ``Preflight``.
        accepted: see ``check_same_identity``.

    Raises:
        ConfigError, DataError, ModelError: something that the config names is missing or does not fit.
        GraderError: responses cannot be scored, since there is no sandbox or no judge, or the judge is down.
    """
    config, recipe, strategy, engine = resolve_arguments(config, recipe, strategy, engine)
    check_instance(environment)
    own = None if recipe == RECIPES.get(config.loss.recipe) else recipe
    passed: dict[str, Any] = dict(recipe=own, strategy=strategy, reward=reward or None, environment=environment)
    config = with_records(config, accepted=accepted, engine=engine, **passed)
    world = world or World()
    preflight = Preflight(config, processes=world.size, stated=stated, **passed).require()
    config, model, tokenizer = preflight.planned, config.model, preflight.tokenizer
    device = resolve_device(model.device)
    if device.type == "cpu":
        keep_freed_memory()
    judge = judges(config, preflight.judge)
    scorer = Scorer(
        config.reward,
        code=code_scorer(config),
        judge=judge,
        functions=preflight.rewards_by_name,
        world=None if world.size == 1 else world,
    )
    policy = load_trained(model, world, seed=config.train.seed, offload=config.parallel.offload_parameters)
    logits, apart = policy.get_output_embeddings().weight.shape[0], preflight.junior_tokenizer is not None
    schedule = schedule_of(config.selection, tokenizer, logits, by_text=apart)
    if strategy is not None:
        schedule = Schedule(partial(strategy_at, strategy), lambda step: None)
    first = schedule.strategy(1)
    check(config, Facts(recipe=preflight.trained_recipe, drops=first.starts is not None))
    models = build_models(preflight, policy, first, world, engine)
    with ExitStack() as unfinished:
        unfinished.callback(models.engine.close)
        (prompts, _), sampling = preflight.prompts, sampling_of(config.rollout)
        options = forward_options(config, sampling, models.engine.vocabulary, world)
        starts, removed = (None if table is None else table.to(device) for table in (first.starts, first.removed))
        # On the weights of model.senior, also if a checkpoint follows: a resumed run has the limit of its past.
        measure = partial(self_difference, models.policy, prompts, options, getattr(torch, model.dtype), world, device)
        setup = RunSetup(
            config=config,
            recipe=preflight.trained_recipe,
            schedule=schedule,
            tokenizer=tokenizer,
            prompts=prompts,
            preflight=preflight,
            sampling=sampling,
            options=options._replace(starts=starts, removed=removed),
            scorer=scorer,
            episode_runner=preflight.episode_runner,
            judge=None if judge is None else judge.judge.model,
            mismatch_limit=mismatch_limit(config, measure),
            device=device,
            world=world,
        )
        levels = [hops(prompt.row) for prompt in prompts] if config.data.order == "by_hops" else None
        sampler = Sampler(len(prompts), seed=config.train.seed, levels=levels)
        unfinished.pop_all()  # from here on ``train`` closes it
        return Run(setup, models, Progress(sampler, config.loss.kl_coef))


def build_models(
    preflight: Preflight, policy: PreTrainedModel, first: Strategy, world: World, factory: EngineFactory | None = None
) -> Models:
    """Make all models of a run around the policy of ``load_trained``, which is changed in place.

    Args:
        first: the strategy of the first step. What it asks for, those of all steps do.
        factory: makes the engine, instead of ``rollout.engine``.
        world: see ``make_engine``.
    """
    config = preflight.planned
    model, loss = config.model, config.loss
    dtype = getattr(torch, model.dtype)
    frozen: dict[tuple[str, str, bool], PreTrainedModel] = {}  # a self-paired junior and the reference can be one model

    def freeze(path: str, dtype_name: str, *, sharded: bool) -> PreTrainedModel:
        """Load a frozen model: sharded like the policy, to score with, or whole, to decode with."""
        name = path, dtype_name, sharded and world.size > 1
        if name not in frozen:
            if model.lora.rank and world.size == 1 and (path, dtype_name) == (model.senior, "float32"):
                loaded = alias(policy)  # whose own weights stay as they are beside the adapters
            else:
                scope = world if sharded else World()
                loaded = load_sharded(path, scope, compute=dtype, dtype=dtype_name, device=model.device, frozen=True)
            frozen[name] = loaded
        return frozen[name]

    partner = model.senior if self_paired(model) else str(model.junior)
    junior = freeze(partner, model.dtype, sharded=True) if loss.junior_kl_coef > 0 else None
    in_a_worker = partial(base_of_worker, partner, model.dtype, model.device)
    load = partial(freeze, partner, model.dtype, sharded=False)
    endpoint = None if model.junior_endpoint.url is None else model.junior_endpoint
    writer = None
    if preflight.strategy is not None or first.writers != "senior":
        writer = ModelSource(partner, load, None, in_a_worker, preflight.junior_tokenizer, endpoint)
    acting = None if preflight.episode_runner is None else preflight.episode_runner.elsewhere(config)
    engine = build_engine(config, writer, preflight.tokenizer, factory, acting, world)
    with ExitStack() as unfinished:
        unfinished.callback(engine.close)
        reference = None
        if model.lora.rank and world.size == 1:
            attach(policy, model.lora, config.train.seed)
        if loss.kl_coef > 0:
            # float32 like the policy, so that both go through the same arithmetic and the KL starts at exactly 0.
            of = partner if loss.kl_to == "junior" else model.senior
            own = model.lora.rank and of == model.senior
            reference = policy if own else freeze(of, "float32", sharded=True)
        value_model = None
        if preflight.trained_recipe.critic:
            module = load_trained(model, world, critic=True, offload=config.parallel.offload_parameters)
            value_model = Trained(module, make_optimizer(module, config.train, config.train.critic_lr))
        made = Models(
            policy=policy,
            optimizer=make_optimizer(policy, config.train, config.train.lr),
            critic=value_model,
            reference=reference,
            junior=junior,
            engine=engine,
        )
        unfinished.pop_all()
    return made


def shares_base(config: Config) -> bool:
    """Whether the engine's junior holds the very weights that the senior began with: same engine, model, dtype and
    device."""
    v, dtype = config.rollout.vllm, config.model.dtype
    apart = v.junior_dtype not in (None, dtype) or v.junior_quantization is not None or v.junior_device is not None
    if config.model.junior_endpoint.url is not None:
        return False
    return self_paired(config.model) and not (config.rollout.kind.reserves and apart)


@cache
def base_of_worker(path: str, dtype: str, device: str) -> PreTrainedModel:
    """The junior of a rollout worker, which may be what adapters stand on, too."""
    return load_frozen(path, dtype, device.partition(":")[0])


def adapted_base_of_worker(path: str, dtype: str, device: str, lora: LoraConfig, seed: int) -> PreTrainedModel:
    """The senior of a rollout worker: adapters on the junior's weights."""
    return adapted_alias(base_of_worker(path, dtype, device), lora, seed)


def build_engine(
    config: Config,
    junior: ModelSource | None,
    tokenizer: PreTrainedTokenizerBase,
    factory: EngineFactory | None = None,
    acting: Acting | None = None,
    world: World | None = None,
) -> Engine:
    """Make the rollout engine, in the compute dtype.

    If the junior is the base of the senior's adapters, the engine's senior is adapters on the junior's weights. Else it
    has weights of its own, which receive merged weights.

    Args:
        junior: the junior. None means that the senior writes alone.
        factory: used instead of ``rollout.engine``.
        acting, world: see ``make_engine``.
    """
    model = config.model
    shared = model.lora.rank > 0 and junior is not None and shares_base(config)
    longest = config.longest_sequence
    if config.data.eval:
        observed = config.response_tokens - config.rollout.max_tokens
        longest = max(longest, profile_of(config.eval).longest(config.data.max_prompt_tokens) + observed)

    def load() -> PreTrainedModel:
        if shared and junior is not None:
            return adapted_alias(junior.load(), model.lora, config.train.seed)
        return load_model(model.senior, dtype=model.dtype, device=model.device).requires_grad_(False)

    plan = None
    if shared and not config.rollout.kind.in_trainer:
        plan = adapter_plan(meta_model(load_configuration(model.senior)), model.lora)
    adapted = (model.senior, model.dtype, model.device, model.lora, config.train.seed)
    in_a_worker = partial(adapted_base_of_worker, *adapted) if shared else None
    senior = ModelSource(model.senior, load, plan, load_elsewhere=in_a_worker)
    return make_engine(
        config.rollout,
        senior,
        junior,
        tokenizer,
        dtype=model.dtype,
        device=model.device,
        longest=longest,
        factory=factory,
        acting=acting,
        world=world,
    )
