# ruff: noqa: N803, N806
"""Computes experts on a CPU with weights in checkpoint form and with shared-outer adapters.

Replaces: `vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.select_unquantized_moe_backend`.
Why: with LoRA enabled, vLLM selects the Triton kernels, which do not run on a CPU. Without LoRA, it selects kernels
    that repack the weights when the model is loaded but not when weights are loaded later. They would read the weights
    of a full push as if they were packed. The patch selects `TorchExperts`, which never packs.
Upstream: none filed.
Delete when: the experts of `cpu_moe.py` support LoRA, and pack the weights again after each load.

Shape suffixes: N tokens, K experts per token, P = N * K pairs of token and expert, sorted by expert and adapter, D
model width, I inner width of an expert, J = 2 I, E experts, R maximum rank, S adapter slots, 1 a dimension that all
experts share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from fovea_sampler.vllm_patches.punica import Run


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)  # constants of gpt-oss (`swiglu_limit` and alpha); vLLM's kernel fixes them too
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


_ACTIVATIONS = {
    MoEActivation.SILU: _swiglu,
    MoEActivation.GELU_TANH: _geglu,
    MoEActivation.SWIGLUOAI: _clamped_swiglu,
}


def apply() -> None:
    """Makes vLLM select TorchExperts. It may be called twice."""
    method: Any = unquantized_fused_moe_method
    method.select_unquantized_moe_backend = _select


def _select(moe_config: Any) -> tuple[UnquantizedMoeBackend, type]:
    if moe_config.activation not in _ACTIVATIONS:
        raise ValueError(f"experts with the activation {moe_config.activation} are not supported on a CPU; use a GPU")
    return UnquantizedMoeBackend.CPU, TorchExperts


@dataclass(frozen=True)
class _Pairs:
    """The pairs of token and expert of one step, sorted by expert and adapter.

    Attributes:
        tokens: The token of each pair, int64 [P].
        order: The index of each pair in the flattened [N, K], int64 [P].
        counts: The number of pairs of each expert.
        segments: (first pair, last pair + 1, expert, index of the run) of consecutive pairs with the same expert and
            the same adapter. Pairs without an adapter are in no segment.
    """

    tokens: Tensor
    order: Tensor
    counts: list[int]
    segments: list[tuple[int, int, int, int]]


class TorchExperts(LoRAExpertsMixin, CPUUnquantizedExperts):  # type: ignore[misc]
    """Experts as one matrix product per expert that has tokens, plus the products of adapters in float32."""

    _lora_context: MoELoRAContext | None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Does nothing, so that the weights stay in checkpoint form; the parent class would pack them."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        *_: object,
        expert_map: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        **__: object,
    ) -> None:
        """Writes the weighted sum over each token's experts of down(activation(gate_up(token))) into `output`.

        Args:
            output: [N, D].
            hidden_states: [N, D]; already multiplied by the weight if `apply_router_weight_on_input`.
            w1: Gate and up projections [E, J, D].
            w2: Down projections [E, D, I].
            topk_weights: The router's weights [N, K].
            topk_ids: The router's experts [N, K].
            activation: The activation between the projections.
            expert_map: For expert parallelism, the local index of each expert of the model, -1 for experts of other
                workers; None if this worker has all. The other workers add their own experts.
            apply_router_weight_on_input: True if the weights have been applied to `hidden_states`.
        """
        runs = self._runs()
        ids_NK = topk_ids.long() if expert_map is None else expert_map.long()[topk_ids.long()]
        pairs = _pair_up(ids_NK, w1.shape[0], runs)
        both_PJ = _multiply(hidden_states[pairs.tokens], w1, self.w1_bias, pairs.counts)
        # gpt-oss interleaves the rows of gate and up; other models concatenate them.
        in_turns = activation == MoEActivation.SWIGLUOAI
        gate_PI, up_PI = (both_PJ[:, ::2], both_PJ[:, 1::2]) if in_turns else both_PJ.chunk(2, dim=1)
        if runs:
            self._adapt_up((gate_PI, up_PI), hidden_states, pairs, runs)
        inner_PI = _ACTIVATIONS[activation](gate_PI, up_PI)
        down_PD = _multiply(inner_PI, w2, self.w2_bias, pairs.counts)
        weights_P = topk_weights.flatten()[pairs.order]
        if apply_router_weight_on_input:
            weights_P = torch.ones_like(weights_P)
        output.zero_().index_add_(0, pairs.tokens, (down_PD * weights_P[:, None]).to(output.dtype))
        if runs:
            self._adapt_down(output, inner_PI, weights_P, pairs, runs)

    def _runs(self) -> list[Run]:
        """Returns the runs of rows with an adapter that has expert factors."""
        context = self._lora_context
        if context is None:
            return []
        enabled = context.adapter_enabled.tolist()
        return [run for run in context.punica_wrapper.token_runs if enabled[run.slot]]

    def _adapt_up(self, halves: tuple[Tensor, Tensor], x_ND: Tensor, pairs: _Pairs, runs: Sequence[Run]) -> None:
        """Adds x A^T B^T to gate and up.

        A is shared by all experts, so x A^T is computed once per token, not per pair.
        """
        context = self._lora_context
        assert context is not None
        for half_PI, a_S1RD, b_SEIR in zip(halves, context.w13_lora_a_stacked, context.w13_lora_b_stacked, strict=True):
            low_NR = x_ND.new_zeros(len(x_ND), a_S1RD.shape[2], dtype=torch.float32)
            for start, end, slot, rank, _place in runs:
                low_NR[start:end, :rank] = x_ND[start:end].float() @ a_S1RD[slot, 0, :rank].float().T
            for start, end, expert, index in pairs.segments:
                _, _, slot, rank, _ = runs[index]
                low_PR = low_NR[pairs.tokens[start:end], :rank]
                half_PI[start:end] += (low_PR @ b_SEIR[slot, expert, :, :rank].float().T).to(half_PI.dtype)

    def _adapt_down(
        self, y_ND: Tensor, inner_PI: Tensor, weights_P: Tensor, pairs: _Pairs, runs: Sequence[Run]
    ) -> None:
        """Adds (sum over a token's pairs of weight * inner A^T) B^T to y.

        B is shared, so it is applied once per token.
        """
        context = self._lora_context
        assert context is not None
        (a_SERI,), (b_S1DR,) = context.w2_lora_a_stacked, context.w2_lora_b_stacked
        low_NR = inner_PI.new_zeros(len(y_ND), a_SERI.shape[2], dtype=torch.float32)
        for start, end, expert, index in pairs.segments:
            _, _, slot, rank, _ = runs[index]
            low_PR = inner_PI[start:end].float() @ a_SERI[slot, expert, :rank].float().T
            low_NR[:, :rank].index_add_(0, pairs.tokens[start:end], low_PR * weights_P[start:end, None])
        for start, end, slot, rank, _place in runs:
            y_ND[start:end] += (low_NR[start:end, :rank] @ b_S1DR[slot, 0, :, :rank].float().T).to(y_ND.dtype)


def _pair_up(ids_NK: Tensor, expert_count: int, runs: Sequence[Run]) -> _Pairs:
    """Sorts pairs by expert and, within an expert, by the run of their token; drops pairs of expert -1."""
    runs_N = torch.zeros(len(ids_NK), dtype=torch.long)  # 0 for a token in no run, else 1 + the index of its run
    for index, run in enumerate(runs, 1):
        runs_N[run.start : run.end] = index
    keys_NK = ids_NK * (len(runs) + 1) + runs_N[:, None]
    keys_P, order_P = keys_NK.flatten().sort(stable=True)
    here = slice(int((ids_NK < 0).sum()), None)
    keys_P, order_P = keys_P[here], order_P[here]
    counts = ids_NK[ids_NK >= 0].bincount(minlength=expert_count).tolist()
    segments, end = [], 0
    keys, lengths = torch.unique_consecutive(keys_P, return_counts=True)
    for key, length in zip(keys.tolist(), lengths.tolist(), strict=True):
        start, end = end, end + length
        expert, index = divmod(key, len(runs) + 1)
        if index:
            segments.append((start, end, expert, index - 1))
    return _Pairs(order_P // ids_NK.shape[1], order_P, counts, segments)


def _multiply(x_PI: Tensor, weights: Tensor, biases: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Multiplies the rows of each expert by its weight [O, I] and adds its bias [O]; returns [P, O]."""
    y_PO = x_PI.new_empty(len(x_PI), weights.shape[1])
    end = 0
    for expert, count in enumerate(counts):
        start, end = end, end + count
        if count:
            bias = None if biases is None else biases[expert]
            y_PO[start:end] = functional.linear(x_PI[start:end], weights[expert], bias)
    return y_PO
