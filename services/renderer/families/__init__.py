"""The model families. To add one: a file with a class that answers `base.Family`, and its name in the list below."""

from services.renderer.families.base import Family
from services.renderer.families.qwen2_5_vl import Qwen25VL
from services.renderer.families.qwen3_vl import Qwen3VL
from services.renderer.families.text import TextOnly
from services.renderer.model_directory import Checkpoint

VISION_FAMILIES: tuple[type[Family], ...] = (Qwen3VL, Qwen25VL)


def choose(checkpoint: Checkpoint) -> type[Family]:
    """The family that reads a checkpoint, by the `model_type` in its config.json.

    Raises ValueError, naming the supported model types, for a vision model of a family that is not listed.
    """
    for family in VISION_FAMILIES:
        if checkpoint.model_type in family.model_types:
            return family
    if not checkpoint.has_vision:
        return TextOnly
    supported = ", ".join(sorted(name for family in VISION_FAMILIES for name in family.model_types))
    raise ValueError(
        f"{checkpoint.directory}: model_type {checkpoint.model_type!r} is a vision model that the renderer does not"
        f" know; supported are {supported}, and text-only models (the trainer takes qwen3 of them)"
    )
