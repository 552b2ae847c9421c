"""Limits on memory and time of a traced loss. Where possible, the cost of an operation is computed before it runs.

Work is counted in elements read and written. Sorting, matrix products and repeating operations read their elements
several times. Each new tensor costs OBJECT elements in addition. If the result of an operation has a gradient, its part
of the backward pass is counted as well.
"""

import math
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

MAX_ELEMENTS = 2**22
"""Maximum number of elements of one value."""

MAX_WORK = 2**27
"""Maximum number of elements that all operations read and write for one datum."""

BACKWARD = 2
"""Work of an operation's backward pass, as a multiple of its forward work: it reads inputs and outputs again, and the
gradients of both.
"""

MAX_VALUES = 2**16
"""Maximum number of values that an operation receives or returns."""

MAX_DIMENSIONS = 64
"""Maximum number of dimensions that torch supports."""

OBJECT = 1024
"""Cost of creating a tensor, in elements."""

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
"""A tensor, number, bool, None, dtype or the like, or a list, tuple, dict or slice of them."""


class RefusedError(ValueError):
    """The error for an operation that is not allowed with its arguments."""


class Meter:
    """Counts the work of one evaluation."""

    def __init__(self) -> None:
        self._work = 0

    def spend(self, work: int) -> None:
        """Adds work.

        Raises:
            RefusedError: The total exceeds MAX_WORK.
        """
        self.expect(work)
        self._work += work

    def expect(self, work: int) -> None:
        """Checks that additional work is allowed, without counting it.

        Raises:
            RefusedError: The total would exceed MAX_WORK.
        """
        if self._work + work > MAX_WORK:
            raise RefusedError(f"makes the loss read and write more than {MAX_WORK} elements for one datum")


def spend_before(
    meter: Meter, function: Callable[..., Resolved], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Counts the elements that a call reads, and checks the size of its result.

    Returns:
        The elements that the backward pass reads again.

    Raises:
        RefusedError: The call exceeds a limit. Exceptions of the callable are passed on.
    """
    tensors = [leaf for leaf in leaves((*args, *kwargs.values())) if isinstance(leaf, Tensor)]
    if len(shapes := {tensor.shape for tensor in tensors if tensor.ndim}) > 1:
        _check_broadcast(shapes)
    if name in _CUTTING:
        if (count := _split_count(name, args, kwargs)) > MAX_VALUES:
            raise RefusedError(f"would split a tensor into {count} parts; at most {MAX_VALUES} are allowed")
        meter.expect(count * OBJECT)
    made = 0
    if name in _GROWING or (name == "getitem" and len(args) == 2 and _picks(args[1])):
        made = _check_growth(function, name, args, kwargs)
    read = sum(tensor.numel() for tensor in tensors)
    passes, products = _passes(name, tensors, args, kwargs), made * _contracted(name, tensors)
    meter.spend(read * passes + products)
    # The backward pass of a sort scatters the gradient to the old positions, in a single pass.
    return read * (1 if name in _SORTING else passes) + products


def spend_after(meter: Meter, value: Resolved, again: int) -> None:
    """Counts the elements that a call returned, and its backward pass if it has one.

    Args:
        meter: The meter.
        value: The result of the call.
        again: The value returned by `spend_before`.

    Raises:
        RefusedError: The result is not allowed, or the work exceeds MAX_WORK.
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
    """Returns the leaf values of nested lists, tuples, dicts and slices.

    Raises:
        RefusedError: There are more than MAX_VALUES.
    """
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
                raise RefusedError(f"receives more than {MAX_VALUES} values")


def _check_tensor(tensor: Tensor) -> None:
    if tensor.numel() > MAX_ELEMENTS:
        raise RefusedError(f"makes {tensor.numel()} elements {list(tensor.shape)}; at most {MAX_ELEMENTS} are allowed")
    if tensor.ndim > MAX_DIMENSIONS:
        raise RefusedError(f"makes a tensor of {tensor.ndim} dimensions; at most {MAX_DIMENSIONS} are allowed")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_complex():
        raise RefusedError(f"makes a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which is not allowed")


def _check_broadcast(shapes: Iterable[torch.Size]) -> None:
    """Checks the size after broadcasting. An operation that does not broadcast returns no more than it receives."""
    widths = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    _check_count(math.prod(max(width) for width in widths))


def _check_count(count: int, shape: str = "") -> None:
    if count > MAX_ELEMENTS:
        raise RefusedError(f"would make {count} elements{shape}; at most {MAX_ELEMENTS} are allowed")


def _check_growth(function: Callable[..., Resolved], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the number of elements of the result.

    The shape is computed on the meta device, before memory is allocated.
    """
    if name == "getitem" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
        return 0  # A boolean mask only selects elements. Their number depends on the data.
    if name == "getitem" and isinstance(args[1], tuple):
        args = (args[0], _without_masks(args[1]))
    shaped_kwargs = _on_meta(kwargs)
    if name in _FACTORIES:  # they have no tensor argument that determines the device
        shaped_kwargs["device"] = torch.device("meta")
    shaped = [leaf for leaf in leaves(function(*_on_meta(args), **shaped_kwargs)) if isinstance(leaf, Tensor)]
    for leaf in shaped:
        _check_count(leaf.numel(), f" {list(leaf.shape)}")
    return sum(leaf.numel() for leaf in shaped)


def _split_count(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the maximum number of tensors that a split returns."""
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
    """Returns the number of times that a call reads its elements."""
    if name in _SORTING:
        return max(_longest(tensors).bit_length(), 1)
    if name == "linalg_norm":  # it may compute a singular value decomposition
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
    """Returns the number of products summed for one element of the result; 0 for operations without products."""
    if name not in _PRODUCTS - {"linalg_norm"}:
        return 0
    return 1 if name == "outer" else max((tensor.shape[-1] for tensor in tensors if tensor.ndim), default=1)


def _picks(index: Any) -> bool:
    """Returns True if an index contains lists or tensors, which may select an element many times."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor | list) for part in parts)


def _without_masks(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns an equivalent index with boolean masks replaced by positions, as indexing itself does."""
    positions: list[Any] = []
    for part in index:
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool
        positions += part.nonzero(as_tuple=True) if is_mask else (part,)
    return tuple(positions)


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
