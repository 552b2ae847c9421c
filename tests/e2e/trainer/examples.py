"""Datums for the trainer's tests."""

import numpy as np
import numpy.typing as npt
from PIL import Image

from fovea.api.v1 import model_input_pb2, trainer_pb2
from fovea.wire import tensors
from tests.e2e.trainer.image_service import Chunk, ImageService, picture

IMAGE_SIZES = [(150, 224), (224, 224), (300, 180)]


def text(length: int, seed: int) -> list[int]:
    """Returns ids of ordinary tokens."""
    ids: list[int] = np.random.default_rng(seed).integers(0, 1200, length).tolist()
    return ids


def datum(rendered: model_input_pb2.RenderedInput, seed: int, **inputs: npt.NDArray) -> trainer_pb2.Datum:
    """Returns a cross_entropy datum with random targets and weights of both signs; `inputs` override them."""
    generator = np.random.default_rng(seed)
    count = len(rendered.tokens) // 4
    given = {
        "target_tokens": generator.integers(0, 1200, count).astype(np.int64),
        "weights": generator.normal(size=count).astype(np.float32),
        **inputs,
    }
    return trainer_pb2.Datum(
        input=rendered, loss_inputs={name: tensors.encode(np.asarray(value)) for name, value in given.items()}
    )


def logprobs_of(output: trainer_pb2.DatumOutput) -> npt.NDArray:
    """Returns the log-probabilities, float32, shaped as the targets."""
    return tensors.decode(output.tensors["logprobs"])


def header(
    model_id: str, count: int, loss: str = "cross_entropy", backward: bool = True, **config: float
) -> trainer_pb2.ForwardBackwardHeader:
    """Returns the first record of a call."""
    return trainer_pb2.ForwardBackwardHeader(
        model_id=model_id, loss_function=loss, loss_config=config, backward=backward, datum_count=count
    )


def chunk_lists(kind: str) -> list[list[Chunk]]:
    """Returns inputs of one kind: `text`, `image` (one or two images, first, last or between) or `mixed`."""
    texts: list[list[Chunk]] = [[text(n, n)] for n in (17, 5, 42, 17, 1)]
    images: list[list[Chunk]] = [
        [text(6, 1), picture(*IMAGE_SIZES[0], 1), text(9, 2)],
        [picture(*IMAGE_SIZES[1], 2), text(4, 3)],
        [text(3, 4), picture(*IMAGE_SIZES[2], 3)],
        [text(2, 5), picture(*IMAGE_SIZES[0], 4), text(2, 6), picture(*IMAGE_SIZES[1], 5), text(7, 7)],
    ]
    return {"text": texts, "image": images, "mixed": [texts[0], images[0], texts[2], images[3], texts[4]]}[kind]


def datums_of(service: ImageService, kind: str) -> list[trainer_pb2.Datum]:
    """Returns the datums of `chunk_lists`."""
    return [datum(service.render(chunks), seed) for seed, chunks in enumerate(chunk_lists(kind))]


__all__ = ["Image", "chunk_lists", "datum", "datums_of", "header", "logprobs_of", "text"]
