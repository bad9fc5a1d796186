"""Faults of a real Ray cluster on this machine, at random moments of a run that its driver makes in another process.

The cluster has a head, on which the driver runs, and raylets with one processor each. ``FaultyRun`` starts the driver,
does to it, its workers and its nodes what a list of ``Fault`` says, and starts it again when it was killed.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import psutil

Kind = Literal["worker killed", "node killed", "node stopped", "driver killed", "weights lost"]
NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 * 2**20, "include_dashboard": False}
NODES = 3
SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1 alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 lets anybody else on a busy machine starve the workers
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}
"""With these, a node that does not answer is given up after 5 to 15 s."""
AMID_S = 60.0
"""For so long a fault waits for a unit that is asked for."""

DRIVER = """
import sys, threading, time
from pathlib import Path
from tandemrl.config import load
from tandemrl.rollout.fleet.ray_workers import RayWorkers
from tandemrl.training.async_rollouts import AsyncRollouts
from tandemrl.training.loop import train

config, here = sys.argv[1], Path(sys.argv[2])
lose, asking, allowed = here / "lose", here / "asking", here / "allowed"
ask, take, lock, running, stored = RayWorkers.ask, AsyncRollouts.take, threading.Lock(), set(), {}
asking.unlink(missing_ok=True)

def told(self, number, weights, *unit):
    with lock:
        running.add(number)
        asking.touch()
        if weights.version not in stored:  # so the worker has to load them
            if stored and lose.exists():
                lose.unlink()
                weights = weights._replace(stored=stored[max(stored)])
            else:
                stored[weights.version] = weights.stored
    try:
        return ask(self, number, weights, *unit)
    finally:
        with lock:
            running.remove(number)
            if not running:
                asking.unlink()

def take_if_allowed(self, step):
    while step > int(allowed.read_text()):
        time.sleep(0.05)
    return take(self, step)

