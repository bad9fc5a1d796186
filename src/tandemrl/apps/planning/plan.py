"""Plans a run on other machines from its config: the memory of one process, and what to change if it does not fit.

The memory of the training pass is found by a rehearsal (``rehearsal``), that of the engine is computed from shapes. All
numbers are of rank 0, which has the most where something cannot be divided evenly, and for sequences of full length.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tandemrl.apps.planning.rehearsal import Role, Work, rehearse, rehearse_prefill
from tandemrl.config import Config, ConfigError
from tandemrl.config.compatibility import Facts, check
from tandemrl.evals import profile_of
from tandemrl.files import LineError, read_json_lines
from tandemrl.models.attention import ModelError
from tandemrl.models.loading import check_folder, is_local, refusal
from tandemrl.models.trainable import self_paired
from tandemrl.processes.world import World, imagined_world
from tandemrl.rollout.kv_cache import PREFILL_TOKENS, roomy
from tandemrl.training.arguments import named_recipe, resolve_recipe
from tandemrl.training.build import shares_base
from tandemrl.training.state import forward_options, sampling_of

GIB = 2**30
DEVICES: dict[str, float | None] = {
    "a100-40": 39.4 * GIB,
    "a100": 79.2 * GIB,
    "h100": 79.2 * GIB,
    "h200": 139.8 * GIB,
    "b200": 178.0 * GIB,
    "l40s": 44.4 * GIB,
    "rtx4090": 23.6 * GIB,
    "cpu": None,
}
"""The bytes that a process can use of a device, by its data sheet. None: not checked, since it is the machine's and
shared."""
RESERVE = 0.06
"""The fraction of a device's memory that a plan leaves free for CUDA's context, NCCL's buffers and gaps between
allocations."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK = 16
"""How many tokens a block of vLLM's KV cache holds."""
LOGITS = 4
"""How many float32 copies of a decoding step's logits are alive together."""

ARCHITECTURES = Path(__file__).with_name("architectures.json")
"""Describes by hub id the models that packaged configs name, and their relatives: the numbers that decide their shapes,
from the ``config.json`` that each model's authors publish beside the weights. ``runs/tiny``, ``runs/tiny-hops`` and
``runs/tiny-calculator`` are pairs that ``tandemrl model tiny`` makes, ``runs/smollm2-pair`` is that of ``tandemrl model
smollm2``."""

Phase = Literal["all the time", "while rollouts are generated", "during the update"]
"""When memory is needed."""
ALWAYS, ROLLOUT, UPDATE = PHASES = get_args(Phase)
HOST = "host memory"


class PlanError(ConfigError):
    """A run does not fit on the devices that it is planned for. The message names what would help."""


class Item(NamedTuple):
    """An item of one process's memory, in bytes. where: `HOST`, or a device that is not the process's own ("")."""

    phase: Phase
    name: str
    size: int
    where: str = ""


class Cache(NamedTuple):
    """The KV cache of an engine's process, which holds ``rows`` rows of ``length`` tokens."""

    rows: int
    length: int
    size: int


