"""Prints a plan, and refuses one that cannot fit."""

import math
from collections.abc import Iterator, Sequence

from tandemrl.apps.planning.accelerators import GIB, RESERVE, Accelerator
from tandemrl.apps.planning.fleet import STEPS, Fleet, Times, units_of
from tandemrl.apps.planning.knobs import remedies
from tandemrl.apps.planning.plan import Phase, Plan
from tandemrl.config import Config, ConfigError


class PlanError(ConfigError):
    """A run does not fit on the devices that it is planned for. The message names what would help."""


def described(found: Plan) -> str:
    """The plan as lines of text."""
    return "\n".join(_lines(found))


def described_fleet(config: Config, found: Sequence[Fleet], times: Sequence[Times]) -> str:
    """What a run with rollout workers came to, as lines of text: at best and at worst, or by the times of a run."""
    best, worst = found[0], found[-1]
    workers, units, ahead = config.rollout.workers, units_of(config), config.train.async_steps
    enough = [_enough_workers(each, units, ahead) for each in times]
    ages = ", ".join(f"{age} ({share:.0%})" for age, share in best.staleness.items())
    pace = _range(best.steps_per_hour, worst.steps_per_hour, ",.3g")
    idle = [_range(getattr(best, who), getattr(worst, who), ".0%") for who in ("idle_trainer", "idle_workers")]
    sheets = "times of full-length rollouts, estimated from data sheets"
    source = sheets if len(times) > 1 else "measured times"
    lines = (
        f"fleet: {workers:,} workers, {units:,} units of {config.rollout.units} prompts a step, generated {ahead} "
        f"steps ahead ({STEPS} steps simulated; {source})",
        f"  {pace} steps/h; the trainer waits {idle[0]} of its time, workers have nothing to do {idle[1]}",
        f"  staleness of the rollouts: {ages}",
        f"  {_range(min(enough), max(enough), ',')} workers would generate as fast as the trainer learns"
        if max(enough) < math.inf
        else "  no number of workers generates as fast as the trainer learns; a greater train.async_steps or smaller "
        "units (rollout.units) would keep more of them busy",
    )
    return "\n".join(lines)


def _enough_workers(times: Times, units: int, ahead: int) -> float:
    """How many workers generate a step's units, and load its weights, while the trainer updates.

    Infinity if there are none: only the units of ``ahead`` steps are in flight, so more workers have nothing to do.
    """
    left = times.update - times.load
    needed = max(1, math.ceil(units * times.unit / left)) if left > 0 else math.inf
    return needed if needed <= units * ahead else math.inf


def _range(low: float, high: float, shown: str) -> str:
    """Two numbers, or one if they look the same."""
    return " to ".join(dict.fromkeys(format(each, shown) for each in sorted((low, high))))


def require_fit(found: Plan, config: Config, ranks: int, device: Accelerator) -> None:
    """Refuse a plan that does not fit.

    Raises:
        PlanError: the plan does not fit; the message names keys that would make it fit, each of which was tried.
    """
    if found.fits:
        return
    if found.cache.rows < 1:
        reason = f"the engine's KV cache does not hold one row of {found.cache.length:,} tokens"
    else:
        card = max(found.cards, key=found.peak_of)
        where = f"on {device.name}" if card is None else f"on {card}, {device.name}"
        reason = f"a process needs {_gib(found.peak)} of {_gib(found.limit)} {where}"
    tried = remedies(config, ranks, device)
    words = "; or ".join(f"{' '.join(each.assignments)} ({_gib(each.plan.peak)})" for each in tried if each.plan.fits)
    if not words:
        near = f"; the closest was {' '.join(tried[0].assignments)} ({_gib(tried[0].plan.peak)})" if tried else ""
        words = f"more --ranks, a larger --device or a smaller model; keys that leave the algorithm alone do not{near}"
    raise PlanError(f"{reason}; what helps: {words}")


def _lines(found: Plan) -> Iterator[str]:
    mesh = " x ".join(f"{axis} {count}" for axis, count in found.mesh.items()) or "no mesh"
    yield f"plan of {found.ranks:,} process(es) on {found.device.name} ({mesh}), per process, full-length sequences:"
    phases: tuple[tuple[Phase, str], ...] = (
        ("always", "all the time"),
        ("rollout", "while rollouts are written"),
        ("update", "while they are learnt from"),
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
    whose = " of a worker" if "unit" in found.seconds else ""
    yield f"engine{whose}: {cache.rows:,} rows of {cache.length:,} tokens in {_gib(cache.size)} of KV cache{blocks}"
    yield f"update: {found.micro_batches} micro-batch(es) of at most {found.tokens:,} tokens, {found.flops:.3g} FLOPs"
    for collective, traffic in sorted(found.sent.items()):
        yield (
            f"  {collective.kind} over {collective.axis}: {traffic.calls:,} calls, {_gib(traffic.sent)} in a step "
            "(whole tensors)"
        )
    for part, (best, worst) in found.seconds.items():
        whole = " on a worker" if part == "unit" else " a step"
        yield f"{part}: {_seconds(best)} to {_seconds(worst)}{whole} (an estimate from data sheets)"
    for note in found.notes:
        yield f"note: {note}"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:,.2f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:,.0f} s"
