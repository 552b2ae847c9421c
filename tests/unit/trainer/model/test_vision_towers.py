"""Generic vision-language models, packed, against transformers' own forward pass of one document at a time, in float32.

Images are random numbers in the shape of the family's processor, in several sizes if the family supports them.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Idefics3Config,
    InternVLConfig,
    Lfm2VlConfig,
    Llama4Config,
    LlamaConfig,
    LlavaOnevisionConfig,
    MiniCPMV4_6Config,
    Mistral3Config,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3Config,
    SiglipVisionConfig,
    SmolVLMConfig,
)

from fovea.api.v1 import model_input_pb2
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import FeatureTensors
from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.micro_batch import BatchLayout, wanted_images
from fovea_trainer.batches.vision_cache import VisionOutput
from fovea_trainer.model.lora import LoraInjector, LoraSettings, LoraWeights
from fovea_trainer.model.model_family import family_of
from fovea_trainer.model.packed_model import PackedModel, constants
from fovea_trainer.model.weight_reading import read_weights
from tests.vision_families import small_qwen3_vl

CPU = torch.device("cpu")
IMAGE, BREAK, VOCABULARY = 90, 91, 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 256,
}
TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGLIP = SiglipVisionConfig(**TOWER, image_size=28, patch_size=7, vision_use_head=False)
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


@dataclass(frozen=True)
class Image:
    """The processor's output for one image: its tensors, and which of its placeholder ids are embeddings."""

    tensors: FeatureTensors
    is_embedding: list[bool]


