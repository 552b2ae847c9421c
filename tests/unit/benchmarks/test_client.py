"""Inputs with a given size."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.client import Bench, datum, noise
from benchmarks.sampler_ways import as_proto
from fovea.wire.tensors import decode_tokens

IMAGE_TOKENS = (448 // 32) ** 2


@pytest.fixture
def bench() -> Bench:
    nobody: Any = None
    return Bench(nobody, "some/model", [4], [5], nobody, {448: IMAGE_TOKENS})


def test_a_picture_has_the_size_that_is_asked_for() -> None:
    picture = Image.open(io.BytesIO(noise(np.random.default_rng(0), 448)))
    assert (picture.size, picture.format) == ((448, 448), "JPEG")


def test_a_prompt_has_the_length_that_is_asked_for(bench: Bench) -> None:
    rng = np.random.default_rng(0)
    assert bench.prompt(rng, 128).length == 128
    assert bench.prompt(rng, 128, 448).length == 128 + IMAGE_TOKENS + 2


def test_a_datum_scores_what_follows_the_prompt(bench: Bench) -> None:
    prompt = bench.prompt(np.random.default_rng(0), 8, 448)
    found = datum(prompt, [30, 31, 32])
    targets, weights = (found.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", "weights"))
    assert found.model_input.length == len(targets) == len(weights) == prompt.length + 2
    assert targets[-3:].tolist() == [30, 31, 32]
    assert weights.sum() == 3
    assert weights[-3:].tolist() == [1, 1, 1]


def test_both_apis_are_given_the_same_prompt(bench: Bench) -> None:
    prompt = bench.prompt(np.random.default_rng(0), 8, 448)
    before, picture, after = as_proto(prompt).chunks
    assert decode_tokens(before.tokens.tokens).tolist() == [4]
    assert picture.image.data == prompt.chunks[1].data
    assert decode_tokens(after.tokens.tokens).tolist() == prompt.chunks[2].tokens
