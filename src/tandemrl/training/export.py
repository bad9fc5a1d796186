"""The policy as a plain Hugging Face folder, and its adapters as peft reads them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tandemrl.distributed.world import World
from tandemrl.files import NEW, write_directory
from tandemrl.models.loading import no_progress_bars
from tandemrl.models.lora import adapter_parameters, merged_parameters, peft_config
from tandemrl.training.card import CARD
from tandemrl.training.checkpoint import CheckpointError, in_every_process, size_in_bytes, write_failure

ADAPTER_FOLDER = "adapter"
"""Inside of an export: the adapters alone."""


def export_hf(
    model: Any,
    tokenizer: Any,
    path: str | Path,
    dtype: str | None = None,
    *,
    world: World = World(),  # noqa: B008 - frozen
    adapters_of: str | None = None,
    card: str | None = None,
) -> Path:
    """Write model (adapters merged) and tokenizer as one HF folder, in one step, in ``dtype`` (None: as it is).

    Every process calls it, with its part of the model; rank 0 gathers the weights in host memory and writes.

    Args:
        adapters_of: the name of the model that the adapters belong to. They are then written, too, by themselves and
            in the dtype that they are trained in: the folder ``adapter`` inside, for ``peft.PeftModel``.
        card: the text of its README.md; None = there is none.

    Raises:
        CheckpointError: on every process, if rank 0 cannot write.
    """
    weights = _full_weights(model, None if dtype is None else getattr(torch, dtype), keep=world.main)
    adapters = {}
    if adapters_of is not None:
        gathered = adapter_parameters(model)
        adapters = {name: value.detach().cpu().contiguous() for name, value in gathered if world.main}
    folder = Path(path)

    def fill(hidden: Path) -> None:
        _save_pretrained(model, tokenizer, weights, hidden)
        if card is not None:
            (hidden / CARD).write_text(card, encoding="utf-8")
        if adapters_of is not None:
            _save_adapters(peft_config(model, adapters_of), adapters, hidden / ADAPTER_FOLDER)

    def write() -> None:
        try:
            if world.main:
                write_directory(folder, fill)
        except Exception as error:
            shutil.rmtree(folder.with_name(f"{NEW}{folder.name}"), ignore_errors=True)
            size = size_in_bytes([*weights.values(), *adapters.values()])
            raise CheckpointError(write_failure(error, folder, size)) from error

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


def _save_adapters(config: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """The two files of a peft folder; equal adapters give equal bytes."""
    config.save_pretrained(folder)
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["target_modules"] = sorted(settings["target_modules"])  # peft keeps them as a set
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
