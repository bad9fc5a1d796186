"""Faults of a real Ray cluster on this machine, at random moments of a run that its driver makes in another process.

The cluster has a head, on which the driver runs, and raylets with one processor each. ``FaultyRun`` starts the driver,
does to it, its workers and its nodes what a list of ``Fault`` says, and starts it again when it was killed. Beside the
files of the run there is then a journal, with what became of every unit and worker, from which ``consequences`` follow.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import psutil

Kind = Literal[
    "worker killed",
    "node killed",
    "node stopped",
    "node added",
    "driver killed",
    "object store full",
    "weights message lost",
]
STORE_BYTES = 100 * 2**20
NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": STORE_BYTES, "include_dashboard": False}
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
WORKER = "ray::RayWorker"
LOSS: Kind = "weights message lost"
AMID_S = 60.0
"""For so long a fault waits for a worker that has a unit."""

DRIVER = """
import json, os, sys, time
from pathlib import Path
from tandemrl.config import load
from tandemrl.rollout.fleet.dispatcher import Dispatcher
from tandemrl.rollout.fleet.ray_workers import RayWorkers
from tandemrl.training.async_rollouts import AsyncRollouts
from tandemrl.training.loop import train

config, here = sys.argv[1], Path(sys.argv[2])
journal, lose, allowed = open(here / "journal.jsonl", "a", buffering=1), here / "lose", here / "allowed"
handle, load_weights, start, take = Dispatcher.handle, RayWorkers.load, RayWorkers.start, AsyncRollouts.take
fleet = []

def process_of(number):
    from ray._private.state import actors
    return actors(fleet[0]._actors[number]._actor_id.hex())["Pid"]

def journaled(self, event, now):
    actions = handle(self, event, now)
    for each in (event, *actions):
        line = {"at": time.monotonic(), "driver": os.getpid(), "what": type(each).__name__}
        line |= {name: getattr(each, name) for name in ("worker", "unit", "attempt", "version", "why")
                 if hasattr(each, name)}
        if line["what"] == "Joined":
            line["process"] = process_of(each.worker)
        if line["what"] not in ("Tick", "Deliver"):
            journal.write(json.dumps(line) + "\\n")
    return actions

def load_or_not(self, number, version):
    if not lose.exists():
        return load_weights(self, number, version)
    lose.unlink()
    line = {"at": time.monotonic(), "driver": os.getpid(), "what": "NotSent", "worker": number}
    journal.write(json.dumps(line) + "\\n")

def started(self, number):
    fleet[:] = [self]
    start(self, number)

def take_if_allowed(self, step):
    while step > int(allowed.read_text()):
        time.sleep(0.05)
    return take(self, step)

