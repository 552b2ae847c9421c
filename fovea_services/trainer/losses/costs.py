"""How much memory and time an operation of a traced loss may take: known before it runs, wherever it can be.

Work is counted in elements read and written. What sorts, multiplies matrices or repeats itself reads its elements
several times, and a tensor costs OBJECT elements beside its own. An operation that the gradient flows through counts
with its part of the backward pass.
"""

import math
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

MAX_ELEMENTS = 2**22
"""The most elements of one value of a traced loss."""

MAX_WORK = 2**27
"""The most elements that all operations of a traced loss read and write for one datum."""

BACKWARD = 2
"""The work of the backward pass of an operation, as a multiple of its own: it reads what went in and what came out
again, with the gradients of both.
"""

MAX_VALUES = 2**16
"""The most values that an operation takes or makes."""

MAX_DIMENSIONS = 64
"""The most that torch itself computes with."""

OBJECT = 1024
"""What making a tensor takes, in elements."""

_PRODUCTS = frozenset({"bmm", "dot", "inner", "linalg_norm", "matmul", "mm", "mv", "outer", "vdot"})
_FACTORIES = frozenset({"arange", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros"})
_GROWING = (
    _PRODUCTS
    | _FACTORIES
    | frozenset(
        """
        broadcast_to cat concat concatenate diag diag_embed expand expand_as hstack index_select nanquantile new_full
        new_ones new_zeros pad quantile repeat stack tile vstack
        """.split()
    )
)
_SORTING = frozenset("argsort kthvalue median msort nanmedian nanquantile quantile sort topk".split())
_CUTTING = frozenset({"chunk", "split", "tensor_split", "unbind"})
_AMOUNTS = ("chunks", "indices", "indices_or_sections", "sections", "split_size", "split_size_or_sections",
            "tensor_indices_or_sections")  # fmt: skip

Resolved = Any
"""Tensor, number, bool, None, dtype and the like, or lists, tuples, dicts and slices of them."""


class RefusedError(ValueError):
    """An operation that may not be done with these arguments."""


class Meter:
    """The work of one evaluation."""

    def __init__(self) -> None:
        self._work = 0

    def spend(self, work: int) -> None:
        """Raises RefusedError if that is too much in all."""
        self.expect(work)
        self._work += work

    def expect(self, work: int) -> None:
        """Raises RefusedError if so much more would be too much, and counts nothing."""
        if self._work + work > MAX_WORK:
            raise RefusedError(f"takes the loss above {MAX_WORK} elements read and written for one datum")


def spend_before(
    meter: Meter, function: Callable[..., Resolved], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Counts what a call will read, and checks what it will make; returns what its backward pass will read again.

    Raises RefusedError, or what the callable raises.
    """
    tensors = [leaf for leaf in leaves((*args, *kwargs.values())) if isinstance(leaf, Tensor)]
    if len(shapes := {tensor.shape for tensor in tensors if tensor.ndim}) > 1:
        _check_broadcast(shapes)
    if name in _CUTTING:
        if (count := _pieces(name, args, kwargs)) > MAX_VALUES:
            raise RefusedError(f"would cut a tensor into {count} pieces; at most {MAX_VALUES} are allowed")
        meter.expect(count * OBJECT)
    made = 0
    if name in _GROWING or (name == "getitem" and len(args) == 2 and _picks(args[1])):
        made = _check_growth(function, name, args, kwargs)
    read = sum(tensor.numel() for tensor in tensors)
    passes, products = _passes(name, tensors, args, kwargs), made * _contracted(name, tensors)
    meter.spend(read * passes + products)
    return read * (1 if name in _SORTING else passes) + products  # the gradient of what is sorted is put in its place


def spend_after(meter: Meter, value: Resolved, again: int) -> None:
    """Counts what a call made, and the backward pass if there is one. Raises RefusedError for a value that a traced
    loss may not hold.

    Args:
        again: What `spend_before` returned.
    """
    parts = value if isinstance(value, list | tuple) else (value,)
    if len(parts) > MAX_VALUES:
        raise RefusedError(f"makes {len(parts)} values; at most {MAX_VALUES} are allowed")
    for part in parts:
        if isinstance(part, Tensor):
            _check_tensor(part)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    made = sum(OBJECT + tensor.numel() for tensor in tensors)
    flows = any(tensor.requires_grad for tensor in tensors)
    meter.spend(made + (BACKWARD * (again + made) if flows else 0))


def leaves(value: Resolved) -> list[Any]:
    """What stands in lists, tuples, dicts and slices. Raises RefusedError for more than MAX_VALUES."""
    found: list[Any] = []
    _collect((value,), found)
    return found


def _collect(values: Iterable[Resolved], found: list[Any]) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif isinstance(value, slice):
            found += (value.start, value.stop, value.step)
        else:
            found.append(value)
            if len(found) > MAX_VALUES:
                raise RefusedError(f"takes more than {MAX_VALUES} values")


def _check_tensor(tensor: Tensor) -> None:
    if tensor.numel() > MAX_ELEMENTS:
        raise RefusedError(f"makes {tensor.numel()} elements {list(tensor.shape)}; at most {MAX_ELEMENTS} are allowed")
    if tensor.ndim > MAX_DIMENSIONS:
        raise RefusedError(f"makes a tensor of {tensor.ndim} dimensions; at most {MAX_DIMENSIONS} are allowed")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_complex():
        raise RefusedError(f"makes a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which is not allowed")


def _check_broadcast(shapes: Iterable[torch.Size]) -> None:
    """Most operations that take several shapes broadcast them; the others make no more than they are given."""
    widths = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    _check_count(math.prod(max(width) for width in widths))


def _check_count(count: int, shape: str = "") -> None:
    if count > MAX_ELEMENTS:
        raise RefusedError(f"would make {count} elements{shape}; at most {MAX_ELEMENTS} are allowed")


def _check_growth(function: Callable[..., Resolved], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The elements of the result: its shape is computed, without data, before it takes memory."""
    if name == "getitem" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
        return 0  # A mask takes elements away; how many is known only to the data.
    if name == "getitem" and isinstance(args[1], tuple):
        args = (args[0], _without_masks(args[1]))
    shaped_kwargs = _on_meta(kwargs)
    if name in _FACTORIES:  # which have no tensor that says where
        shaped_kwargs["device"] = torch.device("meta")
    shaped = [leaf for leaf in leaves(function(*_on_meta(args), **shaped_kwargs)) if isinstance(leaf, Tensor)]
    for leaf in shaped:
        _check_count(leaf.numel(), f" {list(leaf.shape)}")
    return sum(leaf.numel() for leaf in shaped)


def _pieces(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The most pieces that a cut makes."""
    whole = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
    longest = max(whole.shape, default=1) if isinstance(whole, Tensor) else 1
    if name == "unbind":
        return longest
    amount = next((kwargs[key] for key in _AMOUNTS if key in kwargs), args[1] if len(args) > 1 else 1)
    match amount:
        case Tensor():
            return int(amount) if not amount.ndim else amount.numel() + 1
        case list() | tuple():
            return len(amount) + 1
        case int() if name == "split":
            return longest // max(amount, 1) + 1
    return amount if isinstance(amount, int) else 1


def _passes(name: str, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How often a call reads its elements."""
    if name in _SORTING:
        return max(_longest(tensors).bit_length(), 1)
    if name == "linalg_norm":  # may be a singular value decomposition
        return max((min(tensor.shape[-2:]) for tensor in tensors if tensor.ndim > 1), default=1)
    if name == "diff":
        times = kwargs.get("n", args[1] if len(args) > 1 else 1)
        return min(max(int(times), 1), _longest(tensors))
    if name == "roll":
        shifts = kwargs.get("shifts", args[1] if len(args) > 1 else 1)
        return max(len(shifts), 1) if isinstance(shifts, list | tuple) else 1
    return 1


def _longest(tensors: list[Tensor]) -> int:
    return max((extent for tensor in tensors for extent in tensor.shape), default=1)


def _contracted(name: str, tensors: list[Tensor]) -> int:
    """The products that are added up for one element of a result; 0 where there are none."""
    if name not in _PRODUCTS - {"linalg_norm"}:
        return 0
    return 1 if name == "outer" else max((tensor.shape[-1] for tensor in tensors if tensor.ndim), default=1)


def _picks(index: Any) -> bool:
    """Whether an index is made of lists or tensors, which may name an element many times."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor | list) for part in parts)


def _without_masks(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """An index that picks the same, its masks written as the places that they name, as indexing itself does."""
    places: list[Any] = []
    for part in index:
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool
        places += part.nonzero(as_tuple=True) if is_mask else (part,)
    return tuple(places)


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
