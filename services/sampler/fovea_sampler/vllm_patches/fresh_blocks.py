"""Zeroes the blocks of the KV cache before a request gets them, and ends an engine without freeing its memory.

Replaces: `vllm.v1.kv_cache_interface.KVCacheConfig.needs_kv_cache_zeroing`,
    `vllm.v1.worker.cpu_model_runner.CPUModelRunner._zero_block_ids` and, of `vllm.v1.engine.core`,
    `cleanup_dist_env_and_memory`.
Why: the last block of a request is only partly written. Attention kernels read the whole block and multiply the values
    behind the request's end by a probability of 0, but 0 * NaN is NaN. `csrc/cpu/cpu_attn_impl.hpp` rounds the tokens
    of P @ V up to groups of 32 (`BlockSizeAlignment`). On a GPU, FlashAttention 3 and TRT-LLM's kernels do the same
    (pull request 35219). A request that overflows thus leaves NaN behind, which corrupts the requests that get its
    blocks later, even if they sample from other weights.
    vLLM zeroes new blocks only for hybrid models and for caches of mixed types. On a CPU it then skips sliding-window
    layers and layers of different sizes. The patch zeroes new blocks of every model and every attention layer.
    When an engine ends, vLLM unfreezes all objects, collects garbage and empties caches, so that an engine inside
    another program leaves no memory behind. Fovea's engine has a process of its own, which ends right after. The
    collection takes a third of the processor time with which a sampler ends.
Upstream: vllm-project/vllm pull request 50283 (--enable-nan-fault-tolerance), open; 35219 added the zeroing. None filed
    about the end.
Delete when: vLLM has a setting that zeroes the new blocks of every model, on CPU too, and collects garbage only at the
    end of engines without a process of their own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import KVCacheConfig

from fovea_sampler.vllm_patches import draws, grammar_budget


def apply() -> None:
    """Makes vLLM's schedulers and workers in this process zero all new blocks, and its engine end at once.

    It may be called twice. An engine that is forked from this process inherits the patch.
    """
    engine_core: Any = core
    engine_core.cleanup_dist_env_and_memory = _leave_groups
    config: Any = KVCacheConfig
    config.needs_kv_cache_zeroing = property(lambda _: True)
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        CPUModelRunner._zero_block_ids = _zero_on_cpu


def _leave_groups() -> None:
    """Replaces cleanup_dist_env_and_memory: leaves the groups of processes, and frees no memory."""
    destroy_model_parallel()
    destroy_distributed_environment()


def configure(config: Any) -> None:
    """Selects a scheduler that lists new blocks for the workers to zero.

    The scheduler applies the patch itself, because its process may have no worker. `routed_experts` replaces it with a
    subclass for models with experts.

    Args:
        config: vLLM's configuration.
    """
    is_async = config.scheduler_config.async_scheduling
    config.scheduler_config.scheduler_cls = AsyncZeroingScheduler if is_async else ZeroingScheduler


class ZeroingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's Scheduler, with the patch applied in its process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _apply_in_scheduler()
        super().__init__(*arguments, **options)
        draws.configure(self)


class AsyncZeroingScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's AsyncScheduler, with the patch applied in its process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _apply_in_scheduler()
        super().__init__(*arguments, **options)
        draws.configure(self)


def _apply_in_scheduler() -> None:
    """Applies the patches that the scheduler needs, because `before_model` may not be called in its process."""
    apply()
    grammar_budget.apply()


def _zero_on_cpu(runner: Any, block_ids: Sequence[int]) -> None:
    """Replaces CPUModelRunner._zero_block_ids: zeroes the blocks in the caches of all attention layers.

    Block ids are unique across the groups of layers, so zeroing them in every group's cache touches no block in use.
    The states of delta nets and short convolutions are lists, not tensors; vLLM itself initialises them to zero.
    """
    zeroed: set[int] = set()
    for group in runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            layer = runner.compilation_config.static_forward_context.get(name)
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.data_ptr() not in zeroed:
                zeroed.add(cache.data_ptr())
                parts = len(cache) // runner.kv_cache_config.num_blocks  # kernels may split a block into several
                for block_id in block_ids:
                    cache[block_id * parts : (block_id + 1) * parts].zero_()
