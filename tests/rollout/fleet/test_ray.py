"""Workers on a real Ray cluster on this machine: the same bits as one engine, also when a worker is killed, and no
process is left."""

import os
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

from helpers import flat, qwen3, small_qwen3, tokenizer
from local_workers import asked, bits, learnt
from tandemrl.config import ConfigError, RolloutConfig
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Engine, EngineDeadError, EngineError, generate_verified
from tandemrl.rollout.factory import ModelSource, make_engine
from tandemrl.rollout.fleet.engine import FleetEngine
from tandemrl.rollout.fleet.ray_workers import Cluster, RayWorkers, cards_of, parts_of, restored
from tandemrl.rollout.sync import sync_weights

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the ray extra")


@pytest.fixture
def pair_of_models(tmp_path: Path) -> Path:
    """Random models and their tokenizer, in folders from which workers can load them."""
    for name, model in (("senior", qwen3()), ("junior", small_qwen3())):
        model.save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    return tmp_path


def engine_of(pair: Path, workers: int, **settings: Any) -> Engine:
    rollout = RolloutConfig(workers=workers, unit_groups=2, ray="local", **settings)
    sources = [ModelSource(str(pair / who), partial(load_model, pair / who)) for who in ("senior", "junior")]
    return make_engine(rollout, sources[0], sources[1], load_tokenizer(pair / "senior"))


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
def test_two_workers_one_of_which_is_killed_give_the_bits_of_one_engine(pair_of_models: Path) -> None:
    """Before and after new weights; on 127.0.0.1 alone; nothing is left when it is closed."""
    given, alone = asked(max_tokens=24), engine_of(pair_of_models, 0)
    before = bits(alone.generate(given))
    checksum = sync_weights(learnt(load_model(pair_of_models / "senior")), alone, version=1)
    after = bits(alone.generate(given))
    fleet = engine_of(pair_of_models, 2)
    import ray  # not before: the fleet says first that it stays on this machine

    try:
        assert isinstance(fleet, FleetEngine)
        session = session_of_ray()
        assert processes_of(session)
        assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
        workers = [actor["Pid"] for actor in ray._private.state.actors().values()]
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in workers} == {os.getpriority(os.PRIO_PROCESS, 0)}
        assert bits(generate_verified(fleet, given, given[0].strategy)[0]) == before
        assert sync_weights(learnt(load_model(pair_of_models / "senior")), fleet, version=1) == checksum
        assert fleet.fingerprint("junior") == alone.fingerprint("junior")
        kill_at_the_first_unit(fleet)
        written = fleet.generate(given)
        assert bits(written) == after != before
        assert all(c.tokens.flags.writeable for c in flat(written))
        assert fleet.counts()["restarts"] == 1
    finally:
        fleet.close()
    assert not ray.is_initialized()
    assert gone(session)


@needs_ray
def test_a_silent_worker_is_restarted_or_an_error_with_its_cause(tmp_path: Path) -> None:
    import ray

    def unable() -> Any:
        raise EngineError("out of memory")

    class Silent:
        """When it is asked for the first time."""

        def answer(self, asked: str) -> str:
            if not Path(asked).exists():
                Path(asked).touch()
                time.sleep(600)
            return "here"

    workers = RayWorkers(unable, Cluster("local", 1), timeout_s=60.0)
    try:
        with pytest.raises(EngineDeadError, match=r"a rollout worker failed: ActorDiedError: .*out of memory"):
            workers.start()
        workers._timeout_s = 15.0
        actor = ray.remote(max_restarts=-1, max_task_retries=-1)(Silent).remote()
        assert workers._result(actor, actor.answer.remote(str(tmp_path / "asked")), tries=9) == "here"
        with pytest.raises(EngineError, match=r"no answer within 15 s, 1 times"):
            workers._result(actor, actor.answer.remote(str(tmp_path / "never")), tries=1)
    finally:
        workers.end()
        workers.close()


@needs_ray
def test_what_cannot_be_sent_to_workers_is_refused_and_no_cluster_is_left() -> None:
    why = "rollout.workers=1: .* cannot be sent to workers: TypeError: cannot pickle '_thread.lock' object; name one"
    with pytest.raises(ConfigError, match=why):
        RayWorkers(partial(print, Lock()), Cluster("local", 1))
    import ray

    assert not ray.is_initialized()


def kill_at_the_first_unit(fleet: FleetEngine) -> None:
    """Kill the process of the worker that gets the next unit, when it has it."""
    import ray

    workers = fleet._workers
    assert isinstance(workers, RayWorkers)
    result = workers._result

    def result_of_a_killed_worker(actor: Any, asked: Any, *, tries: int) -> Any:
        workers._result = result  # type: ignore[method-assign]
        ray.kill(actor, no_restart=False)
        return result(actor, asked, tries=tries)

    workers._result = result_of_a_killed_worker  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("visible", "trainers", "cards"),
    [("0,1,2,3", "3", ["3"]), ("4,5", "1", ["5"]), ("2", "1", ["2"]), ("0,1", "2", ["0", "1"])],
)
def test_workers_on_this_machine_get_the_gpus_that_trainers_leave(visible, trainers, cards, monkeypatch):
    """The last two: there are not enough, so they are shared."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", trainers)
    assert cards_of(Cluster("local", workers=1, gpus=1)) == cards
    assert cards_of(Cluster("local", workers=1)) is None


def test_weights_come_out_of_the_store_as_they_went_in() -> None:
    generator = torch.Generator().manual_seed(0)
    given = [
        ("scalar", torch.tensor(3.5)),
        ("bf16", torch.randn(5, 3, generator=generator).bfloat16()),
        ("view", torch.randn(4, 6, generator=generator).T),
        ("odd bytes", torch.arange(7, dtype=torch.int8)),
    ]
    parts = list(parts_of(given, limit=100))
    assert [[name for name, *_ in part] for part in parts] == [["scalar", "bf16", "view"], ["odd bytes"]]
    back = [named for part in parts for named in restored(part)]
    assert [name for name, _ in back] == [name for name, _ in given]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(given, back, strict=True))
