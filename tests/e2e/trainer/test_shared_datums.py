"""Ranks compute datums above the token budget together: results and gradients equal those of one rank.

The same holds for several replicas, with short and long datums, text and pictures.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import fovea_tinyvlm
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from tests.e2e.trainer.examples import IMAGE_SIZES, datum, datums_of, text
from tests.e2e.trainer.image_service import ImageService, picture
from tests.e2e.trainer.rank_engine import Call, run_ranks
from tests.e2e.trainer.test_ranks import relative

ADAM = Adam(1e-4, 0.9, 0.95, 1e-8, 0.0, 0.0)
BUDGET = 100
LORAS = {
    "adapter": LoraSettings(8, 32.0, 7, True, True, True, False),
    "adapter of the tower too": LoraSettings(8, 32.0, 7, True, True, True, True),
    "full": None,
}


@pytest.fixture(scope="module")
def datums() -> Iterator[list[bytes]]:
    """Returns short and long datums with and without pictures; the ranks do not divide their lengths."""
    model = AutoModelForImageTextToText.from_pretrained(fovea_tinyvlm.ensure("qwen3_vl"), dtype=torch.float32)
    service = ImageService(fovea_tinyvlm.ensure("qwen3_vl"), model.model.get_rope_index)
    long = [
        [text(301, 30)],
        [text(190, 31), picture(*IMAGE_SIZES[0], 1), text(9, 32), picture(*IMAGE_SIZES[1], 6), text(7, 33)],
        [picture(*IMAGE_SIZES[1], 7), text(150, 34)],
    ]
    found = [*datums_of(service, "mixed"), *(datum(service.render(one), 40 + n) for n, one in enumerate(long))]
    yield [one.SerializeToString() for one in found]
    service.close()


@pytest.fixture(scope="module")
def alone(datums: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(datums, 1, 0, tmp_path_factory.mktemp("alone") / "1")


def run(datums: list[bytes], ranks: int, budget: int, scratch: Path, **more: Any) -> list[dict[str, Any]]:
    settings = {"ranks": ranks, "token_budget": budget, "dtype": "float32", **more}
    calls = [Call(lora, datums, 2, ADAM) for lora in LORAS.values()]
    return run_ranks(fovea_tinyvlm.ensure("qwen3_vl"), settings, calls, ranks, scratch)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, {"keep_gathered": "never", "recompute": "always"}),
        (2, {"keep_gathered": "always"}),
        (4, {"keep_gathered": "never"}),
        (4, {"keep_gathered": "never", "replicas": 2}),
        (4, {"keep_gathered": "always", "replicas": 2}),
        (4, {"replicas": 4}),
    ],
    ids=["two sharded", "two gathered", "four", "two replicas sharded", "two replicas gathered", "four replicas"],
)
def test_ranks_together_are_one(
    datums: list[bytes], alone: list[dict[str, Any]], ranks: int, more: dict[str, Any], tmp_path: Path
) -> None:
    together = run(datums, ranks, BUDGET, tmp_path / "ranks", **more)
    for kind, one, found in zip(LORAS, alone, together, strict=True):
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5), kind
        norms = [[step["grad_norm:mean"] for step in each["metrics"]] for each in (one, found)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-5), kind
        for name, exact in one["gradients"].items():
            assert relative(found["gradients"][name], exact) < 1e-5, (kind, name)
