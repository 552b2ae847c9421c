"""Qwen3-VL."""

from typing import Any

from services.sampler.families.qwen_vision import QwenVisionFamily


class Qwen3VLFamily(QwenVisionFamily):
    """Qwen3-VL, dense and mixture of experts."""

    @classmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        """By `model_type`."""
        return config.get("model_type") in ("qwen3_vl", "qwen3_vl_moe")


FAMILY = Qwen3VLFamily
