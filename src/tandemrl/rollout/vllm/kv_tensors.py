"""The KV caches of both models, which share the block ids of vLLM's scheduler. Each model has tensors of its own."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec

from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.vllm.kv_state import SENIOR
from tandemrl.rollout.vllm.versions import adopt_kv_cache_layout, copy_kv_cache_facts

PREFIX = "junior."  # of the junior's layers, where both models' layers are named side by side


def layers_of(runners: Mapping[int, Any]) -> dict[str, KVCacheSpec]:
    """The layers of both models, so that a block id stands for memory in both.

    The junior's layers have the prefix ``PREFIX``. If the junior has a device of its own, they are left out.

    Args:
        runners: the model runners, by author.

    Raises:
        EngineError: a layer has another kind of attention than full attention.
    """
    specs: dict[str, KVCacheSpec] = {}
    for who, runner in runners.items():
        own = runner.get_kv_cache_spec()
        for name, spec in own.items():
            if type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
                raise EngineError(
                    f"tandem decoding needs full attention; layer {name} of {runner.model_config.model} has "
                    f"{type(spec).__name__}. Sliding windows and state-space layers are not supported"
                )
        if who == SENIOR or runner.device == runners[SENIOR].device:
            specs |= {(name if who == SENIOR else PREFIX + name): spec for name, spec in own.items()}
    return specs


def block_size_of(shared: KVCacheConfig) -> int:
    """How many tokens a block of the scheduler's KV cache has.

    Raises:
        EngineError: there is more than one KV cache group.
    """
    if len(shared.kv_cache_groups) != 1:
        raise EngineError(f"tandem decoding needs one KV cache group, found {len(shared.kv_cache_groups)}")
    return int(shared.kv_cache_groups[0].kv_cache_spec.block_size)


def own_kv_cache(runner: Any, shared: KVCacheConfig, block_size: int) -> KVCacheConfig:
    """The KV cache config of one model: its own layers, with the block ids of the scheduler.

    Args:
        runner: the model runner.
        shared: the scheduler's KV cache config.
        block_size: tokens in a block.

    Raises:
        EngineError: the model cannot have blocks of this size, or not as many.
    """
    config = runner.vllm_config
    adopt_kv_cache_layout(config, shared)
    groups = get_kv_cache_groups(config, runner.get_kv_cache_spec())
    if len(groups) != 1 or groups[0].kv_cache_spec.block_size != block_size:
        raise EngineError(f"{config.model_config.model}: its KV cache cannot share blocks of {block_size} tokens")
    page = sum(spec.page_size_bytes for spec in runner.get_kv_cache_spec().values())
    own = get_kv_cache_config_from_groups(config, groups, shared.num_blocks * page)
    if own.num_blocks != shared.num_blocks:
        raise EngineError(f"planned {own.num_blocks} KV blocks instead of {shared.num_blocks}")
    copy_kv_cache_facts(shared, own)
    config.cache_config.num_gpu_blocks = shared.num_blocks
    return own
