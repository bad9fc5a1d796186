"""Prints a plan, and refuses one that cannot fit."""

from collections.abc import Iterator

from tandemrl.apps.planning.accelerators import GIB, RESERVE, Accelerator
from tandemrl.apps.planning.knobs import remedies
from tandemrl.apps.planning.plan import Phase, Plan
from tandemrl.config import Config, ConfigError


class PlanError(ConfigError):
    """A run does not fit on the devices that it is planned for. The message names what would help."""


def described(found: Plan) -> str:
    """The plan as lines of text."""
    return "\n".join(_lines(found))


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
        reason = f"a process needs {_gib(found.peak)} of {_gib(found.limit)} on {device.name}"
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
    for phase, words in phases:
        for item in (each for each in found.items if each.phase == phase):
            yield f"  {_gib(item.size):>11}  {words}: {item.name}{' (host memory)' if item.on_host else ''}"
    limit = "not checked" if found.device.memory is None else f"{_gib(found.limit)} ({RESERVE:.0%} is left aside)"
    yield f"  {_gib(found.peak):>11}  at most on the device; limit: {limit}"
    cache = found.cache
    blocks = f" ({cache.blocks:,} blocks)" if cache.blocks else ""
    yield f"engine: {cache.rows:,} rows of {cache.length:,} tokens in {_gib(cache.size)} of KV cache{blocks}"
    yield f"update: {found.micro_batches} micro-batch(es) of at most {found.tokens:,} tokens, {found.flops:.3g} FLOPs"
    for collective, traffic in sorted(found.sent.items()):
        yield (
            f"  {collective.kind} over {collective.axis}: {traffic.calls:,} calls, {_gib(traffic.sent)} in a step "
            "(whole tensors)"
        )
    for part, (best, worst) in found.seconds.items():
        yield f"{part}: {_seconds(best)} to {_seconds(worst)} a step (an estimate from data sheets, never measured)"
    for note in found.notes:
        yield f"note: {note}"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:,.2f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:,.0f} s"
