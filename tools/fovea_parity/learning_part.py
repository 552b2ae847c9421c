"""Teaches a tiny model with random weights to name colours in a running Fovea (train, push, sample)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tinker
from PIL import Image

from fovea_parity.documents import DocumentMaker
from fovea_parity.prompts import Prompt

LEAST_ACCURACY = 0.9
MOST_BLIND = 0.5
"""The largest accuracy that chance may reach, with four answers and so few pictures."""

_COLOURS = {"red": (190, 50, 50), "green": (50, 170, 50), "blue": (50, 50, 190), "white": (200, 200, 200)}
_GREY = (120, 120, 120)
_QUESTION = "Which colour is it? "
_SIZE = (64, 64)
_SHADE = 40
"""The largest shift of a picture from its colour, and of each pixel from the picture, of 255 in each channel."""

_RANK = 16
_RATES = {_RANK: 2e-3, 0: 1e-3}
"""The learning rate by rank; rank 0 trains all parameters."""

_WARM_UP_STEPS, _STEPS = 24, 32
_WARM_UP_ANSWERS = (*_COLOURS, next(iter(_COLOURS)))
"""The answers trained with each warm-up picture. One occurs twice, so that a model that has learnt only the answers
always gives that one and is right by chance."""
_SHARE, _HELD_OUT_SHARE = 4, 10
"""Pictures of each colour in a training step, and in the held-out set."""

_WAIT_S = 300


@dataclass(frozen=True, slots=True)
class Lesson:
    """Accuracies of the sampler at temperature 0 on held-out pictures.

    Attributes:
        start: The accuracy of a model that has learnt only the possible answers.
        end: The accuracy after training.
        blind: The accuracy after training on pictures that are all grey. It is above chance if the model can infer the
            answer from anything but the pixels.
        seconds: The duration of the lesson.
    """

    start: float
    end: float
    blind: float
    seconds: float

    @property
    def problem(self) -> str:
        """The reason why the model has not learnt from pixels, or an empty string."""
        if self.end < LEAST_ACCURACY:
            return f"names only {self.end:.2f} of the colours after training, {self.start:.2f} before"
        if self.blind > MOST_BLIND:
            return f"names {self.blind:.2f} of the colours although all pictures are grey"
        return ""


def learn(
    service: tinker.ServiceClient, model: str, maker: DocumentMaker, *, is_full: bool = False, seed: int = 0
) -> Lesson:
    """Trains an adapter, or all parameters, with cross-entropy on the token of the answer; returns the accuracies."""
    began = time.monotonic()
    pupil = _Pupil(service, model, maker, 0 if is_full else _RANK, seed)
    rng, other = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    for _ in range(_WARM_UP_STEPS):
        pupil.step([(picture, answer) for picture, _ in _pictures(rng, 1) for answer in _WARM_UP_ANSWERS])
    held_out = _pictures(other, _HELD_OUT_SHARE)
    start = pupil.accuracies([held_out])[0]
    for _ in range(_STEPS):
        pupil.step(_pictures(rng, _SHARE))
    end, blind = pupil.accuracies([held_out, _pictures(other, _HELD_OUT_SHARE, is_grey=True)])
    return Lesson(start, end, blind, time.monotonic() - began)


Examples = Sequence[tuple[Image.Image, str]]


def _pictures(rng: np.random.Generator, share: int, is_grey: bool = False) -> Examples:
    """Returns `share` pictures of each colour, with its name; all grey if `is_grey`."""
    return [
        (_picture(rng, _GREY if is_grey else colour), name) for name, colour in _COLOURS.items() for _ in range(share)
    ]


def _picture(rng: np.random.Generator, colour: tuple[int, int, int]) -> Image.Image:
    width, height = _SIZE
    shade = rng.integers(-_SHADE, _SHADE + 1, 3)
    grain = rng.integers(-_SHADE, _SHADE + 1, (height, width, 3))
    return Image.fromarray(np.clip(colour + shade + grain, 0, 255).astype(np.uint8))


class _Pupil:
    """The model that is trained, and its samplers."""

    def __init__(self, service: tinker.ServiceClient, model: str, maker: DocumentMaker, rank: int, seed: int) -> None:
        self._training = service.create_lora_training_client(base_model=model, rank=rank, seed=seed).result(_WAIT_S)
        self._maker = maker
        self._adam = tinker.AdamParams(learning_rate=_RATES[rank], eps=1e-8, grad_clip_norm=1.0)
        # The answers are single tokens: the first token of each name.
        self._answers = {name: maker.tokenizer.encode(name, add_special_tokens=False)[0] for name in _COLOURS}

    def step(self, examples: Examples) -> None:
        """Trains one batch."""
        data = [self._prompt(picture).answered(self._answers[name]) for picture, name in examples]
        backward = self._training.forward_backward(data, "cross_entropy")
        step = self._training.optim_step(self._adam)
        backward.result(_WAIT_S)
        step.result(_WAIT_S)

    def accuracies(self, sets: Sequence[Examples]) -> list[float]:
        """Pushes the weights to the sampler; returns its accuracy on each set."""
        sampling = self._training.save_weights_and_get_sampling_client().result(_WAIT_S)
        return [self._accuracy(sampling, examples) for examples in sets]

    def _accuracy(self, sampling: tinker.SamplingClient, examples: Examples) -> float:
        params = tinker.SamplingParams(max_tokens=1, temperature=0.0)
        asked = [sampling.sample(self._prompt(picture).input, 1, params) for picture, _ in examples]
        said = [list(one.result(_WAIT_S).sequences[0].tokens) for one in asked]
        right = [tokens == [self._answers[name]] for tokens, (_, name) in zip(said, examples, strict=True)]
        return sum(right) / len(right)

    def _prompt(self, picture: Image.Image) -> Prompt:
        return Prompt(self._maker, [picture, _QUESTION])
