"""Mixtures of experts: matrix products over tokens sorted by expert, with the trained tensors of the experts.

The modules are transformers' own: a router's `forward` chooses experts and weights for each token, and
`experts_forward` computes the experts. Adapters are "shared outer", as in hosted Tinker: all experts share the A of
gate and up, and the B of down. For gate and up, x A' is then one product per token instead of one per copy.

Shapes: T tokens, K experts per token, S = T K copies of tokens sorted by expert, E experts, D hidden size, I
intermediate size of an expert, G = 2 I, R LoRA rank; for a generic product N inputs, O outputs.
"""

# ruff: noqa: N803, N806, N815 -- the suffix of a tensor's name is its shape

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from fovea_trainer.model.expert_routing import (
    Exchange,
    Routing,
    kernels,
    kernels_compute,
    laid_out_as,
    local_experts,
)
from fovea_trainer.model.fused_layers import weighted_swiglu
from fovea_trainer.model.lora_linear import add_product, gradient_of

EXPERTS_IMPLEMENTATION = "fovea"
"""Name under which `experts_forward` is registered with transformers."""


class ExpertLayout(StrEnum):
    """Layout of a layer's experts in checkpoint files. A module always has [E, O, N]."""

    ONE_BY_ONE = "one by one"
    """One matrix [O, N] per expert and projection, for example `experts.7.gate_proj.weight`."""
    NUMBERED = "one by one, as w1, w2, w3"
    """The same with Mixtral's names, for example `experts.7.w1.weight`."""
    TRANSPOSED = "transposed"
    """[E, N, O]."""
    AS_IN_MODULE = "as in the module"


_ALIGNMENT_BYTES = 16
"""Alignment of rows that torch's grouped products require, in bytes."""


@dataclass(frozen=True)
class Factor:
    """One factor of the adapters of a layer's experts: [E, O, N], or [1, O, N] if all experts share it.

    Args:
        value: float32, the trained tensor.
        cast: `value` in the dtype of the model, used in products.
        grad: float32, to which backward passes add.
    """

    value: Tensor
    cast: Tensor
    grad: Tensor


@dataclass(frozen=True)
class ExpertAdapter:
    """LoRA of a layer's experts, for gate (w1), up (w3) and down (w2): y += scale * B (A x).

    Args:
        factors: Factors keyed by `w1.lora_A` and so on. Their shapes are those of `factor_shapes`.
        scale: alpha / rank.
    """

    factors: Mapping[str, Factor]
    scale: float

    def low(self, name: str, x: Tensor, ends_E: Tensor | None) -> Tensor:
        """Returns x A' of one projection. Without `ends_E` the factor is shared by all experts."""
        factor = self.factors[name]
        return _product(x, factor.cast, ends_E, factor.grad, factor.value)

    def add(self, output: Tensor, names: Sequence[str], lows: Sequence[Tensor], ends_E: Tensor | None) -> Tensor:
        """Adds scale * low B' to the output in place. It is split into equal parts, one for each of `names`."""
        apply: Any = _AddProducts.apply
        factors = [self.factors[name] for name in names]
        found: Tensor = apply(output, self.scale, ends_E, factors, *lows)
        return found


@dataclass(frozen=True)
class ExpertMasters:
    """The float32 masters of a layer's experts. Backward passes add to their `grad`."""

    gate_up_EGD: Tensor
    down_EDI: Tensor

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Returns the gradients of both, which are zeros if there were none yet."""
        return gradient_of(self.gate_up_EGD), gradient_of(self.down_EDI)


def factor_shapes(experts: Any, rank: int) -> dict[str, tuple[int, int, int]]:
    """Returns the shapes of an adapter's factors for the experts of a layer, in order.

    Args:
        experts: transformers' experts module.
        rank: LoRA rank.
    """
    (count, hidden_size, inner_size) = experts.down_proj.shape
    inner_shapes = {"lora_A": (1, rank, hidden_size), "lora_B": (count, inner_size, rank)}
    outer_shapes = {"lora_A": (count, rank, inner_size), "lora_B": (1, hidden_size, rank)}
    return {
        f"{part}.{half}": shape
        for part in ("w1", "w2", "w3")
        for half, shape in (outer_shapes if part == "w2" else inner_shapes).items()
    }


def experts_forward(experts: Any, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Computes the experts of each token; returns their weighted sum, [T, D].

    Collective, also in the backward pass, if experts are distributed over ranks. Each copy is then sent to the rank of
    its expert, which treats it as a token with a single expert.

    Args:
        experts: transformers' experts module. A LoraInjector sets its `trained` to the trained tensors.
        hidden_TD: Hidden states.
        index_TK: int64, the experts of each token.
        weight_TK: Router weights. Some routers return float32 for any dtype of the model.
    """
    weight_TK = weight_TK.to(hidden_TD.dtype)
    if not isinstance(experts.gate_up_proj, DTensor):
        return _computed(experts, hidden_TD, index_TK, weight_TK)
    routing = Routing.of(index_TK, experts.num_experts)
    exchange = Exchange.of(routing.ends_E, experts.gate_up_proj.device_mesh)
    weight_S1 = weight_TK.flatten().gather(0, routing.order_S).unsqueeze(-1)
    own = [exchange.send(rows) for rows in (routing.copies(hidden_TD), weight_S1)]
    return routing.sums(exchange.send_back(_computed(experts, own[0], exchange.index_C1, own[1])))


