"""In bfloat16 too the number of ranks changes gradients by no more than float32 sums in another order do.

Each datum is a micro-batch by itself, so that one rank and two compute the same activations to the bit; what differs is
how gradients are added up.
"""

import pathlib
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForImageTextToText

import tinyvlm
from services.trainer.model.lora import LoraSettings
from services.trainer.model.optimizer import Adam
from tests.e2e.trainer.examples import datums_of
from tests.e2e.trainer.image_service import ImageService
from tests.e2e.trainer.rank_engine import Call, run_ranks

SETTINGS = {"dtype": "bfloat16", "token_budget": 1, "patch_budget": 1, "recompute": "never"}
ADAM = Adam(1e-4, 0.9, 0.95, 1e-8, 0.0, 0.0)


@pytest.fixture(scope="module")
def images() -> Iterator[ImageService]:
    model = AutoModelForImageTextToText.from_pretrained(tinyvlm.ensure("qwen3_vl"), dtype=torch.float32)
    service = ImageService(tinyvlm.ensure("qwen3_vl"), model.model.get_rope_index)
    yield service
    service.close()


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_two_ranks_sum_gradients_as_one_does(images: ImageService, tmp_path: pathlib.Path, kind: str) -> None:
    lora = LoraSettings(8, 32.0, 7, True, True, True, True) if kind == "adapter" else None
    datums = [datum.SerializeToString() for datum in datums_of(images, "mixed")]
    call = Call(SETTINGS, lora, datums, 3, ADAM)
    one, two = (run_ranks(tinyvlm.ensure("qwen3_vl"), call, ranks, tmp_path / str(ranks)) for ranks in (1, 2))
    assert max(relative(two["gradients"][name], exact) for name, exact in one["gradients"].items()) < 1e-6
    norms = [[metrics["grad_norm:mean"] for metrics in found["metrics"]] for found in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    for name, weights in one["weights"].items():
        # Adam divides a gradient by its own size: where one is all but zero, even its last bits show in that element.
        difference = (two["weights"][name] - weights).square().mean().sqrt().item()
        assert difference < 0.1 * ADAM.learning_rate, name


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over the norm."""
    norm = exact.norm().item()
    return (found - exact).norm().item() / norm if norm else found.norm().item()
