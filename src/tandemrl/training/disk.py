"""Whether the disk of ``output_dir`` has room for what a run writes."""

import math
import shutil
import warnings
from pathlib import Path

from tandemrl.config import Config, ConfigError
from tandemrl.training.checkpoint import latest, step_of

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
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output_dir={output}: a file; choose a folder, which need not exist")
    place = next(folder for folder in (output, *output.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free + sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    newest = latest(output)
    done = 0 if newest is None else step_of(newest)
    saves = max(0, math.ceil(config.train.steps / config.train.save_every) - done // config.train.save_every)
    exported = FLOAT32 if config.model.dtype == "float32" else BFLOAT16
    trained = critic + (0 if config.model.lora.rank else policy)  # adapters are small beside the exports
    checkpoints = min(saves, config.train.keep_checkpoints + 1) * trained * FLOAT32 * (1 + ADAM_STATE)
    export = policy * exported
    first = checkpoints + (min(saves, 1) + (1 if config.train.eval_every else 0)) * export
    keep = config.train.keep_exports
    exports = saves if keep is None else min(saves, max(keep, config.train.keep_checkpoints) + 1)
    total = first + max(0, exports - 1) * export
    kept = "all are kept" if keep is None else "the newest are kept"
    plan = f"{exports} exports in hf/ of {export / 1e9:.2f} GB each ({kept}: train.keep_exports={keep or 'null'})"
    there = f"{free / 1e9:.1f} GB free in {place}"
    if first > free:
        raise ConfigError(
            f"output_dir={output}: checkpoints and the first export need {first / 1e9:.2f} GB, {there}; choose "
            "another disk or a smaller train.keep_checkpoints"
        )
    if total > free:
        warnings.warn(
            f"output_dir={output}: {there}, but with {plan} the run needs {total / 1e9:.2f} GB: choose a larger "
            "train.save_every or a smaller train.keep_exports, or move old ones away as it goes on",
            stacklevel=2,
        )
    best = ", hf/best" if config.train.eval_every else ""
    return f"{total / 1e9:.2f} GB for checkpoints ({checkpoints / 1e9:.2f} GB){best} and {plan}; {there}"
