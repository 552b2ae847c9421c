"""What every benchmark of a whole Fovea needs: the SDK pointed at it, and inputs of a given size."""

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
    """One SDK client and the facts about the model that inputs need."""

    service: tinker.ServiceClient
    model: str
    before_picture: list[int]
    after: list[int]
    _sampler: tinker.SamplingClient | None  # None where only a trainer is served
    _image_tokens: dict[int, int] = field(default_factory=dict)

    @classmethod
    def open(cls, base_url: str, api_key: str = "tml-local", headers: Mapping[str, str] | None = None) -> "Bench":
        """Connects to a running Fovea; `headers` go with each request."""
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
        # Text around a picture where the family has such tokens and its processor does not bring them along.
        before, after = ([vocabulary[token]] if token in vocabulary else [] for token in (VISION_START, VISION_END))
        return cls(service, name, before, after, sampler)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Awaited: a process that ends before it is sent leaves its model behind, and the next one may need the trainer.
        self.service.close("errored" if kind else "success").result(60)

    @property
    def sampler(self) -> tinker.SamplingClient:
        """Of the base model."""
        assert self._sampler, "no sampler is served"
        return self._sampler

    def training(self, rank: int) -> tinker.TrainingClient:
        """A fresh model; rank 0 trains all parameters."""
        return self.service.create_lora_training_client(base_model=self.model, rank=rank, seed=1).result(600)

    def prompt(self, rng: np.random.Generator, length: int, image_side: int = 0) -> types.ModelInput:
        """`length` random text ids, after a picture of `image_side` pixels if that is not 0."""
        tokens = self.tokens(rng, length)
        return self.after_picture(noise(rng, image_side) if image_side else b"", image_side, tokens)

    def after_picture(self, picture: bytes, image_side: int, tokens: list[int]) -> types.ModelInput:
        """Text ids, after a JPEG of `image_side` pixels if that is not 0."""
        if not image_side:
            return types.ModelInput.from_ints(tokens)
        image = types.ImageChunk(data=picture, format="jpeg", expected_tokens=self.image_tokens(image_side))
        before, after = types.EncodedTextChunk(tokens=self.before_picture), [*self.after, *tokens]
        return types.ModelInput(
            chunks=[*([before] if before.tokens else []), image, types.EncodedTextChunk(tokens=after)]
        )

    def image_tokens(self, side: int) -> int:
        """Ids that stand for a square picture: only the model's processor knows, which may enlarge or cut it."""
        if side not in self._image_tokens:
            self._image_tokens[side] = token_count(self._sampler or self.model, (side, side))
        return self._image_tokens[side]

    @staticmethod
    def tokens(rng: np.random.Generator, count: int) -> list[int]:
        """Random ids, clear of the special ones."""
        found: list[int] = rng.integers(10, 900, count).tolist()
        return found


def noise(rng: np.random.Generator, side: int) -> bytes:
    """A JPEG of coloured noise."""
    small = rng.integers(0, 255, (side // 16, side // 16, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(out, "JPEG", quality=85)
    return out.getvalue()


def datum(prompt: types.ModelInput, continuation: Sequence[int]) -> types.Datum:
    """A prompt and what follows it, with weight 1 on what follows. Image slots have target 0 and weight 0."""
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
    """forward_backward and optim_step, both submitted, then both awaited."""
    backward = training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=rate)).result(600)
    return backward.result(600)


def scored_part(output: Any, count: int) -> npt.NDArray[np.float64]:
    """The last `count` logprobs of a datum's output."""
    return np.asarray(output["logprobs"].data, np.float64)[-count:]
