"""RMS norms on CPU by the kernels that vLLM 0.32.0 has but offers to GPUs only: one pass instead of seven."""

from typing import Any

import torch

PROVIDER = "fovea_cpu"
_LANES = 16


def register() -> None:
    """Offers the kernels to vLLM's dispatch; twice is no error."""
    from vllm import ir
    from vllm.platforms import current_platform

    if PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_takes)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_takes_sum, inplace=True)(_fused_add_rms_norm)


def priority(_: object) -> Any:
    """What vLLM's platform answers when it is asked whose kernels to take."""
    from vllm.config.kernel import IrOpPriorityConfig

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
