"""Reported GPU memory of sampler and trainer against CUDA's figures, and a trainer with full memory.

The second test needs a realistic shape: `FOVEA_GPU_SHAPE=4b`, five minutes on one H200.
"""

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tinker
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client import Bench, datum
from tests.e2e.stack import Stack, running_stack
from tests.gpu.conftest import FIRST

_OTHERS_BYTES = 4 * 2**30
"""Tolerance between the two readings: they are moments apart, and the driver reserves some memory."""


@pytest.mark.parametrize("service", ["sampler", "trainer"])
def test_memory_of_the_gpus_is_in_the_metrics(stack: Stack, service: str) -> None:
    with urllib.request.urlopen(stack.state["services"][service]["metrics"], timeout=30) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    (family,) = [one for one in families if one.name == "fovea_gpu_memory_bytes"]
    found = {(one.labels["device"], one.labels["kind"]): one.value for one in family.samples}
    devices = {device for device, _ in found}
    assert devices
    for device in devices:
        free, total = torch.cuda.mem_get_info(_index(device))
        assert abs(found[device, "total"] - total) < _OTHERS_BYTES
        assert abs(found[device, "used"] - (total - free)) < _OTHERS_BYTES
        assert found[device, "used"] > 2**28, "a model and a CUDA context"


def _index(device: str) -> int:
    """Returns this process's index of a device of the driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(device) if visible else int(device)


CREATES = 200
SAMPLERS = 64
_ADAM = tinker.AdamParams(learning_rate=1e-5)


@pytest.fixture(scope="module")
def shared_gpu(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A Fovea on one GPU, of which the sampler takes a fifth, for adapters of rank 128."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, this machine has none")
    settings = {
        "FOVEA_TRAINER_MAX_LORA_RANK": "128",
        "FOVEA_SAMPLER_MAX_LORA_RANK": "128",
        "FOVEA_SAMPLER_GPU_MEMORY_FRACTION": "0.2",
        "FOVEA_SAMPLER_EAGER": "true",
    }
    one_gpu = ("--ranks", "1", "--trainer-gpus", FIRST, "--sampler-gpus", FIRST)
    model = request.getfixturevalue("model")
    with mock.patch.dict(os.environ, settings), running_stack(model, *one_gpu) as stack:
        yield stack


def test_adapters_until_memory_is_full_lose_no_model(shared_gpu: Stack) -> None:
    """Creates 200 adapters of rank 128, takes one large step in the remaining memory, then a step of every created
    model.
    """
    with Bench.open(shared_gpu.base_url) as bench:
        made, refused = _create(bench, CREATES, 128)
        assert len(made) >= 2
        assert len(made) + len(refused) == CREATES
        assert all("delete a model" in reason for reason in refused), refused[:1]
        large = _large_step(bench, made[0])
        lost = _lost(bench, made, sample=False)
        print(json.dumps({"rank": 128, "made": len(made), "refused": len(refused), "large_step": large, "lost": lost}))
        assert not lost


def test_tenants_that_have_all_sampled_lose_nothing_in_a_large_step(shared_gpu: Stack) -> None:
    """Trains 64 models with a snapshot each, takes one large step, then a step and a sample of every model."""
    with Bench.open(shared_gpu.base_url) as bench:
        made, refused = _create(bench, SAMPLERS, 32)
        assert not refused
        assert not _lost(bench, made, sample=True)
        large = _large_step(bench, made[0])
        lost = _lost(bench, made, sample=True)
        print(json.dumps({"rank": 32, "made": len(made), "large_step": large, "lost": lost}))
        assert not lost


def _create(bench: Bench, count: int, rank: int) -> tuple[list[tinker.TrainingClient], list[str]]:
    made, refused = [], []
    for _ in range(count):
        try:
            made.append(bench.training(rank))
        except tinker.TinkerError as error:
            refused.append(str(error))
    return made, refused


def _large_step(bench: Bench, training: tinker.TrainingClient) -> str:
    """Sends sixteen datums of 8,192 tokens and one of 30,000; returns the result or the reason for the refusal."""
    rng = np.random.default_rng(2)
    data = [datum(bench.prompt(rng, 64), bench.tokens(rng, count - 63)) for count in (*[8192] * 16, 30_000)]
    started = time.monotonic()
    backward, step = training.forward_backward(data, "cross_entropy"), training.optim_step(_ADAM)
    try:
        backward.result(300)
        step.result(300)
    except tinker.TinkerError as error:
        if "of memory" not in str(error):
            raise
        with pytest.raises(tinker.TinkerError, match="send the forward_backward calls again"):
            step.result(300)
        return f"refused after {time.monotonic() - started:.1f} s: {error}"
    return f"taken in {time.monotonic() - started:.1f} s"


def _lost(bench: Bench, made: list[tinker.TrainingClient], sample: bool) -> list[str]:
    """Returns the reasons that models could not take a small step and be sampled; empty if all did."""
    rng = np.random.default_rng(3)
    data = [datum(bench.prompt(rng, 16), bench.tokens(rng, 16))]
    pending: list[tuple[Any, Any]] = [
        (training.forward_backward(data, "cross_entropy"), training.optim_step(_ADAM)) for training in made
    ]
    reasons = []
    for training, (backward, step) in zip(made, pending, strict=True):
        try:
            backward.result(300)
            step.result(300)
            if sample:
                sampler = training.save_weights_and_get_sampling_client().result(300)
                sampler.sample(data[0].model_input, 1, tinker.SamplingParams(max_tokens=1)).result(300)
        except tinker.TinkerError as error:
            reasons.append(str(error))
    return reasons
