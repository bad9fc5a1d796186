"""Handles the differences between vLLM 0.32 and 0.27 that need more than a line where they matter."""

from dataclasses import fields
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

_FROM_THE_SCHEDULER = ("kv_cache_layout", "hash_block_size", "cache_hit_alignment_tokens", "kv_tp_replicas")
"""The fields of a KV cache's config that the engine core decides for all workers. vLLM 0.27 has none of them: there,
each worker asks its attention backend for the layout."""


STARTING = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""Environment variables for the start of an engine. Without them, the processes of a vLLM 0.27 engine under torchrun
would look for their rendezvous store in torchrun's agent, where it never appears."""

RELOAD_LOGGERS = ("vllm.model_executor.model_loader.reload", "vllm.v1.worker.gpu_model_runner")
"""The loggers that report reloaded weights. In vLLM 0.32 it is only the first one."""


def adopt_kv_cache_layout(config: VllmConfig, shared: KVCacheConfig) -> None:
    """Use the KV cache layout that the engine core has decided on, if it decides on one.

    Args:
        config: the config of the model, which is changed.
        shared: the KV cache config of the engine core.
    """
    layout = getattr(shared, "kv_cache_layout", None)
    if layout is not None:
        from vllm.v1.attention.backends.utils import record_kv_cache_layout

        record_kv_cache_layout(config.cache_config, layout)


def copy_kv_cache_facts(shared: KVCacheConfig, own: KVCacheConfig) -> None:
    """Copy what the engine core has decided about KV caches from its config ``shared`` into ``own``."""
    for name in {field.name for field in fields(KVCacheConfig)}.intersection(_FROM_THE_SCHEDULER):
        setattr(own, name, getattr(shared, name))


def keep_running(client: Any) -> None:
    """Let an engine in this process outlive its ``client`` when that is garbage-collected, as in vLLM 0.27."""
    if hasattr(client, "_finalizer"):
        client._finalizer.detach()


def padding_mask(runner: Any, tokens: int, padded: int) -> Any:
    """The mask of the inputs of a pass that are padding. It is None in vLLM 0.27, which does not need it.

    Args:
        runner: the model runner.
        tokens: how many tokens the pass has.
        padded: how many it has with padding.
    """
    return runner._prepare_padding_mask(tokens, padded) if hasattr(runner, "_prepare_padding_mask") else None
