"""The callables behind the names of fovea/wire/loss_operations.py, called within the bounds of costs.py.

The table is built once, from our own lists. A name from outside is only ever a key of it.
"""

import math
import operator
from collections.abc import Callable
from functools import reduce
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from fovea.wire import loss_operations as names
from services.trainer.losses import costs
from services.trainer.losses.costs import Meter, RefusedError, Resolved

_MAX_INTEGER = 2**63 - 1
_ROOTS: dict[str, Any] = {"torch": torch, "operator": operator, "math": math}


def _getattr(owner: Resolved, attribute: str) -> Resolved:
    if isinstance(owner, Tensor) and attribute in ("values", "indices"):
        raise RefusedError(f"a tensor has no {attribute} here")
    return getattr(owner, attribute)


def _named(target: str) -> Callable[..., Resolved]:
    root, *path = target.split(".")
    found: Callable[..., Resolved] = reduce(getattr, path, _ROOTS[root])
    return found


FUNCTIONS: dict[str, Callable[..., Resolved]] = {
    **{target: _named(target) for target in names.FUNCTIONS - {names.GETATTR}},
    names.GETATTR: _getattr,
}
METHODS: dict[str, Callable[..., Resolved]] = {name: getattr(Tensor, name) for name in names.METHODS}


def call(
    function: Callable[..., Resolved], target: str, args: tuple[Any, ...], kwargs: dict[str, Any], meter: Meter
) -> Resolved:
    """Calls, if neither arguments, work nor result are too large. Raises RefusedError, or what the callable raises."""
    if target.startswith("math.") and any(isinstance(leaf, Tensor) for leaf in costs.leaves(args)):
        raise RefusedError(f"takes numbers, not tensors: use torch.{target.removeprefix('math.')}")
    if target.startswith("operator.") and target != "operator.getitem":
        _check_operands(target, args)
    costs.spend_before(meter, function, target.rpartition(".")[2], args, kwargs)
    result = function(*args, **kwargs)
    _check_kinds(result)
    costs.spend_after(meter, result)
    return result


def _check_operands(target: str, args: tuple[Any, ...]) -> None:
    """Python's own arithmetic knows no bounds: lists multiply, whatever is in them, and whole numbers grow."""
    for leaf in args:
        if not isinstance(leaf, Tensor | bool | int | float | torch.dtype | torch.device):
            raise RefusedError(f"takes tensors and numbers, not a {type(leaf).__name__}")
    if target == "operator.pow" and all(isinstance(leaf, int) for leaf in args):
        base, exponent = args
        if base.bit_length() * abs(exponent) > 63:
            raise RefusedError(f"makes a whole number above 64 bits: {base} ** {exponent}")


def _check_kinds(value: Resolved) -> None:
    """Lists are flat: what may hold lists of itself doubles with every operation."""
    for leaf in value if isinstance(value, list | tuple) else (value,):
        match leaf:
            case Tensor() | bool() | float() | None | str() | EllipsisType():
                pass
            case int() if abs(leaf) <= _MAX_INTEGER:
                pass
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                pass
            case _:
                raise RefusedError(f"makes a {type(leaf).__name__}, which is not allowed")
