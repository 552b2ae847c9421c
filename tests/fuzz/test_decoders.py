"""Decoders of trainer, sampler and renderer refuse an input with a reason or return valid data.

Images and losses run in their real processes, which must not crash.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from safetensors.torch import save

import fovea_tinyvlm
from fovea.api.v1 import model_input_pb2, sampler_pb2, trainer_pb2
from fovea.wire import custom_loss, tensors
from fovea.wire.errors import FoveaError, Internal, InvalidInput
from fovea_renderer import image_header
from fovea_renderer.image_header import InvalidChunk
from fovea_renderer.worker_pool import WorkerProcess, WorkerSettings
from fovea_renderer.worker_protocol import Job
from fovea_sampler.engine_api import Limits
from fovea_sampler.sample_validation import read_request
from fovea_trainer.batches.datum_decoding import DatumLimits, decode_datum
from fovea_trainer.losses import LOSSES, Sandbox, loss_of
from fovea_trainer.weights.weight_files import read_tensors
from tests.fuzz.mutations import Messages, fuzzed, mutated_bytes, mutated_json
from tests.unit.renderer.pictures import encoded, picture
from tests.unit.trainer.losses.traced import graph, message, node, ref, square_loss
from tests.vision_families import IMAGE, small_qwen3_vl

VISION = small_qwen3_vl()
SHA = "0" * 64
_LOGPROBS = [torch.full((length,), -1.0, requires_grad=True) for length in (4, 7)]


def rendered() -> model_input_pb2.RenderedInput:
    """Returns text around an image of four tokens."""
    prompt = model_input_pb2.RenderedInput(tokens=tensors.encode_tokens([1, 2, *[IMAGE] * 4, 3]))
    feature = model_input_pb2.VisionFeature(digest=SHA, token_count=4, tensors_sha256=SHA)
    prompt.spans.add(offset=2, length=4, feature=feature)
    prompt.positions.CopyFrom(tensors.encode(np.ones((3, 7), np.int32)))
    return prompt


def decoded(kind: Any, data: bytes) -> Any:
    """Returns the parsed message, or None for bytes that gRPC itself refuses."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


DATUM = trainer_pb2.Datum(
    input=rendered(),
    loss_inputs={
        "target_tokens": tensors.encode(np.zeros(7, np.int64)),
        "weights": tensors.encode(np.ones(7, np.float32)),
    },
)
DATUMS = Messages([DATUM])
SAMPLE = sampler_pb2.SampleRequest(
    request_id="r", sample_count=1, prompt=rendered(), params=sampler_pb2.SamplingParams(max_tokens=4)
)
SAMPLES = Messages([SAMPLE])


@fuzzed(0.2)
def test_datums(seeds: list[int]) -> None:
    loss = LOSSES["cross_entropy"]({})
    for seed in seeds:
        message = decoded(trainer_pb2.Datum, DATUMS.encoded(random.Random(seed), "Datum"))
        if message is None:
            continue
        try:
            datum = decode_datum(message, 0, loss, DatumLimits(100, 16, VISION))
        except Internal:
            raise
        except FoveaError:
            continue
        assert len(datum.tokens) == len(datum.targets) <= 16
        assert datum.tokens.min() >= 0
        assert datum.tokens.max() < 100
        assert all(np.isfinite(value).all() for value in datum.inputs.values())


@fuzzed(0.2)
def test_samples(seeds: list[int]) -> None:
    limits = Limits(100, 50, 4, 5, 2, 8)
    for seed in seeds:
        message = decoded(sampler_pb2.SampleRequest, SAMPLES.encoded(random.Random(seed), "SampleRequest"))
        if message is None:
            continue
        try:
            spec = read_request(message, limits, VISION)
        except Internal:
            raise
        except FoveaError:
            continue
        assert 0 < len(spec.tokens) + spec.params.max_tokens <= 50
        assert spec.tokens.min() >= 0
        assert spec.tokens.max() < 100


WEIGHTS = save({"a": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}, metadata={"format": "pt"})


@fuzzed(0.1)
def test_files_of_checkpoints(seeds: list[int]) -> None:
    for seed in seeds:
        try:
            read_tensors(mutated_bytes(random.Random(seed), [WEIGHTS]), "the file")
        except InvalidInput:
            continue


