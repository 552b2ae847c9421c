"""Vision-language families, declared once for renderer, sampler and trainer. Depends on numpy only.

A family is a class of facts and formulas (`vision_family.VisionFamily`), bound to a checkpoint by its config.json and
the added tokens of its tokenizer. To add a family, add a class in this folder and list it in `FAMILIES`; or only add
the `model_type` to a class that fits.
"""

from collections.abc import Mapping
from typing import Any

from fovea.vision.processor_vl import (
    MaskedTilesVL,
    PaddedTilesVL,
    PlacedPatchesVL,
    PooledTilesVL,
    RaggedVL,
    ShuffledTilesVL,
    SlicedVL,
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
    ShuffledTilesVL,
    RaggedVL,
    UnpaddedTilesVL,
    PooledTilesVL,
    PaddedTilesVL,
    PlacedPatchesVL,
    SlicedVL,
)

MODEL_TYPES = tuple(sorted(model_type for family in FAMILIES for model_type in family.model_types))
"""Values of `model_type` in config.json that have a family."""

_MAMBA = "packed training has no Mamba 2 layer"
MISSING_PIECES = {
    "deepseek_ocr2": "vLLM has no DeepseekOcr2ForConditionalGeneration, only the class of the checkpoint's custom code",
    "ernie4_5_vl_moe": "vLLM's class reads the configuration of the checkpoint's custom code, not that of transformers",
    "gemma4_unified": "image tokens see later ones in all layers of transformers, in vLLM only in those with a window",
    "gpt_oss": "vLLM's loader loses pushed experts, and its adapters do not fit their interleaved gates",
    "kimi_k25": "vLLM has no adapters for it, and its published weights have 4 bits, which the trainer does not read",
    **dict.fromkeys(("nemotron_h", "nemotron_h_omni"), _MAMBA),
    "phi4_multimodal": "vLLM removed Phi4MultimodalForCausalLM in 0.12",
}
"""By `model_type`: why a family that transformers has is not supported."""

# A config with any of these entries accepts more than text, whatever its model_type.
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
    """Returns the family of a checkpoint, from its config.json; None for a text model.

    Raises:
        ValueError: The model has a vision or audio tower without a family here, or it needs custom code. Lists the
            supported model types.
    """
    model_type = config.get("model_type")
    if config.get("auto_map"):
        raise ValueError(
            f"model_type {model_type!r} needs custom code (auto_map in config.json, trust_remote_code), which Fovea "
            f"never runs; use a checkpoint built into transformers, of one of {', '.join(MODEL_TYPES)}"
        )
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    if all(config.get(key) is None for key in _TOWER_KEYS):
        return None
    raise ValueError(
        f"model_type {model_type!r} is a vision model that Fovea does not support{missing_piece(model_type)}; "
        f"supported are {', '.join(MODEL_TYPES)}, and text-only models"
    )


def with_parts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a config with the entries of its `thinker_config` at the top level, where other models have them.

    Qwen3-Omni's config has one for the model that sees images and writes text, beside those for speech.
    """
    return {**(config.get("thinker_config") or {}), **config}


def missing_piece(model_type: object) -> str:
    """Returns the reason why a family is not supported, after a colon; empty if none is recorded."""
    piece = MISSING_PIECES.get(str(model_type))
    return f": {piece}" if piece else ""


def bind(config: Mapping[str, Any], added_tokens: Mapping[str, int]) -> VisionFamily | None:
    """Returns the family of a checkpoint with the checkpoint's facts; None for a text model.

    Args:
        config: config.json, as stored or as completed by transformers.
        added_tokens: Ids of the added tokens of tokenizer.json, keyed by text.

    Raises ValueError as `choose` does, and if the config lacks an entry that the family needs.
    """
    family = choose(config)
    return None if family is None else family(with_parts(config), added_tokens)
