"""Measures the fill of micro-batches: plans documents of mixed lengths and images with the trainer's own planner."""

from __future__ import annotations

import numpy as np

from fovea_parity.documents import Content, DocumentMaker, picture
from fovea_trainer.batches.datum_decoding import DatumSize
from fovea_trainer.batches.places import plan

_DOCUMENTS = 64
_IMAGE_COUNTS = (0, 0, 1, 1, 2, 4)
_LEAST_SIDE, _MOST_SIDE = 40, 400
"""The range of the sides of images, in pixels."""
_MEDIAN_WORDS, _SPREAD = 30, 1.0
"""The parameters of a log-normal distribution of the number of words, which resembles lengths of answers."""

_RANKS = 2
_LONGEST_IN_BUDGET = 2
"""The size of a micro-batch, in multiples of the longest document."""


def fullness(maker: DocumentMaker) -> dict[str, float]:
    """Returns two fractions of real tokens among all computed ones.

    Returns:
        `packed`: As the trainer runs the documents. A rank with fewer tokens than the other waits for it in each step.
        `padded`: If each document of a micro-batch were padded to the longest one.
    """
    rng = np.random.default_rng(0)
    sizes = [_size(maker, rng) for _ in range(_DOCUMENTS)]
    tokens = _LONGEST_IN_BUDGET * max(size.token_count for size in sizes)
    patches = _LONGEST_IN_BUDGET * max(size.patch_count for size in sizes)
    planned = plan(sizes, _RANKS, tokens, patches)
    batches = [[sizes[index].token_count for index in batch] for step in planned.steps for batch in step.datums]
    padded = sum(len(lengths) * max(lengths) for lengths in batches if lengths)
    return {"packed": planned.efficiency, "padded": sum(map(sum, batches)) / padded}


def _size(maker: DocumentMaker, rng: np.random.Generator) -> DatumSize:
    words = ["word "] * int(rng.lognormal(np.log(_MEDIAN_WORDS), _SPREAD) + 1)
    contents: list[Content] = ["".join(words)]
    for _ in range(int(rng.choice(_IMAGE_COUNTS)) if maker.family else 0):
        width, height = rng.integers(_LEAST_SIDE, _MOST_SIDE, 2, endpoint=True).tolist()
        contents.append(picture((width, height)))
    document = maker.splice(contents)
    patches = 0
    if maker.family is not None:
        embeddings = (int(image.replacement.is_embedding.sum()) for image in document.images)
        patches = sum(map(maker.family.patch_count, embeddings))
    return DatumSize(len(document.ids), patches)
