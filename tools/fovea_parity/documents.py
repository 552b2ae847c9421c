"""Makes texts with images in two ways: with the checkpoint's own processor, and as Fovea's renderer splices them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import float32
from transformers import AutoProcessor, BatchFeature

from fovea.api.v1 import model_input_pb2
from fovea.runtime.model_files import read_directory
from fovea.vision.vision_family import ImageAt, Replacement, image_margin
from fovea.wire import tensors
from fovea.wire.tensors import FeatureTensors, size_bytes, tensors_sha256
from fovea_renderer.image_worker import anywhere, open_processor

SIZES = (
    (64, 64),
    (56, 112),
    (140, 90),
    (90, 140),
    (100, 37),
    (37, 100),
    (224, 224),
    (200, 300),
    (321, 123),
    (448, 448),
)
"""Widths and heights of pictures: square, wide and high, smaller and larger than most families accept unchanged."""

_BEFORE, _AFTER = "aaaa", "zzzz"

Content = str | Image.Image


@dataclass(frozen=True)
class PlacedImage:
    """One image of a document, as the renderer processes it.

    Attributes:
        offset: The index of the first id that replaces it.
        tensors: Its vision tensors.
        replacement: The ids that replace it.
    """

    offset: int
    tensors: dict[str, npt.NDArray[Any]]
    replacement: Replacement


@dataclass(frozen=True)
class Document:
    """A text with images, as the renderer splices it.

    Attributes:
        ids: The ids, int64 [N].
        images: The images, in order.
        positions: The positions, int32 [rows, N]; None if they are 0 .. N-1.
    """

    ids: npt.NDArray[np.int64]
    images: tuple[PlacedImage, ...]
    positions: npt.NDArray[np.int32] | None

    def rendered(self, address: str, held: dict[str, FeatureTensors]) -> model_input_pb2.RenderedInput:
        """Returns the message that a renderer makes of the document.

        Args:
            address: The renderer that gives out the tensors.
            held: Receives the tensors of each image, keyed by digest.
        """
        found = model_input_pb2.RenderedInput(tokens=tensors.encode_tokens(self.ids.astype(np.int32)))
        for image in self.images:
            digest = hashlib.sha256(tensors_sha256(image.tensors).encode()).hexdigest()
            held[digest] = image.tensors
            span = found.spans.add(offset=image.offset, length=len(image.replacement.ids))
            span.feature.digest, span.feature.source = digest, address
            span.feature.token_count, span.feature.size_bytes = span.length, size_bytes(image.tensors)
            span.feature.tensors_sha256 = tensors_sha256(image.tensors)
            span.feature.embedding_mask = image.replacement.is_embedding.astype(np.uint8).tobytes()
        if self.positions is not None:
            found.positions.CopyFrom(tensors.encode(self.positions.astype(np.int32)))
        return found


class DocumentMaker:
    """Makes documents for one checkpoint. Raises ValueError if Fovea does not support its family."""

    def __init__(self, directory: Path) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(directory, trust_remote_code=False)
        self.tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        self.family = read_directory(directory).family
        self._renderer = open_processor(directory) if self.family else None
        self._around = self._words_around_an_image() if self.family else ("", "")

    def own(self, contents: Sequence[Content], **how: Any) -> BatchFeature:
        """Returns a batch of one from the checkpoint's own processor. `how` is passed to the image processor."""
        before, after = self._around
        images = [content for content in contents if isinstance(content, Image.Image)]
        texts = [
            content if isinstance(content, str) else before + self.processor.image_token + after for content in contents
        ]
        if not images:
            return self.tokenizer(["".join(texts)], return_tensors="pt", add_special_tokens=False)
        made = self.processor(
            text=["".join(texts)], images=images, return_tensors="pt", add_special_tokens=False, **how
        )
        return made.to(float32)  # Llama 4's processor computes in bfloat16

    def splice(self, contents: Sequence[Content]) -> Document:
        """Returns the same text as Fovea splices it: it encodes the text between images and replaces each image."""
        ids: list[int] = []
        images: list[PlacedImage] = []
        text = ""
        for content in contents:
            if isinstance(content, str):
                text += content
                continue
            before, after = image_margin(self.tokenizer, len(images))
            ids += self._encode(text + self._around[0] + before)
            placed = self.place(content, len(ids))
            images.append(placed)
            ids += placed.replacement.ids.tolist()
            text = after + self._around[1]
        ids += self._encode(text)
        positions = None
        if images and self.family is not None:
            positions = self.family.positions(len(ids), [ImageAt(one.offset, one.tensors) for one in images])
        return Document(np.array(ids, np.int64), tuple(images), positions)

    def place(self, image: Image.Image, offset: int) -> PlacedImage:
        """Processes an image of which the first id has the index `offset`.

        Raises ValueError if the renderer's tensors are ones that Fovea's services would refuse.
        """
        assert self._renderer is not None
        assert self.family is not None
        tensors = self._renderer.tensors(image, anywhere)
        if problem := self.family.tensors_problem(tensors):
            raise ValueError(f"the renderer computes tensors that Fovea refuses: {problem}")
        return PlacedImage(offset, tensors, self.family.replacement(tensors))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _words_around_an_image(self) -> tuple[str, str]:
        """Returns the text that the chat template puts before and after the processor's image token."""
        if not self.processor.chat_template:
            return "", ""
        content = [{"type": "text", "text": _BEFORE}, {"type": "image"}, {"type": "text", "text": _AFTER}]
        chat = self.processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        word = chat.partition(_BEFORE)[2].partition(_AFTER)[0]
        before, found, after = word.partition(self.processor.image_token)
        return (before, after) if found else ("", "")


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Returns coloured noise of (width, height) pixels, in which any exchange of pixels is detectable."""
    width, height = size
    return Image.fromarray(np.random.default_rng([seed, *size]).integers(0, 256, (height, width, 3), np.uint8))
