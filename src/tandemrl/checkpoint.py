"""Atomic checkpoints, HF exports, and what makes a resumed run the same run.

Every directory appears under its name only when all of it is on disk: it is written beside its place under a hidden
name, synced, then renamed. What a killed process leaves behind is hidden; readers ignore it and ``recover`` tidies up.
"""

import fcntl
import json
import os
import platform
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandemrl.config import Config, ConfigError, difference, to_yaml
from tandemrl.config import load as load_yaml

_STEP = re.compile(r"step_(\d+)")
_NEW, _OLD = ".new-", ".old-"
_FREE_TO_CHANGE = {
    "output_dir",
    "train.save_every",
    "train.eval_every",
    "train.keep_checkpoints",
    "train.log_samples",
    "train.wandb",
    "train.wandb_project",
    "judge.url",
    "judge.api_key_env",
    "judge.backoff_s",
    "judge.timeout_s",
    "judge.concurrency",
}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or continued from; the message names the file and the fix."""


# Atomic files and directories ---------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write a file so that a crash leaves either the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_NEW}{path.name}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write into a hidden directory, then put it in place of ``path``.

    A new path appears in one rename. Replacing an existing directory takes two: the old one is set aside under a hidden
    name first, so a crash between the two leaves it there and ``recover`` puts it back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = path.with_name(f"{_NEW}{path.name}"), path.with_name(f"{_OLD}{path.name}")
    recover(path.parent)
    new.mkdir()
    fill(new)
    for folder, _, files in os.walk(new, topdown=False):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    _sync(path.parent)
    if old.exists():
        shutil.rmtree(old)


def recover(parent: Path) -> None:
    """Undo what a killed process left in ``parent``: half-written directories go, set-aside ones return to their name.

    Only the process that writes there may call it.
    """
    for entry in sorted(parent.glob(f"{_NEW}*")):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for entry in sorted(parent.glob(f"{_OLD}*")):
        home = entry.with_name(entry.name.removeprefix(_OLD))
        shutil.rmtree(entry) if home.exists() else os.rename(entry, home)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Checkpoints --------------------------------------------------------------------------------------------------------


def save(output_dir: str | Path, step: int, state: Mapping[str, Any], config: Config, keep: int) -> Path:
    """Write ``output_dir/checkpoints/step_N`` (state.pt, config.yaml, meta.json) and drop all but the newest ``keep``.

    Raises:
        CheckpointError: the state holds something other than tensors, numbers, strings and containers of them, or
            this step is already saved.
    """
    _require_plain(state, "state")
    path = Path(output_dir, "checkpoints", f"step_{step}")
    if path.exists():
        raise CheckpointError(f"{path} exists already: resume from the newest checkpoint, or discard_after() first")

    def fill(folder: Path) -> None:
        torch.save(dict(state), folder / "state.pt")
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        (folder / "meta.json").write_text(json.dumps({"step": step, "versions": versions()}, indent=1) + "\n")

    write_directory(path, fill)
    for older in _steps(path.parent)[:-keep]:
        _drop(older)
    return path


@contextmanager
def lock(output_dir: str | Path) -> Iterator[None]:
    """Hold a run's folder: a second process that writes there would tear its files.

    Raises:
        CheckpointError: another process holds it.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{folder}: another process is training there; choose another output_dir") from None
        yield


