"""Atomic checkpoints of plain data, models and optimisers.

A checkpoint is ``state.pt`` (plain data), ``tensors/`` (models and optimisers, see ``tensors``; every process
writes its share), ``config.yaml`` and ``meta.json`` (with the hashes of the others, see ``manifest``). ``runs.save``
decides what of a run goes into it. It appears under its name when all of it is on disk (see ``files``). Rank 0 makes
and renames the folder. If one process fails, all of them raise.
"""

import errno
import fcntl
import io
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from tandemrl.config import Config, ConfigError, to_yaml
from tandemrl.config import load as load_yaml
from tandemrl.config.hints import no_folder
from tandemrl.files import NEW, begin, drop, publish, recover, versions
from tandemrl.processes.world import World
from tandemrl.training.checkpoint import manifest
from tandemrl.training.checkpoint.manifest import CheckpointError, DamagedError
from tandemrl.training.checkpoint.tensors import load_tensors, save_tensors, tensors_of
from tandemrl.training.state import Trained

FORMAT = 4
"""The version of the checkpoint format."""
_T = TypeVar("_T")
_STEP = re.compile(r"step_(\d+)")
_CONTENT = ("state.pt", "tensors", "config.yaml", "meta.json")


def save(
    output_dir: str | Path,
    step: int,
    state: Mapping[str, Any],
    config: Config,
    keep: int,
    *,
    parts: Mapping[str, Trained] | None = None,
    world: World = World(),  # noqa: B008 - frozen
) -> Path:
    """Write ``output_dir/checkpoints/step_N``, then remove all but the newest ``keep`` checkpoints.

    Every process must call this.

    Args:
        state: plain data (what ``torch.load`` reads with ``weights_only``), the same in all processes. Rank 0 writes
            its own.
        keep: how many checkpoints to keep.
        parts: models and optimisers by name, sharded or not.

    Returns:
        The folder.

    Raises:
        CheckpointError: on every process, if the state holds something other than tensors, numbers, strings and
            containers of them, if this step is already saved, or if a process cannot write (its disk is full, or it
            does not see output_dir). Earlier checkpoints stay.
    """
    parts = parts or {}
    path = Path(output_dir, "checkpoints", f"step_{step}")
    hidden = path.with_name(f"{NEW}{path.name}")
    plain = {"format": FORMAT, "state": dict(state)}
    tensors = tensors_of(parts)
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(buffer.getvalue())):
        held = ", ".join(unsafe)
        raise CheckpointError(
            f"{path}: its state holds {held}; only tensors, numbers, strings, lists and dicts load again"
        )
    files = {"state.pt": buffer.getvalue(), "config.yaml": to_yaml(config).encode()}
    needed = size_in_bytes(tensors.values()) + sum(map(len, files.values()))

    def make() -> None:
        if path.exists() and not _is_empty(path):
            advice = "resume from the newest checkpoint, or discard_after() first"
            advice = advice if is_checkpoint(path) else "it holds no checkpoint; move it elsewhere"
            raise CheckpointError(f"{path} exists already: {advice}")
        recover(path.parent)  # the folder is this run's alone
        begin(path)

    def fill() -> None:
        _wait_for_folder(hidden, world)
        if tensors:
            save_tensors(hidden / "tensors", tensors, alone=world.size == 1)
        if world.main:
            for name, content in files.items():
                (hidden / name).write_bytes(content)

    def put() -> None:
        meta = {"step": step, "processes": world.size, "versions": versions(), "files": hashes}
        (hidden / "meta.json").write_text(json.dumps(meta, indent=1))
        publish(path)
        for older in _steps(path.parent)[:-keep]:
            try:
                drop(older)
            except OSError as error:
                raise CheckpointError(f"{older}: cannot be removed ({error}); {path} is complete") from error

    together = partial(_together, path=path, needed=needed, world=world)
    together(lambda: make() if world.main else None)
    together(fill)
    hashes = dict(chain.from_iterable(together(lambda: manifest.hashes(hidden, world.rank))))
    together(lambda: put() if world.main else None)
    return path


