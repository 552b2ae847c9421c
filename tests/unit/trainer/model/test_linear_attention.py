"""Stateful layers on packed documents against their own forward pass of one document at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Lfm2Config, Qwen3_5TextConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from fovea_trainer.model import linear_attention

HIDDEN = 24
LENGTHS = [1, 64, 65, 3, 130, 1, 64, 2, 200, 17]
"""Shorter and longer than the convolution's taps and a chunk of the delta rule; equal ones are not adjacent."""


def _delta_net() -> nn.Module:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    config = Qwen3_5TextConfig(hidden_size=HIDDEN, linear_value_head_dim=12, **sizes)
    return Qwen3_5GatedDeltaNet(config, 0)


def _short_convolution(bias: bool) -> nn.Module:
    return Lfm2ShortConv(Lfm2Config(hidden_size=HIDDEN, conv_bias=bias), 0)


LAYERS = {
    "delta net": _delta_net,
    "short convolution": lambda: _short_convolution(False),
    "with a bias": lambda: _short_convolution(True),
}


def _layer(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Returns the packed layer and transformers' layer with the same weights."""
    torch.manual_seed(1)
    layer, own = LAYERS[name](), LAYERS[name]()
    own.load_state_dict(layer.state_dict())
    linear_attention.pack(layer)
    return layer.to(dtype), own.to(dtype)


def _hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, sum(LENGTHS), HIDDEN, generator=generator).to(dtype).requires_grad_()


def _run(layer: Any, hidden: Tensor, lengths: list[int], **more: Any) -> Tensor:
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    given: dict[str, Any] = {"seq_idx": documents[None].int()}
    if isinstance(layer, Qwen3_5GatedDeltaNet):
        given |= {"cu_seq_lens_q": bounds, "max_length_q": max(lengths), "cache_params": None}
    output: Tensor = layer(hidden_states=hidden, **given, **more)
    return output


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients(name: str) -> None:
    layer, own = _layer(name)
    hidden, alone = _hidden(), _hidden()
    packed = _run(layer, hidden, LENGTHS)
    expected = torch.cat([own(hidden_states=part) for part in alone.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-4)
    assert expected.std() > 0.01
    direction = torch.randn(packed.shape, generator=torch.Generator().manual_seed(3))
    torch.autograd.backward([packed, expected], [direction, direction])
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, alone.grad, atol=1e-5, rtol=1e-3)
    theirs = dict(own.named_parameters())
    for key, parameter in layer.named_parameters():
        largest = float(theirs[key].grad.abs().max())
        torch.testing.assert_close(parameter.grad, theirs[key].grad, atol=1e-5 * max(largest, 1), rtol=1e-3)


@pytest.mark.parametrize("name", LAYERS)
def test_bfloat16_is_as_near_to_float32_as_the_layer_alone(name: str) -> None:
    layer, own = _layer(name, torch.bfloat16)
    exact, _ = _layer(name)
    exact.load_state_dict({key: value.float() for key, value in layer.state_dict().items()})
    with torch.no_grad():
        hidden = _hidden(torch.bfloat16)
        wanted = _run(exact, hidden.float(), LENGTHS)
        packed = _run(layer, hidden, LENGTHS)
        alone = torch.cat([own(hidden_states=part) for part in hidden.split(LENGTHS, dim=1)], dim=1)
    assert packed.dtype == torch.bfloat16
    assert (packed - wanted).square().mean() <= 1.2 * (alone - wanted).square().mean()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("changed", [0, 2, 8])
def test_a_document_changes_no_other(name: str, changed: int) -> None:
    layer, _ = _layer(name)
    with torch.no_grad():
        hidden = _hidden().detach()
        before = _run(layer, hidden, LENGTHS).split(LENGTHS, dim=1)
        hidden.split(LENGTHS, dim=1)[changed].add_(1)
        after = _run(layer, hidden, LENGTHS).split(LENGTHS, dim=1)
    assert [bool((a != b).any()) for a, b in zip(before, after, strict=True)] == [
        index == changed for index in range(len(LENGTHS))
    ]


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_not_known_is_refused(name: str) -> None:
    layer, _ = _layer(name)
    with pytest.raises(ValueError, match="do not support attention_mask, which"):
        _run(layer, _hidden(), LENGTHS, attention_mask=torch.ones(1, sum(LENGTHS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_counted_bytes_exceed_the_measured_ones_by_at_most_two_fifths(dtype: torch.dtype) -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
    config = Qwen3_5TextConfig(hidden_size=128, linear_value_head_dim=64, **sizes)
    layer = Qwen3_5GatedDeltaNet(config, 0).to(dtype).requires_grad_(False)
    linear_attention.pack(layer)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _run(layer, torch.randn(1, 700, 128).to(dtype).requires_grad_(), [300, 400])
    measured_bytes = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own) / 700
    assert 1.0 < linear_attention.retained_bytes(config, dtype) / measured_bytes < 1.4
