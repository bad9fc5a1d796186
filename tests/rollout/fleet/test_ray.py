"""Workers on a real Ray cluster on this machine: the same bits as one engine, also when workers are killed, and runs that
end with all their processes."""

import os
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import flat
from tandemrl.config import RolloutConfig, load
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Engine, Request, Sampling, generate_verified
from tandemrl.rollout.factory import ModelSource, make_engine
from tandemrl.rollout.fleet.engine import FleetEngine
from tandemrl.rollout.fleet.ray_workers import RayWorkers
from tandemrl.rollout.schedule import schedule_of
from tandemrl.rollout.sync import sync_weights
from tandemrl.selection.draws import request_key

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the ray extra")


def engine_of(pair: Path, workers: int, **settings: Any) -> Engine:
    rollout = RolloutConfig(workers=workers, unit_groups=2, ray="local", **settings)
    sources = [ModelSource(str(pair / who), partial(load_model, pair / who)) for who in ("senior", "junior")]
    return make_engine(rollout, sources[0], sources[1], load_tokenizer(pair / "senior"))


def asked(pair: Path) -> list[Request]:
    tokenizer = load_tokenizer(pair / "senior")
    strategy = schedule_of(load().selection, tokenizer, len(tokenizer)).strategy(1)
    prompts = [tuple(tokenizer.encode(f"{i} + {i + 1} =")) for i in range(5)]
    keys = [tuple(request_key(0, 1, i, sample) for sample in range(2)) for i in range(5)]
    return [Request(p, k, Sampling(max_tokens=24), strategy) for p, k in zip(prompts, keys, strict=True)]


def bits(written: list[list[Any]]) -> list[Any]:
    return [
        (c.key, c.tokens.tolist(), c.author.tolist(), c.behaviour_logprobs.tolist(), c.policy_version)
        for c in flat(written)
    ]


def learnt(pair: Path) -> Any:
    model = load_model(pair / "senior")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    return model


def processes_of(session: Path) -> list[str]:
    """The command lines of processes that name a Ray session, but for this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if session.name in command:
                found.append(command)
    return found


def session_of_ray() -> Path:
    import ray

    return Path(ray._private.worker._global_node.get_session_dir_path())


def gone(session: Path, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while processes_of(session) and time.monotonic() < end:
        time.sleep(0.2)
    return not processes_of(session)


@needs_ray
def test_two_workers_one_of_which_is_killed_give_the_bits_of_one_engine(tiny_pair: Path) -> None:
    """Before and after new weights; on 127.0.0.1 alone; nothing is left when it is closed."""
    import ray

    requests, alone = asked(tiny_pair), engine_of(tiny_pair, 0)
    before = bits(alone.generate(requests))
    checksum = sync_weights(learnt(tiny_pair), alone, version=1)
    after = bits(alone.generate(requests))
    fleet = engine_of(tiny_pair, 2)
    try:
        assert isinstance(fleet, FleetEngine)
        session = session_of_ray()
        assert processes_of(session)
        assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
        assert bits(generate_verified(fleet, requests, requests[0].strategy)[0]) == before
        assert sync_weights(learnt(tiny_pair), fleet, version=1) == checksum
        assert fleet.fingerprint("junior") == alone.fingerprint("junior")
        kill_at_the_first_unit(fleet)
        written = fleet.generate(requests)
        assert bits(written) == after != before
        assert all(c.tokens.flags.writeable for c in flat(written))
        assert fleet.counts()["restarts"] == 1
        assert fleet.counts()["redone"] == 1
    finally:
        fleet.close()
    assert not ray.is_initialized()
    assert gone(session)


def kill_at_the_first_unit(fleet: FleetEngine) -> None:
    """Kill the process of the worker that gets the next unit, when it has it."""
    import ray

    workers = fleet._workers
    assert isinstance(workers, RayWorkers)
    generate = workers.generate

    def generate_and_die(number: int, *values: Any) -> None:
        workers.generate = generate  # type: ignore[method-assign]
        generate(number, *values)
        ray.kill(workers._actors[number])

    workers.generate = generate_and_die  # type: ignore[method-assign]
