"""What can be read of a model before its weights: tokenizer, configuration, and the shape of its parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tandemrl.config.schema import ModelConfig
from tandemrl.models.attention import ModelError
from tandemrl.models.loading import is_local, junior_tokenizer_of, load_configuration, load_tokenizer
from tandemrl.models.sharded_loading import meta_model


class NotHereError(Exception):
    """Something is not on this machine yet, and downloads are not allowed. The message names it."""


class ModelFiles(NamedTuple):
    """Reads the files of models. Without ``downloads``, a missing one raises a ``NotHereError``."""

    downloads: bool = True

    def tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        with self._here(path):
            return load_tokenizer(path, download=self.downloads)

    def other_tokenizer(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PreTrainedTokenizerBase | None:
        """The tokenizer of a junior, if it has other tokens than that of the senior, or is behind an endpoint."""

        def load(path: str) -> PreTrainedTokenizerBase:
            return tokenizer if path == model.senior else self.tokenizer(path)

        served = model.junior_endpoint.url is not None
        return junior_tokenizer_of(model.senior, model.junior, endpoint=served, load=load)

    def configuration(self, path: str) -> PretrainedConfig:
        with self._here(path):
            return load_configuration(path, download=self.downloads)

    def skeleton(self, path: str) -> Any:
        """The model without its weights, on the meta device."""
        return meta_model(self.configuration(path))

    @contextmanager
    def _here(self, path: str) -> Iterator[None]:
        """A context that tells a model that cannot be read from one that is not here.

        Raises:
            NotHereError: it is a hub id that is not in the cache, and downloads are not allowed.
        """
        try:
            yield
        except ModelError:
            if self.downloads or is_local(path):
                raise
            raise NotHereError(f"{path} is not on this machine yet; train downloads it") from None


def size(model: Any) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())