class Plan(NamedTuple):
    """The plan of one process.

    memory: the bytes of each of its devices; None if they are not checked. cache: that of a rollout worker, if there
    are any. tokens: the most in a micro-batch.
    """

    ranks: int
    device: str
    memory: float | None
    items: list[Item]
    cache: Cache
    tokens: int

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes that are needed at once, by device."""

        def needed(where: str, phase: Phase) -> int:
            return sum(i.size for i in self.items if i.where == where and i.phase in (ALWAYS, phase))

        devices = dict.fromkeys(item.where for item in self.items if item.where != HOST)
        return {where: max(needed(where, ROLLOUT), needed(where, UPDATE)) for where in devices}

    @property
    def limit(self) -> float:
        return math.inf if self.memory is None else self.memory * (1 - RESERVE)

    def require_fit(self) -> None:
        """Refuse a plan that does not fit.

        Raises:
            PlanError: the message names the keys that lower memory and leave the algorithm alone.
        """
        over = [
            f"a process needs {_gib(peak)} of {_gib(self.limit)} on {self.device}{_of(where)}"
            for where, peak in self.peaks.items()
            if peak > self.limit
        ]
        if self.cache.rows < 1:
            over = [f"the engine's KV cache does not hold one row of {self.cache.length:,} tokens"]
        for reason in over:
            raise PlanError(
                f"{reason}; what can help: a smaller rollout.max_rows, train.tokens_per_micro_batch or, with vLLM, "
                "rollout.vllm.gpu_memory_utilization (or rollout.vllm.sleep=true), model.gradient_checkpointing=true, "
                "parallel.offload_optimizer=true, more --ranks, or a larger --device"
            )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"plan of {self.ranks:,} process(es) on {self.device}, per process, full-length sequences:"
        for item in sorted(self.items, key=lambda item: PHASES.index(item.phase)):
            yield f"  {_gib(item.size):>11}  {item.phase}: {item.name}{_of(item.where)}"
        limit = "not checked" if self.memory is None else f"{_gib(self.limit)} ({RESERVE:.0%} is left aside)"
        for where, peak in self.peaks.items():
            yield f"  {_gib(peak):>11}  at most on the device{_of(where)}; limit: {limit}"
        yield f"engine: {self.cache.rows:,} rows of {self.cache.length:,} tokens in {_gib(self.cache.size)} of KV cache"
        yield f"update: micro-batches of at most {self.tokens:,} tokens"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:,.2f} MiB"


def _of(where: str) -> str:
    return f" ({where})" if where else ""


def hours_of(config: Config, folder: str) -> str:
    """How long the steps of a config take if each takes as long as those of a run that was made, in words.

    Raises:
        ConfigError: the run recorded no step after its first one, which is slower than the others.
    """
    file = Path(folder) / "metrics.jsonl"
    try:
        steps = [line["time/step"] for _, line in read_json_lines(file) if line.get("time/step") is not None][1:]
    except (OSError, LineError) as error:
        raise ConfigError(f"--times-of {folder}: {error}; name the folder of a training run") from None
    if not steps:
        raise ConfigError(f"--times-of {folder}: {file} has no step after the first; let the run make a few more")
    hours = config.train.steps * median(steps) / 3600
    return (
        f"time: {config.train.steps:,} steps of {median(steps):.3g} s (median of {len(steps)}) are {hours:,.2g} hours"
    )


def plan(config: Config, ranks: int, device: str) -> Plan:
    """Plan a run of ``ranks`` processes, each on a device of its own, by its name in `DEVICES`.

    Raises:
        ConfigError, ModelError: the mesh does not have ``ranks`` processes, the config does not work with so many, or a
            device or a model is unknown or cannot be split.
    """
    if device not in DEVICES:
        raise ConfigError(f"--device {device}: expected one of {', '.join(DEVICES)}")
    check(config, Facts(processes=ranks))
    with imagined_world(config.parallel, ranks) as world:
        return _plan(config, world, device)


def _plan(config: Config, world: World, device: str) -> Plan:
    model, train, rollout = config.model, config.train, config.rollout
    shapes = {"senior": architecture(model.senior)}
    partner = architecture(model.senior if self_paired(model) else str(model.junior))
    if not config.selection.kind.solo and model.junior_endpoint.url is None:  # the engine has a junior
        shapes["junior"] = partner
    vocabulary = min(shape.get_text_config().vocab_size for shape in shapes.values())
    options = forward_options(config, sampling_of(rollout), vocabulary, world)

    longest, per_update = config.longest_sequence, (train.mini_batch_prompts or train.prompts_per_step)
    sequences = math.ceil(per_update * rollout.group_size / world.data_size)
    tokens = min(train.tokens_per_micro_batch, sequences * longest)
    lengths = (longest,) * (tokens // longest) + ((tokens % longest,) if tokens % longest else ())
    work = Work(lengths, config.data.max_prompt_tokens)

    off_weights = HOST if config.parallel.offload_parameters else ""
    off_state = off_weights or (HOST if config.parallel.offload_optimizer else "")
    items, busiest = list[Item](), 0
    trained = {"policy": shapes["senior"]}
    if resolve_recipe(named_recipe(config.loss), config).advantage is None:
        trained["critic"] = architecture(model.critic or model.senior)
    for name, shape in trained.items():
        found = rehearse(Role(name), shape, config, world, work, options)
        items.append(Item(ALWAYS, f"{name}: weights, float32", found.weights, off_weights))
        items.append(Item(ALWAYS, f"{name}: optimiser", found.optimizer, off_state))
        if off_weights:
            items.append(Item(UPDATE, f"{name}: gradients", found.gradients, HOST))
            busiest = max(busiest, found.activations)
        else:  # in a backward, or in an optimiser step, for which the state comes back from the host
            most = max(found.activations, found.optimizer if off_state else 0)
            busiest = max(busiest, found.gradients + most)
    stay = " (model.activation_offload: planned as if they stayed on the device)" * model.activation_offload
    items.append(Item(UPDATE, f"gradients and activations of a micro-batch{stay}", busiest))
    for name, shape, dtype in _frozen(config, shapes["senior"], partner, world):
        frozen = rehearse(Role("frozen", dtype), shape, config, world, work, options)
        items.append(Item(ALWAYS, f"{name}: weights, {dtype}", frozen.weights))

    engine, cache = _engine(config, shapes, world, DEVICES[device], vocabulary)
    devices = rollout.kind.reserves and rollout.vllm.devices
    where = "each of rollout.vllm.devices" if devices else ""
    if devices and (model.device.partition(":")[2] or "0") in devices.split(","):
        where = ""
    if rollout.workers:
        where = "a rollout worker's device"
    items += [item._replace(where=item.where or where) for item in engine]
    return Plan(world.size, device, DEVICES[device], items, cache, tokens)


def _frozen(
    config: Config, senior: PretrainedConfig, partner: PretrainedConfig, world: World
) -> Iterator[tuple[str, PretrainedConfig, str]]:
    """The frozen models that ``training.build.build_models`` loads to score with, without those that share the storage
    of another model."""
    model, loss = config.model, config.loss
    junior = loss.junior_kl_coef > 0
    of_engine = world.size == 1 and not config.selection.kind.solo and config.rollout.kind.in_trainer
    if junior and not of_engine:
        yield "junior", partner, model.dtype
    other = loss.kl_to == "junior" and not self_paired(model)
    shared = model.dtype == "float32" and (other or self_paired(model)) and (junior or (other and of_engine))
    if loss.kl_coef > 0 and not shared and (other or not model.lora.rank):
        yield "reference", partner if other else senior, "float32"


def _engine(
    config: Config, shapes: Mapping[str, PretrainedConfig], world: World, memory: float | None, vocabulary: int
) -> tuple[list[Item], Cache]:
    """The memory of this process's engine, and its KV cache. ``shapes`` are those of the models that it has."""
    rollout, model, kind = config.rollout, config.model, config.selection.kind
    length = config.longest_sequence
    requests = config.train.prompts_per_step * rollout.group_size
    if config.data.eval and config.train.eval_every:
        spoken = config.response_tokens - rollout.max_tokens
        length = max(length, profile_of(config.eval).longest(config.data.max_prompt_tokens) + spoken)
        problems = config.eval.train_problems * len(config.data.eval)
        requests = max(requests, problems * config.eval.train_samples)
    rows = min(rollout.max_rows, math.ceil(requests / (rollout.workers or world.size)))
    junior_dtype = (rollout.kind.reserves and rollout.vllm.junior_dtype) or model.dtype
    widths = {"senior": BYTES[model.dtype], "junior": BYTES.get(junior_dtype, BYTES[model.dtype])}
    weights = {who: parameters(shape) * widths[who] for who, shape in shapes.items()}
    kept = {who: kv_bytes(shape, widths[who]) for who, shape in shapes.items()}
    logits = LOGITS * rows * vocabulary * 4
    if model.lora.rank > 0 and not kind.solo and shares_base(config):
        weights["senior"] = 0  # adapters on the junior's weights
    if rollout.kind.reserves:
        return _vllm(config, weights, kept, logits, length, memory)
    columns, prompt = roomy(length), min(config.data.max_prompt_tokens, length)
    waiting = rows * config.has_episodes  # between turns, in the device's memory
    size = (rows * columns + waiting * length) * sum(kept.values())
    prompts = max(1, min(PREFILL_TOKENS // prompt, math.ceil(rows / rollout.group_size)))
    dtype = getattr(torch, model.dtype)
    prefill = max(rehearse_prefill(shape, dtype, prompts, prompt) for shape in shapes.values())
    items = [Item(ALWAYS, f"engine, {who}: weights, {model.dtype}", n) for who, n in weights.items() if n]
    items.append(Item(ROLLOUT, "engine: KV cache", size))
    items.append(Item(ROLLOUT, "engine: a prefill or a decoding step", max(prefill, logits)))
    return items, Cache(rows, columns, size)


def _vllm(
    config: Config, weights: dict[str, int], kept: dict[str, int], logits: int, length: int, memory: float | None
) -> tuple[list[Item], Cache]:
    """``weights`` and ``kept``, the bytes of a token's keys and values, are by model."""
    vllm, parallel = config.rollout.vllm, config.rollout.tensor_parallel
    apart = vllm.junior_device if "junior" in weights and vllm.junior_device != config.model.device else None
    together = [who for who in weights if apart is None or who == "senior"]  # on one device
    own = sum(weights[who] for who in together) // parallel
    per_block = BLOCK * max(1, sum(kept[who] for who in together) // parallel)
    budget = None if memory is None else int(vllm.gpu_memory_utilization * memory)
    if vllm.kv_cache_gb is not None or budget is None:
        size = int((vllm.kv_cache_gb or 1.0) * GIB)
        total = own + size + logits
    else:
        size = max(0, budget - own - logits)
        total = max(budget, own + logits)
    blocks = size // per_block
    rows = min(config.rollout.max_rows, blocks // math.ceil(length / BLOCK))
    phase: Phase = ROLLOUT if vllm.sleep else ALWAYS
    items = [Item(phase, "engine: vLLM's share, KV cache included", total)]
    if apart is not None:  # it has as many blocks as the senior
        on_it = weights["junior"] + blocks * BLOCK * kept["junior"] + logits
        items.append(Item(phase, "engine, junior: weights and KV cache", on_it, apart))
    return items, Cache(rows, length, size)


@cache
def packaged() -> dict[str, dict[str, Any]]:
    """The ``config.json`` fields of each packaged model, by hub id or default folder of `tandemrl model`."""
    return dict(json.loads(ARCHITECTURES.read_text()))


def architecture(path: str) -> PretrainedConfig:
    """The configuration of a model. Nothing is downloaded.

    Args:
        path: a model's folder or hub id. A model on this machine takes precedence over a packaged one.

    Raises:
        ModelError: the model is neither on this machine nor packaged.
    """
    known = packaged().get(path)
    if known is not None and not Path(path).is_dir():
        return AutoConfig.for_model(**known)
    try:
        check_folder(path)
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        if is_local(path):
            raise refusal("model", path, error) from None
        raise ModelError(
            f"{path}: its config.json is neither on this machine nor packaged; put it into a folder and name that, or "
            f"plan with one of {', '.join(packaged())}"
        ) from None


def parameters(shape: PretrainedConfig) -> int:
    """How many parameters a model has. Tied ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(shape).parameters())


def kv_bytes(shape: PretrainedConfig, width: int) -> int:
    """The bytes of one token's keys and values in all layers, for numbers of ``width`` bytes."""
    text = shape.get_text_config()
    channels = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * channels * width)
