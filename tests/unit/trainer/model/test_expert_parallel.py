"""Experts spread over two ranks compute the same as one rank, for any distribution of tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fovea_trainer.model.expert_routing import EXPERTS, expert_mesh
from fovea_trainer.model.experts import experts_forward
from fovea_trainer.model.lora import LoraSettings, LoraWeights
from fovea_trainer.model.model_family import LoraTarget, Role
from tests.ranks import run_ranks
from tests.unit.trainer.model.random_experts import COUNT, HIDDEN, random_experts

CPU = torch.device("cpu")
SETTINGS = LoraSettings(3, 6.0, 5, True, True, False, False)
ROUTES = {
    "all experts": (list(range(COUNT)), list(range(COUNT))),
    "nothing for the second rank": ([0, 1, 2], [1, 2]),
    "each other's alone": ([3, 4, 5], [0, 1, 2]),
}
TOKENS = (37, 3)
"""Number of tokens of each rank."""


def _batches(routes: tuple[list[int], list[int]], dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Returns, for each rank, rows, their experts and weights, and the gradient of the output."""
    generator, found = torch.Generator().manual_seed(3), []
    for tokens, own in zip(TOKENS, routes, strict=True):
        chosen = [torch.tensor(own)[torch.randperm(len(own), generator=generator)[:2]] for _ in range(tokens)]
        rows, weights, grads = (torch.randn(tokens, n, generator=generator) for n in (HIDDEN, 2, HIDDEN))
        found.append((rows.to(dtype), torch.stack(chosen), weights.to(dtype), grads.to(dtype)))
    return found


def _pass(experts: Any, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the output, and gradients of rows and weights."""
    rows, chosen, weights, grads = batch
    rows, weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    output = experts_forward(experts, rows, chosen, weights)
    torch.autograd.backward(output, grads)
    assert rows.grad is not None
    assert weights.grad is not None
    return [output, rows.grad, weights.grad]


def _near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    most = 1e-5 if dtype == torch.float32 else 0.03
    assert (found - expected).norm() <= most * expected.norm()


def _weights(experts: Any, mesh: Any = None) -> LoraWeights:
    dtype = experts.gate_up_proj.dtype
    weights = LoraWeights(SETTINGS, [LoraTarget("experts", experts, Role.MLP, False)], CPU, dtype, mesh)
    whole = torch.randn(weights.whole_size, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        weights.flat.copy_(weights.part(whole))
    return weights


def _rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    mesh = expert_mesh("cpu", size, 2, COUNT)
    assert mesh is not None
    for dtype in (torch.float32, torch.bfloat16):
        for routes in ROUTES.values():
            _adapters(rank, mesh, routes, dtype)
            _all_parameters(rank, mesh, routes, dtype)
    _same_weights(mesh)
    dist.destroy_process_group()


def _spread(whole: Any, mesh: Any, trainable: bool) -> Any:
    own = SimpleNamespace(num_experts=COUNT, trained=lambda: None, act_fn=torch.nn.SiLU())
    for name, parameter in whole.named_parameters():
        spread = distribute_tensor(parameter.detach(), mesh[EXPERTS], [Shard(0)])
        setattr(own, name, torch.nn.Parameter(spread, trainable))
        getattr(own, name).grad_dtype = torch.float32 if trainable else parameter.dtype
    return own


def _adapters(rank: int, mesh: Any, routes: Any, dtype: torch.dtype) -> None:
    whole, batches = random_experts(dtype).requires_grad_(False), _batches(routes, dtype)
    own = _spread(whole, mesh, False)
    found = []
    for experts, some, over in ((whole, batches, None), (own, [batches[rank]], mesh)):
        weights = _weights(whole, over)
        experts.trained = lambda weights=weights: weights.experts["experts"]
        weights.cast()
        outputs = [_pass(experts, batch) for batch in some]
        if over is None:
            squares = torch.linalg.vector_norm(weights.flat_grad).square()
        else:
            squares = weights.sum_over_ranks(weights.flat_grad)
        found.append((outputs, squares, weights.whole(weights.flat_grad)))
    (expected, norm, gradients), (outputs, own_norm, own_gradients) = found
    for one, other in zip(outputs[0], expected[rank], strict=True):
        _near(one, other, dtype)
    _near(own_norm, norm, dtype)
    named = dict(_weights(whole).named(own_gradients))
    for name, gradient in _weights(whole).named(gradients):
        _near(named[name], gradient, dtype)


def _all_parameters(rank: int, mesh: Any, routes: Any, dtype: torch.dtype) -> None:
    whole, batches = random_experts(dtype), _batches(routes, dtype)
    own = _spread(whole, mesh, True)
    whole.trained = lambda: None
    for parameter in whole.parameters():
        parameter.grad_dtype = torch.float32
    expected = [_pass(whole, batch) for batch in batches]
    for one, other in zip(_pass(own, batches[rank]), expected[rank], strict=True):
        _near(one, other, dtype)
    for name, parameter in whole.named_parameters():
        gradient = getattr(own, name).grad
        assert isinstance(gradient, DTensor)
        assert gradient.dtype == torch.float32  # not rounded on the way
        _near(gradient.full_tensor(), parameter.grad, dtype)


def _same_weights(mesh: Any) -> None:
    """For any number of ranks, an adapter starts with the same numbers, and its parts make up the whole."""
    experts = random_experts(torch.float32)
    targets = [LoraTarget("experts", experts, Role.MLP, False)]
    one, own = (LoraWeights(SETTINGS, targets, CPU, torch.float32, over) for over in (None, mesh))
    assert torch.equal(own.whole(own.flat), one.flat)
    assert torch.equal(own.part(one.flat), own.flat)
    shared = SETTINGS.rank * 3 * HIDDEN
    assert 2 * (own.flat.numel() - shared) == one.flat.numel() - shared
    assert own.whole_size == one.flat.numel()
    assert {name: part.shape for name, part in own.named(one.flat)} == {
        name: part.shape for name, part in one.named(one.flat)
    }


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path: Path) -> None:
    run_ranks(_rank, 2, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("world_size", "replicas", "spread", "experts", "said"),
    [
        (2, 1, 2, 0, "--expert-parallel is 2, but the model has no experts; set it to 1"),
        (3, 1, 3, 8, "--expert-parallel is 3, which does not divide the model's 8 experts"),
        (6, 1, 2, 8, "--expert-parallel is 2: 4 experts of each rank cannot be sharded evenly over the 3 ranks that"),
        (4, 4, 2, 8, "--expert-parallel is 2, which does not divide the 1 ranks of each of --replicas 4"),
        (12, 2, 2, 8, "4 experts of each rank cannot be sharded evenly over the 3 ranks that hold them"),
    ],
)
def test_what_cannot_be_spread_is_refused(world_size: int, replicas: int, spread: int, experts: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        expert_mesh("cpu", world_size, spread, experts, replicas)


def test_one_is_none() -> None:
    assert expert_mesh("cpu", 2, 1, 0) is None
