"""Exports the policy as a plain Hugging Face folder with a model card, and its adapters as peft reads them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tandemrl.config import Config, to_yaml
from tandemrl.config.fields import is_own
from tandemrl.files import write_directory
from tandemrl.models.loading import no_progress_bars
from tandemrl.models.lora import adapter_parameters, merged_parameters, peft_config
from tandemrl.processes.world import World
from tandemrl.training.checkpoint.storage import in_every_process

CARD = "README.md"
ADAPTER_FOLDER = "adapter"
"""The folder inside of an export that holds the adapters alone."""


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
    """Write a model, with adapters merged, and its tokenizer as one Hugging Face folder.

    Every process must call this with its part of the model. Rank 0 gathers the weights in host memory and writes. The
    folder appears when all of it is written.

    Args:
        dtype: the dtype of the exported weights. None keeps that of the model.
        adapters_of: the name of the model that the adapters belong to. If it is given, the adapters are also written
            by themselves, in the dtype that they are trained in, into the folder ``adapter`` for ``peft.PeftModel``.
        card: the text of the README.md. None means no README.md.

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

    held = [*weights.values(), *adapters.values()]
    in_every_process(lambda: write_directory(folder, fill) if world.main else None, folder, world, writes=held)
    return folder


def _full_weights(model: Any, dtype: torch.dtype | None, *, keep: bool) -> dict[str, Tensor]:
    """The whole parameters, with adapters merged, and the saved buffers of a model on the CPU, tied ones once.

    All processes must call this together. Those that do not ``keep`` the weights get {}.
    """
    held = model.state_dict(keep_vars=True)  # first: it makes FSDP take its parameters apart again
    buffers = ((name, value) for name, value in held.items() if not isinstance(value, nn.Parameter))
    weights: dict[str, Tensor] = {}
    for name, value in chain(buffers, merged_parameters(model)):
        if keep:
            weights[name] = value.detach().to("cpu", dtype if value.is_floating_point() else None)
    return weights


def _save_pretrained(model: Any, tokenizer: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Call ``save_pretrained`` with these weights, and let the saved config name their dtype."""
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
    """Write the two files of a peft folder. Equal adapters give equal bytes."""
    config.target_modules = sorted(config.target_modules)  # peft keeps them as a set
    config.save_pretrained(folder)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def model_card(
    config: Config, *, step: int, best: str, versions: Mapping[str, Any], accepted: Sequence[str] = ()
) -> str:
    """The text of a README.md as the Hugging Face hub reads it. The same run and step give the same text.

    Args:
        best: the step of `hf/best` so far and what chose it, or "none".
    """
    model, data, loss, selection, passed = config.model, config.data, config.loss, config.selection, config.functions
    solo, named = selection.kind.solo and passed.strategy is None, passed.recipe is None
    tags = ["reinforcement-learning"]
    tags += [loss.recipe] if named and not is_own(loss.recipe) else []
    tags += [] if solo else ["tandem-rl"]
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    if not Path(model.senior).exists():  # a name on the hub
        front["base_model"] = model.senior
    header = "".join(f"{name}: {json.dumps(value)}\n" for name, value in front.items())
    agent = replace(config.rollout.agent, run=())  # a command line may hold keys
    shown = replace(config, rollout=replace(config.rollout, agent=agent))
    facts = {
        "senior before training": model.senior,
        "junior": "none" if solo else model.junior or "the senior before training",
        "who wrote the training texts": selection.strategy if passed.strategy is None else passed.strategy.name,
        "weight of the junior's tokens in the loss": f"{loss.junior_weight:g}",
        "steps": f"{step} of {config.train.steps}",
        "recipe": loss.recipe if passed.recipe is None else passed.recipe.name,
        "training data": ", ".join(data.train),
        "held-out data": ", ".join(data.eval) or "none",
        "hf/best so far": best,
        "code changed in the run": ", ".join(accepted) or None,
        **versions,
    }
    table = "".join(f"| {name} | `{value}` |\n" for name, value in facts.items() if value is not None)
    return f"""---
{header}---

# {Path(config.output_dir).name}, step {step}

Trained by [tandemrl](https://github.com/tandemrl/tandemrl). This model, the *senior*, is meant to be used alone.

| | |
|---|---|
{table}
<details><summary>Configuration</summary>

```yaml
{to_yaml(shown).strip()}
```

</details>
"""
