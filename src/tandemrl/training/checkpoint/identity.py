"""What a resumed run must have in common with its past: the config, and what the config does not hold."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl.config import Config, difference
from tandemrl.config.fields import is_own
from tandemrl.models.lora import base_parameters
from tandemrl.models.sharding import full_parameters
from tandemrl.processes.names import import_object
from tandemrl.rewards.functions import imported
from tandemrl.rewards.routing import reward_names
from tandemrl.rollout.signatures import NO_PART_OF_A_SEARCH, signature
from tandemrl.rollout.sync import fingerprint
from tandemrl.training.checkpoint.storage import CheckpointError
from tandemrl.training.state import Run

_FREE = {
    "data": "monitor",
    "model.junior_endpoint": "url api_key_env timeout_s retries backoff_s concurrency max_failure_rate leave_out",
    "rollout": "ray worker_timeout_s",
    # `train.steps` is computed from epochs
    "train": "save_every eval_every eval_first keep_checkpoints keep_exports profile log_samples wandb epochs",
    "judge": "url command wait_s api_key_env backoff_s timeout_s concurrency max_failure_rate",
    "retrieval": " ".join(NO_PART_OF_A_SEARCH),
}
_FREE_TO_CHANGE = {"output_dir", *(f"{section}.{name}" for section, names in _FREE.items() for name in names.split())}
"""Keys that may differ when a run is resumed."""


def identity(run: Run) -> Mapping[str, str]:
    """What a resumed run must have in common with its past, beside the config: recipe, data, frozen models, judge,
    scorers and environment.

    It is computed once per run, since none of it changes. All processes must call this together.
    """
    if run.progress.identity is not None:
        return run.progress.identity
    setup, models, _ = run
    config = setup.config
    read = [
        p.tokens
        if setup.episode_runner is None  # else an environment reads more of a row, such as its documents
        else (p.tokens, (p.row.ground_truth, json.dumps(p.row.extra_info, default=repr)))
        for p in setup.prompts
    ]
    frozen = {
        name: "none" if model is None else hex(fingerprint(full_parameters(model)))
        for name, model in (("junior", models.junior), ("reference", models.reference))
    }
    if config.model.lora.rank:  # of what the adapters, and without them the reference, stand on
        frozen["reference"] = hex(fingerprint(base_parameters(models.policy)))
    if models.junior is None and models.engine.has_junior:
        frozen["junior"] = hex(models.engine.fingerprint("junior"))
    named = {"strategy": config.selection.strategy, "engine": config.rollout.engine}
    passed = {name: record.signature for name, record in vars(config.functions).items() if record is not None}
    code = {key: signature(import_object(name)) for key, name in named.items() if is_own(name) and key not in passed}
    code |= {name: signature(imported(name)) for name in reward_names(config.reward) if is_own(name)}
    run.progress.identity = {
        **code,
        **passed,
        "recipe": str({name: signature(value) for name, value in setup.recipe._asdict().items()}),
        "data.train": hashlib.sha256(repr(read).encode()).hexdigest(),
        **frozen,
        **({} if setup.judge is None else {"judge": setup.judge}),
        **setup.environment_id,
    }
    return run.progress.identity


CODE = ("reward", "recipe", "strategy", "engine", "environment", "retriever")
"""Components whose code may change within a run, if the user says so (``--accept-changed``), to repair it."""


class Resume(NamedTuple):
    """How a run is resumed.

    where: ``auto``, ``never`` or the folder of a checkpoint. accept_changed: components of `CODE` whose code may differ
    from that of the checkpoint, such as a reward that was repaired; later checkpoints and the model card record it.
    """

    where: str = "auto"
    accept_changed: tuple[str, ...] = ()


def check_same_identity(
    run: Run, before: Mapping[str, str], path: Path, accepted: Collection[str] = ()
) -> tuple[str, ...]:
    """Refuse to continue a run whose recipe, data, models, judge, scorers or environment is another one.

    Args:
        before: the identity that the checkpoint ``path`` stores.
        accepted: the components of `CODE` whose code may have changed. Those that have are returned.

    Raises:
        CheckpointError: they differ; the message names what does.
    """
    changed = [name for name, value in identity(run).items() if before.get(name) != value]
    code = {name: "reward" if ":" in name else name for name in changed if ":" in name or name in CODE}
    if refused := [name for name in changed if code.get(name) not in accepted]:
        options = " ".join(
            f"--accept-changed {each}" for each in dict.fromkeys(code[name] for name in refused if name in code)
        )
        fix = f"; to go on with repaired code: {options}" if all(name in code for name in refused) else ""
        raise CheckpointError(f"{path}: written with another {', '.join(refused)}; a resume would mix runs{fix}")
    return tuple(dict.fromkeys(code[name] for name in changed if name in code))


def check_same_config(stored: Config, current: Config, accepted: Collection[str] = ()) -> None:
    """Refuse to continue a run under another config, since the result would belong to neither.

    ``train.steps`` may grow if the learning rate is constant. ``rollout.workers`` may change if the same groups are
    decoded together. Keys that only decide where and how often files are
    written may change.

    Raises:
        CheckpointError: the configs differ; the message names every key that does, with both values.
    """
    changed = {key: pair for key, pair in difference(stored, current).items() if not _may_change(key, pair[0])}
    if current.train.steps > stored.train.steps and current.train.schedule == "constant":
        changed.pop("train.steps", None)
    if current.rollout.units == stored.rollout.units:  # then the bits do not depend on who decodes
        changed.pop("rollout.workers", None)
        changed.pop("rollout.unit_groups", None)
    for name in accepted:
        changed.pop(f"functions.{name}.signature", None)
    if changed:
        listing = ", ".join(f"{key} (checkpoint {old!r}, now {new!r})" for key, (old, new) in changed.items())
        raise CheckpointError(
            f"output_dir={current.output_dir}: the config differs from the checkpoint's: {listing}. Choose another "
            "output_dir for a new run (from exported weights: model.senior=RUN/hf/step_N), or restore these values: "
            "--config RUN has them all"
        )


def _may_change(key: str, stored: Any) -> bool:
    """Whether a key may differ when a run is resumed. The record of a function may differ in its name, but not in its
    signature."""
    if key.startswith("functions."):
        return stored is None or not key.endswith(".signature")
    return key in _FREE_TO_CHANGE or key.startswith("parallel.")
