"""Plans a run on other machines from its config: the memory of one process.

The memory of the training pass is found by a rehearsal (``rehearsal``), that of the engine is computed from shapes. All
numbers are of rank 0, which has the most where something cannot be divided evenly, and for sequences of full length.
"""

import math
from functools import cache
from json import loads
from typing import Any, Literal, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tandemrl.apps.planning.accelerators import RESERVE, Accelerator
from tandemrl.apps.planning.architectures import architecture
from tandemrl.apps.planning.rehearsal import Rehearsal, Role, Work, rehearse, rehearse_prefill
from tandemrl.config import Config, ConfigError, ParallelConfig
from tandemrl.config.compatibility import Facts, check
from tandemrl.evals import profile_of
from tandemrl.models.trainable import self_paired
from tandemrl.processes.world import World, imagined_world
from tandemrl.rollout.engine import Sampling
from tandemrl.rollout.kv_cache import CACHE_STEP, PREFILL_TOKENS
from tandemrl.training.arguments import named_recipe, resolve_recipe
from tandemrl.training.build import shares_base
from tandemrl.training.state import forward_options

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK = 16
"""How many tokens a block of vLLM's KV cache holds."""
LOGITS = 4
"""How many float32 copies of a decoding step's logits are alive together."""

Phase = Literal["always", "rollout", "update"]
"""When memory is needed: all the time, while rollouts are written, or during the update."""


class Item(NamedTuple):
    """An item of one process's memory, in bytes. ``on_host`` says whether it is in host memory, not on a device, and
    ``card`` on which device it is: None is the trainer's."""

    phase: Phase
    name: str
    size: int
    on_host: bool = False
    card: str | None = None


class Cache(NamedTuple):
    """The KV cache of an engine's process, which holds ``rows`` rows of ``length`` tokens, each of ``token`` bytes.
    ``blocks`` counts the blocks of vLLM's cache, and is 0 for the torch engine."""

    rows: int
    length: int
    size: int
    token: int
    blocks: int = 0


class Plan(NamedTuple):
    """The plan of one process.

    cache: that of a rollout worker, if there are any. notes: remarks on what is unusual but not wrong.
    """

    ranks: int
    mesh: dict[str, int]
    device: Accelerator
    items: list[Item]
    cache: Cache
    micro_batches: int
    tokens: int
    notes: list[str]

    @property
    def cards(self) -> list[str | None]:
        """The devices of the process, the trainer's first."""
        return list(dict.fromkeys((None, *(item.card for item in self.items))))

    def peak_of(self, card: str | None) -> int:
        """The most bytes that are needed at once on a device."""
        own = [item for item in self.items if item.card == card and not item.on_host]
        return max(sum(i.size for i in own if i.phase in ("always", phase)) for phase in ("rollout", "update"))

    @property
    def peak(self) -> int:
        """The most bytes that are needed at once on one device."""
        return max(map(self.peak_of, self.cards))

    @property
    def limit(self) -> float:
        return math.inf if self.device.memory is None else self.device.memory * (1 - RESERVE)

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit and self.cache.rows >= 1


def plan(config: Config, ranks: int, device: Accelerator) -> Plan:
    """Plan a run of ``ranks`` processes, each on a device of its own.

    Raises:
        ConfigError, ModelError: the mesh does not have ``ranks`` processes, the config does not work with so many, or a
            model is unknown or cannot be split.
    """
    check(config, Facts(processes=ranks))
    with imagined_world(config.parallel, ranks) as world:
        return _plan(config, world, device)


