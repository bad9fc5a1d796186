"""What can be read of a model before its weights: tokenizer, configuration, and the shape of its parameters."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from tandemrl.models.attention import ModelError
from tandemrl.models.loading import CONFIG, check_folder, is_local, load_tokenizer, refusal


class NotHereError(Exception):
    """Something is not on this machine yet, and downloads are not allowed. The message names it."""


class ModelFiles(NamedTuple):
    """Reads the files of models. Without ``downloads``, a missing one raises a ``NotHereError``."""

    downloads: bool = True

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        self._here(path)
        try:
            return load_tokenizer(path, download=self.downloads)
        except ModelError:
            if self.downloads or is_local(path):
                raise
            raise NotHereError(f"the tokenizer of {path} is not on this machine yet; train downloads it") from None

    def configuration(self, path: str) -> PretrainedConfig:
        self._here(path)
        try:
            return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=not self.downloads)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise refusal("model", path, error) from None

    def skeleton(self, path: str) -> Any:
        """The model without its weights, on the meta device."""
        configuration = self.configuration(path)
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(configuration, trust_remote_code=False)
        except (ValueError, KeyError, RuntimeError) as error:
            raise refusal("model", path, error) from None

    def _here(self, path: str) -> None:
        """Check that a model is on this machine, unless downloads are allowed.

        Raises:
            NotHereError: it is a hub id that is not in the cache, and downloads are not allowed.
        """
        check_folder(path)
        if self.downloads or is_local(path):
            return
        try:
            if isinstance(try_to_load_from_cache(path, CONFIG), str):
                return
        except HFValidationError:
            check_folder(Path(path).absolute())  # no hub id either: no such folder
        raise NotHereError(f"{path} is not on this machine yet; train downloads it")


def size(model: Any) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())
