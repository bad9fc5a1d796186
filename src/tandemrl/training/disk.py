"""Whether the disk of ``output_dir`` has room for what a run writes."""

import math
import shutil
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from tandemrl.config import Config, ConfigError
from tandemrl.files import no_folder
from tandemrl.training.checkpoint import latest, numbered, step_of

FLOAT32, BFLOAT16 = 4, 2
"""Bytes per parameter in these dtypes."""
ADAM_STATE = 2
"""How many numbers the optimiser keeps per parameter."""


def room(config: Config, *, policy: int, critic: int) -> str:
    """What the checkpoints and exports that are still to come will take, in words.

    Room for the next ones but not for all of them gives a warning.

    Args:
        policy: how many parameters the policy has.
        critic: how many the critic has; 0 without one.

    Raises:
        ConfigError: there is no room for the next checkpoints and export.
    """
    output = Path(config.output_dir)
    if reason := no_folder(output):
        raise ConfigError(f"output_dir={output}: {reason}")
    place = next(folder for folder in (output, *output.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    newest = latest(output)
    done = 0 if newest is None else step_of(newest)
    saves = max(0, math.ceil(config.train.steps / config.train.save_every) - done // config.train.save_every)
    exported = FLOAT32 if config.model.dtype == "float32" else BFLOAT16
    trained = critic + (0 if config.model.lora.rank else policy)  # adapters are small beside the exports
    checkpoint, export = trained * FLOAT32 * (1 + ADAM_STATE), policy * exported
    old_checkpoints, old_exports = (_sizes(numbered(output / name)) for name in ("checkpoints", "hf"))
    checkpoints = most_at_once(saves, checkpoint, old_checkpoints, config.train.keep_checkpoints)
    best = max(0, export - sum(_sizes([output / "hf" / "best"]))) if config.train.eval_every else 0
    first = checkpoints + best + min(saves, 1) * export
    keep = config.train.keep_exports
    kept_exports = None if keep is None else max(keep, config.train.keep_checkpoints)
    exports = saves if kept_exports is None else min(saves, kept_exports + 1)
    total = checkpoints + best + most_at_once(saves, export, old_exports, kept_exports)
    kept = "all are kept" if keep is None else "the newest are kept"
    plan = f"{exports} exports in hf/ of {_amount(export)} each ({kept}: train.keep_exports={keep or 'null'})"
    there = f"{free / 1e9:.1f} GB free in {place}"
    if first > free:
        raise ConfigError(
            f"output_dir={output}: checkpoints and the first export need {_amount(first)}, {there}; choose "
            "another disk or a smaller train.keep_checkpoints"
        )
    if total > free:
        warnings.warn(
            f"output_dir={output}: {there}, but with {plan} the run needs {_amount(total)}: choose a larger "
            "train.save_every or a smaller train.keep_exports, or move old ones away as it goes on",
            stacklevel=2,
        )
    with_best = ", hf/best" if config.train.eval_every else ""
    return f"{_amount(total)} for checkpoints ({_amount(checkpoints)}){with_best} and {plan}; {there}"


def most_at_once(saves: int, size: int, old: Sequence[int], keep: int | None) -> int:
    """How many bytes a sequence of saves takes at most beyond what is there now.

    After each save the oldest ones are removed. Until then there is one more than are kept.

    Args:
        saves: how many are to come, each of ``size`` bytes.
        old: the bytes of those that are there, oldest first.
        keep: how many are kept; None: all.

    Examples:
        >>> most_at_once(9, 100, [], keep=2), most_at_once(9, 100, [100, 100], keep=2), most_at_once(9, 100, [1], None)
        (300, 100, 900)
    """
    there, taken, most = list(old), 0, 0
    for _ in range(saves):
        there.append(size)
        taken += size
        most = max(most, taken)
        while keep is not None and len(there) > keep:
            taken -= there.pop(0)
    return most


def _sizes(folders: Iterable[Path]) -> list[int]:
    return [sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in folders]


def _amount(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 5e7 else f"{size / 1e6:.2f} MB"
