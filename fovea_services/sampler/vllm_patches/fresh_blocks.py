"""Blocks of the KV cache are zeroed before a request gets them.

Replaces: `vllm.v1.kv_cache_interface.KVCacheConfig.needs_kv_cache_zeroing` and
    `vllm.v1.worker.cpu_model_runner.CPUModelRunner._zero_block_ids`.
Why: a request's last block is partly unwritten. Attention kernels read all of it and multiply what lies behind the
    request by a probability of 0; but 0 * NaN is NaN. `csrc/cpu/cpu_attn_impl.hpp` rounds the tokens of P @ V up to
    groups of 32 (`BlockSizeAlignment`); on a GPU, by pull request 35219, FlashAttention 3 and TRT-LLM's kernels do so
    too. A request whose numbers overflow spoils those that get its blocks later, whatever weights they sample from.
    vLLM zeroes new blocks itself, but only of hybrid models and of caches of mixed types; on a CPU it then leaves out
    sliding windows and layers of different sizes.
Upstream: vllm-project/vllm pull request 50283 (--enable-nan-fault-tolerance), open; 35219 made the zeroing.
Delete when: vLLM has a setting that zeroes the new blocks of every model, on CPU too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig

from fovea_services.sampler.vllm_patches import grammar_budget


def apply() -> None:
    """Has vLLM's schedulers and workers in this process zero all new blocks; twice is no error."""
    config: Any = KVCacheConfig
    config.needs_kv_cache_zeroing = property(lambda _: True)
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        CPUModelRunner._zero_block_ids = _zero_on_cpu


def configure(config: Any) -> None:
    """Has the scheduler name new blocks, also where its process has no worker. To be called with vLLM's configuration.

    The schedulers of `routed_experts` do it too.
    """
    is_async = config.scheduler_config.async_scheduling
    config.scheduler_config.scheduler_cls = AsyncZeroingScheduler if is_async else ZeroingScheduler


class ZeroingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's, and has new blocks zeroed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _apply_in_scheduler()
        super().__init__(*arguments, **options)


class AsyncZeroingScheduler(AsyncScheduler):  # type: ignore[misc]
    """vLLM's, and has new blocks zeroed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _apply_in_scheduler()
        super().__init__(*arguments, **options)


def _apply_in_scheduler() -> None:
    """Applies what the scheduler's process needs, which may load no model."""
    apply()
    grammar_budget.apply()


def _zero_on_cpu(runner: Any, block_ids: Sequence[int]) -> None:
    """Takes the place of CPUModelRunner._zero_block_ids: the blocks of all layers with attention.

    Blocks are numbered over all groups of layers, so those that another group holds have other numbers. The states of
    delta nets and short convolutions are lists, not tensors; vLLM starts them at zero.
    """
    zeroed: set[int] = set()
    for group in runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            layer = runner.compilation_config.static_forward_context.get(name)
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.data_ptr() not in zeroed:
                zeroed.add(cache.data_ptr())
                parts = len(cache) // runner.kv_cache_config.num_blocks  # of a block, as kernels may see it
                for block_id in block_ids:
                    cache[block_id * parts : (block_id + 1) * parts].zero_()
