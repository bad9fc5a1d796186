"""A run on a real Ray cluster of several nodes on this machine, with faults at random moments: it ends, and is the run
without them, bit for bit.

The cluster has a head, on which the driver of the run is, in a process of its own, and nodes with one processor each.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_ray import gone, session_of_ray

from runs import config, metrics
from tandemrl.config import to_yaml
from tandemrl.training.loop import train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs the ray extra")]
FAULTS = int(os.environ.get("TANDEMRL_FLEET_FAULTS", "12"))
KINDS = ("worker killed", "node killed", "node stopped", "driver killed", "weights lost")
STEPS, WORKERS, NODES, STOP_S = FAULTS + 6, 2, 3, 30.0
RUN = (
    *(f"train.steps={STEPS}", "train.eval_every=0", "data.eval=[]", "train.async_steps=1", "train.keep_exports=1"),
    "rollout.unit_groups=1",
)
NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 * 2**20, "include_dashboard": False}
SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1 alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 lets anybody else on a busy machine starve the workers
    # A node that does not answer is given up after 5 to 15 s.
    **{f"RAY_health_check_{name}_ms": value for name, value in (("initial_delay", "0"), ("period", "1000"))},
    **{"RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "5"},
}
DRIVER = """
import sys, time
from pathlib import Path
from tandemrl.config import load
from tandemrl.rollout.fleet.ray_workers import RayWorkers
from tandemrl.training.async_rollouts import AsyncRollouts
from tandemrl.training.loop import train

here, ask, take, stored = Path(sys.argv[1]), RayWorkers.ask, AsyncRollouts.take, {}

def told(self, number, weights, *unit):
    if weights.version not in stored and stored and (here / "lose").exists():  # so the worker has to load them
        (here / "lose").unlink()
        return ask(self, number, weights._replace(stored=stored[max(stored)]), *unit)
    stored[weights.version] = weights.stored
    return ask(self, number, weights, *unit)

def take_if_allowed(self, step):
    while step > int((here / "allowed").read_text()):
        time.sleep(0.05)
    return take(self, step)

