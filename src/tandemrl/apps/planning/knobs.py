"""Finds config keys that would make a plan fit which does not. Each is tried in the same plan."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from tandemrl.apps.planning.accelerators import Accelerator
from tandemrl.apps.planning.plan import Plan, plan
from tandemrl.config import Config, ConfigError
from tandemrl.config.rules import check
from tandemrl.models.attention import ModelError


class Remedy(NamedTuple):
    """Keys to set, as on the command line, and the plan that follows from them."""

    assignments: tuple[str, ...]
    plan: Plan


def remedies(config: Config, ranks: int, device: Accelerator) -> list[Remedy]:
    """Single keys that make the plan fit. If none does, keys that do so together, or else those that come closest.

    Keys that change what is learnt, such as lengths, models or adapters, are never proposed.

    Args:
        ranks: how many processes the run has.
        device: the device of each process.
    """
    single = [Remedy((f"{key}={_shown(value)}",), found) for key, value, found in _tried(config, ranks, device)]
    if fitting := [each for each in single if each.plan.fits]:
        return fitting
    together, before = Remedy((), plan(config, ranks, device)), config
    for key, value in _knobs(config):
        changed = _set(before, key, value)
        found = _plan_of(changed, ranks, device)
        if found is None or (found.peak >= together.plan.peak and found.cache.rows <= together.plan.cache.rows):
            continue
        together, before = Remedy((*together.assignments, f"{key}={_shown(value)}"), found), changed
        if found.fits:
            break
    return [together] if together.assignments else []


def _tried(config: Config, ranks: int, device: Accelerator) -> Iterator[tuple[str, Any, Plan]]:
    for key, value in _knobs(config):
        found = _plan_of(_set(config, key, value), ranks, device)
        if found is not None:
            yield key, value, found


def _knobs(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield keys with values to try, those that cost little first. Few need another rehearsal, which takes seconds."""
    rollout, vllm, parallel = config.rollout, config.rollout.vllm, config.parallel
    if not rollout.kind.reserves:
        yield from (("rollout.max_rows", rows) for rows in (rollout.max_rows // 2, rollout.max_rows // 8) if rows)
    else:
        if not vllm.sleep:
            yield "rollout.vllm.sleep", True
        yield from (
            ("rollout.vllm.gpu_memory_utilization", share)
            for share in (0.7, 0.5, 0.3)
            if share != vllm.gpu_memory_utilization
        )
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing", True
    if config.train.tokens_per_micro_batch > config.longest_sequence:
        yield "train.tokens_per_micro_batch", config.longest_sequence
    if parallel.dp_replicate > 1:
        yield "parallel.dp_replicate", 1
    if not parallel.offload_optimizer:
        yield "parallel.offload_optimizer", True
    if not parallel.offload_parameters:
        yield "parallel.offload_parameters", True
    if not config.model.activation_offload:
        yield "model.activation_offload", True
    yield "parallel.tp", 2 * parallel.tp
    yield "parallel.sp", 2 * parallel.sp


def _plan_of(config: Config, ranks: int, device: Accelerator) -> Plan | None:
    """The plan of a config, or None if its values contradict each other or the number of processes."""
    parallel = config.parallel
    on_host = parallel.offload_parameters or parallel.offload_optimizer
    if on_host and device.memory is None:
        return None
    try:
        check(config)
        return plan(config, ranks, device)
    except (ConfigError, ModelError):
        return None


def _set(config: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return replace(config, **{name: _set(getattr(config, name), rest, value) if rest else value})


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
