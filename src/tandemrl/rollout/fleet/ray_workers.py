"""Workers that are actors on a Ray cluster, and what an engine in one generates of a unit. This module alone imports
ray, when a cluster is needed.

Ray places the actors, restarts those that are lost and asks them again, and carries requests, completions and weights.
The weights of a version are put into its object store once, in parts; the workers of a node share its copy.
"""

import copy
import importlib.util
import os
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pickle import PicklingError
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandemrl.config import ConfigError
from tandemrl.config.hints import pip_install
from tandemrl.processes.world import environment
from tandemrl.rollout.engine import Completion, Engine, EngineDeadError, EngineError, EngineInfo, Passes, Request
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.rollout.spread import Rounds

INITIAL = -1
"""The version of the weights that workers start with."""
TRIES = 4  # of a unit, before the fleet gives up
PART_BYTES = 2**28  # what is copied at once on the way of the weights
LEAST_STORE_BYTES = 100 * 2**20  # Ray takes no less than 75 MB

Stored = tuple[str, str, tuple[int, ...], Any]
"""A tensor in the object store: its name, dtype, shape and bytes (a NumPy array, which Ray does not copy to read)."""
Acting = Callable[[], EpisodeRunner | None]
"""Makes what the authors of a worker take turns with; None = nothing."""


