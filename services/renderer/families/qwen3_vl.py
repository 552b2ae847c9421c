"""Qwen3-VL: patch 16, merge 2, interleaved MRoPE (which concerns the model, not the position ids)."""

from typing import ClassVar

from services.renderer.families.qwen_vl import QwenVL


class Qwen3VL(QwenVL):
    """Dense Qwen3-VL checkpoints."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl",)
