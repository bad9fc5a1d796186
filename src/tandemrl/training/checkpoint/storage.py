"""Atomic checkpoints of plain data, models and optimisers.

A checkpoint is a folder of four:

- ``state.pt``: plain data, as ``runs.save`` lists it.
- ``tensors/``: of the policy and the critic, the trained parameters, the saved buffers and the optimiser's moments
  (``tensors_of``). Every process writes its share, through ``torch.distributed.checkpoint``. Names and shapes are those
  of whole tensors, so that any mesh can read what any other wrote. Frozen parameters come from the model that a run is
  built from.
- ``config.yaml``: the resolved config.
- ``meta.json``: the step, the versions of the code, and the SHA-256 of every other file, so that one that differs from
  what was written is noticed before it is used.

It appears under its name when all of it is on disk (see ``files``). Rank 0 makes and renames the folder. If one process
fails, all of them raise.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tandemrl.config import Config, ConfigError, to_yaml
from tandemrl.config import load as load_yaml
from tandemrl.config.hints import no_folder
from tandemrl.files import NEW, begin, drop, publish, recover, versions
from tandemrl.processes.world import World
from tandemrl.training.state import Trained

FORMAT = 4
"""The version of the checkpoint format."""
_T = TypeVar("_T")
_STEP = re.compile(r"step_(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or continued from; the message names the file and the fix."""


