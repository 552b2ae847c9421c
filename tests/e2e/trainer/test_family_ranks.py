"""Families with unusual layers and images on several ranks: sharded, recomputed, with the gradients of one rank.

Qwen3.5 mixes layers with attention and with a state. Qwen3-VL's mixture shards its experts, or spreads them over ranks,
also of two replicas; so does Llama 4, with weighted inputs of experts and with chunks. Mistral 3 calls its tower once
per image shape, so a different number of times on each rank. Gemma 4 (`gemma4_e2b`: windows, shared keys, per-layer
embeddings, untrained constants) passed the same test, which takes another minute.
"""

from pathlib import Path

import numpy as np
import pytest

from fovea.api.v1 import model_input_pb2
from fovea.wire import tensors
from fovea.wire.tensors import FeatureTensors
from fovea_parity.documents import Content, DocumentMaker, picture
from fovea_parity.refusals import running_renderer
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from tests.e2e.trainer.examples import datum
from tests.e2e.trainer.rank_engine import Call, run_ranks
from tests.e2e.trainer.test_ranks import relative
from tests.families import ensure_family

ADAM = Adam(1e-4, 0.9, 0.95, 1e-8, 0.0, 0.0)
SETTINGS = {"keep_gathered": "never", "recompute": "always", "dtype": "float32"}


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl_moe", "mistral3", "llama4"])
def test_two_ranks_are_one(name: str, tmp_path: Path) -> None:
    directory = ensure_family(name)
    maker = DocumentMaker(directory)
    contents: list[list[Content]] = [
        ["Some words about nothing in particular."],
        [picture((60, 110), 1), "What is this?"],
        ["Short."],
        ["Two: ", picture((100, 37), 2), " and ", picture((60, 110), 1), " differ."],
        ["One document more."],
    ]
    with running_renderer() as (address, held):
        inputs = [rendered(maker, one, address, held) for one in contents]
        datums = [
            datum(one, seed, target_tokens=np.roll(tensors.decode_tokens(one.tokens), -1).astype(np.int64))
            for seed, one in enumerate(inputs)
        ]
        calls = [
            Call(lora, [one.SerializeToString() for one in datums], 2, ADAM)
            for lora in (LoraSettings(4, 32.0, 7, True, True, True, True), None)
        ]
        alone = run_ranks(directory, SETTINGS, calls, 1, tmp_path / "1")
        spread = [(2, 2, 1, 1e-5), (4, 2, 2, 1e-5)] if name in ("qwen3_vl_moe", "llama4") else []
        for ranks, experts, replicas, most in [(2, 1, 1, 1e-3), *spread]:
            settings = {**SETTINGS, "ranks": ranks, "expert_parallel": experts, "replicas": replicas}
            together = run_ranks(directory, settings, calls, ranks, tmp_path / f"{ranks}-{experts}-{replicas}")
            for one, two in zip(alone, together, strict=True):
                assert one["losses"] == pytest.approx(two["losses"], rel=most)
                norms = [[step["grad_norm:mean"] for step in each["metrics"]] for each in (one, two)]
                assert norms[1] == pytest.approx(norms[0], rel=1e-4)
                assert norms[0][0] > 0
                assert max(relative(two["gradients"][key], exact) for key, exact in one["gradients"].items()) < most


def rendered(
    maker: DocumentMaker, contents: list[Content], address: str, held: dict[str, FeatureTensors]
) -> model_input_pb2.RenderedInput:
    """Returns the renderer's output for the contents; it serves the tensors under `address`."""
    return maker.splice(contents).rendered(address, held)
