"""The root module that FSDP wraps: from a packed micro-batch to its loss in one forward call.

Shapes: T packed tokens, K targets a position, D hidden size, M placeholder tokens.
"""

# ruff: noqa: N806 -- the suffix of a tensor's name is its shape

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer.batch import Batch
from services.trainer.families import Family
from services.trainer.families.base import PatchNormalizer, VisionOutput
from services.trainer.logprobs import LoraPair, target_logprobs
from services.trainer.losses import Loss, LossValue

HF_PREFIX = "hf."


class PackedModel(nn.Module):
    """A Hugging Face model of a known family, run on packed micro-batches.

    Everything that needs gathered parameters happens inside `forward`, the unembedding and the loss included: this
    is what FSDP's hooks surround.
    """

    def __init__(self, family: Family, hf: Any, normalizer: PatchNormalizer | None, chunk_positions: int) -> None:
        super().__init__()
        self.family = family
        self.hf = hf
        self._normalizer = normalizer
        self._chunk_positions = chunk_positions

    def forward(
        self,
        batch: Batch,
        loss: Loss,
        config: Mapping[str, float],
        unembedding: LoraPair | None,
        train_vision: bool,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss (float32 scalar with gradient), log-probabilities float32 [T, K] without, and metrics."""
        hidden_TD = self._hidden(batch, train_vision)
        logprobs_TK = target_logprobs(
            hidden_TD, self.hf.lm_head.weight, unembedding, batch.targets_TK, self._chunk_positions
        )
        if batch.datums:
            value = loss.compute(logprobs_TK, batch.inputs_TK, config)
        else:
            value = LossValue(logprobs_TK.sum() * 0.0, {})
        return value.loss, logprobs_TK.detach(), {name: metric.detach() for name, metric in value.metrics.items()}

    def _hidden(self, batch: Batch, train_vision: bool) -> Tensor:
        embeddings_TD = self.family.embed(self.hf, batch.tokens_T)
        vision: VisionOutput | None = None
        index_M = batch.images.index_M if batch.images else None
        if batch.images is not None:
            vision = self._vision(batch, train_vision)
            if index_M is None:
                embeddings_TD = embeddings_TD + vision.anchored()
                vision = None
            else:
                embeddings_TD = embeddings_TD.index_copy(0, index_M, vision.embeddings.to(embeddings_TD.dtype))
        return self.family.run_language(self.hf, embeddings_TD, batch.positions, batch.documents, vision, index_M)

    def _vision(self, batch: Batch, train_vision: bool) -> VisionOutput:
        assert batch.images is not None
        assert self._normalizer is not None
        pixels_PW = self._normalizer(batch.images.patches_PW, self.hf.dtype)
        with torch.set_grad_enabled(train_vision and torch.is_grad_enabled()):
            return self.family.run_vision(self.hf, pixels_PW, batch.images.grids_I3)
