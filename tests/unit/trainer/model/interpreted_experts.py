"""Runs the kernels in Triton's interpreter: `python -m tests.unit.trainer.model.interpreted_experts`."""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Callable, Sequence
from typing import Any

from fovea.runtime.processes import UNUSED, importing

with importing(*UNUSED):
    import torch
    from torch import Tensor

    from fovea_trainer.model import expert_kernels
    from fovea_trainer.model.expert_routing import Routing, computed_with_kernels
    from fovea_trainer.model.experts import experts_forward
    from fovea_trainer.model.lora import LoraInjector, LoraSettings, LoraWeights
    from fovea_trainer.model.model_family import LoraTarget, Role
    from tests.unit.trainer.model.random_experts import COUNT, HIDDEN, random_experts

EXPERTS = 5
INNER = 70
"""More than a block."""


def copies_and_sums() -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        for token_count, size, top_k in ((1, 1, 1), (1, 24, 2), (7, 300, 3), (3, 2049, 4), (0, 8, 2)):
            index_TK = torch.rand(token_count, EXPERTS, generator=generator).argsort(1)[:, :top_k]
            routing = Routing.of(index_TK, EXPERTS)
            rows_TN = torch.randn(token_count, size, generator=generator).to(dtype)
            rows_SN = torch.randn(token_count * top_k, size, generator=generator).to(dtype)
            copies_SN = expert_kernels.copies(rows_TN, routing.slot_S)
            assert torch.equal(copies_SN, routing.copies(rows_TN)), (dtype, token_count, size)
            found = expert_kernels.sums(rows_SN, routing.slot_S, top_k)
            exact = routing.sums(rows_SN.double())
            # The interpreter's rounding to bfloat16 may differ by one unit in the last place.
            unit = (1 if dtype == torch.bfloat16 else top_k) * torch.finfo(dtype).eps
            assert found.dtype == dtype
            assert ((found.double() - exact).abs() <= unit * routing.sums(rows_SN.double().abs())).all(), dtype


def layer(dtype: torch.dtype) -> None:
    """Checks all combinations of trained inputs, with and without an adapter; experts without tokens and with more than
    a block.
    """
    generator = torch.Generator().manual_seed(2)
    # The interpreter is slow, and truncates where a card rounds to bfloat16: about eight times here, by up to one unit
    # in the last place each. On an H200 both are bit-identical except two sums (docs/lab/performance.md).
    exact = dtype == torch.float32
    most = 2e-5 if exact else 8 * torch.finfo(dtype).eps
    # Blocks of 64 copies: one copy alone, one block, and several blocks shared by experts.
    for token_count, top_k in ((1, 1), (1, 2), (32, 2), (43, 3)) if exact else ((1, 2), (32, 2)):
        for rank in (0, 3, 32) if exact else (3,):
            for needing in ((True, True), (True, False), (False, True), (False, False)):
                if needing != (True, True) and (not exact or rank == 32 or token_count * top_k != 2):
                    continue
                chosen_TK = torch.rand(token_count, COUNT - 1, generator=generator).argsort(1)[:, :top_k]
                compute = _case(dtype, rank, needing, chosen_TK, generator)
                with computed_with_kernels(False):
                    expected = compute()
                with computed_with_kernels(True):
                    found = compute()
                    # A second pass shows that the first one left nothing behind: for all small cases, and with an
                    # adapter for a whole block in each type and for several blocks. Each of the others would take the
                    # interpreter seconds.
                    again = token_count == 1 or (token_count, rank) == (43, 3) or (token_count, exact) == (32, False)
                    repeated = [compute()] if again else []
                case = (dtype, token_count, top_k, rank, needing)
                _compare(found, expected, most, case)
                for second in repeated:
                    assert all(torch.equal(found[name], second[name]) for name in found), case


def _case(
    dtype: torch.dtype, rank: int, needing: Sequence[bool], chosen_TK: Tensor, generator: torch.Generator
) -> Callable[[], dict[str, Tensor]]:
    """Computes a layer forward and backward; returns a dict of the outputs and each gradient."""
    experts: Any = random_experts(dtype, INNER)
    target = LoraTarget("experts", experts.requires_grad_(not rank), Role.MLP, False)
    injector = LoraInjector([target])
    weights = None
    if rank:
        weights = LoraWeights(
            LoraSettings(rank, 6.0, 0, False, True, False, False), [target], torch.device("cpu"), dtype
        )
        with torch.no_grad():
            weights.flat.normal_(std=0.3, generator=generator)
    hidden_TD, direction_TD = (torch.randn(len(chosen_TK), HIDDEN, generator=generator) for _ in range(2))
    share_TK = torch.rand(chosen_TK.shape, generator=generator)

    def compute() -> dict[str, Tensor]:
        injector.activate(weights)
        given = [
            one.to(dtype, copy=True).requires_grad_(needed)
            for one, needed in zip((hidden_TD, share_TK), needing, strict=True)
        ]
        # As in recomputed blocks: the forward pass runs again during the backward pass.
        outer_TD = torch.utils.checkpoint.checkpoint(
            experts_forward, experts, given[0], chosen_TK, given[1], use_reentrant=False
        )
        torch.autograd.backward((outer_TD * direction_TD.to(dtype)).sum())
        found = {"output": outer_TD.detach()}
        names = ("hidden", "weights")
        found |= {name: one.grad for name, one in zip(names, given, strict=True) if one.grad is not None}
        if weights is None:
            parameters = dict(experts.named_parameters())
        else:
            parameters = {}
            for name, factor in weights.experts["experts"].factors.items():
                found[name] = factor.grad.clone()
                factor.grad.zero_()
        for name, one in parameters.items():
            assert one.grad is not None
            found[name], one.grad = one.grad, None
        assert set(names) & found.keys() == {name for name, needed in zip(names, needing, strict=True) if needed}
        return found

    return compute


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], most: float, case: object) -> None:
    assert found.keys() == expected.keys(), case
    for name, one in expected.items():
        off = (found[name].double() - one.double()).abs().max()
        assert found[name].dtype == one.dtype
        assert off <= most * one.double().abs().max(), (name, case, off)


if __name__ == "__main__":
    copies_and_sums()
    print("copies and sums", flush=True)
    layer(torch.float32)
    print("a layer in float32", flush=True)
    layer(torch.bfloat16)
    print("a layer in bfloat16", flush=True)
