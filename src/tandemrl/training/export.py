"""The policy as a plain Hugging Face folder."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandemrl.distributed.world import World
from tandemrl.files import NEW, write_directory
from tandemrl.models.loading import no_progress_bars
from tandemrl.models.lora import merged_parameters
from tandemrl.training.checkpoint import CheckpointError, in_every_process, size_in_bytes, write_failure


def export_hf(
    model: Any,
    tokenizer: Any,
    path: str | Path,
    dtype: str | None = None,
    *,
    world: World = World(),  # noqa: B008 - frozen
) -> Path:
    """Write model (adapters merged) and tokenizer as one HF folder, in one step, in ``dtype`` (None: as it is).

    Every process calls it, with its part of the model; rank 0 gathers the weights in host memory and writes.

    Raises:
        CheckpointError: on every process, if rank 0 cannot write.
    """
    weights = _full_weights(model, None if dtype is None else getattr(torch, dtype), keep=world.main)
    folder = Path(path)

    def write() -> None:
        try:
            if world.main:
                write_directory(folder, lambda hidden: _save_pretrained(model, tokenizer, weights, hidden))
        except Exception as error:
            shutil.rmtree(folder.with_name(f"{NEW}{folder.name}"), ignore_errors=True)
            raise CheckpointError(write_failure(error, folder, size_in_bytes(weights.values()))) from error

    in_every_process(write, folder, world)
    return folder


def _full_weights(model: Any, dtype: torch.dtype | None, *, keep: bool) -> dict[str, Tensor]:
    """Parameters, adapters merged, and saved buffers of a model as one process would have them, on the CPU, tied ones
    once. All processes have to gather; {} for those that do not ``keep``."""

    def here(value: Tensor) -> Tensor:
        return value.detach().to("cpu", dtype if value.is_floating_point() else None)

    held = model.state_dict(keep_vars=True)  # first: it makes FSDP take its parameters apart again
    weights = {name: here(value) for name, value in held.items() if not isinstance(value, nn.Parameter)} if keep else {}
    for name, value in merged_parameters(model):
        if keep:
            weights[name] = here(value)
    return weights


def _save_pretrained(model: Any, tokenizer: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """``save_pretrained`` with these weights, whose dtype the config then names."""
    own = model.config.dtype
    try:
        with no_progress_bars():
            model.save_pretrained(folder, state_dict=dict(weights))
        model.config.dtype = next((value.dtype for value in weights.values() if value.is_floating_point()), own)
        model.config.save_pretrained(folder)  # save_pretrained names the model's own dtype
    finally:
        model.config.dtype = own
    tokenizer.save_pretrained(folder)