RayWorkers.ask, AsyncRollouts.take = told, take_if_allowed
train(load(here / "config.yaml"), quiet=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors and nodes with one each, all on 127.0.0.1."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
        try:
            for _ in range(NODES):
                made.add_node(**NODE, num_cpus=1)
            ray.init(made.address, log_to_driver=False, logging_level="error", namespace="tandemrl")
            session = session_of_ray()
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
        assert gone(session)


class FaultyRun:
    """A run to which ``fault`` does something. stuck_s: nothing that is waited for takes so long, unless it hangs."""

    def __init__(self, cluster: Any, here: Path, stuck_s: float) -> None:
        self.cluster, self.here, self.stuck_s, self.random = cluster, here, stuck_s, random.Random(0)
        self.stopped: list[tuple[float, list[int]]] = []
        self.start()

    def start(self) -> None:
        with open(self.here / "driver.log", "ab") as log:
            command = [sys.executable, "-X", "faulthandler", "-c", DRIVER, str(self.here)]
            self.driver = subprocess.Popen(command, stdout=log, stderr=log)

    def allow(self, steps: int) -> None:
        (self.here / "new").write_text(str(steps))
        (self.here / "new").replace(self.here / "allowed")

    def until(self, holds: Callable[[], object]) -> None:
        """Wait, and look after the nodes: stopped ones go on in time, and those that have ended are replaced."""
        begun = time.monotonic()
        while not holds():
            tail = (self.here / "driver.log").read_text(errors="replace")[-6000:]
            assert self.driver.poll() is None, f"the driver has ended with {self.driver.returncode}: {tail}"
            assert time.monotonic() - begun < self.stuck_s, f"nothing for {self.stuck_s:.0f} s: {tail}"
            for node in [node for node in self.cluster.worker_nodes if not alive(raylet(node))]:
                self.cluster.remove_node(node, allow_graceful=False)
            for _ in range(NODES - len(self.cluster.worker_nodes)):
                self.cluster.add_node(**NODE, num_cpus=1, wait=False)
            self.go_on(time.monotonic())
            time.sleep(0.1)

    def go_on(self, now: float) -> None:
        for when, processes in [each for each in self.stopped if now >= each[0]]:
            self.stopped.remove((when, processes))
            signalled(processes, signal.SIGCONT)

    def times(self) -> list[float]:
        """Of the steps that are finished."""
        with suppress(OSError, ValueError):
            return [step["time/step"] for step in metrics(self.here / "run")]
        return []

    def fault(self, kind: str) -> None:
        nodes = [node for node in self.cluster.worker_nodes if alive(raylet(node))]
        node = self.random.choice([each for each in nodes if workers_of(each)] or nodes)
        if kind == "worker killed":
            signalled(workers_of(node)[:1], signal.SIGKILL)
        elif kind == "node killed":
            signalled([*children_of(node), raylet(node)], signal.SIGKILL)
        elif kind == "node stopped":
            self.stopped.append((time.monotonic() + STOP_S, [raylet(node), *workers_of(node)]))
            signalled(self.stopped[-1][1], signal.SIGSTOP)
        elif kind == "driver killed":
            self.driver.kill()
            self.driver.wait()
            self.start()
        else:
            (self.here / "lose").touch()


def test_a_run_with_faults_is_that_without(cluster: Any, tiny_pair: Path, tmp_path: Path) -> None:
    alone = train(config(tiny_pair, tmp_path / "alone", *RUN), quiet=True)
    begun, here = time.monotonic(), tmp_path / "here"  # on a busy machine, starting workers is what takes long
    subprocess.run([sys.executable, "-c", "import tandemrl.rollout.factory, ray"], check=True, timeout=600)
    timeout = 60 + 4 * (time.monotonic() - begun)
    fleet = (f"rollout.workers={WORKERS}", f"rollout.ray={cluster.address}", f"rollout.worker_timeout_s={timeout:.0f}")
    here.mkdir()
    (here / "config.yaml").write_text(to_yaml(config(tiny_pair, here / "run", *RUN, *fleet)))
    (here / "allowed").write_text("3")
    run = FaultyRun(cluster, here, 3 * timeout)
    try:
        run.until(lambda: len(run.times()) >= 3)
        step_s, kinds = max(run.times()), run.random.sample(KINDS, len(KINDS))
        for number in range(FAULTS):
            if run.random.random() < 0.75:  # else it comes before all workers are back
                run.until(lambda: len(living()) == WORKERS)
            run.allow(4 + number)
            moment = time.monotonic() + run.random.random() * step_s
            run.until(lambda moment=moment: time.monotonic() >= moment)
            run.fault(kinds[number % len(KINDS)])
        run.allow(FAULTS + 4)  # with new weights, if they still have to be lost
        run.until(lambda: not (here / "lose").exists())
        listening = listeners()
        run.allow(STEPS)
        assert run.driver.wait(run.stuck_s) == 0, (here / "driver.log").read_text(errors="replace")[-6000:]
    finally:
        run.driver.kill()
        run.driver.wait()
        run.go_on(float("inf"))
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    for file in ("samples.jsonl", f"hf/step_{STEPS}/model.safetensors"):
        assert (here / "run" / file).read_bytes() == (alone / file).read_bytes(), file
    assert sum(step["fleet/restarts"] for step in metrics(here / "run")) >= 1


def listeners() -> set[str]:
    """The addresses at which this process and those that it started listen."""
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = (each for process in everyone for each in process.net_connections("inet"))
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def alive(process: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def children_of(node: Any) -> list[int]:
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(raylet(node)).children(recursive=True)]
    return []


def living() -> list[int]:
    """The processes of our workers."""
    from ray._private.state import actors

    return [actor["Pid"] for actor in actors().values() if actor["State"] == "ALIVE"]


def workers_of(node: Any) -> list[int]:
    return sorted({*living()} & {*children_of(node)})


def signalled(processes: list[int], how: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, how)
