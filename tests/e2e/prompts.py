"""Prompts with and without pictures, and the training examples that score the same positions."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tinker
from PIL import Image
from transformers import PreTrainedTokenizerBase

PATCH_PAIR = 32  # patch 16, merged 2 x 2


def picture(width: int, height: int, seed: int = 0, image_format: str = "png", color: str | None = None) -> bytes:
    """Returns an encoded picture: smooth noise from `seed`, or one plain colour."""
    if color:
        image = Image.new("RGB", (width, height), color)
    else:
        noise = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, image_format.upper())
    return buffer.getvalue()


def image_chunk(data: bytes, image_format: str = "png", expected: int | None = None) -> tinker.types.ImageChunk:
    """Returns the SDK's image chunk."""
    return tinker.types.ImageChunk(data=data, format=image_format, expected_tokens=expected)


@dataclass(frozen=True)
class Prompt:
    """A prompt and its token ids after rendering.

    Attributes:
        model_input: The client's input.
        ids: The model's input, including placeholders.
    """

    model_input: tinker.ModelInput
    ids: list[int]

    def datum(self) -> tinker.Datum:
        """Returns a datum that scores every position: the target of position i is token i + 1, the last target is token
        0.
        """
        targets = [*self.ids[1:], 0]
        return tinker.Datum(
            model_input=self.model_input,
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
                "weights": tinker.TensorData(data=[1.0] * len(targets), dtype="float32", shape=[len(targets)]),
            },
        )


class PromptBuilder:
    """Builds prompts from text and pictures."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pad: int = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def build(self, *parts: str | tuple[bytes, int]) -> Prompt:
        """Builds a prompt from texts and from pictures with their expected number of placeholder tokens."""
        chunks: list[tinker.EncodedTextChunk | tinker.types.ImageChunk] = []
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                tokens = self._tokenizer.encode(part, add_special_tokens=False)
                chunks.append(tinker.EncodedTextChunk(tokens=tokens))
                ids += tokens
            else:
                chunks.append(image_chunk(part[0], expected=part[1]))
                ids += [self._pad] * part[1]
        return Prompt(tinker.ModelInput(chunks=chunks), ids)

    def catalogue(self) -> dict[str, Prompt]:
        """Returns prompts of every shape on which sampler and trainer must agree."""
        small, wide = (picture(224, 224, 1), 64), (picture(150, 224, 2), 70)
        start, end = "<|im_start|>user\n<|vision_start|>", "<|vision_end|>What is this?<|im_end|>\n"
        return {
            "text": self.build("<|im_start|>user\nWhat colour is the sky?<|im_end|>\n<|im_start|>assistant\n"),
            "one image": self.build(start, small, end),
            "two images": self.build(start, small, "<|vision_end|> and <|vision_start|>", wide, end),
            "image first": self.build(wide, end),
            "image last": self.build("Look here: <|vision_start|>", small),
            "sampled placeholder": self.build(start, small, "<|vision_end|>one <|image_pad|> two"),
            "150x224": self.build(start, wide, end),
        }


def max_difference(first: Sequence[float | None], second: Sequence[float]) -> float:
    """Returns the largest difference between two scores of the same positions; lengths must be equal."""
    assert len(first) == len(second), (len(first), len(second))
    return max(abs(a - b) for a, b in zip(first, second, strict=True) if a is not None)
