"""How full micro-batches are: mixed lengths, image counts and sizes through the trainer's own plan."""

from __future__ import annotations

import numpy as np

from fovea_parity.documents import Maker, Piece, picture
from fovea_services.trainer.batches.packing import DatumSize, plan

_DOCUMENTS = 64
_IMAGE_COUNTS = (0, 0, 1, 1, 2, 4)
_LEAST_SIDE, _MOST_SIDE = 40, 400
"""Pixels."""
_MEDIAN_WORDS, _SPREAD = 30, 1.0
"""Of a log-normal distribution, as lengths of answers are."""

_RANKS = 2
_LONGEST_IN_BUDGET = 2
"""How many of the longest document a micro-batch may hold."""


def fullness(maker: Maker) -> dict[str, float]:
    """Shares of tokens that are real.

    Returns:
        `packed`: as the trainer runs them, where a rank that has less in a step than the other waits.
        `padded`: had each document of a micro-batch to be as long as the longest of it.
    """
    rng = np.random.default_rng(0)
    sizes = [_size(maker, rng) for _ in range(_DOCUMENTS)]
    tokens = _LONGEST_IN_BUDGET * max(size.token_count for size in sizes)
    patches = _LONGEST_IN_BUDGET * max(size.patch_count for size in sizes)
    planned = plan(sizes, _RANKS, tokens, patches)
    batches = [[sizes[index].token_count for index in batch] for step in planned.steps for batch in step.datums]
    padded = sum(len(lengths) * max(lengths) for lengths in batches if lengths)
    return {"packed": planned.efficiency, "padded": sum(map(sum, batches)) / padded}


def _size(maker: Maker, rng: np.random.Generator) -> DatumSize:
    words = ["word "] * int(rng.lognormal(np.log(_MEDIAN_WORDS), _SPREAD) + 1)
    pieces: list[Piece] = ["".join(words)]
    for _ in range(int(rng.choice(_IMAGE_COUNTS)) if maker.family else 0):
        width, height = rng.integers(_LEAST_SIDE, _MOST_SIDE, 2, endpoint=True).tolist()
        pieces.append(picture((width, height)))
    document = maker.splice(pieces)
    patches = 0
    if maker.family is not None:
        embeddings = (int(image.replacement.is_embedding.sum()) for image in document.images)
        patches = sum(map(maker.family.patch_count, embeddings))
    return DatumSize(len(document.ids), patches)
