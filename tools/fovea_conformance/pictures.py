"""Makes prompts and training examples with images as the cookbook does, for the checks of images."""

import functools
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tinker
from tinker import types

from fovea_conformance.check import Failed, expect
from fovea_conformance.target import Target

logger = logging.getLogger(__name__)

START, END = "<|vision_start|>", "<|vision_end|>"
USER, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Picture:
    """An encoded image and its expected number of tokens."""

    data: bytes
    image_format: str
    tokens: int


@dataclass(frozen=True)
class Example:
    """A sequence of text and images.

    Args:
        chunks: Chunks of the prompt.
        ids: Token of each position; None in images.
    """

    chunks: list[types.ModelInputChunk]
    ids: list[int | None]

    @property
    def prompt(self) -> types.ModelInput:
        """The whole sequence as a prompt."""
        return types.ModelInput(chunks=self.chunks)

    @property
    def after_image(self) -> list[int]:
        """Positions of text after the first image."""
        first = self.ids.index(None) if None in self.ids else len(self.ids)
        return [at for at in range(first, len(self.ids)) if self.ids[at] is not None]

    def datum(self, weighted: Sequence[int] | None = None) -> types.Datum:
        """Returns a datum as in the cookbook's SFT: inputs without the last token, targets without the first.

        Images have target 0.

        Args:
            weighted: Positions of the sequence with weight 1; by default all text after the first position.
        """
        *kept, last = self.chunks
        assert isinstance(last, types.EncodedTextChunk), "the last chunk must be text"
        shorter = [types.EncodedTextChunk(tokens=list(last.tokens)[:-1])] if len(last.tokens) > 1 else []
        chosen = {at for at, token in enumerate(self.ids) if token is not None} if weighted is None else set(weighted)
        count = len(self.ids) - 1
        weights = [1.0 if at in chosen else 0.0 for at in range(1, count + 1)]
        return types.Datum(
            model_input=types.ModelInput(chunks=[*kept, *shorter]),
            loss_fn_inputs={
                "target_tokens": types.TensorData([token or 0 for token in self.ids[1:]], "int64", [count]),
                "weights": types.TensorData(weights, "float32", [count]),
            },
        )


def picture(target: Target, width: int, height: int, seed: int = 0, mode: str = "RGB", kind: str = "jpeg") -> Picture:
    """Makes coloured noise, as JPEG like the cookbook's images, or as PNG."""
    return Picture(target.image(width, height, seed, mode, kind), kind, image_tokens(target.checkpoint, width, height))


def compose(target: Target, *parts: str | Picture, expected: bool = True) -> Example:
    """Makes an example of texts and pictures. Without `expected`, image chunks lack their number of tokens."""
    chunks: list[types.ModelInputChunk] = []
    ids: list[int | None] = []
    for part in parts:
        if isinstance(part, str):
            tokens = target.encode(part)
            chunks.append(types.EncodedTextChunk(tokens=tokens))
            ids += tokens
        else:
            chunks.append(image_chunk(part.data, part.image_format, part.tokens if expected else None))
            ids += [None] * part.tokens
    return Example(chunks, ids)


def image_chunk(data: bytes, image_format: str, expected: int | None) -> types.ImageChunk:
    """Returns the SDK's chunk of an image."""
    return types.ImageChunk.model_validate({"data": data, "format": image_format, "expected_tokens": expected})


def asked_about(target: Target, image: Picture, answer: str = "a picture", expected: bool = True) -> Example:
    """Makes an example with a question about an image, and an answer."""
    question = f"{END}What is this?{ASSISTANT}"
    return compose(target, f"{USER}{START}", image, question, f"{answer}<|im_end|>", expected=expected)


# The contract's numbers for Qwen3-VL, with patches of 16 pixels that are merged 2 x 2.
CONTRACT_TOKENS = {(224, 224): 64, (150, 224): 70, (400, 300): 108}


def image_tokens(model: str, width: int, height: int) -> int:
    """Returns the tokens of an image by the model's image processor, counted as the cookbook does.

    If the processor cannot be loaded, the model counts as a Qwen3-VL.
    """
    processor = _image_processor(model)
    if processor is None:
        return CONTRACT_TOKENS[width, height]
    return int(processor.get_number_of_image_patches(height, width, images_kwargs={}) // processor.merge_size**2)


@functools.cache
def _image_processor(model: str) -> Any:
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(model)
    except OSError as error:
        logger.info("no image processor of %s: %s", model, error)
        return None


@contextmanager
def user_mistake(*words: str) -> Iterator[None]:
    """Expects a failed future of category user, or HTTP 4xx when a sample is submitted, with all `words`."""
    try:
        yield
    except tinker.RequestFailedError as error:
        expect(error.category == types.RequestErrorCategory.User, f"category {error.category}: {error}")
        message = str(error)
    except tinker.APIStatusError as error:
        expect(error.status_code in (400, 413, 422), f"HTTP {error.status_code}: {error}")
        message = str(error)
    else:
        raise Failed("was accepted, expected an error of category user")
    missing = [word for word in words if not re.search(rf"(?i)(?<!\w){re.escape(word)}(?!\w)", message)]
    expect(not missing, f"the error does not name {', '.join(missing)}: {message}")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Adds `what` before the message of a Failed."""
    try:
        yield
    except Failed as reason:
        raise Failed(f"{what}: {reason}") from None