RayWorkers.ask, AsyncRollouts.take = told, take_if_allowed
train(load(config), quiet=True)
"""


def steps_for(faults: int) -> int:
    return faults + 6


class Fault(NamedTuple):
    kind: Kind
    at_once: bool
    """It does not wait until there are as many workers as there shall be."""
    moment: float | None
    """When it comes in a step, as a fraction of its time. None = when a worker is asked for a unit."""


def drawn(count: int, seed: int) -> list[Fault]:
    """Faults of all kinds in a random order, each kind as often as the others. Some come amid a unit."""
    generator = random.Random(seed)
    kinds: list[Kind] = []
    while len(kinds) < count:
        kinds += generator.sample(get_args(Kind), len(get_args(Kind)))
    faults = []
    for kind in kinds[:count]:
        at_once, moment = generator.random() < 0.25, generator.random()
        amid = not at_once and generator.random() < 0.5
        faults.append(Fault(kind, at_once, None if amid else moment))
    return faults


class FaultyRun:
    """A run with faults.

    Args:
        cluster: the ``ray.cluster_utils.Cluster``, to which this process is connected.
        config: the file of the run's config, in a folder of its own.
        out: its ``output_dir``.
        workers: ``rollout.workers``.
        stop_s: for how long a node is stopped.
        stuck_s: nothing that is waited for takes so long, unless the run hangs.
    """

    def __init__(
        self, cluster: Any, config: Path, out: Path, *, workers: int, seed: int, stop_s: float, stuck_s: float
    ) -> None:
        self.cluster, self.config, self.out, self.size = cluster, config, out, workers
        self.stop_s, self.stuck_s = stop_s, stuck_s
        self.here, self.random = config.parent, random.Random(seed)
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.drivers = self.allowed = 0

    def finish(self, faults: list[Fault]) -> None:
        """Run to the end, of ``steps_for(faults)`` steps.

        Raises:
            AssertionError: the driver has ended with an error, or the run hangs.
        """
        self.allow(3)
        self.start_driver()
        try:
            self.until(lambda: len(self.times()) >= 3)
            step_s = max(self.times())
            for fault in faults:
                if not fault.at_once:
                    self.until(self.whole)
                    self.allow(self.allowed + 1)
                if fault.moment is None:
                    self.until((self.here / "asking").exists, every_s=0.005, at_most_s=AMID_S)
                else:
                    self.until(partial(passed, time.monotonic() + fault.moment * step_s))
                self.make(fault.kind)
            self.allow(self.allowed + 1)  # with new weights, if they still have to be lost
            self.until(lambda: not self.lose.exists())
            self.allow(10**9)
            assert self.driver.wait(self.stuck_s) == 0, self.tail()
        finally:
            self.driver.kill()
            self.driver.wait()
            for _, act in self.later:
                act()

    def until(self, holds: Callable[[], object], *, every_s: float = 0.1, at_most_s: float = math.inf) -> None:
        begun = time.monotonic()
        while not holds() and time.monotonic() - begun < at_most_s:
            code = self.driver.poll()
            assert code is None, f"the driver has ended with {code}: {self.tail()}"
            assert time.monotonic() - begun < self.stuck_s, f"nothing for {self.stuck_s:.0f} s: {self.tail()}"
            self.look_after_nodes()
            time.sleep(every_s)

    def allow(self, steps: int) -> None:
        self.allowed = steps
        (self.here / "new").write_text(str(steps))
        (self.here / "new").replace(self.here / "allowed")

    def start_driver(self) -> None:
        self.drivers += 1
        with open(self.here / "driver.log", "ab") as log:
            command = [sys.executable, "-X", "faulthandler", "-c", DRIVER, str(self.config), str(self.here)]
            self.driver = subprocess.Popen(command, stdout=log, stderr=log)

    def times(self) -> list[float]:
        """Of the steps that are finished."""
        with suppress(OSError, ValueError):
            return [json.loads(line)["time/step"] for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        return []

    def whole(self) -> bool:
        """Whether there are as many workers as there shall be."""
        return len(living()) == self.size

    @property
    def lose(self) -> Path:
        return self.here / "lose"

    def tail(self) -> str:
        return (self.here / "driver.log").read_text(errors="replace")[-6000:]

    # ------------------------------------------------------------------------------------------------------- the faults

    def make(self, kind: Kind) -> None:
        match kind:
            case "worker killed":
                if workers := workers_of(self.a_node()):
                    end(self.random.choice(workers), signal.SIGKILL)
            case "node killed":
                node = self.a_node()
                for each in (*children_of(node), raylet(node)):
                    end(each, signal.SIGKILL)
            case "node stopped":
                node = self.a_node()
                self.stop([raylet(node), *workers_of(node)])
            case "driver killed":
                self.driver.kill()
                self.driver.wait()
                self.start_driver()
            case "weights lost":
                self.lose.touch()

    def a_node(self) -> Any:
        """One with a worker, if there is one."""
        nodes = [node for node in self.cluster.worker_nodes if alive(raylet(node))]
        return self.random.choice([node for node in nodes if workers_of(node)] or nodes)

    def stop(self, processes: list[int]) -> None:
        for process in processes:
            end(process, signal.SIGSTOP)

        def go_on() -> None:
            for process in processes:
                end(process, signal.SIGCONT)

        self.later.append((time.monotonic() + self.stop_s, go_on))

    # ------------------------------------------------------------------------------------------------------ the cluster

    def look_after_nodes(self) -> None:
        """Let stopped ones go on in time, and replace those that have ended."""
        for when, act in [*self.later]:
            if time.monotonic() >= when:
                self.later.remove((when, act))
                act()
        for node in [*self.cluster.worker_nodes]:
            if not alive(raylet(node)):
                self.cluster.remove_node(node, allow_graceful=False)
        for _ in range(NODES - len(self.cluster.worker_nodes)):
            self.cluster.add_node(**NODE, num_cpus=1, wait=False)


def start_s() -> float:
    """How long a process takes here to import what a worker does. On a busy machine, it is all that faults wait for."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import tandemrl.rollout.factory, ray"], check=True, timeout=600)
    return time.monotonic() - begun


def passed(when: float) -> bool:
    return time.monotonic() >= when


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
    """Those on a node."""
    return sorted({*living()} & {*children_of(node)})


def end(process: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, how)
