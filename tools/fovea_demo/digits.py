"""Provides scikit-learn's 1,797 real scans of handwritten digits as PNG pictures, with a question and an answer."""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tinker
from PIL import Image

if TYPE_CHECKING:  # the import takes two seconds, which would delay --help
    from transformers import PreTrainedTokenizerBase

HELD_OUT_COUNT = 300
QUESTION = "Which digit is this?"


@dataclass(frozen=True)
class Scan:
    """One scan.

    Attributes:
        png: The picture, 8-bit grey, as a PNG file.
        digit: The written digit, 0 to 9.
    """

    png: bytes
    digit: int


def load_scans(seed: int = 0) -> tuple[list[Scan], list[Scan]]:
    """Returns the training scans and the held-out scans, shuffled by `seed`. No scan is in both."""
    rows = _read_rows()
    order = np.random.default_rng(seed).permutation(len(rows))
    scans = [Scan(encode_png(rows[i, :-1].reshape(8, 8)), int(rows[i, -1])) for i in order]
    return scans[HELD_OUT_COUNT:], scans[:HELD_OUT_COUNT]


def _read_rows() -> np.ndarray:
    """Returns scikit-learn's data, float64 [1797, 65]: the 64 pixels of each scan and its digit.

    It reads the file of `sklearn.datasets.load_digits`, because importing scikit-learn takes more than a second.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the scans are a file of scikit-learn: pip install scikit-learn", name="sklearn")
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        return np.loadtxt(file, delimiter=",")


def encode_png(image: np.ndarray) -> bytes:
    """Returns an 8 x 8 scan with values 0 to 16 as a PNG of the same size, with white ink on black."""
    pixels = np.round(image * (255 / 16)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


class Prompter:
    """Makes prompts and training examples in the model's chat format."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before = self._chunk("<|im_start|>user\n<|vision_start|>")
        self._after = self._chunk(f"<|vision_end|>{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
        self.end_token: int = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def prompt(self, scan: Scan) -> tinker.ModelInput:
        """Returns the prompt: the picture and the question."""
        return tinker.ModelInput(chunks=[self._before, self._image(scan), self._after])

    def datum(self, scan: Scan, image_token_count: int) -> tinker.Datum:
        """Returns the prompt with its answer as a training example; only the answer's tokens have weight.

        Args:
            scan: The picture and its digit.
            image_token_count: The number of placeholder tokens of a picture in this model.
        """
        answer = [*self._tokenizer.encode(str(scan.digit), add_special_tokens=False), self.end_token]
        # The last token is only predicted, never an input.
        model_input = tinker.ModelInput(
            chunks=[self._before, self._image(scan), self._after, tinker.EncodedTextChunk(tokens=answer[:-1])]
        )
        question_length = len(self._before.tokens) + image_token_count + len(self._after.tokens)
        targets = [0] * (question_length - 1) + answer
        weights = [0.0] * (question_length - 1) + [1.0] * len(answer)
        return tinker.Datum(
            model_input=model_input,
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
                "weights": tinker.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
            },
        )

    def read(self, tokens: list[int]) -> str:
        """Returns the text of the model's answer, without the end-of-turn token."""
        return str(self._tokenizer.decode([token for token in tokens if token != self.end_token])).strip()

    def _chunk(self, text: str) -> tinker.EncodedTextChunk:
        return tinker.EncodedTextChunk(tokens=self._tokenizer.encode(text, add_special_tokens=False))

    @staticmethod
    def _image(scan: Scan) -> tinker.types.ImageChunk:
        return tinker.types.ImageChunk(data=scan.png, format="png")
