"""A Fovea with a sampler of two workers: each receives its rows and experts, and the numbers equal the trainer's.

So do those of the base, although its checkpoint has no weights: trainer and sampler generate the same ones.
tests/e2e/sampler/test_tensor_parallel.py covers dense models over two workers, test_experts.py beside it experts from
files.
"""

import os
import re
import urllib.request
from collections.abc import Iterator
from unittest import mock

import pytest
from transformers import AutoTokenizer

from benchmarks import random_checkpoint
from fovea_sampler.engine.manifest_check import checkpoint_shapes
from tests.e2e.prompts import Prompt, PromptBuilder
from tests.e2e.sampler.rows import own_bytes, received_bytes
from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_agreement import check_model
from tests.families import ensure_family

_VARIABLES = {"FOVEA_SAMPLER_TENSOR_PARALLEL": "2", "FOVEA_SAMPLER_EXPERT_PARALLEL": "true"}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Fovea with two trainer ranks and a sampler of two workers, each with half of the experts unsharded."""
    model = tmp_path_factory.mktemp("random") / "model"
    random_checkpoint.copy(ensure_family("qwen3_vl_moe"), model, seed=7)
    (file,) = model.glob("*.safetensors")
    assert file.stat().st_blocks * 512 < file.stat().st_size / 2
    with mock.patch.dict(os.environ, _VARIABLES), running_stack(model, "--ranks", "2") as stack:
        yield stack


@pytest.fixture(scope="module")
def pictured(split: Stack) -> dict[str, Prompt]:
    """Prompts of text and images; test_agreement.py scores all others."""
    catalogue = PromptBuilder(AutoTokenizer.from_pretrained(split.model)).catalogue()
    return {name: catalogue[name] for name in ("text", "two images")}


@pytest.mark.parametrize(("rank", "rate"), [(8, 5e-3), (0, 5e-4)], ids=["adapter", "full"])
def test_both_workers_have_what_was_trained(split: Stack, pictured: dict[str, Prompt], rank: int, rate: float) -> None:
    before = metrics_page(split)
    with split.service_client() as service:
        check_model(split, service, rank, rate, pictured)
    if rank:
        return
    pushes = full_pushes(metrics_page(split)) - full_pushes(before)
    assert pushes >= 3
    shapes = checkpoint_shapes(split.model)
    received = zip(received_bytes(metrics_page(split)), received_bytes(before), strict=True)
    assert [after - old for after, old in received] == [pushes * own_bytes(shapes, worker) for worker in range(2)]


def metrics_page(stack: Stack) -> str:
    """Returns the metrics of the sampler."""
    page: bytes = urllib.request.urlopen(stack.state["services"]["sampler"]["metrics"], timeout=10).read()
    return page.decode()


def full_pushes(page: str) -> float:
    """Returns the number of pushes of full parameters that the sampler has loaded."""
    found = re.search(r'^fovea_sampler_snapshots_total{kind="full",outcome="loaded"} (\S+)', page, re.MULTILINE)
    return float(found[1]) if found else 0.0
