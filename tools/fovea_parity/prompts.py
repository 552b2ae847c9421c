"""Converts documents into requests of the official SDK."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker
from PIL import Image
from tinker import types

from fovea_parity.documents import Content, Document, DocumentMaker

API_KEY = "tml-local"


class Prompt:
    """A document, its form in the SDK (`input`), and the ids that the model reads (`ids`)."""

    def __init__(self, maker: DocumentMaker, contents: Sequence[Content]) -> None:
        self.maker, self.document = maker, maker.splice(contents)
        images = [content for content in contents if isinstance(content, Image.Image)]
        self.ids: list[int] = self.document.ids.tolist()
        self.input = types.ModelInput(chunks=list(_chunks(self.document, images)))

    def datum(self) -> tinker.Datum:
        """Returns a datum that scores every id but the first, at the position before it."""
        return self._datum([*self.ids[1:], 0], [1.0] * (len(self.ids) - 1) + [0.0])

    def answered(self, token: int) -> tinker.Datum:
        """Returns a datum that scores `token` after the last id."""
        before = len(self.ids) - 1
        return self._datum([0] * before + [token], [0.0] * before + [1.0])

    def _datum(self, targets: list[int], weights: list[float]) -> tinker.Datum:
        return tinker.Datum(
            model_input=self.input,
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
                "weights": tinker.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
            },
        )


def _chunks(document: Document, images: Sequence[Image.Image]) -> Iterator[Any]:
    ids, start = document.ids.tolist(), 0
    for placed, image in zip(document.images, images, strict=True):
        if placed.offset > start:
            yield types.EncodedTextChunk(tokens=ids[start : placed.offset])
        file = io.BytesIO()
        image.save(file, "PNG")
        count = len(placed.replacement.ids)
        yield types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=count)
        start = placed.offset + count
    if start < len(ids):
        yield types.EncodedTextChunk(tokens=ids[start:])


def scores(sampling: tinker.SamplingClient, prompt: Prompt) -> npt.NDArray[np.float64]:
    """Returns the log-probabilities [N-1] of the ids after the first, from the sampler."""
    return np.array(sampling.compute_logprobs(prompt.input).result(300)[1:], np.float64)


def trained_scores(
    training: tinker.TrainingClient,
    prompts: Sequence[Prompt],
    experts: Sequence[npt.NDArray[np.int64]] | None = None,
) -> list[npt.NDArray[np.float64]]:
    """Returns the same log-probabilities for each prompt, from the trainer.

    Args:
        training: The model.
        prompts: The prompts.
        experts: For each prompt, the experts [N, L, K] that the trainer uses; None if its router chooses them.
    """
    data = [prompt.datum() for prompt in prompts]
    for datum, chosen in zip(data, experts or (), strict=experts is not None):
        datum.loss_fn_inputs["routed_experts"] = tinker.TensorData.from_numpy(chosen)
    outputs = training.forward(data, "cross_entropy").result(300).loss_fn_outputs
    return [np.array(list(output["logprobs"].data)[:-1]) for output in outputs]
