"""What a vision-language family is, declared once for renderer, sampler and trainer. numpy only.

A family is a class of facts and formulas (`vision_family.VisionFamily`), bound to a checkpoint by its config.json and
the added tokens of its tokenizer. A new one is a class in a file here and its name in `FAMILIES`, or no more than its
`model_type` in the class that fits.
"""

from collections.abc import Mapping
from typing import Any

from fovea.vision.processor_vl import (
    MaskedTilesVL,
    PaddedTilesVL,
    PlacedPatchesVL,
    PooledTilesVL,
    RaggedVL,
    TiledVL,
    UnpaddedTilesVL,
)
from fovea.vision.qwen_vl import Glm4v, QwenVL
from fovea.vision.vision_family import VisionFamily

FAMILIES: tuple[type[VisionFamily], ...] = (
    QwenVL,
    Glm4v,
    TiledVL,
    MaskedTilesVL,
    RaggedVL,
    UnpaddedTilesVL,
    PooledTilesVL,
    PaddedTilesVL,
    PlacedPatchesVL,
)

MODEL_TYPES = tuple(sorted(model_type for family in FAMILIES for model_type in family.model_types))
"""The values of `model_type` in config.json that have a family."""

# A configuration with any of these takes more than text, whatever its model_type.
_TOWER_KEYS = (
    "vision_config",
    "audio_config",
    "visual",
    "vision_tower",
    "mm_vision_tower",
    "image_token_id",
    "image_token_index",
)


def choose(config: Mapping[str, Any]) -> type[VisionFamily] | None:
    """The family of a checkpoint by its config.json; None for a model that takes text only.

    Raises ValueError, naming the supported model types, for a model with a vision or audio tower of no family here, and
    for one that brings code of its own.
    """
    model_type = config.get("model_type")
    if config.get("auto_map"):
        raise ValueError(
            f"model_type {model_type!r} brings code of its own (auto_map in config.json, trust_remote_code), which"
            f" Fovea never runs; take a checkpoint that transformers knows itself, of one of {', '.join(MODEL_TYPES)}"
        )
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    if all(config.get(key) is None for key in _TOWER_KEYS):
        return None
    raise ValueError(
        f"model_type {model_type!r} is a vision model that Fovea does not know; supported are {', '.join(MODEL_TYPES)},"
        " and text-only models"
    )


def bind(config: Mapping[str, Any], added_tokens: Mapping[str, int]) -> VisionFamily | None:
    """The family of a checkpoint with its facts, None for a model that takes text only.

    Args:
        config: config.json, as the file has it or as transformers completes it.
        added_tokens: Ids of the added tokens of tokenizer.json by their text.

    Raises ValueError as `choose` does, and for a configuration that lacks an entry which the family needs.
    """
    family = choose(config)
    return None if family is None else family(config, added_tokens)