Dispatcher.handle, RayWorkers.load, RayWorkers.start = journaled, load_or_not, started
AsyncRollouts.take = take_if_allowed
train(load(config), quiet=True)
"""


def steps_for(faults: int) -> int:
    return faults + 6


class Fault(NamedTuple):
    kind: Kind
    at_once: bool
    """It does not wait until there are as many workers as there shall be."""
    moment: float | None
    """When it comes in a step, as a fraction of its time. None = when a worker has a unit; then it hits that worker
    or its node, and the next fault waits until it is given up."""


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


@dataclass
class Done:
    """A fault that was made. ``hit``: the processes of the workers that it ended or stopped."""

    kind: Kind
    at: float
    step: int
    """How many were finished."""
    hit: list[int] = field(default_factory=list)


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
        self.done: list[Done] = []
        self.held: list[Any] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.peak_bytes = self.drivers = self.allowed = 0

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
                    self.until(self.with_a_unit, every_s=0.005, at_most_s=AMID_S)
                    self.make(fault.kind, self.with_a_unit())
                    self.until(lambda: not self.open_ends() - self.of_this_driver("NotSent").keys())
                else:
                    self.until(partial(passed, time.monotonic() + fault.moment * step_s))
                    self.make(fault.kind)
            self.allow(self.allowed + 1)  # with new weights, if they still have to be lost
            self.until(lambda: not self.lose.exists() and self.whole() and not self.open_ends())
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

    def journal(self) -> list[dict[str, Any]]:
        with suppress(OSError, ValueError):
            return [json.loads(line) for line in (self.here / "journal.jsonl").read_text().splitlines()]
        return []

    def of_this_driver(self, what: str) -> dict[int, Any]:
        return {
            line["worker"]: line for line in self.journal() if (line["driver"], line["what"]) == (self.driver.pid, what)
        }

    def with_a_unit(self) -> list[int]:
        """The processes of the workers that generate a unit now."""
        having, processes = dict[int, Any](), dict[int, int]()
        for line in self.journal():
            if line["driver"] != self.driver.pid:
                continue
            match line["what"]:
                case "Joined":
                    processes[line["worker"]] = line["process"]
                case "Assign":
                    having[line["worker"]] = line["unit"]
                case "Answered" if having.get(line["worker"]) == line["unit"]:
                    del having[line["worker"]]
                case "Fence":
                    having.pop(line["worker"], None)
        return [processes[worker] for worker in having]

    def whole(self) -> bool:
        """Whether there are as many workers as there shall be."""
        return len(self.of_this_driver("Joined").keys() - self.of_this_driver("Fence").keys()) == self.size

    def open_ends(self) -> set[int]:
        """The workers that a fault has hit, and that this driver has not given up so far."""
        hit = {process for done in self.done for process in done.hit}
        joined = self.of_this_driver("Joined").items()
        lost = {number for number, line in joined if line["process"] in hit} | self.of_this_driver("NotSent").keys()
        return lost - self.of_this_driver("Fence").keys()

    @property
    def lose(self) -> Path:
        return self.here / "lose"

    def tail(self) -> str:
        files = [self.here / "driver.log", self.here / "journal.jsonl"]
        return "\n".join(file.read_text(errors="replace")[-3000:] for file in files if file.exists())

    # ------------------------------------------------------------------------------------------------------- the faults

    def make(self, kind: Kind, targets: Sequence[int] = ()) -> None:
        """Make a fault. What hits a worker or its node takes one of ``targets``, or whichever if there are none."""
        done = Done(kind, time.monotonic(), len(self.times()))
        self.done.append(done)
        self.inflict(kind, done, targets)
        self.note_memory()
        with open(self.here / "faults.jsonl", "a") as file:
            file.write(json.dumps(asdict(done)) + "\n")

    def inflict(self, kind: Kind, done: Done, targets: Sequence[int]) -> None:
        match kind:
            case "worker killed":
                if workers := targets or workers_of(self.a_node()):
                    done.hit = [self.random.choice(workers)]
                    end(done.hit[0], signal.SIGKILL)
            case "node killed":
                node = self.a_node(targets)
                done.hit = workers_of(node)
                for each in (*children_of(node), raylet(node)):
                    end(each, signal.SIGKILL)
            case "node stopped":
                node = self.a_node(targets)
                done.hit = workers_of(node)
                self.stop([raylet(node), *done.hit])
            case "node added":
                self.cluster.add_node(**NODE, num_cpus=1, wait=False)
            case "driver killed":
                self.driver.kill()
                self.driver.wait()
                done.at = time.monotonic()
                self.start_driver()
            case "object store full":
                self.fill_stores()
            case "weights message lost":
                self.lose.touch()

    def a_node(self, targets: Sequence[int] = ()) -> Any:
        """One with a worker among these, or with any, if there is one."""
        nodes = [node for node in self.cluster.worker_nodes if alive(raylet(node))]
        hosts = {id(node): children_of(node) if targets else workers_of(node) for node in nodes}
        with_one = [node for node in nodes if set(hosts[id(node)]) & set(targets or hosts[id(node)])]
        return self.random.choice(with_one or nodes)

    def stop(self, processes: list[int]) -> None:
        for process in processes:
            end(process, signal.SIGSTOP)

        def go_on() -> None:
            for process in processes:
                end(process, signal.SIGCONT)

        self.later.append((time.monotonic() + self.stop_s, go_on))

    def fill_stores(self) -> None:
        """More than a store holds, in use, so that none of it can be moved to a disk: on the driver's node, and on that
        of a worker. Until the stores are filled the next time."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(self.a_node().node_id, soft=True)
        self.held = [fill(), ray.remote(num_cpus=0, scheduling_strategy=there)(Filler).remote()]

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

    def note_memory(self) -> None:
        """What all processes of the cluster and the run have, each shared page in part."""
        used = 0
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                used += process.memory_full_info().pss
        self.peak_bytes = max(self.peak_bytes, used)


class Filler:
    """An actor that fills the store of its node."""

    def __init__(self) -> None:
        self.kept = fill()


def fill() -> list[Any]:
    import ray

    references = [ray.put(np.ones(STORE_BYTES // 5, np.uint8)) for _ in range(6)]
    return [references, ray.get(references)]


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


def workers_of(node: Any) -> list[int]:
    """The processes of our workers on a node. Once they have started, only Ray knows which ones they are."""
    from ray._private.state import actors

    living = {actor["Pid"] for actor in actors().values() if actor["State"] == "ALIVE"}
    found = []
    for process in children_of(node):
        with suppress(psutil.Error):
            if process in living or psutil.Process(process).name().startswith(WORKER):
                found.append(process)
    return found


def end(process: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, how)


# ------------------------------------------------------------------------------------------------------ what it came to


def consequences(journal: list[dict[str, Any]], done: list[Done]) -> dict[str, Any]:
    """What became of each fault: the workers that were given up for it, and after how long; the units that they had,
    and after how long another worker had answered them. And how long workers took to start."""
    faults: list[dict[str, Any]] = [
        {"kind": d.kind, "after_step": d.step, "fenced_s": [], "redone_s": []} for d in done
    ]
    started: dict[Any, float] = {}
    cause: dict[Any, int] = {}
    had: dict[Any, Any] = {}
    lost: dict[Any, int] = {}
    starts = []
    for line in journal:
        worker = line["driver"], line.get("worker")
        unit = line["driver"], *line.get("unit", ())
        match line["what"]:
            case "Start":
                started[worker] = line["at"]
            case "Joined":
                starts.append(round(line["at"] - started[worker], 1))
                if hits := [i for i, d in enumerate(done) if line["process"] in d.hit]:
                    cause[worker] = hits[0]
            case "NotSent":
                cause[worker] = max(i for i, d in enumerate(done) if (d.kind, d.at < line["at"]) == (LOSS, True))
                done[cause[worker]].at = line["at"]
            case "Assign":
                had[worker] = unit
            case "Answered":
                if had.get(worker) == unit:
                    del had[worker]
                    if unit in lost:
                        i = lost.pop(unit)
                        faults[i]["redone_s"].append(round(line["at"] - done[i].at, 1))
            case "Fence" if worker in cause:
                faults[cause[worker]]["fenced_s"].append(round(line["at"] - done[cause[worker]].at, 1))
                if worker in had:
                    lost[had.pop(worker)] = cause[worker]
    return {"faults": faults, "worker_start_s": starts, "not_redone": len(lost)}
