"""Qwen2.5-VL: patch 14, merge 2. Its time scaling (`tokens_per_second`) is for videos; an image has one moment."""

from typing import ClassVar

from services.renderer.families.qwen_vl import QwenVL


class Qwen25VL(QwenVL):
    """Qwen2.5-VL checkpoints."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)
