"""Saves a run and restores it, and refuses to continue a run as a different one."""

import hashlib
import json
import math
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandemrl.config import Config, difference, to_yaml
from tandemrl.config.fields import is_own
from tandemrl.data.rows import Row
from tandemrl.files import versions, write_text
from tandemrl.models.lora import base_parameters
from tandemrl.models.sharding import full_parameters
from tandemrl.processes.names import named
from tandemrl.rewards.functions import imported
from tandemrl.rewards.routing import reward_names
from tandemrl.rollout.signatures import NO_PART_OF_A_SEARCH, signature
from tandemrl.rollout.sync import fingerprint
from tandemrl.training import checkpoint, coverage
from tandemrl.training.card import model_card
from tandemrl.training.checkpoint import CheckpointError, DamagedError
from tandemrl.training.coverage import Coverage
from tandemrl.training.export import export_hf
from tandemrl.training.sharded_state import move_state
from tandemrl.training.state import Run

_FREE_TO_CHANGE = {
    "output_dir",
    "data.monitor",
    "model.lora.export",
    "train.save_every",
    "train.eval_every",
    "train.keep_checkpoints",
    "train.keep_exports",
    "train.log_samples",
    "train.max_samples_gb",
    "train.wandb",
    "train.wandb_project",
    "train.wandb_name",
    "train.wandb_tags",
    "train.log",
    "train.keep_eval_texts",
    "train.epochs",  # which `train.steps` is computed from
    "train.async_save",
    "train.profile",
    "judge.url",
    "judge.command",
    "judge.wait_s",
    "judge.api_key_env",
    "judge.backoff_s",
    "judge.timeout_s",
    "judge.concurrency",
    "judge.max_failure_rate",
    *(f"retrieval.{name}" for name in NO_PART_OF_A_SEARCH),
}


