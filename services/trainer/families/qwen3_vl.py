"""Qwen3-VL: deepstack features from several tower layers, interleaved MRoPE."""

from typing import ClassVar

from transformers import Qwen3VLForConditionalGeneration

from services.trainer.families.base import Role
from services.trainer.families.qwen_vl import QwenVl


class Qwen3Vl(QwenVl):
    """`model_type` qwen3_vl."""

    model_type = "qwen3_vl"
    architecture = Qwen3VLForConditionalGeneration
    # linear_fc1 and linear_fc2 name the linears of the blocks, of the merger and of the deepstack mergers alike.
    vision_roles: ClassVar[dict[str, Role]] = {
        "qkv": Role.ATTENTION,
        "proj": Role.ATTENTION,
        "linear_fc1": Role.MLP,
        "linear_fc2": Role.MLP,
    }
