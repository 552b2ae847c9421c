"""One Fovea per layout of GPUs, in bfloat16.

`FOVEA_GPU_SHAPE` chooses another size from benchmarks/shapes.py, `FOVEA_GPUS` other devices than 0,1.
"""

import os
import pathlib
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

from benchmarks.client import Bench
from benchmarks.shapes import build
from fovea.runtime.credentials import SECRET_VARIABLE
from fovea.runtime.hosts import free_ports
from tests.e2e.stack import Stack, running_stack
from tests.service_process import service_process

FIRST, SECOND = os.environ.get("FOVEA_GPUS", "0,1").split(",")
LAYOUTS = {
    "one GPU, CUDA IPC": (1, ["--ranks", "1", "--trainer-gpus", FIRST, "--sampler-gpus", FIRST]),
    "two GPUs, NCCL": (2, ["--ranks", "1", "--trainer-gpus", FIRST, "--sampler-gpus", SECOND]),
    "two ranks, NCCL": (2, ["--ranks", "2", "--trainer-gpus", f"{FIRST},{SECOND}", "--sampler-gpus", SECOND]),
    "tensor-parallel sampler": (2, ["--ranks", "1", "--trainer-gpus", FIRST, "--sampler-gpus", f"{FIRST},{SECOND}"]),
    "two nodes, NCCL": (2, ["--ranks", "1", "--trainer-gpus", FIRST, "--sampler-gpus", SECOND]),
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A Qwen3-VL with random weights of realistic scale."""
    shape = os.environ.get("FOVEA_GPU_SHAPE", "tiny")
    directory = tmp_path_factory.mktemp("shapes") / shape
    build(shape, directory, "cuda")
    torch.cuda.empty_cache()
    return directory


@pytest.fixture(scope="session", params=LAYOUTS)
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Fovea on the GPUs of a layout."""
    gpu_count, arguments = LAYOUTS[request.param]
    if torch.cuda.device_count() < gpu_count:
        pytest.skip(f"needs {gpu_count} GPUs, this machine has {torch.cuda.device_count()}")
    os.environ |= {"FOVEA_SAMPLER_EAGER": "true", "FOVEA_SAMPLER_GPU_MEMORY_FRACTION": "0.4"}
    model = request.getfixturevalue("model")
    others = second_node(model) if "nodes" in request.param else nullcontext()
    with others, running_stack(model, *arguments) as stack:
        yield stack


@contextmanager
def second_node(model: pathlib.Path) -> Iterator[None]:
    """A trainer's node of one rank on the second GPU, for a Fovea that starts later with the first node."""
    meeting, port = free_ports(2)
    both = {
        "FOVEA_TRAINER_NODES": "2",
        "FOVEA_TRAINER_MASTER_ADDR": "127.0.0.1",
        "FOVEA_TRAINER_MASTER_PORT": str(meeting),
        SECRET_VARIABLE: secrets.token_urlsafe(32),
    }
    own = {"FOVEA_TRAINER_NODE_RANK": "1", "CUDA_VISIBLE_DEVICES": SECOND}
    log, address = model.with_name("second-node.log"), f"127.0.0.1:{port}"
    # The state folder of the Fovea that starts later.
    kept = ("--checkpoints", tempfile.gettempdir())
    arguments = ("--model", str(model), "--ranks", "1", "--port", str(port), *kept)
    with (
        mock.patch.dict(os.environ, both),
        service_process(log, "TrainerService", address, *arguments, environment=own),
    ):
        yield


@pytest.fixture
def bench(stack: Stack) -> Iterator[Bench]:
    """The official SDK for this Fovea; its models are freed with the test."""
    with Bench.open(stack.base_url) as bench:
        yield bench
