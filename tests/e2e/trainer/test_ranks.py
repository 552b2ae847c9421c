"""In bfloat16, too, the number of ranks changes gradients only by the rounding of float32 sums.

Each datum is its own micro-batch, so that one rank and two compute bit-identical activations; only the order of
gradient sums differs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3TextConfig

import fovea_tinyvlm
from fovea.api.v1 import model_input_pb2
from fovea.wire import tensors
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from tests.e2e.trainer.examples import datum, datums_of, text
from tests.e2e.trainer.image_service import ImageService
from tests.e2e.trainer.rank_engine import Call, run_ranks

SETTINGS = {"dtype": "bfloat16", "token_budget": 1, "patch_budget": 1, "recompute": "never", "datum_ranks": 1}
ADAM = Adam(1e-4, 0.9, 0.95, 1e-8, 0.0, 0.0)


@pytest.fixture(scope="module")
def images() -> Iterator[ImageService]:
    model = AutoModelForImageTextToText.from_pretrained(fovea_tinyvlm.ensure("qwen3_vl"), dtype=torch.float32)
    service = ImageService(fovea_tinyvlm.ensure("qwen3_vl"), model.model.get_rope_index)
    yield service
    service.close()


@pytest.fixture(scope="module")
def found(images: ImageService, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Training results on one rank and on two, by kind of model."""
    datums = [datum.SerializeToString() for datum in datums_of(images, "mixed")]
    loras = {"adapter": LoraSettings(8, 32.0, 7, True, True, True, True), "full": None}
    calls = [Call(lora, datums, 3, ADAM) for lora in loras.values()]
    folder, model = tmp_path_factory.mktemp("ranks"), fovea_tinyvlm.ensure("qwen3_vl")
    results = [run_ranks(model, SETTINGS, calls, ranks, folder / str(ranks)) for ranks in (1, 2)]
    return dict(zip(loras, map(list, zip(*results, strict=True)), strict=True))


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_two_ranks_sum_gradients_as_one_does(found: dict[str, list[dict[str, Any]]], kind: str) -> None:
    one, two = found[kind]
    assert max(relative(two["gradients"][name], exact) for name, exact in one["gradients"].items()) < 1e-6
    norms = [[metrics["grad_norm:mean"] for metrics in each["metrics"]] for each in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    for name, weights in one["weights"].items():
        # Adam divides a gradient by its own size, so even the last bits of a nearly zero gradient change that element.
        difference = (two["weights"][name] - weights).square().mean().sqrt().item()
        assert difference < 0.1 * ADAM.learning_rate, name


def test_a_family_by_rule_is_sharded_and_recomputed(tmp_path: Path) -> None:
    """Gemma 3, with sliding layers and scaled embeddings, in float32."""
    config = Gemma3TextConfig(
        vocab_size=1280, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, query_pre_attn_scalar=24, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    texts = [tensors.encode_tokens(np.array(text(length, length))) for length in (17, 5, 42, 17, 30)]
    rendered = [model_input_pb2.RenderedInput(tokens=tokens) for tokens in texts]
    datums = [datum(one, seed).SerializeToString() for seed, one in enumerate(rendered)]
    settings, calls = {"keep_gathered": "never", "recompute": "always"}, [Call(None, datums, 1, ADAM)]
    ((one,), (two,)) = (run_ranks(tmp_path / "model", settings, calls, n, tmp_path / str(n)) for n in (1, 2))
    assert one["gradients"].keys() >= {"model.embed_tokens.weight", "model.layers.5.self_attn.q_norm.weight"}
    assert max(relative(two["gradients"][name], exact) for name, exact in one["gradients"].items()) < 1e-4


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the norm of the difference over the norm."""
    norm = exact.norm().item()
    return (found - exact).norm().item() / norm if norm else found.norm().item()
