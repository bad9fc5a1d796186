"""What can be read of a model before its weights: tokenizer, configuration, and the shape of its parameters."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from tandemrl.config import Config, ConfigError
from tandemrl.config.compatibility import Facts, check
from tandemrl.config.schema import ModelConfig
from tandemrl.models.attention import ModelError
from tandemrl.models.loading import (
    check_folder,
    is_local,
    junior_tokenizer_of,
    load_tokenizer,
    refusal,
    stored_eos_token_ids,
    vocabulary_check,
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


def vocabularies(
    config: Config,
    files: ModelFiles,
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase | None,
    *,
    passed: bool,
) -> str:
    """Check that the models of a run have one vocabulary, or work with two, and that a text of theirs can end.

    Args:
        tokenizer: that of the senior.
        other: the tokenizer of a junior with a vocabulary of its own, if it has one.
        passed: whether a strategy was passed in Python.

    Returns:
        the sizes, in words.

    Raises:
        ConfigError, ModelError: they do not; the message names the key.
    """
    model = config.model
    if model.critic is not None:
        vocabulary_check(tokenizer, files.tokenizer(model.critic), other="critic")
    if other is not None:
        check(config, Facts(apart=True))
        if passed:
            raise ConfigError(
                "strategy: the senior and the junior have two vocabularies, and a strategy looks at tokens; pass none, "
                "and use selection.strategy=before_word"
            )
    logits = files.configuration(model.senior).get_text_config().vocab_size
    one = other is None and model.junior_endpoint.url is None and (passed or not config.selection.kind.solo)
    ends = stored_eos_token_ids(model.senior, tokenizer, model.junior if one else None, download=files.downloads)
    if not any(0 <= token < logits for token in ends):
        raise ModelError(
            f"model.senior={model.senior}: no author has an EOS token ({ends or 'none is named'}), so that "
            "every response would be truncated; set eos_token_id in its generation_config.json, or eos_token in "
            "its tokenizer_config.json"
        )
    return f"{len(tokenizer)} tokens" + ("" if other is None else f"; the junior has {len(other)} of its own")
