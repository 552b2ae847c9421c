"""Kernels on CPU: RMS norms in one pass instead of seven, and rotary embeddings that know tokens from heads.

Replaces: `vllm.platforms.cpu.CpuPlatform.get_default_ir_op_priority`, and `RotaryEmbedding.forward_cpu`; adds an
    implementation to `vllm.ir.ops.rms_norm` and `vllm.ir.ops.fused_add_rms_norm`.
Why: vLLM's CPU build contains the fused norms but registers them for GPUs only, and takes the native formula.
    Its rotary kernel takes the last but one dimension for tokens: of queries [T, heads, D], as LFM2 has them, it turns
    the heads of the first ones by the angles of later tokens (0.4 nat). [T, heads * D] is right.
Upstream: none filed; vllm-project/vllm pull request 33825 made these operations.
Delete when: another implementation than "native" takes norms on CPU and the CPU platform prefers it, and the rotary
    kernel makes the same of both shapes.
"""

from typing import Any

import torch
from vllm import ir
from vllm.config.kernel import IrOpPriorityConfig
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

PROVIDER = "fovea_cpu"
_LANES = 16  # vectors of vLLM's kernels; other widths are left to its own formula


def apply() -> None:
    """Offers the kernels to vLLM's dispatch and has it prefer them; twice is no error."""
    _flatten_heads()
    platform: Any = type(current_platform)
    platform.get_default_ir_op_priority = classmethod(lambda _, config: _priority())
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_takes_sum, inplace=True)(_fused_add_rms_norm)


def _flatten_heads() -> None:
    rotate: Any = RotaryEmbedding.forward_cpu
    if rotate.__module__ == __name__:
        return

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        flat_query, flat_key = rotate(self, positions, query.flatten(1), key if key is None else key.flatten(1))
        return flat_query.view(query.shape), key if key is None else flat_key.view(key.shape)

    RotaryEmbedding.forward_cpu = forward_cpu


def _priority() -> Any:
    ours = [PROVIDER, "native"]
    return IrOpPriorityConfig.with_default(["native"], rms_norm=ours, fused_add_rms_norm=ours)


def _takes(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    fits = weight is not None and weight.dtype == x.dtype and x.shape[-1] % _LANES == 0
    return fits and variance_size is None and x.device.type == "cpu"


def _takes_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _takes(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()  # heads of a packed projection are not
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
