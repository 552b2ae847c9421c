"""The root module that FSDP wraps: from a packed micro-batch to the log-probabilities of its targets.

Shapes: T packed tokens, K targets a position, D hidden size, M placeholder tokens.
"""

# ruff: noqa: N806 -- the suffix of a tensor's name is its shape

import math
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer.batches.micro_batch import Batch, TowerInput
from services.trainer.batches.vision_memory import SeenImage, join_outputs, split_output
from services.trainer.model.families import Family
from services.trainer.model.families.base import PatchNormalizer, VisionOutput
from services.trainer.model.lora_pair import LoraPair
from services.trainer.model.target_logprobs import target_logprobs

HF_PREFIX = "hf."


class PackedModel(nn.Module):
    """A Hugging Face model of a known family, run on packed micro-batches.

    Everything that needs gathered parameters happens inside `forward`, the unembedding included: this is what FSDP's
    hooks surround.

    Args:
        normalizer: None for a model without vision.
        chunk_positions: Logits are made for so many positions at a time.
        head_dtype: The type of logits.

    `recompute_above` may be set: micro-batches of more tokens keep no activations but each block's input.
    """

    recompute_above = math.inf

    def __init__(
        self, family: Family, hf: Any, normalizer: PatchNormalizer | None, chunk_positions: int, head_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.family = family
        self.hf = hf
        self._normalizer = normalizer
        self._chunk_positions = chunk_positions
        self._head_dtype = head_dtype
        hf.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, batch: Batch, unembedding: LoraPair | Tensor | None, seen: dict[str, SeenImage] | None) -> Tensor:
        """Log-probabilities of the targets, float32 [T, K], with gradients.

        Args:
            unembedding: What is trained of it, as `target_logprobs` takes it.
            seen: What a frozen tower made of images so far, by digest; new ones are added. None if it is trained.
        """
        for block in self.family.blocks(self.hf):
            block.gradient_checkpointing = len(batch.tokens_T) > self.recompute_above  # type: ignore[assignment]
        hidden_TD = self._hidden(batch, seen)
        return target_logprobs(
            hidden_TD, self.hf.lm_head.weight, unembedding, batch.targets_TK, self._chunk_positions, self._head_dtype
        )

    def _hidden(self, batch: Batch, seen: dict[str, SeenImage] | None) -> Tensor:
        embeddings_TD = self.family.embed(self.hf, batch.tokens_T)
        vision = self._vision(batch, seen)
        index_M = None
        if batch.placement is not None and vision is not None:
            index_M = batch.placement.index_M
            embeddings_TD = embeddings_TD.index_copy(0, index_M, vision.embeddings.to(embeddings_TD.dtype))
        elif vision is not None:
            embeddings_TD = embeddings_TD + vision.anchored()
            vision = None
        return self.family.run_language(self.hf, embeddings_TD, batch.positions, batch.documents, vision, index_M)

    def _vision(self, batch: Batch, seen: dict[str, SeenImage] | None) -> VisionOutput | None:
        """The output for all images of the micro-batch, or for a filler."""
        if seen is None:
            return self._run_tower(batch.tower) if batch.tower else None
        if batch.tower is not None:
            with torch.no_grad():
                output = self._run_tower(batch.tower)
            if batch.tower.images:
                grids = [grid for _, grid in batch.tower.images]
                images = split_output(output, grids, self.family.merge_size(self.hf.config))
                seen |= {digest: image for (digest, _), image in zip(batch.tower.images, images, strict=True)}
        return join_outputs(seen[digest] for digest in batch.placement.digests) if batch.placement else None

    def _run_tower(self, tower: TowerInput) -> VisionOutput:
        assert self._normalizer is not None
        pixels_PW = self._normalizer(tower.patches_PW, self.hf.dtype)
        return self.family.run_vision(self.hf, pixels_PW, tower.grids_I3)