def require_ray(what: str) -> ModuleType:
    """Ray itself.

    Raises:
        ConfigError: it is not installed. The message says how to install it.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{what} needs Ray, which is not installed: {pip_install('ray')}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as will be the default
    import ray

    return ray


class Cluster(NamedTuple):
    """What to ask Ray for."""

    address: str
    """``rollout.ray``."""
    workers: int
    gpus: int = 0
    """Of each worker."""
    store_bytes: int | None = LEAST_STORE_BYTES
    """Of the object store, if the cluster is our own; None = as much as Ray thinks right."""


class Weights(NamedTuple):
    """Weights of the senior, which workers can load."""

    version: int
    stored: Any
    """What ``RayWorkers.put`` returned; None = those that workers start with."""
    checksum: int | None
    """None until a worker says it."""


class Described(NamedTuple):
    """What the engines of all workers have in common."""

    info: EngineInfo
    vocabulary: int
    context: int
    has_junior: bool
    policy_version: int
    """Of the weights that they start with."""
    senior: int
    """The fingerprint of these."""
    junior: int | None
    """That of the junior."""
    acts: bool
    """Whether the workers have an environment to take turns with."""


class Generated(NamedTuple):
    """What a worker has generated of a unit, or why it cannot, and what it cost."""

    version: int
    fingerprint: int
    """Of the weights that it has, read back."""
    described: Described
    process: str
    """Another one after each start of the worker."""
    load_s: float
    """What it took to load the weights; 0 if it had them."""
    unit_s: float
    completions: list[list[Completion]]
    passes: Passes
    tally: Mapping[str, int]
    """Of the turns that were taken with an environment."""
    failure: EngineError | None


class WorkerEngine:
    """The engine of a worker.

    Args:
        acting: what the authors take turns with; None = nothing.
    """

    def __init__(self, engine: Engine, acting: EpisodeRunner | None) -> None:
        self.engine, self.acting, self.process = engine, acting, uuid.uuid4().hex
        self._version, self._fingerprint = INITIAL, engine.fingerprint("senior")
        junior = engine.fingerprint("junior") if engine.has_junior else None
        told = (engine.info, engine.vocabulary, engine.context, engine.has_junior, engine.policy_version)
        self.described = Described(*told, self._fingerprint, junior, acts=acting is not None)

    def generate(
        self, version: int, weights: Iterable[tuple[str, Tensor]], requests: Sequence[Request], turns: bool
    ) -> Generated:
        """Generate a unit with the ``weights`` of this ``version``, which are loaded unless the engine has them.

        Args:
            turns: whether the authors take turns with the environment. Its episodes begin and end with the unit.

        Raises:
            EngineError: the weights do not fit, or the engine's process has ended.
        """
        begun = loaded = time.monotonic()
        if version != self._version:
            if version == INITIAL:
                raise EngineError("a worker does not go back to the weights that it started with")
            self.engine.load_weights(weights, version)
            self._version, self._fingerprint = version, self.engine.fingerprint("senior")
            loaded = time.monotonic()
        episodes = self.acting.episodes() if turns and self.acting is not None else None
        responder: dict[str, Any] = {} if episodes is None else {"responder": Rounds(episodes)}  # not all take turns
        completions, passes, failure = list[list[Completion]](), Passes(), None
        try:
            if requests:
                completions = self.engine.generate(requests, **responder)
                passes = self.engine.passes
        except EngineDeadError:
            raise  # so that the worker is lost, and another one generates the unit
        except EngineError as error:
            failure = error
        seconds, tally = (loaded - begun, time.monotonic() - loaded), {} if episodes is None else episodes.tally
        told = self._version, self._fingerprint, self.described, self.process, *seconds
        return Generated(*told, completions, passes, tally, failure)


class RayWorker:
    """The actor: an engine and an environment, made where it runs."""

    def __init__(self, make: Sequence[Any], path: Sequence[str], threads: int) -> None:
        import ray

        torch.set_num_threads(threads)
        sys.path += [folder for folder in path if folder not in sys.path]  # before what is in them is unpickled
        engine, acting = ray.get(make[0])
        self.own = WorkerEngine(engine(), None if acting is None else acting())

    def describe(self) -> tuple[Described, str]:
        return self.own.described, self.own.process

    def generate(self, version: int, parts: Sequence[Any], requests: Sequence[Request], turns: bool) -> Generated:
        import ray

        weights = (named for part in parts for named in restored(ray.get(part)))
        return self.own.generate(version, weights, requests, turns)


class RayWorkers:
    """Processes on Ray that each hold an engine, by number.

    Args:
        make: makes the engine of a worker there. It is pickled.
        cluster: with ``address`` "local", a cluster of our own on this machine, which ``close`` ends; with "auto", the
            cluster that Ray's own ``RAY_ADDRESS`` names, as it does within ``ray job submit``, and without it one of
            our own; else the cluster at this address.
        acting: makes what the authors take turns with in a worker. It is pickled, too.
        timeout_s: a worker that does not start or answer in this time is restarted.

    Raises:
        ConfigError: Ray is not installed, no cluster at the address lets us in, or something cannot be pickled.
    """

    def __init__(
        self, make: Callable[[], Engine], cluster: Cluster, acting: Acting | None = None, timeout_s: float = 600.0
    ) -> None:
        address = cluster.address
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or "local"
        if address == "local":  # then Ray takes 127.0.0.1 for this machine's address, and listens nowhere else
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by Ray: whoever shares the machine would starve them
        self._ray = require_ray(f"rollout.workers={cluster.workers}")
        self._ours = self._connect(cluster, address)
        self._size, self._timeout_s = cluster.workers, timeout_s
        self._actor = self._ray.remote(
            num_cpus=1,
            num_gpus=cluster.gpus,
            max_restarts=-1,
            max_task_retries=TRIES - 1,
            scheduling_strategy="SPREAD",
        )(RayWorker)
        try:
            self._make = self._ray.put((make, acting))
        except (TypeError, PicklingError) as error:
            if self._ours:
                self._ray.shutdown()
            raise ConfigError(
                f"rollout.workers={cluster.workers}: an engine or environment that was passed cannot be sent to "
                f"workers: {_why(error.__cause__ or error)}; name one as module:name, or set rollout.workers=0"
            ) from error
        self._actors: list[Any] = []

    def _connect(self, cluster: Cluster, address: str) -> bool:
        """Connect this process, unless it is. Returns whether it was not."""
        ray = self._ray
        if ray.is_initialized():
            return False
        if address != "local":
            try:
                ray.init(address, log_to_driver=False, logging_level="error", namespace="tandemrl")
            except (ConnectionError, ray.exceptions.RayError) as error:
                raise ConfigError(
                    f"rollout.ray={cluster.address}: no Ray cluster there lets this process in: {_why(error)}; start "
                    "one, and if it has a token, set RAY_AUTH_MODE=token and the same token here"
                ) from None
            return True
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False  # the variable of above, if ray was imported before (by vllm)
        cards = cards_of(cluster)  # of the cluster, not of this process
        with warnings.catch_warnings(), environment({"CUDA_VISIBLE_DEVICES": ",".join(cards)} if cards else {}):
            warnings.simplefilter("ignore")
            ray.init(
                "local",
                num_cpus=cluster.workers,
                object_store_memory=cluster.store_bytes and max(LEAST_STORE_BYTES, cluster.store_bytes),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                _node_ip_address="127.0.0.1",
            )
        return True

    def start(self) -> list[tuple[Described, str]]:
        """Start all of them. Returns ``described`` and ``process`` of their ``WorkerEngine``.

        Raises:
            EngineError: one does not start.
        """
        threads = torch.get_num_threads()
        self._actors = [self._actor.remote([self._make], sys.path, threads) for _ in range(self._size)]
        return [self._result(actor, actor.describe.remote(), tries=1) for actor in self._actors]

    def ask(self, number: int, weights: Weights, requests: Sequence[Request], turns: bool) -> Generated:
        """What ``WorkerEngine.generate`` of a worker returns.

        Raises:
            EngineDeadError: the worker fails; after a restart it may be asked again.
            EngineError: it is silent, however often it is restarted.
        """
        actor = self._actors[number]
        asked = actor.generate.remote(weights.version, weights.stored or [], requests, turns)
        told: Generated = self._result(actor, asked, tries=TRIES)
        return copy.deepcopy(told)  # no longer in Ray's memory, where its arrays could not be written to

    def _result(self, actor: Any, asked: Any, *, tries: int) -> Any:
        """What an actor answers. Ray asks it again when it was lost; one that is silent is restarted."""
        errors = self._ray.exceptions
        for _ in range(tries):
            try:
                return self._ray.get(asked, timeout=self._timeout_s)
            except errors.GetTimeoutError:
                self._ray.kill(actor, no_restart=False)
            except errors.RayError as error:
                raise EngineDeadError(f"a rollout worker failed: {_why(error)}") from None
        # Ray might still repeat the task, so it must not be asked for anew.
        raise EngineError(f"a rollout worker gave no answer within {self._timeout_s:g} s, {tries} times")

    def restart(self, number: int) -> None:
        self._ray.kill(self._actors[number], no_restart=False)

    def put(self, weights: Iterable[tuple[str, Tensor]]) -> list[Any]:
        """Keep weights for all workers, as long as there is a reference to what this returns."""
        return [self._ray.put(part) for part in parts_of(weights, PART_BYTES)]

    def end(self) -> None:
        """End all workers. What is still asked for fails."""
        for actor in self._actors:
            self._ray.kill(actor)

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()


def cards_of(cluster: Cluster) -> list[str] | None:
    """The GPUs that workers on this machine choose from: those that its trainer processes leave, if they are enough,
    else all. None = there is nothing to choose."""
    if not cluster.gpus:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    spare = cards[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :]  # a trainer has that of its local rank
    return spare if len(spare) >= cluster.workers * cluster.gpus else cards


def parts_of(weights: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[Stored]]:
    """Weights in parts of about ``limit`` bytes, as plain arrays in host memory."""
    part: list[Stored] = []
    size = 0
    for name, tensor in weights:
        host = tensor.detach().cpu().contiguous()
        dtype = str(host.dtype).removeprefix("torch.")
        part.append((name, dtype, tuple(host.shape), host.flatten().view(torch.uint8).numpy()))
        size += host.nbytes
        if size >= limit:
            yield part
            part, size = [], 0
    if part:
        yield part


def restored(part: Iterable[Stored]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a part. They are to be copied from, not written to."""
    for name, dtype, shape, data in part:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that they cannot be written to
            flat = torch.from_numpy(data)
        yield name, flat.view(getattr(torch, dtype)).view(shape)


def _why(error: BaseException) -> str:
    """What is worth telling of Ray's errors, which hold the other side's traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
