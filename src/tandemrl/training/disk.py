"""Whether the disk of ``output_dir`` has room for what a run writes."""

import math
import shutil
import warnings
from pathlib import Path

from tandemrl.config import Config, ConfigError
from tandemrl.config.hints import no_folder

WITH_MOMENTS = 3
"""A checkpoint has three numbers per trained parameter in float32: its weight and the two of the optimiser."""


def check_disk_space(config: Config, *, policy: int, critic: int) -> str:
    """What the checkpoints and exports of a run take, in words. Room for the first but not for all gives a warning.

    Args:
        policy: how many parameters the policy has.
        critic: how many the critic has; 0 without one.

    Raises:
        ConfigError: there is no room for the checkpoints that are kept, one more, and an export.
    """
    output, train = Path(config.output_dir), config.train
    if reason := no_folder(output):
        raise ConfigError(f"output_dir={output}: {reason}")
    place = next(folder for folder in (output, *output.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    written = [output / name for name in ("checkpoints", "hf")]  # by the run that goes on
    old = sum(file.stat().st_size for folder in written for file in folder.rglob("*") if file.is_file())
    saves = math.ceil(train.steps / train.save_every)
    trained = critic + (0 if config.model.lora.rank else policy)  # adapters are small beside the exports
    checkpoints = min(saves, train.keep_checkpoints + 1) * trained * 4 * WITH_MOMENTS
    export = policy * (4 if config.model.dtype == "float32" else 2)
    kept = saves if train.keep_exports is None else max(train.keep_exports, train.keep_checkpoints) + 1
    exports = min(saves, kept) + (train.eval_every > 0)  # and hf/best
    plan = f"{_amount(checkpoints)} for checkpoints and {exports} exports in hf/ of {_amount(export)} each"
    there = f"{(free + old) / 1e9:.1f} GB free in {place}"
    if checkpoints + export > free + old:
        raise ConfigError(
            f"output_dir={output}: {plan}, {there}; choose another disk or a smaller train.keep_checkpoints"
        )
    if checkpoints + exports * export > free + old:
        warnings.warn(
            f"output_dir={output}: {plan}, {there}: choose a larger train.save_every or a smaller train.keep_exports, "
            "or move old ones away as it goes on",
            stacklevel=2,
        )
    return f"{plan}; {there}"


def _amount(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 5e7 else f"{size / 1e6:.2f} MB"
