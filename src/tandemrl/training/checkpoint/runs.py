"""Saves a run and restores it: what of it goes into a checkpoint, and where that goes when it comes back."""

import random
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandemrl.config import to_yaml
from tandemrl.files import hint, recover, versions, write_text
from tandemrl.training.checkpoint import coverage, storage
from tandemrl.training.checkpoint.card import model_card
from tandemrl.training.checkpoint.coverage import Coverage
from tandemrl.training.checkpoint.export import export_hf
from tandemrl.training.checkpoint.identity import check_same_config, check_same_identity, identity
from tandemrl.training.checkpoint.manifest import CheckpointError, DamagedError
from tandemrl.training.state import Best, Run, move_state

CPU = torch.device("cpu")
Records = tuple[Coverage, ...]
"""The lines of metrics.jsonl and samples.jsonl that the checkpoints of a run cover, on rank 0 only."""


def save(run: Run, records: Records, rng: Mapping[str, Any] | None = None) -> list[Path]:
    """Save the run: first the Hugging Face export, then the checkpoint, so that a checkpoint always has its export.

    Args:
        records: the lines that earlier checkpoints cover, as ``restore`` returns them. They grow to the lines of now.
        rng: the states of the random generators; None means those of now.

    Returns:
        earlier exports that were removed (``train.keep_exports``), on rank 0 only.
    """
    setup, models, progress = run
    config, train = setup.config, setup.config.train
    rng = rng or rng_state(setup.device)
    export(run, f"step_{progress.step}", progress.step)
    for record in records:
        record.extend(progress.step)
    state = {
        "step": progress.step,
        "sampler": progress.sampler.state_dict(),
        "best": progress.best and progress.best._asdict(),
        "ahead": progress.rollouts_in_flight,
        "kl_coef": progress.kl_coef,
        "identity": identity(run),
        "accepted": progress.accepted,
        "records": {record.file.name: record.to_plain() for record in records},
        "rng": {**rng, "cuda": [each for own in setup.world.gather(rng["cuda"]) for each in own]},
    }
    storage.save(
        config.output_dir,
        progress.step,
        state,
        config,
        train.keep_checkpoints,
        parts=models.trained,
        world=setup.world,
        background=train.async_save,
    )
    keep, output = train.keep_exports, config.output_dir
    if keep is None:
        return []
    return storage.in_every_process(
        lambda: storage.drop_exports(output, keep) if setup.world.main else [], output, setup.world
    )


def export(run: Run, name: str, step: int) -> None:
    """Export the policy after a step to ``hf/NAME``, in the compute dtype."""
    config = run.setup.config
    folder, adapters_of = Path(config.output_dir, "hf", name), config.model.senior if config.model.lora.export else None
    policy, tokenizer, world = run.models.policy, run.setup.tokenizer, run.setup.world
    if world.main:
        recover(folder.parent)  # it is this run's alone
    card = model_card(
        config, step=step, best=str(run.progress.best or "none"), versions=versions(), accepted=run.progress.accepted
    )
    export_hf(policy, tokenizer, folder, config.model.dtype, world=world, adapters_of=adapters_of, card=card)


def check_resume(resume: str, output_dir: str | Path) -> str:
    """Check the value of ``--resume``: auto, never, or the folder of a checkpoint.

    Raises:
        CheckpointError: it is none of these; the message names the checkpoint that was probably meant.
    """
    folder = Path(resume)
    if resume in ("auto", "never") or storage.is_checkpoint(folder):
        return resume
    run = next((part for part in (folder, *folder.parents) if (part / "checkpoints").is_dir()), Path(output_dir))
    same = run / "checkpoints" / folder.name
    meant = same if (same / "meta.json").is_file() else storage.latest(run)
    near = f"; did you mean {meant}?" if meant is not None else hint(folder)
    what = "not a checkpoint" if folder.exists() else "no such folder"
    raise CheckpointError(f"--resume {resume}: {what}; expected auto, never or a folder checkpoints/step_N{near}")