def save(run: Run) -> list[Path]:
    """Save the run: first the Hugging Face export, then the checkpoint, so that a checkpoint always has its export.

    Returns:
        earlier exports that were removed (``train.keep_exports``), on rank 0 only.
    """
    setup, models, progress = run
    config, train = setup.config, setup.config.train
    export(run, f"step_{progress.step}", progress.step)
    for record in progress.records:
        record.extend(progress.step)
    state = {
        "step": progress.step,
        "sampler": progress.sampler.state_dict(),
        "best": progress.best,
        "ahead": progress.rollouts_in_flight,
        "kl_coef": progress.kl_coef,
        "identity": identity(run),
        "records": {record.file.name: record.to_plain() for record in progress.records},
        "rng": rng_state(),
    }
    checkpoint.save(
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
    return checkpoint.in_every_process(
        lambda: checkpoint.drop_exports(output, keep) if setup.world.main else [], output, setup.world
    )


def export(run: Run, name: str, step: int) -> None:
    """Export the policy after a step to ``hf/NAME``, in the compute dtype."""
    config = run.setup.config
    folder, adapters_of = Path(config.output_dir, "hf", name), config.model.senior if config.model.lora.export else None
    policy, tokenizer, world = run.models.policy, run.setup.tokenizer, run.setup.world
    card = model_card(config, step=step, best=run.progress.best, versions=versions())
    export_hf(policy, tokenizer, folder, config.model.dtype, world=world, adapters_of=adapters_of, card=card)


def identity(run: Run) -> dict[str, str]:
    """What a resumed run must have in common with its past, beside the config: recipe, data, frozen models, judge,
    scorers and environment."""
    setup, models, _ = run
    config, functions = setup.config, setup.config.functions
    fields = {k: signature(v) for k, v in setup.recipe._asdict().items()}
    read = [p.tokens if setup.episode_runner is None else (p.tokens, _of_the_world(p.row)) for p in setup.prompts]
    prompts = hashlib.sha256(repr(read).encode()).hexdigest()
    frozen = {
        name: "none" if model is None else _checksum(fingerprint(full_parameters(model)))
        for name, model in (("junior", models.junior), ("reference", models.reference))
    }
    if config.model.lora.rank:  # of what the adapters, and without them the reference, stand on
        frozen["reference"] = _checksum(fingerprint(base_parameters(models.policy)))
    if models.junior is None and models.engine.has_junior:
        frozen["junior"] = _checksum(models.engine.fingerprint("junior"))
    strategy = _own(config.selection.strategy) if functions.strategy is None else functions.strategy.signature
    judge = {} if setup.judge is None else {"judge": setup.judge}
    scorers = {name: signature(imported(name)) for name in reward_names(config.reward) if is_own(name)}
    reward = {} if functions.reward is None else {"reward": functions.reward.signature}
    return {
        "recipe": str(fields),
        "strategy": strategy,
        "data.train": prompts,
        **frozen,
        **judge,
        **scorers,
        **reward,
        **({"engine": _own(config.rollout.engine)} if is_own(config.rollout.engine) else {}),
        **setup.environment_id,
    }


def _own(component: str) -> str:
    """The signature of a component of the user's own; "none" for one of the library's."""
    return signature(named(component)) if is_own(component) else "none"


def _checksum(fingerprint: int) -> str:
    """A fingerprint with its version. Version 1, which had no prefix, summed other words."""
    return f"2:{fingerprint:#x}"


def _of_the_world(row: Row) -> tuple[str, str]:
    """What an environment reads of a row beside its prompt, such as its documents."""
    return row.ground_truth, json.dumps(row.extra_info, default=repr)


def restore(run: Run, resume: str) -> None:
    """Bring the run to the state of a checkpoint. A fresh run stays at step 0.

    Args:
        resume: ``auto`` for the newest checkpoint in output_dir, if there is one; ``never`` to require a fresh
            output_dir; or the path of a checkpoint.

    Raises:
        CheckpointError: the checkpoint was written under another config, or output_dir is not fresh.
        DamagedError: the checkpoint, or the lines of metrics.jsonl and samples.jsonl that it covers, differ from what
            was written; the message names an older undamaged checkpoint, if there is one.
    """
    config, world, progress = run.setup.config, run.setup.world, run.progress
    output = Path(config.output_dir)
    path = checkpoint.latest(output) if resume in ("auto", "never") else Path(resume)
    metrics = output / "metrics.jsonl"
    started = path is not None or (metrics.is_file() and metrics.stat().st_size > 0)
    if resume == "never" and started:
        raise CheckpointError(
            f"{output} already holds a run; resume it (--resume auto), or choose another output_dir or remove it"
        )
    progress.step = 0
    progress.records = tuple(Coverage(output / name) for name in coverage.FILES) if world.main else ()
    if path is None and started:  # a run that died before its first checkpoint
        check_same_config(checkpoint.load_config(output), config)
    if path is not None:
        try:
            _restore_from(run, path)
        except DamagedError as error:
            advice = world.broadcast(_older_undamaged(path, output) if world.main else "")
            raise DamagedError(f"{error}. {advice}") from None
    if world.main:
        checkpoint.discard_after(output, progress.step)
        for record in progress.records:
            record.drop_rest()
        write_text(output / "config.yaml", to_yaml(config))
    world.barrier()


def _restore_from(run: Run, path: Path) -> None:
    """Fill a run from a checkpoint. Every process must call this, and if one fails, all raise."""
    setup, models, progress = run
    output, world = Path(setup.config.output_dir), setup.world
    config = checkpoint.in_every_process(lambda: checkpoint.load_config(path), path, world)
    check_same_config(config, setup.config)
    state = checkpoint.load(path, world)
    progress.records = checkpoint.in_every_process(
        lambda: _covered(path, state, output, warn=True) if world.main else (), path, world
    )
    before = state["identity"]
    changed = [name for name, value in identity(run).items() if before.get(name) != value]
    unknown = [name for name in changed if before.get(name, "").startswith("0x")]  # version 1, see _checksum
    if unknown and world.main:
        warnings.warn(
            f"{path} was written by an earlier version: whether its {' and '.join(unknown)} had the weights of now "
            "cannot be told",
            stacklevel=2,
        )
    if changed := [name for name in changed if name not in unknown]:
        raise CheckpointError(f"{path}: written with another {', '.join(changed)}; a resume would mix runs")
    checkpoint.load_parts(path, models.trained, world)
    if setup.config.parallel.offload_optimizer:
        for part in models.trained.values():
            move_state(part.optimizer, to_host=True)
    progress.sampler.load_state_dict(state["sampler"])
    progress.best = state["best"] if (output / "hf" / "best").is_dir() else -math.inf
    progress.rollouts_in_flight = state["ahead"]
    progress.kl_coef = state["kl_coef"]
    progress.step = int(state["step"])
    restore_rng(state["rng"])


def _covered(path: Path, state: Mapping[str, Any], output: Path, *, warn: bool = False) -> tuple[Coverage, ...]:
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
    for other in checkpoint.older(path):
        try:
            checkpoint.verify(other)
            _covered(other, checkpoint.load(other), output)
        except (CheckpointError, OSError):
            continue
        return (
            f"{other} is whole: resume from it (--resume {other}), and the steps after {checkpoint.step_of(other)} are "
            "trained again"
        )
    return (
        f"No older checkpoint in {path.parent} is whole: start again in another output_dir, or from an export "
        "(hf/step_N as model.senior)"
    )


def check_same_config(stored: Config, current: Config) -> None:
    """Refuse to continue a run under another config, since the result would belong to neither.

    ``train.steps`` may grow if the learning rate is constant. Keys that only decide where and how often files are
    written may change.

    Raises:
        CheckpointError: the configs differ; the message names every key that does, with both values.
    """
    changed = {key: pair for key, pair in difference(stored, current).items() if not _may_change(key, pair[0])}
    if current.train.steps > stored.train.steps and current.train.schedule == "constant":
        changed.pop("train.steps", None)
    if changed:
        listing = ", ".join(f"{key} (checkpoint {old!r}, now {new!r})" for key, (old, new) in changed.items())
        raise CheckpointError(
            f"the config differs from the checkpoint's: {listing}. Restore these values, or start over in another "
            "output_dir"
        )


def _may_change(key: str, stored: Any) -> bool:
    """Whether a key may differ when a run is resumed.

    The record of a function may differ in its name, but not in its signature. A config from before there were records
    has none, which is no difference: ``identity`` covers such functions.
    """
    if key.startswith("functions."):
        return stored is None or not key.endswith(".signature")
    return key in _FREE_TO_CHANGE or key.startswith("parallel.")


def rng_state() -> dict[str, Any]:
    """The states of the global random generators of Python, NumPy and torch (with CUDA, if in use) as plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one, on purpose
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore what ``rng_state`` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
