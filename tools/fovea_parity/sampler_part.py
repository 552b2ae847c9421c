"""Compares vLLM's processing of images with the renderer's, and checks that vLLM supports the model.

Starts no engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fovea.vision.vision_family import image_margin
from fovea_parity.documents import SIZES, DocumentMaker, PlacedImage, picture
from fovea_parity.finding import Finding
from fovea_sampler.engine.vllm_launch import check_model, prepare_environment, read_config, register_eagerly
from fovea_sampler.settings import SamplerSettings

_SIZE_COUNT = 4
"""The number of image sizes: square, high and wide. The check of the renderer uses more."""


def check(directory: Path) -> Finding:
    """Checks the architecture, the support of adapters, and the processing of images."""
    settings = SamplerSettings(model=str(directory))
    prepare_environment(settings)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    (architecture,) = read_config(str(directory))["architectures"]
    if architecture not in ModelRegistry.get_supported_archs():
        return Finding("sampler", False, f"vLLM has no {architecture}")
    register_eagerly(architecture)
    config = AsyncEngineArgs(model=str(directory), dtype="float32", max_model_len=2048).create_model_config()
    model_class, _ = ModelRegistry.resolve_model_cls([architecture], config)
    adapts = supports_lora(model_class)
    adapters = "with adapters" if adapts else "full parameters only: vLLM has no LoRA for it"
    check_model(str(directory))
    maker = DocumentMaker(directory)
    if maker.family is not None and maker.family.takes_adapters != adapts:
        return Finding("sampler", False, f"{adapters}; takes_adapters of {type(maker.family).__name__} says otherwise")
    if maker.family is not None and (problem := _image_problem(maker, config)):
        return Finding("sampler", False, f"vLLM has {architecture}, {adapters}; {problem}")
    same = "" if maker.family is None else "; ids and embeddings of images equal"
    return Finding("sampler", True, f"vLLM has {architecture}, {adapters}{same}")


def _image_problem(maker: DocumentMaker, config: Any) -> str:
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    from fovea_sampler.engine.request_conversion import PromptMaker

    processor = MULTIMODAL_REGISTRY.create_processor(config)
    prompts = PromptMaker(config, processor)
    token = maker.tokenizer.convert_tokens_to_ids(maker.processor.image_token)
    margins = [maker.tokenizer.encode(text, add_special_tokens=False) for text in image_margin(maker.tokenizer)]
    for size in SIZES[:_SIZE_COUNT]:
        placed = maker.place(picture(size, 1), 0)
        items = processor.info.parse_mm_data({"image": [picture(size, 1)]})
        made = processor.apply(ProcessorInputs([token], items), TimingContext())
        if problem := _difference(placed, made, *margins):
            return f"{size[0]}x{size[1]}: {problem}"
        ours, own = prompts.item(placed.tensors).get_data(), made["mm_kwargs"]["image"][0].get_data()
        if missing := sorted(set(own) - set(ours)):
            return f"{size[0]}x{size[1]}: vLLM also makes {', '.join(missing)} of an image"
    return ""


def _difference(placed: PlacedImage, made: Any, before: list[int], after: list[int]) -> str:
    ids, mine = list(made["prompt_token_ids"]), placed.replacement.ids.tolist()
    if ids != [*before, *mine, *after]:
        return f"vLLM replaces an image by {len(ids)} ids, the renderer by {len(mine)}"
    (place,) = made["mm_placeholders"]["image"]
    is_embedding = np.zeros(len(ids), np.bool_)
    inside = slice(place.offset, place.offset + place.length)
    is_embedding[inside] = True if place.is_embed is None else place.is_embed.numpy()
    if not np.array_equal(is_embedding, np.pad(placed.replacement.is_embedding, (len(before), len(after)))):
        return "vLLM puts embeddings in other places than the renderer"
    return ""
