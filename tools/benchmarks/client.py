"""Helpers for benchmarks of a whole Fovea: a client of the SDK, and inputs of a given size."""

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker
from PIL import Image
from tinker import types

from fovea.runtime.model_files import read_added_tokens
from fovea_data.picture_tokens import checkpoint_directory, token_count

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True)
class Bench:
    """A client of the SDK, and the facts about the model that inputs need."""

    service: tinker.ServiceClient
    model: str
    before_picture: list[int]
    after: list[int]
    _sampler: tinker.SamplingClient | None  # None if only a trainer is served
    _image_tokens: dict[int, int] = field(default_factory=dict)

    @classmethod
    def open(cls, base_url: str, api_key: str = "tml-local", headers: Mapping[str, str] | None = None) -> "Bench":
        """Connects to a running Fovea. `headers` are sent with each request."""
        os.environ["TINKER_TELEMETRY"] = "0"
        service = tinker.ServiceClient(
            base_url=base_url, api_key=api_key, default_headers_overrides=dict(headers or {})
        )
        rest = tinker.RestClient(base_url=base_url, api_key=api_key)
        served = rest.get_server_capabilities().result(60).supported_models[0]
        name = served.model_name
        assert name is not None
        sampler = None if served.sampleable is False else service.create_sampling_client(base_model=name).result(60)
        vocabulary = sampler.get_tokenizer().get_vocab() if sampler else read_added_tokens(checkpoint_directory(name))
        # Text around an image, for families that have such tokens without a processor that adds them.
        before, after = ([vocabulary[token]] if token in vocabulary else [] for token in (VISION_START, VISION_END))
        return cls(service, name, before, after, sampler)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Wait for it: a process that ends before the request is sent leaves its model behind and occupies the trainer.
        self.service.close("errored" if kind else "success").result(60)

    @property
    def sampler(self) -> tinker.SamplingClient:
        """The sampler of the base model."""
        assert self._sampler, "no sampler is served"
        return self._sampler

    def training(self, rank: int) -> tinker.TrainingClient:
        """Creates a model. Rank 0 trains all parameters."""
        return self.service.create_lora_training_client(base_model=self.model, rank=rank, seed=1).result(600)

    def prompt(self, rng: np.random.Generator, length: int, image_side: int = 0) -> types.ModelInput:
        """Returns a prompt of `length` random text ids, after an image with sides of `image_side` pixels unless that is
        0.
        """
        tokens = self.tokens(rng, length)
        return self.after_picture(noise(rng, image_side) if image_side else b"", image_side, tokens)

    def after_picture(self, picture: bytes, image_side: int, tokens: list[int]) -> types.ModelInput:
        """Returns text ids, after a JPEG with sides of `image_side` pixels unless that is 0."""
        if not image_side:
            return types.ModelInput.from_ints(tokens)
        image = types.ImageChunk(data=picture, format="jpeg", expected_tokens=self.image_tokens(image_side))
        before, after = types.EncodedTextChunk(tokens=self.before_picture), [*self.after, *tokens]
        return types.ModelInput(
            chunks=[*([before] if before.tokens else []), image, types.EncodedTextChunk(tokens=after)]
        )

    def image_tokens(self, side: int) -> int:
        """Returns the number of ids that replace a square image. Only the model's processor, which may resize it,
        knows.
        """
        if side not in self._image_tokens:
            self._image_tokens[side] = token_count(self._sampler or self.model, (side, side))
        return self._image_tokens[side]

    @staticmethod
    def tokens(rng: np.random.Generator, count: int) -> list[int]:
        """Returns random ids that are not special tokens."""
        found: list[int] = rng.integers(10, 900, count).tolist()
        return found


def noise(rng: np.random.Generator, side: int) -> bytes:
    """Returns a JPEG of coloured noise."""
    small = rng.integers(0, 255, (side // 16, side // 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(out, "JPEG", quality=85)
    return out.getvalue()


def datum(prompt: types.ModelInput, continuation: Sequence[int]) -> types.Datum:
    """Returns a prompt and its continuation. The continuation has weight 1; image slots have target and weight 0."""
    chunks = [*prompt.chunks, types.EncodedTextChunk(tokens=list(continuation[:-1]))]
    text = [list(c.tokens) if isinstance(c, types.EncodedTextChunk) else [0] * c.length for c in prompt.chunks]
    flat = [token for part in text for token in part]
    targets = np.asarray([*flat[1:], *continuation], np.int64)
    weights = np.zeros(len(targets), np.float32)
    weights[len(flat) - 1 :] = 1.0
    return types.Datum(
        model_input=types.ModelInput(chunks=chunks),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(targets),
            "weights": types.TensorData.from_numpy(weights),
        },
    )


def take_step(training: tinker.TrainingClient, data: list[types.Datum], rate: float) -> tinker.ForwardBackwardOutput:
    """Submits forward_backward and optim_step together, then waits for both."""
    backward = training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=rate)).result(600)
    return backward.result(600)


def scored_part(output: Any, count: int) -> npt.NDArray[np.float64]:
    """Returns the last `count` log-probabilities of a datum's output."""
    return np.asarray(output["logprobs"].data, np.float64)[-count:]
