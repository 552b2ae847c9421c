"""Qwen2.5-VL: a tower with window attention, one merger."""

from typing import ClassVar

from transformers import Qwen2_5_VLForConditionalGeneration

from services.trainer.model.families.base import Role
from services.trainer.model.families.qwen_vl import QwenVl


class Qwen25Vl(QwenVl):
    """`model_type` qwen2_5_vl."""

    model_type = "qwen2_5_vl"
    architecture = Qwen2_5_VLForConditionalGeneration
    # The merger is a Sequential: its linears are called 0 and 2.
    vision_roles: ClassVar[dict[str, Role]] = {
        "qkv": Role.ATTENTION,
        "proj": Role.ATTENTION,
        "gate_proj": Role.MLP,
        "up_proj": Role.MLP,
        "down_proj": Role.MLP,
        "0": Role.MLP,
        "2": Role.MLP,
    }
