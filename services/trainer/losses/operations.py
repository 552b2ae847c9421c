"""The callables behind the names of fovea/wire/loss_operations.py, and how much memory and time a call may take.

The table is built once, from our own lists. A name from outside is only ever a key of it.
"""

import math
import operator
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import zip_longest
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from fovea.wire import loss_operations as names

MAX_ELEMENTS = 2**22
"""The most elements of one value of a traced loss."""

MAX_WORK = 2**26
"""The most elements that all operations of a traced loss make for one datum; products count their multiplications."""

_MAX_INTEGER = 2**63 - 1
_ROOTS: dict[str, Any] = {"torch": torch, "operator": operator, "math": math}

Resolved = Any
"""Tensor, number, bool, None, dtype and the like, or lists, tuples, dicts and slices of them."""


class RefusedError(ValueError):
    """An operation that may not be done with these arguments."""


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

_PRODUCTS = frozenset({"bmm", "dot", "inner", "linalg_norm", "matmul", "mm", "mv", "outer", "vdot"})
_GROWING = _PRODUCTS | frozenset(
    """
    arange broadcast_to cat concat concatenate diag diag_embed expand expand_as eye full hstack index_select linspace
    nanquantile new_full new_ones new_zeros ones pad quantile repeat stack tile vstack zeros
    """.split()
)
_CUTTING = frozenset({"chunk", "split", "tensor_split", "unbind"})
_MAX_PIECES = 2**16


def call(function: Callable[..., Resolved], target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Resolved:
    """Calls, if neither arguments nor result are too large. Raises RefusedError, or whatever the callable raises."""
    tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if target.startswith("math.") and tensors:
        raise RefusedError(f"takes numbers, not tensors: use torch.{target.removeprefix('math.')}")
    if target.startswith("operator.") and not tensors and target != "operator.getitem":
        _check_numbers(target, args)
    if len(shapes := {tensor.shape for tensor in tensors if tensor.ndim}) > 1:
        _check_broadcast(shapes)
    name = target.rpartition(".")[2]
    if name in _GROWING or (name == "getitem" and len(args) == 2 and _picks(args[1])):
        _check_growth(function, args, kwargs)
    if name in _CUTTING and any(tensor.numel() > _MAX_PIECES for tensor in tensors):
        raise RefusedError(f"cuts a tensor of more than {_MAX_PIECES} elements into pieces")
    result = function(*args, **kwargs)
    check_value(result)
    return result


def work_of(target: str, args: tuple[Any, ...], result: Resolved) -> int:
    """What a call adds to MAX_WORK."""
    made = sum(leaf.numel() for leaf in _leaves(result) if isinstance(leaf, Tensor))
    if target.rpartition(".")[2] not in _PRODUCTS:
        return made
    inner = [leaf.shape[-1] for leaf in _leaves(args) if isinstance(leaf, Tensor) and leaf.ndim]
    read = max((leaf.numel() for leaf in _leaves(args) if isinstance(leaf, Tensor)), default=0)
    return max(made, read) * max(inner, default=1)


def check_value(value: Resolved) -> None:
    """Raises RefusedError for a value that a traced loss may not hold."""
    for leaf in _leaves(value):
        match leaf:
            case Tensor():
                _check_tensor(leaf)
            case bool() | float() | None | str():
                pass
            case int() if abs(leaf) <= _MAX_INTEGER:
                pass
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                pass
            case EllipsisType():
                pass
            case _:
                raise RefusedError(f"makes a {type(leaf).__name__}, which is not allowed")


def _check_tensor(tensor: Tensor) -> None:
    if tensor.numel() > MAX_ELEMENTS:
        raise RefusedError(f"makes {tensor.numel()} elements {list(tensor.shape)}; at most {MAX_ELEMENTS} are allowed")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_complex():
        raise RefusedError(f"makes a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which is not allowed")


def _check_numbers(target: str, args: tuple[Any, ...]) -> None:
    """Python's own arithmetic knows no bounds: lists multiply, and whole numbers grow."""
    for leaf in args:
        if not isinstance(leaf, bool | int | float | torch.dtype | torch.device):
            raise RefusedError(f"takes tensors and numbers, not a {type(leaf).__name__}")
    if target == "operator.pow" and all(isinstance(leaf, int) for leaf in args):
        base, exponent = args
        if base.bit_length() * abs(exponent) > 63:
            raise RefusedError(f"makes a whole number above 64 bits: {base} ** {exponent}")


def _check_broadcast(shapes: set[torch.Size]) -> None:
    """Most operations that take several shapes broadcast them; the others make no more than they are given."""
    widths = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    count = math.prod(max(width) for width in widths)
    if count > MAX_ELEMENTS:
        raise RefusedError(f"would make {count} elements; at most {MAX_ELEMENTS} are allowed")


def _check_growth(function: Callable[..., Resolved], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Computes the shape of the result, without data, before it takes memory."""
    if function is operator.getitem and isinstance(mask := args[1], Tensor) and mask.dtype == torch.bool:
        return  # A mask takes elements away; how many is known only to the data.
    shaped = function(*_on_meta(args), **_on_meta(kwargs))
    for leaf in _leaves(shaped):
        if isinstance(leaf, Tensor) and leaf.numel() > MAX_ELEMENTS:
            raise RefusedError(
                f"would make {leaf.numel()} elements {list(leaf.shape)}; at most {MAX_ELEMENTS} are allowed"
            )


def _picks(index: Any) -> bool:
    """Whether an index is made of lists or tensors, which may name an element many times."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor | list) for part in parts)


def _on_meta(value: Any) -> Any:
    match value:
        case Tensor():
            return value.detach().to("meta")
        case torch.device():
            return torch.device("meta")
        case tuple() if not isinstance(value, torch.Size):
            return tuple(_on_meta(item) for item in value)
        case list():
            return [_on_meta(item) for item in value]
        case dict():
            return {key: _on_meta(item) for key, item in value.items()}
    return value


def _leaves(value: Any) -> Iterator[Any]:
    match value:
        case list() | tuple():
            for item in value:
                yield from _leaves(item)
        case dict():
            for item in value.values():
                yield from _leaves(item)
        case slice():
            yield from (value.start, value.stop, value.step)
        case _:
            yield value