class DamagedError(CheckpointError):
    """A file of a run differs from what was written. Another checkpoint may be undamaged."""


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

    Every process must call this. The files are written into a hidden folder beside it, synced to the disk, and renamed
    at the end, so a killed run leaves a whole checkpoint or none.

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
    path = Path(output_dir, "checkpoints", f"step_{step}")
    hidden = path.with_name(f"{NEW}{path.name}")
    tensors = tensors_of(parts or {})
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "state": dict(state)}, buffer)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(buffer.getvalue())):
        held = ", ".join(unsafe)
        raise CheckpointError(
            f"{path}: its state holds {held}; only tensors, numbers, strings, lists and dicts load again"
        )

    def make() -> None:
        if path.exists() and any(path.iterdir()):
            raise CheckpointError(f"{path} exists already: resume from the newest checkpoint, or move it elsewhere")
        recover(path.parent)  # the folder is this run's alone
        begin(path)
        (hidden / "state.pt").write_bytes(buffer.getvalue())
        (hidden / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    def put(hashes: dict[str, str]) -> None:
        if unseen := [name for name in hashes if not (hidden / name).is_file()]:
            raise CheckpointError(
                f"{hidden / unseen[0]}: written by another process, and not seen by process 0: output_dir must be on a "
                "file system that all nodes share"
            )
        meta = {"step": step, "processes": world.size, "versions": versions(), "files": hashes}
        (hidden / "meta.json").write_text(json.dumps(meta, indent=1))
        publish(path)
        for older in _steps(path.parent)[:-keep]:
            _remove(older, f"cannot be removed; {path} is complete")

    together = partial(in_every_process, path=path, world=world, writes=[*tensors.values()])
    try:
        together(lambda: make() if world.main else None)
        if tensors:
            together(lambda: save_tensors(hidden / "tensors", tensors, alone=world.size == 1))
        every = dict(chain.from_iterable(world.gather(together(lambda: hashes(hidden, world.rank)))))
        together(lambda: put(every) if world.main else None)
    except CheckpointError:
        if world.main:
            shutil.rmtree(hidden, ignore_errors=True)
        raise
    return path


def in_every_process(
    act: Callable[[], _T], path: str | Path, world: World, writes: Iterable[Tensor] | None = None
) -> _T:
    """Call ``act``, which reads or writes at ``path``, in every process. If one fails, all raise the same error.

    An exception that ends a process (KeyboardInterrupt, SystemExit) is passed on; ``recover`` later removes what a
    write left.

    Args:
        writes: the tensors that it writes. None: it reads.
    """
    result, failure, cause, rank = None, None, None, world.rank
    try:
        result = act()
    except (Exception, CheckpointException) as error:
        cause = error
        if isinstance(error, CheckpointException) and error.failures:
            rank = min(error.failures)
            cause = error.failures[rank][0]  # type: ignore[assignment]  # of any kind
        if not isinstance(cause, Exception):
            raise cause from None
        who = f"process {rank}: " if world.size > 1 else ""
        failure = cause if isinstance(cause, CheckpointError) else _failure(Path(path), cause, who, writes)
    try:
        failures = world.gather(failure)
    except RuntimeError as error:
        raise failure or CheckpointError(f"{path}: a process is gone or hangs ({_brief(error)})") from error
    if first_failure := next(filter(None, failures), None):
        raise first_failure from cause
    return result  # type: ignore[return-value]  # there is one, as nothing failed


def _failure(path: Path, error: Exception, who: str, writes: Iterable[Tensor] | None) -> CheckpointError:
    """Why ``path`` could not be read or written, and what to do about it."""
    if writes is None:
        return DamagedError(f"{path}: not readable: {who}{_brief(error)}")
    free = shutil.disk_usage(next(folder for folder in path.absolute().parents if folder.is_dir())).free
    needed = sum(tensor.numel() * tensor.element_size() for tensor in writes)
    # torch's writer reports a full disk as a RuntimeError of its own
    full = error.errno in (errno.ENOSPC, errno.EDQUOT) if isinstance(error, OSError) else free < needed
    fix = f"free space in {path.parent.parent} (hf/step_*, older checkpoints), lower train.keep_checkpoints, or move it"
    room = f". The disk is full: it takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free; {fix}" if full else ""
    return CheckpointError(
        f"{path}: not written, {who}{type(error).__name__}: {_brief(error)}{room}. What was there before is untouched"
    )


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
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    if reason := no_folder(folder):
        raise CheckpointError(f"output_dir={folder}: {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{folder}: another process is training there; choose another output_dir") from None
        os.register_at_fork(after_in_child=file.close)  # an engine that outlives a killed run must not hold the lock
        try:
            yield
        finally:
            with suppress(OSError):  # something else is in one of them by now
                if new and os.listdir(folder) == [".lock"]:
                    Path(file.name).unlink()
                    for each in new:
                        each.rmdir()


def latest(output_dir: str | Path) -> Path | None:
    """The checkpoint with the highest step, or None."""
    checkpoints = _steps(Path(output_dir, "checkpoints"))
    return checkpoints[-1] if checkpoints else None


def before(path: Path) -> Path | None:
    """The checkpoint before another one in the same folder, or None."""
    steps = _steps(path.parent)
    return steps[steps.index(path) - 1] if path in steps[1:] else None


def step_of(path: Path) -> int:
    """The step of a folder called step_N."""
    return int(path.name.removeprefix("step_"))


def load(path: str | Path, world: World = World()) -> dict[str, Any]:  # noqa: B008 - frozen
    """Load the state of one checkpoint, with tensors on the CPU. The file cannot execute code (``weights_only``).

    Raises:
        CheckpointError: it has another format.
        DamagedError: the file differs from what was written.
    """

    def read() -> dict[str, Any]:
        file = Path(path, "state.pt")
        verify(file.parent, [file.name])
        saved = torch.load(file, map_location="cpu", weights_only=True)
        if saved.get("format") != FORMAT:
            raise CheckpointError(
                f"{file}: format {saved.get('format')}, this version of tandemrl reads {FORMAT}: finish the run with "
                "the version that meta.json names, or start from its export (hf/step_N as model.senior) in another "
                "output_dir"
            )
        return dict(saved["state"])

    return in_every_process(read, path, world)


def load_parts(path: str | Path, parts: Mapping[str, Trained], world: World = World()) -> None:  # noqa: B008
    """Fill models and optimisers, in place, from a checkpoint that was written on any mesh. Every process must call
    this.

    Raises:
        CheckpointError: on every process, if the checkpoint cannot be read, or is not of these models and optimisers.
        DamagedError: on every process, if a file is missing, was added, or differs from what was written. Nothing has
            been filled then.
    """
    folder = Path(path)

    def compare() -> None:
        """Compare this process's part of the tensor files with their hashes."""
        written = [name for name in read_hashes(folder) if name.startswith("tensors/")]
        found = [str(file.relative_to(folder)) for file in folder.glob("tensors/*.distcp")]
        verify(folder, sorted({*written, *found})[world.rank :: world.size])

    in_every_process(compare, path, world)
    in_every_process(lambda: load_tensors(folder / "tensors", parts, alone=world.size == 1), path, world)


def load_config(path: str | Path) -> Config:
    """The resolved config that a checkpoint, or a run without one, was written with.

    Raises:
        CheckpointError: config.yaml is missing, or does not fit this version of the library.
        DamagedError: it differs from what was written.
    """
    file = Path(path, "config.yaml")
    if is_checkpoint(file.parent):
        verify(file.parent, [file.name])
    try:
        return load_yaml(file)
    except ConfigError as error:
        raise CheckpointError(f"{error}; was it written by another version of tandemrl?") from None


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
        _remove(path, f"cannot be removed, as train.keep_exports={keep} asks")
    return dropped


def _remove(path: Path, otherwise: str) -> None:
    try:
        drop(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {otherwise} ({error})") from error


def _steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder, including damaged ones, in the order of their steps."""
    return [path for path in numbered(folder) if is_checkpoint(path)]


def numbered(folder: Path) -> list[Path]:
    """The directories called step_N, in the order of their steps."""
    folders = [path for path in folder.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=step_of)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory holds a checkpoint or part of one. A config.yaml alone belongs to a run."""
    return any((path / name).exists() for name in ("state.pt", "tensors", "meta.json"))


# -------------------------------------------------------------------------------------------------------------- tensors


def tensors_of(parts: Mapping[str, Trained]) -> dict[str, Tensor]:
    """All tensors to store, not copies: ``PART/model/PARAMETER`` and ``PART/optimizer/PARAMETER/MOMENT``."""
    tensors: dict[str, Tensor] = {}
    for part, (module, optimizer) in parts.items():
        for name, tensor in _stored(module).items():
            tensors[f"{part}/model/{name}"] = tensor.detach()
            for moment, value in optimizer.state.get(tensor, {}).items():
                tensors[f"{part}/optimizer/{name}/{moment}"] = value.detach()
    return tensors


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Write named tensors. Unless ``alone``, every process must call this, each with its shards of the same tensors.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException: on every process, if one of them fails.
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that it is alone
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=alone)


def load_tensors(folder: Path, parts: Mapping[str, Trained], *, alone: bool) -> None:
    """Fill modules and optimisers, in place, with what ``save_tensors`` wrote. The hyperparameters of optimisers stay:
    they are the config's.

    torch's own ``get_optimizer_state_dict`` is not used: it fills an optimiser that has not stepped yet by stepping it,
    which would shift the bias correction of every later step.

    Raises:
        CheckpointError: the folder does not hold exactly these parts' tensors.
        torch.distributed.checkpoint.api.CheckpointException: on every process, if one of them cannot read.
    """
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    targets: dict[str, Tensor] = {}
    states: list[tuple[torch.optim.Optimizer, dict[Tensor, dict[str, Tensor]]]] = []
    for part, (module, optimizer) in parts.items():
        states.append((optimizer, {}))
        for name, tensor in _stored(module).items():
            targets[f"{part}/model/{name}"] = tensor.detach()
            for key in (key for key in stored if key.startswith(f"{part}/optimizer/{name}/")):
                entry, moment = stored[key], key.rpartition("/")[2]
                assert isinstance(entry, TensorStorageMetadata)
                targets[key] = states[-1][1].setdefault(tensor, {})[moment] = _like(tensor, entry)
    missing, more = set(targets) - set(stored), set(stored) - set(targets)
    if missing or more:
        raise CheckpointError(
            f"{folder.parent}: does not fit the model: missing {_listed(missing)}; not in the model or its optimiser "
            f"{_listed(more)}. It was written by a run with another model or other trained parameters"
        )
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(targets, storage_reader=reader, no_dist=alone)
    for optimizer, state in states:
        optimizer.state.clear()
        optimizer.state.update(state)


def _stored(module: nn.Module) -> dict[str, Tensor]:
    """The trained parameters and saved buffers by name, tied ones once. Copies that FSDP gathered are freed first."""
    tensors, seen = dict[str, Tensor](), set[int]()
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in seen and (value.requires_grad or not isinstance(value, nn.Parameter)):
            tensors[name] = value
        seen.add(id(value))
    return tensors


def _like(parameter: Tensor, entry: TensorStorageMetadata) -> Tensor:
    """An empty tensor for an optimiser's moment. It is sharded like the parameter if it has the parameter's shape."""
    dtype = entry.properties.dtype
    if entry.size == parameter.shape and parameter.ndim:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=dtype, device=parameter.device)  # a fused optimiser's step counts there


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3]) or "nothing"
    return f"{shown}, … ({len(names)})" if len(names) > 3 else shown


