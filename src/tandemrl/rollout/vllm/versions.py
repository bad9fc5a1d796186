"""What differs between vLLM 0.32 and 0.27; nothing else asks for a version."""

import importlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

_FROM_THE_SCHEDULER = ("kv_cache_layout", "hash_block_size", "cache_hit_alignment_tokens", "kv_tp_replicas")
"""Of a KV cache's configuration: what the engine core decides for all workers. vLLM 0.27 has none of them: each worker
asks its attention backend for the layout."""


STARTING = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""Environment of an engine that starts. Under torchrun the processes of a vLLM 0.27 engine would look for the store at
which they meet among torchrun's, where it never comes up."""

RELOAD_LOGGERS = ("vllm.model_executor.model_loader.reload", "vllm.v1.worker.gpu_model_runner")
"""Those that tell of reloaded weights; in vLLM 0.32 it is the first alone."""


def adopt_kv_cache_layout(config: VllmConfig, shared: KVCacheConfig) -> None:
    """Have a model's KV cache laid out as the engine core has decided, if it does."""
    layout = getattr(shared, "kv_cache_layout", None)
    if layout is not None:
        from vllm.v1.attention.backends.utils import record_kv_cache_layout

        record_kv_cache_layout(config.cache_config, layout)


def copy_kv_cache_facts(shared: KVCacheConfig, own: KVCacheConfig) -> None:
    """What the engine core has decided about KV caches, in place."""
    for name in {field.name for field in fields(KVCacheConfig)}.intersection(_FROM_THE_SCHEDULER):
        setattr(own, name, getattr(shared, name))


def keep_running(client: Any) -> None:
    """An engine in this process does not shut down with its client. That of vLLM 0.27 never does by itself."""
    if hasattr(client, "_finalizer"):
        client._finalizer.detach()


def misdone(params: SamplingParams) -> dict[str, bool]:
    """What a request cannot ask of this version, by name, and whether ``params`` do. Before vLLM 0.31, the mask of
    ``allowed_token_ids`` stays behind when rows of the batch move, and holds for other requests."""
    name = f"allowed_token_ids (vLLM {vllm.__version__} confines other requests by them, too; 0.31 does not)"
    return {name: bool(params.allowed_token_ids) and vllm.__version_tuple__ < (0, 31)}


def make_arg_parser() -> Callable[[Any], Any]:
    """The function that adds the options of ``vllm serve`` to a parser."""
    try:
        module = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    except ModuleNotFoundError:  # vLLM 0.27
        module = importlib.import_module("vllm.entrypoints.openai.cli_args")
    function: Callable[[Any], Any] = module.make_arg_parser
    return function


def configure_logging(args: Namespace) -> None:
    """As ``vllm serve`` does with its options. vLLM 0.27 has none for that, only environment variables."""
    import vllm.logger

    if hasattr(vllm.logger, "configure_logging_from_args"):
        vllm.logger.configure_logging_from_args(args)


def padding_mask(runner: Any, tokens: int, padded: int) -> Any:
    """Which inputs of a pass are padding. Nobody asks the model runner of vLLM 0.27 for that."""
    return runner._prepare_padding_mask(tokens, padded) if hasattr(runner, "_prepare_padding_mask") else None
