"""The shape of a model without its weights: from its folder, from the hub's cache, or packaged with the library.

``architectures.json`` describes by hub id the models that packaged configs name, and their relatives. It holds the
numbers that decide their shapes, from the ``config.json`` that each model's authors publish beside the weights.
``runs/tiny``, ``runs/tiny-hops`` and ``runs/tiny-calculator`` are pairs that ``tandemrl model tiny`` makes,
``runs/smollm2-pair`` is that of ``tandemrl model smollm2``.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from tandemrl.models.attention import ModelError
from tandemrl.models.loading import check_folder, is_local, refusal

FILE = Path(__file__).with_name("architectures.json")


@cache
def packaged() -> dict[str, dict[str, Any]]:
    """The ``config.json`` fields of each packaged model, by hub id or default folder of `tandemrl model`."""
    return dict(json.loads(FILE.read_text()))


def architecture(path: str) -> PretrainedConfig:
    """The configuration of a model. Nothing is downloaded.

    Args:
        path: a model's folder or hub id. A model on this machine takes precedence over a packaged one.

    Raises:
        ModelError: the model is neither on this machine nor packaged.
    """
    known = packaged().get(path)
    if known is not None and not Path(path).is_dir():
        return AutoConfig.for_model(**known)
    try:
        check_folder(path)
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        if is_local(path):
            raise refusal("model", path, error) from None
        raise ModelError(
            f"{path}: its config.json is neither on this machine nor packaged; put it into a folder and name that, or "
            f"plan with one of {', '.join(packaged())}"
        ) from None


def with_layers(configuration: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The same model with its first ``layers`` decoder layers."""
    values = configuration.to_dict()
    values["num_hidden_layers"] = layers
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    return type(configuration).from_dict(values)