def latest(output_dir: str | Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    found = _steps(Path(output_dir, "checkpoints"))
    return found[-1] if found else None


def step_of(path: str | Path) -> int:
    """The step of a checkpoint folder, from its name.

    Raises:
        CheckpointError: the folder is not called step_N.
    """
    match = _STEP.fullmatch(Path(path).name)
    if match is None:
        raise CheckpointError(f"{path}: not a checkpoint folder; expected …/checkpoints/step_N")
    return int(match.group(1))


def load(path: str | Path) -> dict[str, Any]:
    """The state of one checkpoint, tensors on the CPU. Nothing in the file can execute code (``weights_only``).

    Raises:
        CheckpointError: there is no readable checkpoint at ``path``.
    """
    file = Path(path, "state.pt")
    if not file.is_file():
        raise CheckpointError(f"{path}: no checkpoint there (state.pt is missing); expected …/checkpoints/step_N")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{file}: not readable: {' '.join(str(error).split())[:300]}") from error
    assert isinstance(state, dict)
    return state


def load_config(path: str | Path) -> Config:
    """The resolved config that a checkpoint was written with.

    Raises:
        CheckpointError: config.yaml is missing or does not fit this version of the library.
    """
    file = Path(path, "config.yaml")
    if not file.is_file():
        raise CheckpointError(f"{path}: config.yaml is missing; not a checkpoint")
    try:
        return load_yaml(file)
    except ConfigError as error:
        raise CheckpointError(f"written by another version of tandemrl? {error}") from None


def discard_after(output_dir: str | Path, step: int) -> None:
    """Remove the checkpoints later than ``step``: a run that goes back must not find its abandoned future."""
    for path in reversed(_steps(Path(output_dir, "checkpoints"))):
        if step_of(path) > step:
            _drop(path)


def check_resume(stored: Config, current: Config) -> None:
    """Refuse to continue a run under another config; it would be neither run.

    ``train.steps`` may grow (under a constant learning rate), and what only decides where and how often things are
    written may change.

    Raises:
        CheckpointError: names every key that differs, with both values.
    """
    changed = {key: pair for key, pair in difference(stored, current).items() if key not in _FREE_TO_CHANGE}
    if current.train.steps > stored.train.steps and current.train.schedule == "constant":
        changed.pop("train.steps", None)
    if changed:
        listing = ", ".join(f"{key} (checkpoint {old!r}, now {new!r})" for key, (old, new) in changed.items())
        raise CheckpointError(
            f"the config differs from the checkpoint's: {listing}. Restore these values, or start over in another "
            "output_dir"
        )


def _steps(folder: Path) -> list[Path]:
    """Complete checkpoints in the order of their steps."""
    found = [path for path in folder.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def _drop(path: Path) -> None:
    """Remove a checkpoint; hidden first, so that no half-removed one is ever visible."""
    hidden = path.with_name(f"{_NEW}{path.name}")
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def _require_plain(value: Any, where: str) -> None:
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            _require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _require_plain(item, f"{where}[{i}]")
    else:
        raise CheckpointError(
            f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, lists and dicts only"
        )


# Random state, exports, provenance ----------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The global generators of Python, NumPy and torch (CUDA where it is in use) as plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one, on purpose
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Inverse of ``rng_state``."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def export_hf(model: Any, tokenizer: Any, path: str | Path, dtype: str | None = None) -> Path:
    """Write model and tokenizer as one HF folder, in one step, the weights in ``dtype`` (None: as they are)."""
    from transformers.utils import logging

    def fill(folder: Path) -> None:
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # they would break into the console of the run
        try:
            if dtype is None:
                model.save_pretrained(folder)
            else:
                _save_in(model, folder, getattr(torch, dtype))
        finally:
            if bars:
                logging.enable_progress_bar()
        tokenizer.save_pretrained(folder)

    write_directory(Path(path), fill)
    return Path(path)


def _save_in(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Like ``save_pretrained``, but in another dtype than the model's own, which its config then names."""
    own = model.config.dtype
    model.config.dtype = dtype
    try:
        model.save_pretrained(folder, state_dict={name: value.to(dtype) for name, value in model.state_dict().items()})
    finally:
        model.config.dtype = own


def versions() -> dict[str, str | bool | None]:
    """What produced a result: Python, libraries, and the git revision of this code (None when not from a checkout)."""
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    revision = _git("rev-parse", "HEAD") if tracked else None
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "tandemrl")},
        "git_revision": revision,
        "git_dirty": None if revision is None else bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        here = str(Path(__file__).parent)
        done = subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def truncate_jsonl(path: str | Path, last_step: int) -> int:
    """Drop the lines of later steps, and a torn last line, so that a resumed run writes no step twice. Atomic.

    Returns:
        The number of lines dropped.

    Raises:
        CheckpointError: a line other than the last is not JSON with a ``step``.
    """
    source = Path(path)
    if not source.is_file():
        return 0
    temporary = source.with_name(f"{_NEW}{source.name}")
    dropped, torn = 0, 0
    with open(source, encoding="utf-8", errors="replace") as lines, open(temporary, "w", encoding="utf-8") as kept:
        for number, line in enumerate(lines, 1):
            if torn:
                raise CheckpointError(f"{source}: line {torn} is not a JSON object with a step; repair or remove it")
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                torn = number
                continue
            if step > last_step:
                dropped += 1
            else:
                kept.write(line if line.endswith("\n") else f"{line}\n")
        kept.flush()
        os.fsync(kept.fileno())
    os.replace(temporary, source)
    _sync(source.parent)
    return dropped + bool(torn)
