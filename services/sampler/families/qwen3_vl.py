"""Qwen3-VL."""

from typing import Any

from services.sampler.families.qwen_vision import QwenVisionFamily


class Qwen3VLFamily(QwenVisionFamily):
    """Qwen3-VL, dense."""

    @classmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        """By `model_type`."""
        return config.get("model_type") == "qwen3_vl"


FAMILY = Qwen3VLFamily
