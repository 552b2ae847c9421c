"""Qwen3, Qwen2.5-VL and Qwen3-VL. The last two have a tower, mergers, and a language model with MRoPE."""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from services.trainer.batches.micro_batch import Documents
from services.trainer.batches.vision_cache import VisionOutput
from services.trainer.model.layers import fuse_layers
from services.trainer.model.lora_linear import embedding
from services.trainer.model.model_family import LANGUAGE_ROLES, Family, LoraTarget, Role, named_linears


class QwenVl(Family):
    """Base of Qwen2.5-VL and Qwen3-VL, whose modules have the same places."""

    vision_roles: ClassVar[dict[str, Role]]

    def load(self, model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
        model: Any = super().load(model_dir, dtype)
        patch_embed = model.model.visual.patch_embed
        patch_embed.forward = MethodType(embed_patches, patch_embed)
        fuse_layers(model.model.language_model.layers)
        return model  # type: ignore[no-any-return]

    def blocks(self, model: Any) -> Iterator[nn.Module]:
        yield from model.model.visual.blocks
        yield from model.model.language_model.layers

    def lora_targets(self, model: Any) -> Iterator[LoraTarget]:
        yield from named_linears("model.visual", model.model.visual, self.vision_roles, vision=True)
        yield from named_linears("model.language_model", model.model.language_model, LANGUAGE_ROLES, vision=False)
        yield LoraTarget("lm_head", model.lm_head, Role.UNEMBEDDING, vision=False)

    def embed(self, model: Any, tokens_T: Tensor) -> Tensor:
        return embedding(tokens_T, model.model.language_model.embed_tokens.weight)

    def run_vision(self, model: Any, pixels_PW: Tensor, grids_I3: Tensor) -> VisionOutput:
        output = model.model.visual(pixels_PW, grid_thw=grids_I3, return_dict=True)
        return VisionOutput(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))

    def run_language(
        self,
        model: Any,
        embeddings_TD: Tensor,
        positions: Tensor,
        documents: Documents,
        vision: VisionOutput | None,
        image_index_M: Tensor | None,
    ) -> Tensor:
        deepstack: dict[str, Any] = {}
        if vision is not None and vision.deepstack and image_index_M is not None:
            deepstack = {"visual_pos_masks": image_index_M, "deepstack_visual_embeds": list(vision.deepstack)}
        return run_packed(model.model.language_model, embeddings_TD, positions.unsqueeze(1), documents, **deepstack)


def run_packed(language: Any, embeddings_TD: Tensor, position_ids: Tensor, documents: Documents, **more: Any) -> Tensor:
    """Final hidden states [T, D] of documents that lie end to end, each of which sees itself alone.

    Args:
        language: The Hugging Face language model, without its unembedding.
        position_ids: int64 [3, 1, T] with multimodal RoPE, else [1, T].
        more: What the model takes besides.
    """
    output = language(
        inputs_embeds=embeddings_TD.unsqueeze(0),
        position_ids=position_ids,
        use_cache=False,
        cu_seq_lens_q=documents.bounds,
        cu_seq_lens_k=documents.bounds,
        max_length_q=documents.longest,
        max_length_k=documents.longest,
        **more,
    )
    hidden_1TD: Tensor = output.last_hidden_state
    return hidden_1TD.squeeze(0)


def embed_patches(patch_embed: Any, pixels_PW: Tensor) -> Tensor:
    """What the module's Conv3d computes on patches of exactly its kernel's size, as the matrix product that it is.

    torch's convolution takes five times as long for it on a CPU.
    """
    weight = patch_embed.proj.weight
    return functional.linear(pixels_PW.to(weight.dtype), weight.flatten(1), patch_embed.proj.bias)


class Qwen25Vl(QwenVl):
    """Qwen2.5-VL: a tower with window attention, one merger."""

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


class Qwen3Vl(QwenVl):
    """Qwen3-VL: deepstack features from several tower layers, interleaved MRoPE."""

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


class Qwen3(Family):
    """Qwen3: a language model without a tower."""

    model_type = "qwen3"
    architecture = Qwen3ForCausalLM

    def load(self, model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
        model: Any = super().load(model_dir, dtype)
        fuse_layers(model.model.layers)
        return model  # type: ignore[no-any-return]

    def blocks(self, model: Any) -> Iterator[nn.Module]:
        yield from model.model.layers

    def lora_targets(self, model: Any) -> Iterator[LoraTarget]:
        yield from named_linears("model", model.model, LANGUAGE_ROLES, vision=False)
        yield LoraTarget("lm_head", model.lm_head, Role.UNEMBEDDING, vision=False)

    def embed(self, model: Any, tokens_T: Tensor) -> Tensor:
        return embedding(tokens_T, model.model.embed_tokens.weight)

    def run_language(
        self,
        model: Any,
        embeddings_TD: Tensor,
        positions: Tensor,
        documents: Documents,
        vision: VisionOutput | None,
        image_index_M: Tensor | None,
    ) -> Tensor:
        return run_packed(model.model, embeddings_TD, positions, documents)
