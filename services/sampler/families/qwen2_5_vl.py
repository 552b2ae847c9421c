"""Qwen2.5-VL."""

from typing import Any

from services.sampler.families.qwen_vision import QwenVisionFamily


class Qwen25VLFamily(QwenVisionFamily):
    """Qwen2.5-VL."""

    @classmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        """By `model_type`."""
        return config.get("model_type") == "qwen2_5_vl"


FAMILY = Qwen25VLFamily
