"""What can be read of a model before its weights: tokenizer, configuration, and the shape of its parameters."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from tandemrl.config.schema import ModelConfig
from tandemrl.models.attention import ModelError
from tandemrl.models.loading import (
    check_folder,
    is_local,
    junior_tokenizer_of,
    load_tokenizer,
    refusal,
)


class NotHereError(Exception):
    """Something is not on this machine yet, and downloads are not allowed. The message names it."""


class ModelFiles(NamedTuple):
    """Reads the files of models. Without ``downloads``, a missing one raises a ``NotHereError``."""

    downloads: bool = True

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        check_folder(path)
        try:
            return load_tokenizer(path, download=self.downloads)
        except ModelError:
            self._require(path)
            raise

    def other_tokenizer(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PreTrainedTokenizerBase | None:
        """The tokenizer of a junior, if it has other tokens than that of the senior, or is behind an endpoint."""

        def load(path: str) -> PreTrainedTokenizerBase:
            return tokenizer if path == model.senior else self.tokenizer(path)

        served = model.junior_endpoint.url is not None
        return junior_tokenizer_of(model.senior, model.junior, endpoint=served, load=load)

    def configuration(self, path: str) -> PretrainedConfig:
        check_folder(path)
        try:
            return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=not self.downloads)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            if "Incorrect path" in str(error):  # no hub id either: no such folder
                check_folder(Path(path).absolute())
            self._require(path)
            raise refusal("model", path, error) from None

    def skeleton(self, path: str) -> Any:
        """The model without its weights, on the meta device."""
        configuration = self.configuration(path)
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(configuration, trust_remote_code=False)
        except (ValueError, KeyError, RuntimeError) as error:
            raise refusal("model", path, error) from None

    def _require(self, path: str) -> None:
        """Tell a model that cannot be read from one that is not here.

        Raises:
            NotHereError: it is a hub id that is not in the cache, and downloads are not allowed.
        """
        if not (self.downloads or is_local(path)):
            raise NotHereError(f"{path} is not on this machine yet; train downloads it") from None


def size(model: Any) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())