def _computed(experts: Any, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """Computes `experts_forward` for the experts of this rank."""
    trained: ExpertAdapter | ExpertMasters | None = experts.trained()
    adapter = trained if isinstance(trained, ExpertAdapter) else None
    totals = trained.gradients() if isinstance(trained, ExpertMasters) else (None, None)
    routing = Routing.of(index_TK, len(local_experts(experts.gate_up_proj)))
    weight_S1 = weight_TK.flatten().gather(0, routing.order_S).unsqueeze(-1)
    inner_SG = _product(routing.copies(hidden_TD), experts.gate_up_proj, routing.ends_E, totals[0])
    lows_TR = [] if adapter is None else [adapter.low(f"{part}.lora_A", hidden_TD, None) for part in ("w1", "w3")]
    gated_SI, low_SR = gated(inner_SG, weight_S1, lows_TR, routing, adapter, experts.act_fn)
    outer_TD = routing.sums(_product(gated_SI, experts.down_proj, routing.ends_E, totals[1]))
    if adapter is None or low_SR is None:
        return outer_TD
    return adapter.add(outer_TD, ("w2.lora_B",), [routing.sums(low_SR)], None)


def gated(
    inner_SG: Tensor,
    weight_S1: Tensor,
    lows_TR: Sequence[Tensor],
    routing: Routing,
    adapter: ExpertAdapter | None,
    activation: nn.Module,
) -> tuple[Tensor, Tensor | None]:
    """Returns f(gate) * up * weight, [S, I], and x A' of the down projection, [S, R], or None without an adapter.

    The router weight is applied here instead of to the output of the last product, which is as wide as the model. This
    is equivalent, because that product is linear.

    Args:
        inner_SG: Gate and up without the adapter's contribution; may be overwritten.
        weight_S1: Router weights.
        lows_TR: x A' of gate and up; empty without an adapter.
        routing: Positions of the copies.
        adapter: The adapter, or None.
        activation: f. The kernels compute SiLU only.
    """
    is_silu = isinstance(activation, SiLUActivation | nn.SiLU)
    if is_silu and kernels_compute(inner_SG) and (adapter is None or lows_TR[0].shape[1] <= kernels().MAX_RANK):
        apply: Any = _Gated.apply
        found: tuple[Tensor, Tensor | None] = apply(inner_SG, weight_S1, routing, adapter, *lows_TR)
        return found
    if adapter is not None:
        lows = [routing.copies(low_TR) for low_TR in lows_TR]
        inner_SG = adapter.add(inner_SG, ("w1.lora_B", "w3.lora_B"), lows, routing.ends_E)
    gate_SI, up_SI = inner_SG.chunk(2, dim=-1)
    gated_SI = weighted_swiglu(gate_SI, up_SI, weight_S1) if is_silu else activation(gate_SI) * up_SI * weight_S1
    return gated_SI, None if adapter is None else adapter.low("w2.lora_A", gated_SI, routing.ends_E)


def use_experts(decoder: Any) -> None:
    """Makes a language model compute its experts with `experts_forward`."""
    decoder.config._experts_implementation = EXPERTS_IMPLEMENTATION
    for module in list(decoder.modules()):
        if isinstance(module, Llama4TextMoe):
            module.experts = InputWeightedExperts(module.experts)
            module.forward = MethodType(_llama4_mixture, module)


class InputWeightedExperts(nn.Module):
    """A layer's experts of Llama 4, where the router's weight multiplies the input of an expert, before its gate.

    transformers computes every expert for every token, with matrices in the layout `TRANSPOSED`. This module has the
    usual layout, and computes each copy as a token with a single expert and the weight 1.

    Args:
        whole: transformers' module.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self._is_expert_parallel = whole.num_experts, whole.act_fn, False
        self.gate_up_proj = nn.Parameter(whole.gate_up_proj.mT.contiguous())
        self.down_proj = nn.Parameter(whole.down_proj.mT.contiguous())

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Returns the sum over each token's experts, [T, D]; arguments are those of `experts_forward`."""
        copies_SD = (hidden_TD.unsqueeze(1) * weight_TK.unsqueeze(-1)).flatten(0, 1)
        ones_S1 = torch.ones_like(weight_TK).view(-1, 1)
        found_SD = experts_forward(self, copies_SD, index_TK.reshape(-1, 1), ones_S1)
        return found_SD.view(*index_TK.shape, -1).sum(1)


def _llama4_mixture(mixture: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces the forward of `Llama4TextMoe`: returns the output [T, D] and the router's logits [T, E]."""
    hidden_TD = hidden.flatten(0, -2)
    logits_TE = functional.linear(hidden_TD, mixture.router.weight)
    logits_TK, index_TK = torch.topk(logits_TE, mixture.top_k, dim=-1)
    weight_TK = torch.sigmoid(logits_TK.float()).to(hidden.dtype)
    return mixture.shared_expert(hidden_TD) + mixture.experts(hidden_TD, index_TK, weight_TK), logits_TE


def transposed_experts(model: nn.Module) -> list[WeightConverter]:
    """Returns the conversions of a model's experts on loading that transformers does not know."""
    if not any(isinstance(module, InputWeightedExperts) for module in model.modules()):
        return []
    names = [f"feed_forward.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    return [WeightConverter(name, name, [Transpose(1, 2)]) for name in names]


def _product(
    x: Tensor, weight: Tensor, ends_E: Tensor | None, total: Tensor | None = None, leaf: Tensor | None = None
) -> Tensor:
    """Returns x W', each row with the W of its expert; rows are sorted by expert.

    Args:
        x: [rows, N].
        weight: [E, O, N].
        ends_E: int32, the end of each expert's rows. None if there is a single W for all rows.
        total: float32 [E, O, N], to which the gradient of W is added. None returns the gradient to autograd.
        leaf: A trained tensor, which makes the output part of the graph even if x is not.
    """
    apply: Any = _Product.apply
    found: Tensor = apply(x, weight, ends_E, total, leaf)
    return found


class _Product(torch.autograd.Function):
    """The autograd function of `_product`. The gradient of W is float32, added to `total` or returned to autograd.

    On a GPU, torch sums each expert's gradient in float32 and rounds it once to the model's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends_E: Tensor | None, total: Tensor | None, leaf: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x if total is not None or ctx.needs_input_grad[1] else None, weight, ends_E)
        ctx.total = total
        return _times(x, local_experts(weight).mT, ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, parameter, ends_E = ctx.saved_tensors
        weight = local_experts(parameter)
        d_x = _times(grads[0], weight, ends_E) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.total is not None:
            _add_outer(ctx.total, grads[0], x, ends_E)
        elif ctx.needs_input_grad[1]:
            d_weight = torch.zeros(weight.shape, device=weight.device)
            _add_outer(d_weight, grads[0], x, ends_E)
            d_weight = laid_out_as(parameter, d_weight)
        return d_x, d_weight, None, None, None


class _AddProducts(torch.autograd.Function):
    """The autograd function of `ExpertAdapter.add`."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, scale: float, ends_E: Tensor | None, factors: Sequence[Factor], *xs: Tensor
    ) -> Tensor:
        for part, factor, x in zip(output.chunk(len(factors), dim=-1), factors, xs, strict=True):
            part.add_(_times(x, factor.cast.mT, ends_E), alpha=scale)
        ctx.mark_dirty(output)
        ctx.save_for_backward(ends_E, *xs)
        ctx.scale, ctx.factors = scale, factors
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ends_E, *xs = ctx.saved_tensors
        d_xs = []
        for grad, factor, x in zip(grads[0].chunk(len(xs), dim=-1), ctx.factors, xs, strict=True):
            d_xs.append(_times(grad, factor.cast, ends_E).mul_(ctx.scale))
            _add_outer(factor.grad, grad, x, ends_E, ctx.scale)
        return grads[0], None, None, None, *d_xs


class _Gated(torch.autograd.Function):
    """The autograd function of `gated`: one kernel forward, one backward for all gradients except the factors'."""

    @staticmethod
    def forward(
        ctx: Any,
        inner_SG: Tensor,
        weight_S1: Tensor,
        routing: Routing,
        adapter: ExpertAdapter | None,
        *lows_TR: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        gated_SI, low_SR = kernels().gated(inner_SG, weight_S1, _around_gate(routing, adapter, lows_TR))
        ctx.save_for_backward(inner_SG, weight_S1, None if adapter is None else gated_SI, *lows_TR)
        ctx.routing, ctx.adapter = routing, adapter
        return gated_SI, low_SR

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inner_SG, weight_S1, gated_SI, *lows_TR = ctx.saved_tensors
        routing, adapter = ctx.routing, ctx.adapter
        around = _around_gate(routing, adapter, lows_TR)
        d_low_SR = None if adapter is None else grads[1]
        d_inner_SG, d_weight_S1, *d_lows_SR = kernels().gated_gradients(grads[0], d_low_SR, inner_SG, weight_S1, around)
        d_lows_TR = []
        if adapter is not None:
            _add_outer(adapter.factors["w2.lora_A"].grad, grads[1].contiguous(), gated_SI, routing.ends_E)
            for part, grad_SI, low_TR, d_low in zip(
                ("w1", "w3"), d_inner_SG.chunk(2, dim=-1), lows_TR, d_lows_SR, strict=True
            ):
                low_SR = routing.copies(low_TR)
                _add_outer(adapter.factors[f"{part}.lora_B"].grad, grad_SI, low_SR, routing.ends_E, adapter.scale)
                d_lows_TR.append(routing.sums(d_low))
        return d_inner_SG, d_weight_S1, None, None, *d_lows_TR


def _around_gate(routing: Routing, adapter: ExpertAdapter | None, lows_TR: Sequence[Tensor]) -> Any:
    if adapter is None:
        return None
    casts = [adapter.factors[name].cast for name in ("w1.lora_B", "w3.lora_B", "w2.lora_A")]
    return kernels().GateAdapter(adapter.scale, routing.token_S, routing.expert_S, *lows_TR, *casts)


def _times(x: Tensor, weight_ENO: Tensor, ends_E: Tensor | None) -> Tensor:
    """Returns x W, each row with the W of its expert. Without `ends_E` all rows use the only W."""
    if ends_E is None:
        return x @ weight_ENO[0]
    found = functional.grouped_mm(_padded(x, 1), _padded(weight_ENO, 2), offs=ends_E)
    if found.shape[1] == weight_ENO.shape[2]:
        return found
    # Return a copy: callers add to it in place, which a view forbids. For zero rows `contiguous` would return the view.
    return found[:, : weight_ENO.shape[2]].clone(memory_format=torch.contiguous_format)


def _add_outer(total_EON: Tensor, grad: Tensor, x: Tensor, ends_E: Tensor | None, scale: float = 1.0) -> None:
    """Adds scale * grad' x of each expert's rows to `total_EON`, summed in float32."""
    if ends_E is None:
        return add_product(total_EON[0], grad.T, x, scale)
    if not grad.is_cuda:  # the CPU kernel would sum in the operands' dtype
        grad, x = grad.float(), x.float()
    found = functional.grouped_mm(_padded(grad, 1).T, _padded(x, 1), offs=ends_E)
    total_EON.add_(found[:, : total_EON.shape[1], : total_EON.shape[2]], alpha=scale)


def _padded(tensor: Tensor, count: int) -> Tensor:
    """Pads the last `count` dimensions with zeros to the alignment that torch requires.

    For example, the rank of an adapter need not be aligned.
    """
    unit = _ALIGNMENT_BYTES // tensor.itemsize
    missing = [-size % unit for size in tensor.shape[-count:]]
    if any(missing):
        return functional.pad(tensor, [amount for size in reversed(missing) for amount in (0, size)])
    return tensor


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