IMAGES = {
    "PNG": [
        encoded(picture(40, 30)), encoded(picture(40, 30).convert("P")), encoded(picture(40, 30).convert("RGBA")),
        encoded(picture(33, 65), interlace=True), encoded(picture(64, 64).convert("I;16")),
    ],
    "JPEG": [
        encoded(picture(40, 30), "JPEG"), encoded(picture(99, 65), "JPEG", progressive=True),
        encoded(picture(40, 30).convert("L"), "JPEG"), encoded(picture(40, 30).convert("CMYK"), "JPEG"),
        encoded(picture(40, 30), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """A worker process as a renderer starts it."""
    limits = WorkerSettings(
        fovea_tinyvlm.ensure("qwen3_vl"), memory_bytes=4 * 2**30, job_timeout_s=20, start_timeout_s=120
    )
    process = WorkerProcess(limits)
    process.start()
    yield process
    process.stop()


@fuzzed(0.1)
def test_images(worker: WorkerProcess, seeds: list[int]) -> None:
    """A WorkerDied error or a worker without an answer fails this test."""
    for seed in seeds:
        rng = random.Random(seed)
        declared: Any = rng.choice(["PNG", "JPEG"])
        data = mutated_bytes(rng, IMAGES[declared])
        try:
            header = image_header.read(data, declared)
            if header.width * header.height <= 2**20:  # larger ones are valid but slow
                worker.process(Job(header, data, rng.choice([0, 16])))
        except InvalidChunk:
            continue
    good = IMAGES["PNG"][0]
    assert worker.process(Job(image_header.read(good, "PNG"), good)).tensors


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """The process with limits that evaluates losses."""
    made = Sandbox(timeout_s=5.0, memory_mib=64)
    yield made
    made.close()


X = ref("logprobs")
GRAPHS = [
    json.loads(loss.graph)
    for loss in (
        square_loss(),
        graph(
            node("call_method", "wide", "repeat", X, 3),
            node("call_function", "sum", "torch.add", ref("wide"), 1.5),
            node("call_method", "clamped", "clamp", ref("sum"), min=-1, max=1),
            node("call_method", "total", "mean", ref("clamped"), dim=0),
        ),
    )
]
GRAPH_BYTES = [json.dumps(each).encode() for each in GRAPHS]
TARGETS = (
    "repeat",
    "sum",
    "exp",
    "cumsum",
    "expand",
    "zeros",
    "new_zeros",
    "sort",
    "outer",
    "matmul",
    "unbind",
    "index_select",
)


def graph_bytes(rng: random.Random) -> bytes:
    """Returns a graph with changed bytes, values or operations."""
    how = rng.randrange(3)
    if not how:
        return mutated_bytes(rng, GRAPH_BYTES)
    value = mutated_json(rng, rng.choice(GRAPHS)) if how == 1 else json.loads(rng.choice(GRAPH_BYTES))
    if how == 2:
        for each in value["nodes"][1:-1]:
            each["target"] = rng.choice([*TARGETS, each["target"]])
            each["args"] += rng.choices([2**22, 2**40, -1, 0, 1.5, [3, 2**20], X, None], k=rng.randrange(3))
    return json.dumps(value).encode()


def loss_fuzz(sandbox: Sandbox, seed: int) -> None:
    """Parses one loss, and evaluates it if it is accepted."""
    loss = message("fuzzed", {"logprobs": 1}, graph_bytes(random.Random(seed)))
    try:
        custom_loss.parse(loss)
        header = trainer_pb2.ForwardBackwardHeader(loss_function="custom", custom_loss=loss)
        loss_of(header, sandbox).compute_each(range(2), _LOGPROBS, [{}] * 2)
    except Internal:
        raise
    except FoveaError:
        return


@fuzzed(0.05)
def test_losses(sandbox: Sandbox, seeds: list[int]) -> None:
    for seed in seeds:
        loss_fuzz(sandbox, seed)
    header = trainer_pb2.ForwardBackwardHeader(loss_function="custom", custom_loss=square_loss())
    first, _ = loss_of(header, sandbox).compute_each(range(2), _LOGPROBS, [{}] * 2)
    assert first.loss.item() == 4
