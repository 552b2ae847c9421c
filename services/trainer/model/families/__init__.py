"""Model families by `model_type` of the checkpoint's configuration. A new family adds its file and its line here."""

from services.trainer.model.families.base import Family
from services.trainer.model.families.qwen2_5_vl import Qwen25Vl
from services.trainer.model.families.qwen3 import Qwen3
from services.trainer.model.families.qwen3_vl import Qwen3Vl

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: dict[str, type[Family]] = {family.model_type: family for family in (Qwen3Vl, Qwen25Vl, Qwen3)}


def family_of(model_type: str) -> Family:
    """The family of a checkpoint. Raises ValueError naming the known ones."""
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]()
