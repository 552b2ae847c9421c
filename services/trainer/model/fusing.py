"""Pointwise functions as one GPU kernel: compiled by torch where the tensors are on a GPU, plain where they are not."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def fused(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates a pure function of tensors, the first of which says where it runs. Any sizes share one kernel."""
    # Adapters and full parameters, with gradients and without, are kernels of their own; above the limit none is made.
    torch._dynamo.config.recompile_limit = 32
    # Rounding between steps stays as written: the sampler rounds there too, and agrees better for it.
    compiled: Any = torch.compile(function, dynamic=True, options={"emulate_precision_casts": True})

    @wraps(function)
    def run(first: Tensor, *rest: Any) -> Result:
        result: Result = (compiled if first.is_cuda else function)(first, *rest)
        return result

    return run