def restore(run: Run, resume: str, accepted: Collection[str] = ()) -> Records:
    """Bring the run to the state of a checkpoint. A fresh run stays at step 0.

    Args:
        resume: ``auto`` for the newest checkpoint in output_dir, if there is one; ``never`` to require a fresh
            output_dir; or the path of a checkpoint.
        accepted: see ``check_same_identity``.

    Returns:
        the lines that the checkpoint covers, for ``save``.

    Raises:
        CheckpointError: the checkpoint was written under another config, or output_dir is not fresh.
        DamagedError: the checkpoint, or the lines of metrics.jsonl and samples.jsonl that it covers, differ from what
            was written; the message names an older undamaged checkpoint, if there is one.
    """
    config, world, progress = run.setup.config, run.setup.world, run.progress
    output = Path(config.output_dir)
    path = storage.latest(output) if resume in ("auto", "never") else Path(resume)
    metrics = output / "metrics.jsonl"
    started = path is not None or (metrics.is_file() and metrics.stat().st_size > 0)
    if resume == "never" and started:
        raise CheckpointError(
            f"{output} already holds a run; resume it (--resume auto), or choose another output_dir or remove it"
        )
    progress.step = 0
    records = tuple(Coverage(output / name) for name in coverage.FILES) if world.main else ()
    if path is None and started:  # a run that died before its first checkpoint
        check_same_config(storage.load_config(output), config, accepted)
    if path is not None:
        try:
            records = _restore_from(run, path, accepted)
        except DamagedError as error:
            advice = world.broadcast(_older_undamaged(path, output) if world.main else "")
            raise DamagedError(f"{error}. {advice}") from None
    if world.main:
        storage.discard_after(output, progress.step)
        for record in records:
            record.drop_rest()
        write_text(output / "config.yaml", to_yaml(config))
    world.barrier()
    return records


def _restore_from(run: Run, path: Path, accepted: Collection[str]) -> Records:
    """Fill a run from a checkpoint. Every process must call this, and if one fails, all raise."""
    setup, models, progress = run
    output, world = Path(setup.config.output_dir), setup.world
    config = storage.in_every_process(lambda: storage.load_config(path), path, world)
    check_same_config(config, setup.config, accepted)
    state = storage.load(path, world)
    records: Records = storage.in_every_process(
        lambda: _covered(path, state, output, warn=True) if world.main else (), path, world
    )
    changed = check_same_identity(run, state["identity"], path, accepted)
    storage.load_parts(path, models.trained, world)
    if setup.config.parallel.offload_optimizer:
        for part in models.trained.values():
            move_state(part.optimizer, to_host=True)
    progress.sampler.load_state_dict(state["sampler"])
    known = isinstance(state["best"], dict) and (output / "hf" / "best").is_dir()  # version 0.1 stored a number
    progress.best = Best(**state["best"]) if known else None
    progress.rollouts_in_flight = state["ahead"]
    progress.kl_coef = state["kl_coef"]
    progress.step = int(state["step"])
    progress.accepted = [*state.get("accepted", ()), *(f"{name} after step {progress.step}" for name in changed)]
    restore_rng(state["rng"], setup.device, rank=world.rank)
    return records


def _covered(path: Path, state: Mapping[str, Any], output: Path, *, warn: bool = False) -> Records:
    """The lines of metrics.jsonl and samples.jsonl that a checkpoint covers, after a check that they are there.

    A run that continues in another folder than its checkpoint's begins new files there, unless they were copied along.

    Raises:
        DamagedError: a line is missing, torn or changed.
    """
    stored, step = state.get("records", {}), state["step"]
    if warn and not stored:
        warnings.warn(
            f"{path} was written by an earlier version: damage to it, to metrics.jsonl or samples.jsonl may go unseen",
            stacklevel=2,
        )
    moved = path.resolve().parent.parent != output.resolve()
    records = []
    for name in coverage.FILES:
        file = output / name
        if moved and coverage.begins_after(file, step):
            records.append(Coverage(file))
            continue
        try:
            known = name in stored
            records.append(coverage.restored(file, stored[name], step) if known else coverage.of_step(file, step))
        except DamagedError as error:
            raise DamagedError(
                f"{error}. {path} covers these lines: put {file.name} back from a copy, or go on without them in "
                f"another folder (output_dir=OTHER --resume {path})"
            ) from None
    return tuple(records)


def _older_undamaged(path: Path, output: Path) -> str:
    """What to do about a damaged checkpoint, for a message: resume from the newest older one that is undamaged."""
    for other in storage.older(path):
        try:
            storage.verify(other)
            _covered(other, storage.load(other), output)
        except (CheckpointError, OSError):
            continue
        return (
            f"{other} is whole: resume from it (--resume {other}), and the steps after {storage.step_of(other)} are "
            "trained again"
        )
    return (
        f"No older checkpoint in {path.parent} is whole: start again in another output_dir, or from an export "
        "(hf/step_N as model.senior)"
    )


def rng_state(device: torch.device = CPU) -> dict[str, Any]:
    """The states of the global random generators of Python, NumPy, torch and, if it is a GPU, the device of this
    process, as plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one, on purpose
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore_rng(state: Mapping[str, Any], device: torch.device = CPU, *, rank: int = 0) -> None:
    """Restore what ``rng_state`` returned.

    The states of GPUs are those of the processes, by rank. With more processes than before they are dealt out again.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"][rank % len(state["cuda"])], device)
