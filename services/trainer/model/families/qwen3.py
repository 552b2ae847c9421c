"""Qwen3: text only."""

# ruff: noqa: N803, N806 -- the suffix of a tensor's name is its shape

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3ForCausalLM

from services.trainer.model.families.base import (
    LANGUAGE_ROLES,
    Documents,
    Family,
    LoraTarget,
    Role,
    VisionOutput,
    named_linears,
)
from services.trainer.model.families.fused import fuse_layers
from services.trainer.model.products import embedding


class Qwen3(Family):
    """`model_type` qwen3."""

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
        output = model.model(
            inputs_embeds=embeddings_TD.unsqueeze(0),
            position_ids=positions,
            use_cache=False,
            cu_seq_lens_q=documents.bounds,
            cu_seq_lens_k=documents.bounds,
            max_length_q=documents.longest,
            max_length_k=documents.longest,
        )
        hidden_1TD: Tensor = output.last_hidden_state
        return hidden_1TD.squeeze(0)
