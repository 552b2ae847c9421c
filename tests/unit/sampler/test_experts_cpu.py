"""Experts on CPU against separate products for each pair of token and expert."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from fovea_sampler.vllm_patches.experts_cpu import TorchExperts
from fovea_sampler.vllm_patches.punica import Run

TOKENS, TOP, EXPERTS, WIDTH, INNER, MAX_RANK, SLOTS = 11, 2, 4, 8, 6, 5, 3
RUNS = [Run(1, 4, 2, 3), Run(4, 5, 0, MAX_RANK), Run(6, 9, 2, 3), Run(9, 11, 1, 2)]
"""The adapter of slot 1 adapts no experts."""


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32) / shape[-1] ** 0.5


@pytest.fixture
def factors() -> SimpleNamespace:
    """Slots of adapters, zero beyond their ranks."""
    torch.manual_seed(0)
    context = SimpleNamespace(
        w13_lora_a_stacked=(random(SLOTS, 1, MAX_RANK, WIDTH), random(SLOTS, 1, MAX_RANK, WIDTH)),
        w13_lora_b_stacked=(random(SLOTS, EXPERTS, INNER, MAX_RANK), random(SLOTS, EXPERTS, INNER, MAX_RANK)),
        w2_lora_a_stacked=(random(SLOTS, EXPERTS, MAX_RANK, INNER),),
        w2_lora_b_stacked=(random(SLOTS, 1, WIDTH, MAX_RANK),),
        adapter_enabled=torch.tensor([1, 0, 1, 0]),
        punica_wrapper=SimpleNamespace(token_runs=RUNS),
    )
    ranks = {run.slot: run.rank for run in RUNS}
    for stacked, axis in ((context.w13_lora_a_stacked, 2), (context.w2_lora_a_stacked, 2)):
        for tensor in stacked:
            for slot, rank in ranks.items():
                tensor[slot].narrow(axis - 1, rank, MAX_RANK - rank).zero_()
    context.w13_lora_a_stacked[0][1] = context.w13_lora_a_stacked[1][1] = context.w2_lora_a_stacked[0][1] = 0
    return context


def experts(context: Any, biases: tuple[torch.Tensor, torch.Tensor] | None = None) -> TorchExperts:
    """Experts without a model around them."""
    made = TorchExperts.__new__(TorchExperts)
    b1, b2 = biases or (None, None)
    made.quant_config = SimpleNamespace(w1_bias=b1, w2_bias=b2)  # type: ignore[assignment]
    made._lora_context = context
    return made


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slot: int, expert: int) -> torch.Tensor:
    """Returns an expert's weight with an adapter's part; a shared factor applies to each expert."""
    one_a, one_b = (stacked[slot][min(expert, stacked.shape[1] - 1)] for stacked in (a, b))
    return weight + one_b @ one_a


@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.GELU_TANH, MoEActivation.SWIGLUOAI])
@pytest.mark.parametrize("adapted", [False, True])
def test_one_pair_at_a_time(factors: SimpleNamespace, activation: MoEActivation, adapted: bool) -> None:
    in_turns = activation is MoEActivation.SWIGLUOAI
    x, gate, up = random(TOKENS, WIDTH), random(EXPERTS, INNER, WIDTH), random(EXPERTS, INNER, WIDTH)
    down, b_gate, b_up, b_down = random(EXPERTS, WIDTH, INNER), *(random(EXPERTS, n) for n in (INNER, INNER, WIDTH))
    weights, ids = random(TOKENS, TOP).softmax(1), torch.rand(TOKENS, EXPERTS).topk(TOP).indices.int()

    def joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack([one, other], 2).flatten(1, 2) if in_turns else torch.cat([one, other], 1)

    slots = dict.fromkeys(range(TOKENS), -1)
    for run in RUNS if adapted else []:
        slots |= dict.fromkeys(range(run.start, run.end), run.slot)
    expected = torch.zeros(TOKENS, WIDTH)
    (a1, a3), (b1, b3) = factors.w13_lora_a_stacked, factors.w13_lora_b_stacked
    (a2,), (b2,) = factors.w2_lora_a_stacked, factors.w2_lora_b_stacked
    for token in range(TOKENS):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            own = [gate[expert], up[expert], down[expert]]
            if slots[token] >= 0:
                factored = ((a1, b1), (a3, b3), (a2, b2))
                own = [merged(w, a, b, slots[token], expert) for w, (a, b) in zip(own, factored, strict=True)]
            g, u = own[0] @ x[token] + b_gate[expert], own[1] @ x[token] + b_up[expert]
            if in_turns:
                g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0) + 1
            is_gelu = activation is MoEActivation.GELU_TANH
            silu = g * torch.sigmoid((1.702 if in_turns else 1.0) * g)
            inner = (functional.gelu(g, approximate="tanh") if is_gelu else silu) * u
            expected[token] += weight * (own[2] @ inner + b_down[expert])
    made = experts(factors if adapted else None, (joined(b_gate, b_up), b_down))
    output = torch.empty(TOKENS, WIDTH)
    made.apply(
        output,
        x,
        joined(gate, up),
        down,
        weights,
        ids,
        activation,
    )
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


def test_weights_that_were_multiplied_before(factors: SimpleNamespace) -> None:
    """Weights that are already multiplied in, with one expert for each token."""
    x, both, down = random(TOKENS, WIDTH), random(EXPERTS, 2 * INNER, WIDTH), random(EXPERTS, WIDTH, INNER)
    ids, weights = torch.arange(TOKENS)[:, None] % EXPERTS, torch.full((TOKENS, 1), 0.3)
    output = torch.empty(TOKENS, WIDTH)
    experts(None).apply(output, x, both, down, weights, ids, MoEActivation.SILU, apply_router_weight_on_input=True)
    expected = []
    for row, expert in zip(x, ids[:, 0].tolist(), strict=True):
        gate, up = (both[expert] @ row).chunk(2)
        expected.append(down[expert] @ (functional.silu(gate) * up))
    torch.testing.assert_close(output, torch.stack(expected), atol=1e-6, rtol=1e-5)
