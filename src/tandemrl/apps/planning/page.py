"""Prints a plan, and refuses one that cannot fit."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tandemrl.apps.planning.accelerators import GIB, RESERVE, Accelerator
from tandemrl.apps.planning.plan import Phase, Plan
from tandemrl.config import Config, ConfigError
from tandemrl.files import LineError, read_json_lines


class PlanError(ConfigError):
    """A run does not fit on the devices that it is planned for. The message names what would help."""


def described(found: Plan) -> str:
    """The plan as lines of text."""
    return "\n".join(_lines(found))


def described_time(config: Config, folder: str) -> str:
    """How long the steps of a config take if each takes as long as those of a run that was made.

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


def require_fit(found: Plan, config: Config, device: Accelerator) -> None:
    """Refuse a plan that does not fit.

    Raises:
        PlanError: the plan does not fit; the message names the keys that lower memory and leave the algorithm alone.
    """
    if found.fits:
        return
    if found.cache.rows < 1:
        reason = f"the engine's KV cache does not hold one row of {found.cache.length:,} tokens"
    else:
        card = max(found.cards, key=found.peak_of)
        where = f"on {device.name}" if card is None else f"on {card}, {device.name}"
        reason = f"a process needs {_gib(found.peak)} of {_gib(found.limit)} {where}"
    raise PlanError(f"{reason}; what can help: {', '.join(_savings(config))}, more --ranks or a larger --device")


def _savings(config: Config) -> Iterator[str]:
    """Yield the keys that are left to lower memory, those that cost the least time first."""
    rollout, parallel = config.rollout, config.parallel
    if not rollout.kind.reserves:
        yield f"rollout.max_rows below {rollout.max_rows}"
    else:
        if not rollout.vllm.sleep:
            yield "rollout.vllm.sleep=true"
        yield f"rollout.vllm.gpu_memory_utilization below {rollout.vllm.gpu_memory_utilization:g}"
    if config.train.tokens_per_micro_batch > config.longest_sequence:
        yield f"train.tokens_per_micro_batch={config.longest_sequence}"
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    if not parallel.offload_parameters and not parallel.offload_optimizer:
        yield "parallel.offload_optimizer=true"


def _lines(found: Plan) -> Iterator[str]:
    mesh = " x ".join(f"{axis} {count}" for axis, count in found.mesh.items()) or "no mesh"
    yield f"plan of {found.ranks:,} process(es) on {found.device.name} ({mesh}), per process, full-length sequences:"
    phases: tuple[tuple[Phase, str], ...] = (
        ("always", "all the time"),
        ("rollout", "while rollouts are generated"),
        ("update", "during the update"),
    )
    limit = "not checked" if found.device.memory is None else f"{_gib(found.limit)} ({RESERVE:.0%} is left aside)"
    for card in found.cards:
        where = "" if card is None else f" on {card}"
        for phase, words in phases:
            for item in (each for each in found.items if (each.phase, each.card) == (phase, card)):
                yield f"  {_gib(item.size):>11}  {words}{where}: {item.name}{' (host memory)' if item.on_host else ''}"
        yield f"  {_gib(found.peak_of(card)):>11}  at most{where or ' on the device'}; limit: {limit}"
    cache = found.cache
    blocks = f" ({cache.blocks:,} blocks)" if cache.blocks else ""
    yield f"engine: {cache.rows:,} rows of {cache.length:,} tokens in {_gib(cache.size)} of KV cache{blocks}"
    yield f"update: {found.micro_batches} micro-batch(es) of at most {found.tokens:,} tokens"
    for note in found.notes:
        yield f"note: {note}"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:,.2f} MiB"
