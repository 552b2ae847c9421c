"""Qwen3-VL: deepstack features from several tower layers, interleaved MRoPE."""

# ruff: noqa: N803 -- the suffix of a tensor's name is its shape

from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3VLForConditionalGeneration

from services.trainer.model.families.base import Role
from services.trainer.model.families.qwen_vl import QwenVl


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

    def load(self, model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
        model: Any = super().load(model_dir, dtype)
        language = model.model.language_model
        language._deepstack_process = MethodType(_add_level, language)
        return model  # type: ignore[no-any-return]


def _add_level(_: Any, hidden_1TD: Tensor, image_index_M: Tensor, level_MD: Tensor) -> Tensor:
    """Adds one level of deepstack features where the images are.

    The module's own takes a mask, for which the host has to wait for the GPU six times a pass.
    """
    return hidden_1TD.index_add(1, image_index_M, level_MD.to(hidden_1TD.dtype).unsqueeze(0))
