"""The FLOP count of a shape against transformers' own model of that shape."""

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.family_shapes import size_of
from benchmarks.flops import SIZES, FamilySize
from benchmarks.shapes import SHAPES


@pytest.fixture(params=sorted(SIZES))
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(shape: str) -> torch.nn.Module:
    """A model without memory, on the meta device."""
    text, vision = SHAPES[shape]
    common = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
    tower = {"num_heads": 16, "out_hidden_size": text["hidden_size"], "patch_size": 16}
    with torch.device("meta"):
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=common | text, vision_config=tower | vision))


def test_language_parameters_are_those_of_its_matrices(shape: str, model: torch.nn.Module) -> None:
    layers = weights_of(model.model.language_model.layers)
    assert SIZES[shape].language_parameters == layers + weights_of(model.lm_head)


def test_vision_parameters_are_those_of_the_blocks(shape: str, model: torch.nn.Module) -> None:
    assert SIZES[shape].vision_parameters == weights_of(model.model.visual.blocks)


def test_all_parameters_cost_half_as_much_again_as_adapters(shape: str) -> None:
    size = SIZES[shape]
    attention = 12 * size.layers * size.heads * 128 * 1000**2 / 2
    adapters, everything = (size.flops([1000], 0, trains_all) - attention for trains_all in (False, True))
    assert everything == pytest.approx(1.5 * adapters)
    assert adapters == pytest.approx(4 * 1000 * size.language_parameters)


def weights_of(module: torch.nn.Module) -> int:
    """Returns the number of elements of all linear layers."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, torch.nn.Linear))


def test_a_family_at_published_size_is_counted_on_its_own_model() -> None:
    """Qwen3.5 9B: 8.95 billion parameters without the tower; the embedding table costs no FLOPs."""
    size = size_of("qwen3_5-9b")
    assert size.language_parameters == pytest.approx(8.95e9 - 248320 * 4096, rel=0.002)
    assert len(size.attention) == 8
    assert size.flops([512, 64], 1, False) < size.flops([512, 64], 1, True)


def test_a_window_bounds_what_attention_costs() -> None:
    whole, windowed = (FamilySize(0, ((1, window),), 0, 0, 0, 0) for window in (None, 100))
    assert whole.flops([1000], 0, False) == 3 * 4 * 1000**2 / 2
    assert windowed.flops([1000], 0, False) == 3 * 4 * (100**2 / 2 + 900 * 100)
    assert windowed.flops([80], 0, False) == whole.flops([80], 0, False)


def test_only_active_parameters_of_a_mixture_count() -> None:
    """Qwen3-VL-30B-A3B: attention, router and 8 of 128 experts in each of 48 layers, and the head."""
    size = size_of("qwen3_vl-30b-a3b")
    layer = 2048 * 128 * (2 * 32 + 2 * 4) + 2048 * 128 + 8 * 3 * 2048 * 768
    assert size.language_parameters == 48 * layer + 151936 * 2048
    attention = 2 * (2048 + 32 * 128) + 2 * (2048 + 4 * 128)
    assert size.adapter_width == 48 * (attention + 3 * (2048 + 8 * 768)) + 2048 + 151936
    own = size.flops([10], 0, False, 32) - size.flops([10], 0, False)
    assert own == 6 * 32 * size.adapter_width * 10
