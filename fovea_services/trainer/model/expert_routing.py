"""Routing of tokens to experts: copies sorted by expert, replay of a sampler's routing, and load counts.

Router replay makes the layers use the experts that a sampler chose, instead of choosing themselves.

Shapes: T packed tokens, K experts per token, S = T K copies of tokens sorted by expert, E experts, L layers with
experts, N columns of a row.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fovea.runtime.model_files import experts_of
from fovea_services.trainer.batches.datum_decoding import ExpertShape

ROUTED_EXPERTS = "routed_experts"
"""Keyword argument of a decoder, which it passes on to its layers: int16 [T, L, K], -1 where the model's own router
decides.
"""


_KERNEL_TYPES = (torch.bfloat16, torch.float32)
_forced: list[bool] = []
"""Overrides by `computed_with_kernels`; the last entry applies."""


def kernels_compute(rows: Tensor) -> bool:
    """Returns True if `expert_kernels.py` computes the steps between matrix products, and False for torch's operators.

    The kernels are used on a GPU, where they are faster (`benchmarks/experts.py`).
    """
    if _forced:
        return _forced[-1]
    return rows.is_cuda and rows.dtype in _KERNEL_TYPES and _triton_is_here()


@contextmanager
def computed_with_kernels(wanted: bool) -> Iterator[None]:
    """Forces the kernels on or off for all threads within a block, to measure or compare them."""
    _forced.append(wanted)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _triton_is_here() -> bool:
    return find_spec("triton") is not None


def kernels() -> ModuleType:
    from fovea_services.trainer.model import expert_kernels  # imported late, because it imports Triton

    return expert_kernels


@dataclass(frozen=True)
class Routing:
    """Positions of token copies after sorting by expert.

    Args:
        token_S: int64, the token of each copy.
        expert_S: int64, the expert of each copy, ascending.
        order_S: int64, the position of each copy in the flattened [T, K].
        place_S: int64, the inverse: the slot of each entry of [T, K] among the copies.
        ends_E: int32, the end of each expert's copies.
        top_k: K.
    """

    token_S: Tensor
    expert_S: Tensor
    order_S: Tensor
    place_S: Tensor
    ends_E: Tensor
    top_k: int

    @classmethod
    def of(cls, index_TK: Tensor, expert_count: int) -> Self:
        """Sorts the copies for the chosen experts, int64 [T, K]."""
        top_k = index_TK.shape[-1]
        sorted_S, order_S = torch.sort(index_TK.flatten(), stable=True)
        places_S = torch.arange(len(order_S), device=order_S.device)
        experts_E = torch.arange(expert_count, device=order_S.device)
        ends_E = torch.searchsorted(sorted_S, experts_E, right=True, out_int32=True)
        place_S = torch.empty_like(order_S).scatter_(0, order_S, places_S)
        return cls(order_S // top_k, sorted_S, order_S, place_S, ends_E, top_k)

    def copies(self, rows_TN: Tensor) -> Tensor:
        """Copies the row of each token to all its copies, [S, N]."""
        apply: Any = _Copies.apply
        found: Tensor = apply(rows_TN, self)
        return found

    def sums(self, rows_SN: Tensor) -> Tensor:
        """Returns the sum of the copies of each token, [T, N]. Uses no atomic additions, so it is reproducible."""
        apply: Any = _Sums.apply
        found: Tensor = apply(rows_SN, self)
        return found


def is_experts(module: nn.Module) -> bool:
    """Returns True if a module is a layer's experts in transformers' common form."""
    return hasattr(module, "_is_expert_parallel")


class ExpertLoads:
    """Number of tokens per expert in the latest forward pass.

    Attributes:
        layers: Numbers of the layers with experts.
    """

    def __init__(self, decoder: Any) -> None:
        self.layers: list[int] = []
        self._counts: dict[int, Tensor] = {}
        for number, layer in enumerate(decoder.layers):
            for module in filter(is_experts, layer.modules()):
                self.layers.append(number)
                module.register_forward_pre_hook(partial(self._note, number))

    def counts(self) -> Tensor | None:
        """Returns int64 [layers, E] on the device, without waiting for it; None for a model without experts."""
        return torch.stack([self._counts[number] for number in self.layers]) if self.layers else None

    def _note(self, number: int, experts: Any, given: tuple[Tensor, ...]) -> None:
        index_S = given[1].flatten()
        # bincount would make the host wait for the device.
        counts_E = torch.zeros(experts.num_experts, dtype=torch.int64, device=index_S.device)
        self._counts[number] = counts_E.scatter_add_(0, index_S, torch.ones_like(index_S))


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TN: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        if kernels_compute(rows_TN):
            found: Tensor = kernels().copies(rows_TN, routing.place_S)
            return found
        return rows_TN.index_select(0, routing.token_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.routing.sums(grads[0]), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SN: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        if kernels_compute(rows_SN):
            found: Tensor = kernels().sums(rows_SN, routing.place_S, routing.top_k)
            return found
        return rows_SN.index_select(0, routing.place_S).view(-1, routing.top_k, rows_SN.shape[-1]).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.routing.copies(grads[0]), None


def expert_shape(model: Any) -> ExpertShape | None:
    """Returns numbers of layers, experts per token and experts of a model; None for a model without experts."""
    layers = sum(1 for _ in _routed_layers(model.get_decoder()))
    if not layers:
        return None
    text = model.config.get_text_config()
    return ExpertShape(layers, text.num_experts_per_tok, getattr(text, experts_of(text.to_dict())))


def replay_routing(decoder: Any) -> None:
    """Makes a decoder's layers with experts follow `ROUTED_EXPERTS`. Call it once, after all other changes to layers.

    The experts are an argument of each layer, so a block that recomputes its activations in the backward pass uses the
    same experts.
    """
    for place, layer in enumerate(_routed_layers(decoder)):
        layer.forward = partial(_replayed, layer.forward, place)


def _routed_layers(decoder: Any) -> Iterator[Any]:
    return (layer for layer in decoder.layers if hasattr(getattr(layer, "mlp", None), "experts"))


def _replayed(
    forward: Callable[..., Any], place: int, *arguments: Any, routed_experts: Tensor | None = None, **options: Any
) -> Any:
    given = nullcontext() if routed_experts is None else _GivenRouting(routed_experts[:, place])
    with given:
        return forward(*arguments, **options)


class _GivenRouting(TorchFunctionMode):
    """Makes `torch.topk`, with which every router chooses, return given indices.

    The router's own code computes their weights, whether softmax comes before or after and normalized or not, so
    gradients flow as if the router had chosen them.
    """

    def __init__(self, chosen_TK: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._chosen_TK = chosen_TK.long()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return found
        index_TK = torch.where(self._chosen_TK < 0, found.indices, self._chosen_TK)
        return torch.return_types.topk((args[0].gather(-1, index_TK), index_TK))
