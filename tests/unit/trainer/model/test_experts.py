"""Experts in low precision and odd sizes against a float32 loop."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fovea_trainer.model.experts import experts_forward
from fovea_trainer.model.lora import LoraInjector, LoraSettings, LoraWeights
from fovea_trainer.model.model_family import LoraTarget, Role
from fovea_trainer.weights.weight_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    copy_into,
    one_by_one,
    peft_files,
    read_tensors,
)
from tests.unit.trainer.model.random_experts import COUNT, HIDDEN, INNER, random_experts

CPU = torch.device("cpu")
TOKENS = 37


def _routed() -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows, their experts and weights; no row uses the last expert."""
    generator = torch.Generator().manual_seed(3)
    chosen = torch.stack([torch.randperm(COUNT - 1, generator=generator)[:2] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, 2, generator=generator)
    return torch.randn(TOKENS, HIDDEN, generator=generator), chosen, weights


def _loop(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for row, own, shares in zip(hidden, chosen, weights, strict=True):
        total = torch.zeros(HIDDEN)
        for expert, share in zip(own.tolist(), shares, strict=True):
            gate, up = (experts.gate_up_proj[expert] @ row).chunk(2)
            total = total + share * (experts.down_proj[expert] @ (functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def _near(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None
    assert expected is not None
    most = 1e-5 if dtype == torch.float32 else 0.03
    assert (found.float() - expected).abs().max() <= most * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_parameters_and_what_comes_before(dtype: torch.dtype) -> None:
    experts, reference = random_experts(dtype), random_experts(torch.float32)
    target = LoraTarget("experts", experts, Role.MLP, False)
    injector = LoraInjector([target])
    masters = {f"experts.{name}": one.detach().float() for name, one in experts.named_parameters()}
    hidden, chosen, weights = _routed()
    given = [one.to(dtype, copy=True).requires_grad_() for one in (hidden, weights)]
    own = [one.clone().requires_grad_() for one in (hidden, weights)]
    direction = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))
    torch.autograd.backward((_loop(reference, own[0], chosen, own[1]) * direction).sum())
    for kept in ({}, masters):
        experts.requires_grad_(True)
        injector.activate_full(kept)
        found = experts_forward(experts, given[0], chosen, given[1])
        torch.autograd.backward((found * direction.to(dtype)).sum())
        for name, one in reference.named_parameters():
            _near(kept[f"experts.{name}"].grad if kept else getattr(experts, name).grad, one.grad, dtype)
    for one, other in zip(given, own, strict=True):
        _near(one.grad, None if other.grad is None else 2 * other.grad, dtype)
    assert not masters["experts.down_proj"].grad[-1].any()  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_odd_rank(dtype: torch.dtype) -> None:
    experts, reference = random_experts(dtype), random_experts(torch.float32)
    target = LoraTarget("experts", experts.requires_grad_(False), Role.MLP, False)
    injector = LoraInjector([target])
    weights = LoraWeights(LoraSettings(3, 6.0, 0, False, True, False, False), [target], CPU, dtype)
    assert {name: tuple(one.shape) for name, one in weights.named(weights.flat)} == {
        "base_model.model.experts.w1.lora_A.weight": (1, 3, HIDDEN),
        "base_model.model.experts.w1.lora_B.weight": (COUNT, INNER, 3),
        "base_model.model.experts.w2.lora_A.weight": (COUNT, 3, INNER),
        "base_model.model.experts.w2.lora_B.weight": (1, HIDDEN, 3),
        "base_model.model.experts.w3.lora_A.weight": (1, 3, HIDDEN),
        "base_model.model.experts.w3.lora_B.weight": (COUNT, INNER, 3),
    }
    factors = weights.experts["experts"].factors
    assert not any(factor.value.any() for name, factor in factors.items() if name.endswith("B"))
    hidden, chosen, shares = _routed()
    bare = experts_forward(experts, hidden.to(dtype), chosen, shares.to(dtype))
    injector.activate(weights)
    assert torch.equal(experts_forward(experts, hidden.to(dtype), chosen, shares.to(dtype)), bare)
    with torch.no_grad():
        weights.flat.normal_(std=0.3, generator=torch.Generator().manual_seed(6))
    injector.activate(weights)
    direction = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))
    found = experts_forward(experts, hidden.to(dtype), chosen, shares.to(dtype))
    torch.autograd.backward((found * direction.to(dtype)).sum())
    leaves = {name: factor.value.detach().clone().requires_grad_() for name, factor in factors.items()}
    w1, w2, w3 = (2.0 * leaves[f"w{part}.lora_B"] @ leaves[f"w{part}.lora_A"] for part in (1, 2, 3))
    gate_up = reference.gate_up_proj.detach() + torch.cat([w1, w3], dim=1)
    merged = SimpleNamespace(gate_up_proj=gate_up, down_proj=reference.down_proj.detach() + w2)
    expected = _loop(merged, hidden, chosen, shares)
    _near(found, expected.detach(), dtype)
    torch.autograd.backward((expected * direction).sum())
    for name, leaf in leaves.items():
        _near(factors[name].grad, leaf.grad, dtype)


def test_adapter_files_come_back_and_an_export_is_one_by_one() -> None:
    target = LoraTarget("experts", random_experts(torch.float32), Role.MLP, False)
    weights = LoraWeights(LoraSettings(3, 6.0, 0, False, True, False, False), [target], CPU, torch.float32)
    with torch.no_grad():
        weights.flat.normal_(generator=torch.Generator().manual_seed(6))
    files = peft_files(weights.named(weights.flat), 3, 6.0, "base")
    assert json.loads(b"".join(files[ADAPTER_CONFIG]))["target_modules"] == ["experts.w1", "experts.w2", "experts.w3"]
    flat = torch.zeros_like(weights.flat)
    copy_into(weights.named(flat), read_tensors(b"".join(files[ADAPTER_WEIGHTS]), "file"), "file")
    assert torch.equal(flat, weights.flat)
    factors = weights.experts["experts"].factors
    exported = dict(one_by_one(dict(weights.named(weights.flat))))
    assert len(exported) == COUNT * 3 * 2
    for index in range(COUNT):
        for part, projection in {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.items():
            for half in ("lora_A", "lora_B"):
                own = factors[f"{part}.{half}"].value
                found = exported[f"base_model.model.experts.{index}.{projection}.{half}.weight"]
                assert torch.equal(found, own[index % len(own)])