# --------------------------------------------------------------------------------------------------------------- hashes


def hashes(folder: Path, rank: int) -> list[tuple[str, str]]:
    """The names and hashes of the files that a process wrote: shards have its rank, rank 0 wrote all others."""
    own = [
        file
        for file in folder.rglob("*")
        if file.name.startswith(f"__{rank}_") or (rank == 0 and not file.name.startswith("__"))
    ]
    return [(str(file.relative_to(folder)), _digest(file)) for file in own if file.is_file()]


def read_hashes(folder: Path) -> dict[str, str]:
    """The hash of each file of a checkpoint.

    Raises:
        DamagedError: meta.json is missing, or has none.
    """
    file = folder / "meta.json"
    try:
        return dict(json.loads(file.read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{file}: missing, or without the hashes that it was written with ({error})") from None


def verify(folder: Path, names: Iterable[str]) -> None:
    """Compare files of a checkpoint with their hashes.

    Raises:
        DamagedError: a file is missing, was added, or differs from what was written; the message names the first one.
    """
    written = read_hashes(folder)
    for name in names:
        file = folder / name
        if not file.is_file():
            raise DamagedError(f"{file}: missing, but the checkpoint was written with it")
        if _digest(file) != written.get(name):
            raise DamagedError(f"{file}: added, or not as it was written (by the SHA-256 in meta.json)")


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