def _plan(config: Config, world: World, device: Accelerator) -> Plan:
    model, train, rollout, loss = config.model, config.train, config.rollout, config.loss
    recipe = resolve_recipe(named_recipe(loss), config)
    senior = architecture(model.senior)
    partner = architecture(model.senior if self_paired(model) else str(model.junior))
    tandem = not config.selection.kind.solo and model.junior_endpoint.url is None  # the engine has a junior
    vocabulary = min(senior.get_text_config().vocab_size, (partner if tandem else senior).get_text_config().vocab_size)
    sampling = Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
    options = forward_options(config, sampling, vocabulary, world)

    longest, notes = config.longest_sequence, []
    per_update = (train.mini_batch_prompts or train.prompts_per_step) * rollout.group_size
    updates = train.prompts_per_step * rollout.group_size // per_update
    share = math.ceil(per_update / world.data_size)
    if per_update < world.data_size:
        notes.append(
            f"{per_update} sequences per update for {world.data_size} data ranks: {world.data_size - per_update} of "
            "them are idle; raise train.mini_batch_prompts, train.prompts_per_step or parallel.tp"
        )
    tokens = min(train.tokens_per_micro_batch, share * longest)
    lengths = (longest,) * (tokens // longest) + ((tokens % longest,) if tokens % longest else ())
    work = Work(lengths, config.data.max_prompt_tokens)
    micro_batches = updates * math.ceil(share / max(1, tokens // longest))

    policy = _rehearsed(Role("policy"), senior, config, world, work, options)
    off_weights, off_state = offloaded(config.parallel)
    items = _trained_items("policy", policy, off_weights, off_state)
    busiest = _busiest(policy, off_weights, off_state)
    if recipe.advantage is None:
        shape = architecture(model.critic or model.senior)
        critic = _rehearsed(Role("critic"), shape, config, world, work, options)
        items += _trained_items("critic", critic, off_weights, off_state)
        busiest = max(busiest, _busiest(critic, off_weights, off_state))
    if off_weights:
        items.append(Item("update", "gradients", policy.gradients, on_host=True))
    items.append(Item("update", "gradients and activations of a micro-batch", busiest))
    for name, shape, dtype in _frozen(config, senior, partner, world):
        frozen = _rehearsed(Role("frozen", dtype), shape, config, world, work, options)
        items.append(Item("always", f"{name}: weights, {dtype}", frozen.weights))

    engine, cache = _engine(config, senior, partner if tandem else None, world, device, vocabulary)
    if rollout.workers:
        notes.append("rollout workers are on devices of their own, which this memory does not count")
    else:
        items += engine
    if cache.rows < 1:
        notes.append(f"the engine's KV cache does not hold one row of {cache.length:,} tokens")
    mesh = {} if world.mesh is None else dict(zip(world.mesh.mesh_dim_names or (), world.mesh.shape, strict=True))
    return Plan(world.size, mesh, device, items, cache, micro_batches, tokens, notes)


def offloaded(parallel: ParallelConfig) -> tuple[bool, bool]:
    """Whether host memory keeps weights, gradients and the optimiser's state, and whether it keeps that state alone,
    between steps that are made on the device."""
    return parallel.offload_parameters, parallel.offload_optimizer and not parallel.offload_parameters


# --------------------------------------------------------------------------------------------------------------- memory


def _trained_items(name: str, found: Rehearsal, off_weights: bool, off_state: bool) -> list[Item]:
    return [
        Item("always", f"{name}: weights, float32", found.weights, off_weights),
        Item("always", f"{name}: optimiser", found.optimizer, off_weights or off_state),
    ]


def _busiest(found: Rehearsal, off_weights: bool, off_state: bool) -> int:
    """The most bytes on the device beside those that are always there: in a backward, or in an optimiser step whose
    state was moved from the host."""
    gradients = 0 if off_weights else found.gradients
    return gradients + max(found.activations, found.optimizer if off_state else 0)


def _rehearsed(
    role: Role, shape: PretrainedConfig, config: Config, world: World, work: Work, options: Any
) -> Rehearsal:
    """The rehearsal of a model. It is not repeated for a config that differs only in keys without influence on it."""
    influences = config.parallel, config.model, config.loss.entropy_coef, world.size
    key = role, *_known(shape), *influences, work, options
    if key not in _KNOWN:
        _KNOWN[key] = rehearse(role, shape, config, world, work, options)
    return _KNOWN[key]


_KNOWN: dict[Any, Rehearsal] = {}


def _frozen(
    config: Config, senior: PretrainedConfig, partner: PretrainedConfig, world: World
) -> list[tuple[str, PretrainedConfig, str]]:
    """The frozen models that ``training.build.build_models`` loads to score with, without those that share the storage
    of another model."""
    model, loss = config.model, config.loss
    alone = world.size == 1
    found: list[tuple[str, PretrainedConfig, str]] = []
    junior = loss.junior_kl_coef > 0
    if junior and not (alone and not config.selection.kind.solo and config.rollout.kind.in_trainer):
        found.append(("junior", partner, model.dtype))  # else it is the engine's
    if loss.kl_coef > 0 and not model.lora.rank and not (junior and self_paired(model) and model.dtype == "float32"):
        found.append(("reference", senior, "float32"))
    return found


def _engine(
    config: Config,
    senior: PretrainedConfig,
    junior: PretrainedConfig | None,
    world: World,
    device: Accelerator,
    vocabulary: int,
) -> tuple[list[Item], Cache]:
    """The memory of this process's engine, and its KV cache. ``junior`` is None if the senior writes alone."""
    rollout, model = config.rollout, config.model
    width = BYTES[model.dtype]
    junior_dtype = (rollout.kind.reserves and rollout.vllm.junior_dtype) or model.dtype
    widths = {"senior": width, "junior": BYTES.get(junior_dtype, width)}
    length = config.longest_sequence
    requests = _sequences(config, config.train.prompts_per_step, rollout.group_size, world)
    if config.data.eval and config.train.eval_every:
        spoken = config.response_tokens - rollout.max_tokens
        length = max(length, profile_of(config.eval).longest(config.data.max_prompt_tokens) + spoken)
        problems = config.eval.train_problems * len(config.data.eval)
        requests = max(requests, _sequences(config, problems, config.eval.train_samples, world))
    rows = min(rollout.max_rows, requests)
    shapes = [senior] if junior is None else [senior, junior]
    for heads in (shape.get_text_config().num_attention_heads for shape in shapes):
        if heads % rollout.tensor_parallel:
            raise ConfigError(
                f"rollout.tensor_parallel={rollout.tensor_parallel}: must divide the {heads} attention heads of the "
                "models"
            )
    writers = dict(zip(("senior", "junior"), shapes, strict=False))
    weights = {who: parameters(shape) * widths[who] for who, shape in writers.items()}
    kept = {who: kv_bytes(shape, widths[who]) for who, shape in writers.items()}
    per_token = sum(kept.values())
    logits = LOGITS * rows * vocabulary * 4
    if _adapters_alone(config):
        weights["senior"] = 0  # adapters on the junior's weights
    if not rollout.kind.reserves:
        columns = _columns(config.data.max_prompt_tokens, length)
        waiting = rows * config.has_episodes  # between turns, in the device's memory
        size = rows * columns * per_token + waiting * length * per_token
        prompt = min(config.data.max_prompt_tokens, length)
        prompts = max(1, min(PREFILL_TOKENS // prompt, math.ceil(rows / rollout.group_size)))
        prefill = max(_prefill(*_known(shape), model.dtype, prompts, prompt) for shape in shapes)
        items = [Item("always", f"engine, {who}: weights, {model.dtype}", n) for who, n in weights.items() if n]
        items += [
            Item("rollout", "engine: KV cache", size),
            Item("rollout", "engine: a prefill or a decoding step", max(prefill, logits)),
        ]
        return items, Cache(rows, columns, size, per_token)
    return _vllm(config, weights, kept, logits, length, device)


def _sequences(config: Config, prompts: int, samples: int, world: World) -> int:
    """How many sequences of a step or an evaluation an engine gets at once: a unit, or all of its process."""
    units = config.rollout.units
    if config.rollout.workers:
        assert units is not None
        return min(units, prompts) * samples
    share = math.ceil(prompts * samples / world.size)
    return share if units is None else min(units * samples, share)


def _adapters_alone(config: Config) -> bool:
    """Whether the engine's senior is adapters on the junior's weights, as in ``training.build.build_engine``."""
    kind = config.selection.kind
    return config.model.lora.rank > 0 and not kind.solo and shares_base(config, whole_words=kind.drops)


def _vllm(
    config: Config, weights: dict[str, int], kept: dict[str, int], logits: int, length: int, device: Accelerator
) -> tuple[list[Item], Cache]:
    """``weights`` and ``kept``, the bytes of a token's keys and values, are by model."""
    vllm, parallel = config.rollout.vllm, config.rollout.tensor_parallel
    trainer, cards, apart = _cards(config)
    shared = [who for who in weights if who != "junior" or apart is None]
    engines = [[who] for who in shared] if config.rollout.kind.spans and config.selection.kind.drops else [shared]
    size, total, blocks, rows = 0, 0, 0, config.rollout.max_rows
    for models in engines:
        own = sum(weights[who] for who in models) // parallel
        per_token = max(1, sum(kept[who] for who in models) // parallel)
        budget = None if device.memory is None else int(vllm.gpu_memory_utilization / len(engines) * device.memory)
        if vllm.kv_cache_gb is not None or budget is None:
            its = int((vllm.kv_cache_gb or 1.0) * 2**30)
            total += own + its + logits
        else:
            its = max(0, budget - own - logits)
            total += max(budget, own + logits)
        size, blocks = size + its, blocks + its // (per_token * BLOCK)
        rows = min(rows, its // (per_token * BLOCK) // math.ceil(length / BLOCK))
    phase: Phase = "rollout" if vllm.sleep else "always"
    share = [(card, "engine: vLLM's share, KV cache included", total) for card in cards]
    if apart is not None and "junior" in kept:  # as many blocks as the senior, beside whom vLLM counts its memory
        junior = blocks * BLOCK * kept["junior"]
        size += junior
        share += [
            (apart, "engine, junior: weights", weights["junior"]),
            (apart, "engine, junior: KV cache", junior),
            (apart, "engine, junior: a decoding step", logits),
        ]
    items = [Item(phase, name, n, card=None if card == trainer else f"cuda:{card}") for card, name, n in share]
    return items, Cache(rows, length, size, max(1, sum(kept.values()) // parallel), blocks)


def _cards(config: Config) -> tuple[str, list[str], str | None]:
    """The numbers of the trainer's card, of the engine's, and of the junior's if it has one of its own. With several
    ranks, the trainer's stands for that of each rank."""
    vllm, parallel = config.rollout.vllm, config.rollout.tensor_parallel
    kind, _, number = config.model.device.partition(":")
    trainer = number or "0"
    if kind == "cpu":
        return trainer, [trainer], None
    cards = [str(int(trainer) + rank) for rank in range(parallel)] if vllm.devices is None else vllm.devices.split(",")
    if vllm.junior_device is None:
        return trainer, cards[:parallel], None
    junior = vllm.junior_device.partition(":")[2] or "0"
    if vllm.devices is not None:  # which the engine's process counts from 0
        if int(junior) >= len(cards):
            raise ConfigError(
                f"rollout.vllm.junior_device={vllm.junior_device}: rollout.vllm.devices={vllm.devices} has no card "
                f"{junior}, counted from 0; add one"
            )
        junior = cards[int(junior)]
    return trainer, cards[:parallel], None if junior in cards[:parallel] else junior


def _columns(prompt: int, longest: int) -> int:
    """How many columns a KV cache of the torch engine has when it holds ``longest`` tokens."""
    columns = prompt + CACHE_STEP
    while columns < longest:
        columns += max(CACHE_STEP, columns // 4)
    return columns


def parameters(shape: PretrainedConfig) -> int:
    """How many parameters a model has. Tied ones count once."""
    return sum(parameter.numel() for parameter in _skeleton(*_known(shape)).parameters())


def kv_bytes(shape: PretrainedConfig, width: int) -> int:
    """The bytes of one token's keys and values in all layers, for numbers of ``width`` bytes."""
    text = shape.get_text_config()
    channels = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * channels * width)


def _known(shape: PretrainedConfig) -> tuple[Any, str]:
    """A model's shape as what can be hashed: the class of its configuration, and its values as JSON."""
    return type(shape), shape.to_json_string(use_diff=False)


@cache
def _prefill(kind: Any, json: str, dtype: str, prompts: int, length: int) -> int:
    return rehearse_prefill(kind.from_dict(loads(json)), getattr(torch, dtype), prompts, length)


@cache
def _skeleton(kind: Any, json: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(kind.from_dict(loads(json)))
