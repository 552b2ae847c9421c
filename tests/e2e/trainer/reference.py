"""The same datums through plain transformers, one at a time, without packing, sharding or code of the trainer."""

from typing import Any

import numpy as np
import torch
from PIL import Image

from fovea.api.v1 import trainer_pb2
from fovea.wire import tensors
from tests.e2e.trainer.image_service import Chunk, ImageService


def logprobs(model: Any, service: ImageService, chunks: list[Chunk], datum: trainer_pb2.Datum) -> torch.Tensor:
    """Returns float32 [N] log-probabilities of the datum's targets, with gradients."""
    ids = torch.from_numpy(np.array(tensors.decode_tokens(datum.input.tokens)).astype(np.int64))[None]
    images = [chunk for chunk in chunks if isinstance(chunk, Image.Image)]
    vision: dict[str, Any] = {}
    if images:
        made = service.processor(images, return_tensors="pt")
        kinds = (ids == service.config.image_token_id).int()
        vision = {
            "pixel_values": made["pixel_values"],
            "image_grid_thw": made["image_grid_thw"],
            "mm_token_type_ids": kinds,
        }
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **vision).logits[0]
    targets = torch.from_numpy(np.array(tensors.decode(datum.loss_inputs["target_tokens"])))
    return logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def cross_entropy(
    model: Any, service: ImageService, chunk_lists: list[list[Chunk]], datums: list[trainer_pb2.Datum]
) -> torch.Tensor:
    """Returns -sum w logprob over all datums."""
    total = torch.zeros(())
    for chunks, datum in zip(chunk_lists, datums, strict=True):
        weights = torch.from_numpy(np.array(tensors.decode(datum.loss_inputs["weights"])))
        total = total - (weights * logprobs(model, service, chunks, datum)).sum()
    return total