def _pixels(generator: np.random.Generator, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return generator.normal(size=shape).astype(np.float32)


def _patches(generator: np.random.Generator, size: int) -> Image:
    height, width = 2 * (1 + size), 4
    pixels = _pixels(generator, height * width, 3 * 2 * 4 * 4)
    tensors: FeatureTensors = {"pixel_values": pixels, "image_grid_thw": np.array([[1, height, width]])}
    return Image(tensors, [True] * (height * width // 4))


def _tiles(generator: np.random.Generator, size: int) -> Image:
    return Image({"pixel_values": _pixels(generator, 1 + size, 3, 28, 28)}, [False, *[True] * 4 * (1 + size), False])


def _any_resolution(generator: np.random.Generator, size: int) -> Image:
    # 16 of the whole, and 4 x 8 of two tiles with a newline token after each row; nothing is cropped from [28, 56]
    # pixels.
    height, width = [(28, 56), (56, 28)][size % 2]
    rows, columns = height // 7, width // 7
    tensors = {"pixel_values": _pixels(generator, 1, 3, 3, 28, 28), "image_sizes": np.array([[height, width]])}
    return Image(tensors, [True] * (16 + rows * (columns + 1)))


def _ragged(generator: np.random.Generator, size: int) -> Image:
    height, width = 14 * (1 + size), 28
    tensors = {"pixel_values": _pixels(generator, 1, 3, height, width), "image_sizes": np.array([[height, width]])}
    return Image(tensors, [True, True, False] * (1 + size))


def _masked_tiles(generator: np.random.Generator, size: int) -> Image:
    mask = np.ones((1, 1 + size, 28, 28), np.int64)
    mask[:, -1, 21:] = 0
    tensors: FeatureTensors = {"pixel_values": _pixels(generator, 1, 1 + size, 3, 28, 28), "pixel_attention_mask": mask}
    return Image(tensors, [False, *[True] * 4] * (1 + size))


def _padded_patches(generator: np.random.Generator, size: int) -> Image:
    height, width = 2, 2 * (1 + size)
    mask = np.zeros((1, 16), np.int32)
    mask[:, : height * width] = 1
    tensors = {
        "pixel_values": _pixels(generator, 1, 16, 3 * 4 * 4),
        "pixel_attention_mask": mask,
        "spatial_shapes": np.array([[height, width]]),
    }
    return Image(tensors, [False, *[True] * (1 + size), False])


def _slices(generator: np.random.Generator, size: int) -> Image:
    """Returns the embeddings of an overview of 4 x 8 patches and of slices of 4 x 4, each in a row of its own."""
    grids = np.array([[4, 8], *[[4, 4]] * size], np.int32)
    pixels = _pixels(generator, 1, 3, 4, 4 * int(grids.prod(axis=1).sum()))
    tensors: FeatureTensors = {"pixel_values": pixels, "target_sizes": grids}
    return Image(tensors, [False, True, True, *[False, True] * size, False])


def _placed_patches(generator: np.random.Generator, size: int) -> Image:
    """Returns two or four embeddings of 3 x 3 patches each, padded to 36 patches."""
    width, height = 3 * (1 + size), 6
    places = np.full((1, 36, 2), -1, np.int64)
    places[0, : width * height] = np.stack(np.meshgrid(range(width), range(height)), axis=-1).reshape(-1, 2)
    tensors: FeatureTensors = {"pixel_values": _pixels(generator, 1, 36, 3 * 4 * 4), "image_position_ids": places}
    return Image(tensors, [False, *[True] * 2 * (1 + size), False])


def _gemma4(text: dict[str, Any], vision: dict[str, Any]) -> PretrainedConfig:
    sizes = {"head_dim": 16, "global_head_dim": 24, "sliding_window": 6, "final_logit_softcapping": 5.0}
    tower = {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 3}
    return Gemma4Config(
        text_config={**TEXT, **sizes, "vocab_size_per_layer_input": VOCABULARY, **text},
        vision_config={**TOWER, **tower, "position_embedding_size": 16, **vision},
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=92,
        audio_token_id=93,
    )


_SLIDING, _FULL = "sliding_attention", "full_attention"
_E2B: dict[str, Any] = {
    **{"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL], "num_kv_shared_layers": 2},
    **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "num_key_value_heads": 1},
}
_31B: dict[str, Any] = {
    **{"num_hidden_layers": 3, "layer_types": [_SLIDING, _SLIDING, _FULL], "num_global_key_value_heads": 1},
    **{"attention_k_eq_v": True, "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0},
}

_26B: dict[str, Any] = {
    **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20},
}


def _idefics(kind: type[PretrainedConfig]) -> PretrainedConfig:
    tower = {**TOWER, "image_size": 28, "patch_size": 7}
    return kind(text_config=LlamaConfig(**TEXT), vision_config=tower, image_token_id=IMAGE, scale_factor=2, **TIED)


TIED = {"tie_word_embeddings": False}
FAMILIES: dict[str, tuple[Callable[[], PretrainedConfig], Callable[[np.random.Generator, int], Image]]] = {
    "qwen2_vl": (
        lambda: Qwen2VLConfig(
            text_config=TEXT | {"rope_parameters": ROPE},
            vision_config={
                **{"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
            },
            image_token_id=IMAGE,
            vision_start_token_id=89,
            video_token_id=92,
            **TIED,
        ),
        _patches,
    ),
    "qwen3_5": (
        lambda: Qwen3_5Config(
            text_config={
                **TEXT,
                **{"head_dim": 16, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
                **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
                **{"linear_value_head_dim": 8, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
            },
            vision_config={
                **{"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4},
                **{"out_hidden_size": TEXT["hidden_size"], "num_position_embeddings": 16},
            },
            image_token_id=IMAGE,
            vision_start_token_id=89,
            video_token_id=92,
            **TIED,
        ),
        _patches,
    ),
    "internvl": (
        lambda: InternVLConfig(
            text_config=Qwen3Config(**TEXT, head_dim=16, **TIED),
            vision_config={**TOWER, "image_size": [28, 28], "patch_size": [7, 7]},
            image_token_id=IMAGE,
            image_seq_length=4,
            **TIED,
        ),
        _tiles,
    ),
    "llava_onevision": (
        lambda: LlavaOnevisionConfig(
            text_config=Qwen2Config(**TEXT, **TIED),
            vision_config=SIGLIP,
            image_token_index=IMAGE,
            video_token_index=92,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
            **TIED,
        ),
        _any_resolution,
    ),
    "mistral3": (
        lambda: Mistral3Config(
            text_config=MistralConfig(**TEXT, head_dim=16, sliding_window=8, **TIED),
            vision_config={"model_type": "pixtral", **TOWER, "head_dim": 8, "image_size": 56, "patch_size": 7},
            image_token_index=IMAGE,
            spatial_merge_size=2,
            vision_feature_layer=-1,
            **TIED,
        ),
        _ragged,
    ),
    "gemma3": (
        lambda: Gemma3Config(
            text_config={
                **TEXT,
                **{"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
            },
            vision_config=SIGLIP,
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=91,
            eoi_token_index=92,
        ),
        _tiles,
    ),
    "gemma4 e2b": (lambda: _gemma4(_E2B, {"use_clipped_linears": True}), _placed_patches),
    "gemma4 31b": (lambda: _gemma4(_31B, {"standardize": True}), _placed_patches),
    "gemma4 26b": (lambda: _gemma4(_31B | _26B, {"standardize": True}), _placed_patches),
    "llama4": (
        lambda: Llama4Config(
            text_config={
                **TEXT,
                **{"head_dim": 16, "attention_chunk_size": 8, "floor_scale": 6, "no_rope_layers": [1, 0]},
                **{"intermediate_size": 20, "intermediate_size_mlp": 40, "num_local_experts": 6},
                **{"interleave_moe_layer_step": 2},
            },
            vision_config={
                **{**TOWER, "intermediate_size": 64, "image_size": 28, "patch_size": 7, "projector_input_dim": 24},
                **{"projector_output_dim": 24, "vision_output_dim": 24, "rope_parameters": {"rope_theta": 1e4}},
            },
            image_token_index=IMAGE,
        ),
        _tiles,
    ),
    "lfm2_vl": (
        lambda: Lfm2VlConfig(
            text_config={
                **{"model_type": "lfm2", **TEXT, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 3},
                **{"layer_types": ["conv", "full_attention", "conv"]},
            },
            vision_config={"model_type": "siglip2_vision_model", **TOWER, "patch_size": 4, "num_patches": 16},
            image_token_id=IMAGE,
            downsample_factor=2,
        ),
        _padded_patches,
    ),
    "minicpmv4_6": (
        lambda: MiniCPMV4_6Config(
            text_config={
                **{"model_type": "qwen3_5_text", **TEXT, "head_dim": 16, "linear_num_key_heads": 2},
                **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
                **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
            vision_config={**TOWER, "num_hidden_layers": 3, "image_size": 24, "patch_size": 4},
            insert_layer_id=1,
            image_token_id=IMAGE,
            **TIED,
        ),
        _slices,
    ),
    "idefics3": (lambda: _idefics(Idefics3Config), _masked_tiles),
    "smolvlm": (lambda: _idefics(SmolVLMConfig), _masked_tiles),
}


@cache
def _checkpoint(name: str) -> Path:
    """Writes a checkpoint with random weights large enough that every part matters, including biases and norms."""
    directory = Path(mkdtemp(prefix="families-"))
    model = AutoModelForImageTextToText.from_config(FAMILIES[name][0]())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.dim() >= 2 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        for _, buffer in constants(model):
            buffer.clamp_(-2, 2).add_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model.save_pretrained(directory)
    return directory


@cache
def _loaded(name: str) -> PackedModel:
    family = family_of(name.partition(" ")[0])
    hf = family.build(AutoConfig.from_pretrained(_checkpoint(name)), torch.float32)
    read_weights(hf, _checkpoint(name), CPU)
    return PackedModel(family, None, hf, None, 64, torch.float32)


def _packed(name: str) -> PackedModel:
    """Returns one packed model for all tests, reset: no gradients, and a new injector without an adapter."""
    module = _loaded(name)
    LoraInjector(module.family.lora_targets(module.hf))
    module.zero_grad()
    return module.requires_grad_(False)


@cache
def _pristine(name: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(_checkpoint(name), dtype=torch.float32)


def _reference(name: str) -> Any:
    return deepcopy(_pristine(name))


@cache
def _documents(name: str) -> tuple[list[Datum], dict[str, FeatureTensors]]:
    """Returns documents: text alone, one image, two of different sizes, two of the same size, and an image that occurs
    twice.
    """
    generator = np.random.default_rng(3)
    images = [FAMILIES[name][1](generator, size) for size in (0, 1, 1)]
    tensors = {str(number): image.tensors for number, image in enumerate(images)}
    reference = _pristine(name)
    datums = []
    for index, chosen in enumerate([(), (0,), (1, 0), (1, 2), (2,)]):
        ids: list[int] = generator.integers(3, 80, 4 + index).tolist()
        spans = []
        for number in chosen:
            mask = np.array(images[number].is_embedding)
            feature = model_input_pb2.VisionFeature(digest=str(number))
            spans.append(ImageSpan(len(ids), mask, feature))
            ids += np.where(mask, IMAGE, BREAK).tolist() + generator.integers(3, 80, 3).tolist()
        tokens, targets = np.array(ids), generator.integers(3, 80, (len(ids), 1))
        positions = _positions(reference, tokens, [tensors[str(number)] for number in chosen])
        datums.append(Datum(index, tokens, positions, tuple(spans), 0, targets, {}, True))
    return datums, tensors


def _positions(reference: Any, tokens: Any, images: list[FeatureTensors]) -> Any:
    if not images or not hasattr(getattr(reference, "model", None), "get_rope_index"):
        return None
    ids = torch.from_numpy(tokens)[None]
    grids = torch.from_numpy(np.concatenate([image["image_grid_thw"] for image in images]))
    found, _ = reference.model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grids)
    return found[:, 0].numpy()


def _run(module: PackedModel, name: str, datums: list[Datum], cached: dict[str, VisionOutput] | None) -> Tensor:
    layout = BatchLayout(small_qwen3_vl() if name in ("qwen2_vl", "qwen3_5") else None, CPU)
    _, tensors = _documents(name)
    run_tower = bool(wanted_images(datums, cached))
    logprobs: Tensor = module(layout.pack(datums, tensors, run_tower, cached), None, cached)
    return logprobs[:, 0]


def _run_reference(model: Any, name: str, datums: list[Datum]) -> Tensor:
    _, tensors = _documents(name)
    found = []
    for datum in datums:
        images = [tensors[span.feature.digest] for span in datum.spans]
        ids = torch.from_numpy(datum.tokens)[None]
        given = {}
        for key in images[0] if images else ():
            given[key] = torch.from_numpy(_side_by_side(name, [image[key] for image in images]))
        if "image_grid_thw" in given or "gemma4" in name:
            given["mm_token_type_ids"] = (ids == IMAGE).int()
        if name == "gemma3":
            given["token_type_ids"] = (ids == IMAGE).int()
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits[0]
        found.append(logits.log_softmax(-1).gather(1, torch.from_numpy(datum.targets))[:, 0])
    return torch.cat(found)


def _side_by_side(name: str, arrays: list[Any]) -> Any:
    """Batches images as processors do: smaller ones are padded below and to the right."""
    if name == "mistral3" and arrays[0].ndim == 4:
        height = max(array.shape[2] for array in arrays)
        arrays = [np.pad(array, [(0, 0), (0, 0), (0, height - array.shape[2]), (0, 0)]) for array in arrays]
    if name == "minicpmv4_6" and arrays[0].ndim == 4:
        return np.concatenate(arrays, axis=-1)
    return np.concatenate(arrays, axis=1 if name in ("idefics3", "smolvlm") else 0)


def _direction(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_one_by_one_and_transformers(name: str) -> None:
    module, (datums, _) = _packed(name), _documents(name)
    kept: dict[str, VisionOutput] = {}
    with torch.no_grad():
        packed = _run(module, name, datums, None)
        alone = torch.cat([_run(module, name, [datum], None) for datum in datums])
        frozen, again = _run(module, name, datums, kept), _run(module, name, datums, kept)
        expected = _run_reference(_reference(name), name, datums)
    assert set(kept) == {"0", "1", "2"}
    assert (packed - expected).abs().max() <= 1e-4
    for other in (alone, frozen, again):
        assert (packed - other).abs().max() <= 2e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_go_by_their_names_in_the_files(name: str) -> None:
    with safe_open(_checkpoint(name) / "model.safetensors", "pt") as file:
        assert set(_packed(name).file_names.values()) == set(file.keys())


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_all_parameters(name: str) -> None:
    module, (datums, _) = _packed(name), _documents(name)
    module.requires_grad_(True)
    logprobs = _run(module, name, datums, None)
    torch.autograd.backward((logprobs * _direction(len(logprobs))).sum())
    reference = _reference(name)
    torch.autograd.backward((_run_reference(reference, name, datums) * _direction(len(logprobs))).sum())
    found = dict(module.hf.named_parameters())
    moved = 0
    for key, parameter in reference.named_parameters():
        if parameter.grad is None:
            assert found[key].grad is None or not found[key].grad.any(), key
            continue
        moved += "vision" in key or "visual" in key
        is_transposed = name == "llama4" and parameter.dim() == 3
        expected = parameter.grad.mT if is_transposed else parameter.grad
        torch.testing.assert_close(found[key].grad, expected, atol=5e-4, rtol=5e-4)
    assert moved > 10


def test_layers_that_share_keys_and_values_are_computed_again() -> None:
    """Without stored activations: later layers read the keys and values of earlier ones in the second pass, too."""
    module, (datums, tensors) = _packed("gemma4 e2b"), _documents("gemma4 e2b")
    module.requires_grad_(True)
    batch = BatchLayout(None, CPU).pack(datums, tensors, True, None)
    found = []
    for recompute in (False, True):
        logprobs = module(batch, None, None, recompute)[:, 0]
        torch.autograd.backward((logprobs * _direction(len(logprobs))).sum())
        found.append({key: parameter.grad for key, parameter in module.named_parameters()})
        module.zero_grad()
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_the_language_model(name: str) -> None:
    module, (datums, _) = _packed(name), _documents(name)
    targets = list(module.family.lora_targets(module.hf))
    language = [target for target in targets if not target.vision]
    odd = {
        "gemma3": 6 * 7,
        "gemma4 e2b": 2 * 7 + 2 * 5,
        "gemma4 31b": 2 * 7 + 6,
        "gemma4 26b": 2 * 7 + 6 + 3,
        "lfm2_vl": 3 * 3 + 4 + 2 * 2,
        "llama4": 2 * 7 + 1,
    }
    linears = (odd | dict.fromkeys(("qwen3_5", "minicpmv4_6"), 2 * 3 + 5 + 4)).get(name, 2 * 7)
    assert len(language) == linears + 1
    injector = LoraInjector(targets)
    weights = LoraWeights(LoraSettings(4, 8.0, 0, True, True, True, False), targets, CPU, torch.float32)
    injector.activate(weights)
    reference = _reference(name)
    head = reference.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())  # an adapter unties a tied one
    parts = dict(reference.named_modules())
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, pair in weights.pairs.items():
            pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.1)
            parts[key].weight += pair.scale * pair.b @ pair.a
        layout = BatchLayout(small_qwen3_vl() if name in ("qwen2_vl", "qwen3_5") else None, CPU)
        batch = layout.pack(datums, _documents(name)[1], True, {})
        (unembedding,) = (pair for key, pair in weights.pairs.items() if key.endswith("lm_head"))
        found = module(batch, unembedding, {})[:, 0]
        expected = _run_reference(reference, name, datums)
    assert (found - expected).abs().max() <= 1e-4