def _together(act: Callable[[], _T], *, path: Path, needed: int, world: World) -> list[_T]:
    """Call ``act``, which writes ``path``, in every process. If it fails in one of them, all raise the same error, and
    the hidden folder is removed.

    An exception that ends a process (KeyboardInterrupt, SystemExit) is passed on; ``recover`` later removes the
    hidden folder.

    Returns:
        what ``act`` returned in each process.
    """
    result, failure, cause, lost = None, None, None, False
    try:
        result = act()
    except (Exception, CheckpointException) as error:
        rank, cause = _cause(error, world.rank)
        if not isinstance(cause, Exception):
            raise cause from None
        lost = cause is error and isinstance(error, RuntimeError) and not isinstance(error, CheckpointError)
        failure = write_failure(cause, path, needed, f"process {rank}: " if world.size > 1 else "")
    try:
        results = world.gather((result, failure))
    except RuntimeError as error:
        if failure is None or lost:
            failure = f"{path}: not written: a process is gone or hangs ({_brief(error)})"
        raise CheckpointError(failure) from error
    if first := next((failure for _, failure in results if failure), None):
        if world.main:
            shutil.rmtree(path.with_name(f"{NEW}{path.name}"), ignore_errors=True)
        raise CheckpointError(first) from cause
    return [result for result, _ in results]


def write_failure(error: Exception, path: Path, needed: int, who: str = "") -> str:
    """A message that says why ``path``, of ``needed`` bytes, could not be written, and what to do about it."""
    if isinstance(error, CheckpointError):
        return str(error)
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        free = needed
    # torch's writer reports a full disk as a RuntimeError of its own
    full = error.errno in (errno.ENOSPC, errno.EDQUOT) if isinstance(error, OSError) else free < needed
    if not full:
        return f"{path}: not written ({who}{type(error).__name__}: {_brief(error)}). What was there before is untouched"
    return (
        f"{path}: not written, the disk is full ({who}{_brief(error)}). It takes {needed / 1e9:.3g} GB, "
        f"{free / 1e9:.3g} GB are free: free space in {path.parent.parent} (hf/step_*, older checkpoints), lower "
        "train.keep_checkpoints, or move output_dir. What was there before is untouched"
    )


def size_in_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _cause(error: BaseException, rank: int) -> tuple[int, BaseException]:
    """The rank of the process that failed first, and its error."""
    if isinstance(error, CheckpointException) and error.failures:
        first = min(error.failures)
        return first, error.failures[first][0]
    return rank, error


