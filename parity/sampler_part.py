"""Sampler against the renderer, without an engine: vLLM knows the model, and would make the same of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature

from parity.documents import SIZES, Maker, PlacedImage, picture
from parity.finding import Finding
from services.sampler.engine.vllm_launch import check_model, prepare_environment, read_config
from services.sampler.settings import SamplerSettings


def check(directory: Path) -> Finding:
    """Architecture, adapters, and for images the processor side."""
    settings = SamplerSettings(model=str(directory))
    prepare_environment(settings)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    (architecture,) = read_config(str(directory))["architectures"]
    if architecture not in ModelRegistry.get_supported_archs():
        return Finding("sampler", False, f"vLLM has no {architecture}")
    config = AsyncEngineArgs(model=str(directory), dtype="float32", max_model_len=2048).create_model_config()
    model_class, _ = ModelRegistry.resolve_model_cls([architecture], config)
    adapters = "with adapters" if supports_lora(model_class) else "full parameters only: vLLM has no LoRA for it"
    check_model(str(directory))
    maker = Maker(directory)
    if maker.family is not None and (problem := _image_problem(maker, config)):
        return Finding("sampler", False, f"vLLM has {architecture}, {adapters}; {problem}")
    same = "" if maker.family is None else "; ids and embeddings of images equal"
    return Finding("sampler", True, f"vLLM has {architecture}, {adapters}{same}")


def _image_problem(maker: Maker, config: Any) -> str:
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    processor = MULTIMODAL_REGISTRY.create_processor(config)
    token = maker.tokenizer.convert_tokens_to_ids(maker.processor.image_token)
    for size in SIZES:
        placed = maker.place(picture(size, 1), 0)
        items = processor.info.parse_mm_data({"image": [picture(size, 1)]})
        made = processor.apply(ProcessorInputs([token], items), TimingContext())
        if problem := _difference(placed, made) or _fields_problem(processor, placed):
            return f"{size[0]}x{size[1]}: {problem}"
    return ""


def _difference(placed: PlacedImage, made: Any) -> str:
    ids, mine = list(made["prompt_token_ids"]), placed.replacement.ids.tolist()
    if ids != mine:
        return f"vLLM replaces an image by {len(ids)} ids, the renderer by {len(mine)}"
    (place,) = made["mm_placeholders"]["image"]
    is_embedding = np.zeros(len(ids), np.bool_)
    inside = slice(place.offset, place.offset + place.length)
    is_embedding[inside] = True if place.is_embed is None else place.is_embed.numpy()
    if not np.array_equal(is_embedding, placed.replacement.is_embedding):
        return "vLLM puts embeddings in other places than the renderer"
    return ""


def _fields_problem(processor: Any, placed: PlacedImage) -> str:
    """Whether the sampler can hand these tensors to vLLM: as services.sampler.engine.request_conversion does."""
    from vllm.multimodal.inputs import MultiModalKwargsItems

    features = BatchFeature({name: torch.from_numpy(array) for name, array in placed.tensors.items()})
    fields = processor._get_mm_fields_config(features, {})
    items = MultiModalKwargsItems.from_hf_inputs(features, fields)
    return "" if len(items["image"]) == 1 else f"vLLM takes the tensors of one image for {len(items['image'])}"
