"""Adapters: layout, initialization, injection."""

import pytest
import torch
from torch import nn

from fovea.wire.errors import InvalidInput
from fovea_trainer.model.lora import LoraInjector, LoraSettings, LoraWeights
from fovea_trainer.model.lora_linear import unembedding_of
from fovea_trainer.model.model_family import LoraTarget, Role
from fovea_trainer.weights.weight_files import copy_into, peft_files, read_tensors

CPU = torch.device("cpu")


def _settings(**changes: object) -> LoraSettings:
    values = {
        "rank": 2, "alpha": 32.0, "seed": 1, "train_attention": True, "train_mlp": True, "train_unembedding": False,
        "train_vision": False, **changes,
    }  # fmt: skip
    return LoraSettings(**values)  # type: ignore[arg-type]


def _targets() -> list[LoraTarget]:
    return [
        LoraTarget("model.layers.0.self_attn.q_proj", nn.Linear(6, 4), Role.ATTENTION, False),
        LoraTarget("model.layers.0.mlp.up_proj", nn.Linear(6, 8, bias=False), Role.MLP, False),
        LoraTarget("model.visual.merger.0", nn.Linear(6, 6), Role.MLP, True),
        LoraTarget("lm_head", nn.Linear(6, 10, bias=False), Role.UNEMBEDDING, False),
    ]


def test_the_unembedding_is_found_by_its_last_name() -> None:
    """Llama 4's is `language_model.lm_head`."""
    for name in ("lm_head", "language_model.lm_head"):
        targets = [*_targets()[:3], LoraTarget(name, nn.Linear(6, 10, bias=False), Role.UNEMBEDDING, False)]
        weights = LoraWeights(_settings(train_unembedding=True), targets, CPU, torch.float32)
        assert unembedding_of(weights.pairs) is weights.pairs[name]
        assert unembedding_of(weights.layout.pairs_on(weights.flat, weights.flat_grad)) is not None
    assert unembedding_of(LoraWeights(_settings(), _targets(), CPU, torch.float32).pairs) is None


def test_tensors_are_views_of_one_buffer_under_peft_names() -> None:
    weights = LoraWeights(_settings(), _targets(), CPU, torch.float32)
    names = dict(weights.named(weights.flat))
    assert list(names) == [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight",
    ]
    weights.flat.zero_()
    assert not weights.pairs["model.layers.0.mlp.up_proj"].a.any()
    assert weights.flat.numel() == 2 * 6 + 4 * 2 + 2 * 6 + 8 * 2


def test_injection_adds_scaled_product_and_gradients_land_in_the_buffer() -> None:
    targets = _targets()
    injector = LoraInjector(targets)
    weights = LoraWeights(_settings(), targets, CPU, torch.float32)
    with torch.no_grad():
        weights.flat.normal_(generator=torch.Generator().manual_seed(0))
    module, x = targets[0].module, torch.randn(3, 5, 6)
    plain = module(x)
    injector.activate(weights)
    pair = weights.pairs[targets[0].name]
    found = module(x)
    torch.testing.assert_close(found, plain + 16.0 * x @ pair.a.T @ pair.b.T)
    found.sum().backward()
    assert weights.flat_grad[:20].any()
    assert not weights.flat_grad[20:].any()
    torch.testing.assert_close(
        targets[2].module(x), nn.functional.linear(x, targets[2].module.weight, targets[2].module.bias)
    )
    injector.activate(None)
    torch.testing.assert_close(module(x), plain)


def test_low_precision_follows_the_weights_and_gradients_are_summed_in_float32() -> None:
    target = LoraTarget("q_proj", nn.Linear(64, 48, bias=False, dtype=torch.bfloat16), Role.ATTENTION, False)
    injector = LoraInjector([target])
    weights = LoraWeights(_settings(rank=8), [target], CPU, torch.bfloat16)
    x, direction = torch.randn(32, 64).bfloat16(), torch.randn(32, 48).bfloat16()
    for _ in range(2):
        with torch.no_grad():
            weights.flat.normal_(generator=torch.Generator().manual_seed(0))
        weights.flat_grad.zero_()
        injector.activate(weights)
        for _ in range(3):
            target.module(x).backward(direction)
        pair = weights.pairs["q_proj"]
        a, b = (leaf.detach().bfloat16().float().requires_grad_() for leaf in (pair.a, pair.b))
        (4.0 * x.float() @ a.T @ b.T).backward(3 * direction.float())
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(pair.a_grad, a.grad, rtol=0.02, atol=0.02 * a.grad.abs().max().item())
        torch.testing.assert_close(pair.b_grad, b.grad, rtol=0.02, atol=0.02 * b.grad.abs().max().item())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rank": 0}, "lora.rank"),
        ({"rank": 9}, "lora.rank"),
        ({"alpha": float("nan")}, "lora.alpha"),
        ({"train_attention": False, "train_mlp": False}, "lora.train_attention"),
        ({"train_vision": True}, "lora.train_vision"),
    ],
)
def test_impossible_settings(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        _settings(**changes).check(max_rank=8, adapts_vision=False)
    assert caught.value.field == field


def test_a_model_without_adapters_says_what_works() -> None:
    with pytest.raises(InvalidInput, match="vLLM does not support LoRA for this model; train full parameters instead"):
        _settings().check(max_rank=0, adapts_vision=False)


def test_peft_files_come_back() -> None:
    weights = LoraWeights(_settings(), _targets(), CPU, torch.float32)
    files = peft_files(weights.named(weights.flat), 2, 32.0, "base")
    flat = torch.zeros_like(weights.flat)
    copy_into(weights.named(flat), read_tensors(b"".join(files["adapter_model.safetensors"]), "file"), "file")
    assert torch.equal(flat, weights.flat)


def test_partial_copies_change_nothing() -> None:
    target = {"a": torch.zeros(2), "b": torch.zeros(3)}
    for source, message in [
        ({"a": torch.ones(2)}, "has no b"),
        ({"a": torch.ones(2), "b": torch.ones(4)}, r"b with shape \[4\], but the model needs \[3\]"),
        ({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, "has c"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            copy_into(target.items(), source, "file")
    assert not target["a"].any()