def _wait_for_folder(folder: Path, world: World, seconds: float = 20.0) -> None:
    """Wait until a folder that rank 0 made is visible, which takes a while on network file systems."""
    end = time.monotonic() + seconds
    while not folder.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{folder}: made by process 0, but process {world.rank} on {platform.node()} does not see it: "
                "output_dir must be on a file system that all nodes share"
            )
        time.sleep(0.1)


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@contextmanager
def lock(output_dir: str | Path) -> Iterator[None]:
    """A context that locks the folder of a run, since a second process that writes there would corrupt its files.

    The folder is made, and removed again if nothing was written there.

    Raises:
        CheckpointError: another process holds it, or it is a file.
    """
    folder = Path(output_dir)
    path, new = folder / ".lock", [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    if reason := no_folder(folder):
        raise CheckpointError(f"output_dir={folder}: {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{folder}: another process is training there; choose another output_dir") from None
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise CheckpointError(f"{folder}: another process has just ended there; start again")
        os.register_at_fork(after_in_child=file.close)  # an engine that outlives a killed run must not hold the lock
        try:
            yield
        finally:
            with suppress(OSError):
                if new and os.listdir(folder) == [path.name]:
                    path.unlink()
                    for each in new:
                        each.rmdir()


def latest(output_dir: str | Path) -> Path | None:
    """The checkpoint with the highest step, or None."""
    checkpoints = _steps(Path(output_dir, "checkpoints"))
    return checkpoints[-1] if checkpoints else None


def older(path: str | Path) -> list[Path]:
    """The checkpoints of lower steps in the same folder, newest first. A path that is not called step_N has none."""
    if not _STEP.fullmatch(Path(path).name):
        return []
    return [other for other in reversed(_steps(Path(path).parent)) if step_of(other) < step_of(path)]


def step_of(path: str | Path) -> int:
    """The step of a checkpoint folder, from its name.

    Raises:
        CheckpointError: the folder is not called step_N.
    """
    match = _STEP.fullmatch(Path(path).name)
    if match is None:
        raise CheckpointError(f"{path}: not a checkpoint folder; expected …/checkpoints/step_N")
    return int(match.group(1))


def load(path: str | Path, world: World = World()) -> dict[str, Any]:  # noqa: B008 - frozen
    """Load the state of one checkpoint, with tensors on the CPU. The file cannot execute code (``weights_only``).

    Raises:
        CheckpointError: there is no readable checkpoint at ``path``, or it has another format.
        DamagedError: the file differs from what was written.
    """
    return in_every_process(lambda: _read_state(Path(path))["state"], path, world)


def load_parts(path: str | Path, parts: Mapping[str, Trained], world: World = World()) -> None:  # noqa: B008
    """Fill models and optimisers, in place, from a checkpoint that was written on any mesh. Every process must call
    this.

    Raises:
        CheckpointError: on every process, if the checkpoint cannot be read, or is not of these models and optimisers.
        DamagedError: on every process, if a file is missing, was added, or differs from what was written. Nothing has
            been filled then.
    """
    folder = Path(path)
    in_every_process(lambda: _verify_tensors(folder, world), path, world)
    in_every_process(lambda: load_tensors(folder / "tensors", parts, alone=world.size == 1), path, world)


def verify(path: str | Path) -> None:
    """Read a whole checkpoint in one process, and compare it with its hashes.

    Raises:
        CheckpointError: it cannot be read, or differs from what was written.
    """
    load(path)
    load_config(path)
    _verify_tensors(Path(path), World())


def in_every_process(act: Callable[[], _T], path: str | Path, world: World) -> _T:
    """Call ``act``, which reads or writes at ``path``, in every process. If one fails, all raise the same error."""
    result, failure = None, None
    try:
        result = act()
    except (Exception, CheckpointException) as error:
        _, cause = _cause(error, world.rank)
        if not isinstance(cause, Exception):
            raise cause from None
        known = isinstance(cause, CheckpointError)
        failure = cause if known else DamagedError(f"{path}: not readable: {_brief(cause)}")
    if first := next(filter(None, world.gather(failure)), None):
        raise first
    return result  # type: ignore[return-value]  # there is one, as nothing failed


def _verify_tensors(path: Path, world: World) -> None:
    """Compare this process's share of the tensor files with their hashes."""
    hashes = {name: value for name, value in manifest.read_hashes(path).items() if name.startswith("tensors/")}
    manifest.refuse_others(path, "tensors/*.distcp", hashes)
    manifest.verify(path, {name: hashes[name] for name in sorted(hashes)[world.rank :: world.size]})


def _read_state(path: Path) -> dict[str, Any]:
    file = path / "state.pt"
    if not file.is_file():
        if is_checkpoint(path):
            raise DamagedError(f"{file}: missing, but the checkpoint was written with it")
        raise CheckpointError(f"{path}: no checkpoint there (state.pt is missing); expected …/checkpoints/step_N")
    content = manifest.read_bytes(file)
    try:
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise DamagedError(f"{file}: not readable: {_brief(error)}") from error
    version = saved.get("format", 1) if isinstance(saved, dict) else None
    if version != FORMAT:
        raise CheckpointError(
            f"{file}: format {version}, this version of tandemrl reads {FORMAT}: finish the "
            "run with the version that meta.json names, or start again from its export (hf/step_N as model.senior) in "
            "another output_dir"
        )
    if not manifest.read_hashes(path):
        raise DamagedError(f"{path / 'meta.json'}: missing, or without the hashes that it was written with")
    return saved


def load_config(path: str | Path) -> Config:
    """The resolved config that a checkpoint was written with.

    Raises:
        CheckpointError: config.yaml is missing or does not fit this version of the library.
    """
    file = Path(path, "config.yaml")
    if not file.is_file():
        raise CheckpointError(f"{path}: config.yaml is missing; not a checkpoint")
    manifest.read_bytes(file)
    try:
        return load_yaml(file)
    except ConfigError as error:
        raise CheckpointError(f"written by another version of tandemrl? {error}") from None


def discard_after(output_dir: str | Path, step: int) -> None:
    """Remove the checkpoints and exports after ``step``, so that a run that goes back does not find them later.

    Folders of other names, and folders that are not checkpoints, stay.
    """
    for path in [*reversed(_steps(Path(output_dir, "checkpoints"))), *numbered(Path(output_dir, "hf"))]:
        if step_of(path) > step:
            drop(path)


def drop_exports(output_dir: str | Path, keep: int) -> list[Path]:
    """Remove all exports ``hf/step_N`` except the newest ``keep`` and those whose checkpoint still exists.

    Returns:
        The folders that were removed.

    Raises:
        CheckpointError: a folder cannot be removed.
    """
    exports = numbered(Path(output_dir, "hf"))
    kept = {path.name for path in (*exports[-keep:], *_steps(Path(output_dir, "checkpoints")))}
    dropped = [path for path in exports if path.name not in kept]
    for path in dropped:
        try:
            drop(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed ({error}), as train.keep_exports={keep} asks") from error
    return dropped


def _steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, including damaged ones, in the order of their steps."""
    return [path for path in numbered(folder) if is_checkpoint(path)]


def numbered(folder: Path) -> list[Path]:
    """The directories called step_N, in the order of their steps."""
    folders = [path for path in folder.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=step_of)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory holds a checkpoint or part of one. A config.yaml alone belongs to a run."""
    return any((path / name).exists() for name in _CONTENT if name != "config.yaml")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
