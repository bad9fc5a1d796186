"""The fleet of rank 0 serves all processes: what they get, in which order, and that a slow rollout is no hang."""

import copy
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import local_workers
import runs
from helpers import flat, tokenizer
from local_workers import LocalWorkers, bits, learnt, make, models
from processes import run
from tandemrl.config import ParallelConfig
from tandemrl.processes.world import World, init_world
from tandemrl.rollout.engine import Completion, Engine, EngineError, Request
from tandemrl.rollout.fleet.engine import FleetEngine
from tandemrl.rollout.spread import SpreadEngine
from tandemrl.rollout.sync import sync_weights
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.training.async_rollouts import AsyncRollouts
from tandemrl.training.loop import train


def asked(step: int, max_tokens: int = 10) -> list[Request]:
    made = local_workers.asked(4, max_tokens)
    return [replace(request, keys=tuple(key + 1000 * step for key in request.keys)) for request in made]


def shared() -> tuple[FleetEngine, World]:
    world = init_world(ParallelConfig(timeout_s=60.0), torch.device("cpu"))
    workers = LocalWorkers(make, size=2) if world.main else None
    return FleetEngine(workers, size=2, unit_groups=2, world=world), world


class Ahead(AsyncRollouts):
    """Three steps ahead, of made-up requests and without a policy."""

    def __init__(self, fleet: FleetEngine) -> None:
        train = SimpleNamespace(async_steps=3, prompts_per_step=1)
        sampler = SimpleNamespace(next=lambda count: [0])
        run: Any = SimpleNamespace(
            setup=SimpleNamespace(config=SimpleNamespace(train=train)),
            models=SimpleNamespace(engine=fleet, policy=nn.Module()),
            progress=SimpleNamespace(sampler=sampler, rollouts_in_flight=[]),
        )
        super().__init__(run, None, None)  # type: ignore[arg-type]  # stand-ins

    def generate(self, step: int, examples: Any, drawn: int = 0, engine: Any = None) -> Any:
        return engine.generate(asked(step))


def rolled_out() -> dict[str, Any]:
    """In one of the processes: rollouts of three steps at once, with the weights of now; then newer weights."""
    fleet, world = shared()
    assert isinstance(fleet, Engine)
    found: dict[str, Any] = {"first": bits(fleet.generate(asked(0)))}
    with Ahead(fleet) as rollouts:
        rollouts.start_until(1, 3)
        found["checksum"] = sync_weights(learnt(models()[0]), fleet, version=4)
        # `generate` above gives plain completions.
        found |= {f"step {step}": bits(rollouts.take(step)[0]) for step in (1, 2, 3)}  # type: ignore[arg-type]
    found["after"] = bits(fleet.generate(asked(4)))
    found["passes"] = fleet.passes
    try:
        fleet.generate([replace(asked(5)[0], prompt=())])
    except EngineError as error:
        found["refused"] = str(error)
    found["again"] = bits(fleet.generate(asked(4)))
    found["counted"] = fleet.counts()["units"] > 0
    fleet.close()
    return found | {"main": world.main}


def test_all_processes_get_what_the_fleet_of_rank_0_generates() -> None:
    one, other = run(rolled_out, 2)
    assert (one.pop("main"), other.pop("main"), one.pop("counted"), other.pop("counted")) == (True, False, True, False)
    assert "prompt" in one["refused"]
    assert other.pop("refused") == f"rank 0: {one.pop('refused')}"
    assert one == other
    alone = SpreadEngine(make(), unit_groups=2)
    assert one["first"] == bits(alone.generate(asked(0)))
    for step in (1, 2, 3):
        assert one[f"step {step}"] == bits(alone.generate(asked(step)))
    assert one["checksum"] == sync_weights(learnt(models()[0]), alone, version=4)
    assert one["after"] == one["again"] == bits(alone.generate(asked(4)))
    assert one["passes"] == alone.passes


def failed_before() -> dict[str, Any]:
    """In one of the processes: steps 1 to 3, of which step 2 fails before it generates."""
    fleet, _ = shared()

    class Failing(Ahead):
        def generate(self, step: int, *given: Any, **options: Any) -> Any:
            if step == 2:
                raise EngineError("row 7 cannot begin")
            return [c.tokens.tolist() for c in flat(super().generate(step, *given, **options))]

    found: dict[str, Any] = {}
    with Failing(fleet) as rollouts:
        rollouts.start_until(1, 3)
        for step in (1, 2, 3):
            try:
                found[f"step {step}"], _ = rollouts.take(step)
            except EngineError as error:
                found[f"step {step}"] = str(error)
    fleet.close()
    return found


def test_a_step_that_fails_before_it_generates_fails_everywhere() -> None:
    alone = SpreadEngine(make(), unit_groups=2)
    right = {f"step {step}": [c.tokens.tolist() for c in flat(alone.generate(asked(step)))] for step in (1, 2, 3)}
    for rank, found in enumerate(run(failed_before, 2)):
        assert found == right | {"step 2": ("rank 0: " if rank else "") + "row 7 cannot begin"}


class Slow(TorchEngine):
    """Takes longer for a rollout than a collective may."""

    def generate(self, *given: Any, **options: Any) -> list[list[Completion]]:
        time.sleep(5)
        return super().generate(*given, **options)


def waited() -> int:
    """In one of the processes."""
    world = init_world(ParallelConfig(timeout_s=3.0), torch.device("cpu"))
    slow = LocalWorkers(lambda: Slow(*copy.deepcopy(models()), tokenizer()))
    fleet = FleetEngine(slow if world.main else None, size=1, unit_groups=8, world=world)
    count = len(flat(fleet.generate(asked(0, 4))))
    fleet.close()
    return count


def test_a_rollout_may_take_longer_than_a_collective() -> None:
    assert run(waited, 2) == [8, 8]


def trained(pair: str, out: str, *overrides: str) -> None:
    """In one of the processes."""
    train(runs.config(Path(pair), Path(out), *overrides), quiet=True)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the ray extra")
def test_two_processes_train_with_the_workers_of_one(tiny_pair: Path, tmp_path: Path) -> None:
    keys = ("train.steps=3", "train.eval_every=2", "rollout.unit_groups=2", "rollout.workers=2", "train.async_steps=1")
    alone, together = tmp_path / "alone", tmp_path / "together"
    trained(str(tiny_pair), str(alone), *keys)
    run(trained, 2, str(tiny_pair), str(together), *keys, "parallel.dp_shard=2", timeout=600)
    first, other = ([line for line in runs.samples(out) if line["step"] < 3] for out in (alone, together))
    assert first == other  # of the weights that both begin with
    for line, its in zip(runs.metrics(alone), runs.metrics(together), strict=True):
        for name in ("reward/mean", "fleet/staleness", "loss"):
            assert line[name] == pytest.approx(its[name], rel=1e-4, abs=1e-5), name
    assert len(runs.metrics(together)) == 3
