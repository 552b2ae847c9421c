"""Mixtures of experts: the base, adapters of experts and full weights.

An adapter has Tinker's layout ("shared outer"): the factors with the model's width exist once for all experts.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fovea.client.inference import SamplerClient
from fovea.wire.errors import InvalidInput
from tests.e2e.sampler.asking import Answer, ask, rendered, request_for
from tests.e2e.sampler.conftest import MIXTURE, THREE_SLOTS, sampler_of
from tests.e2e.sampler.reference import Reference, as_in_files, random_adapter
from tests.e2e.sampler.sender import Sender
from tests.e2e.sampler.test_weights import trained
from tests.families import ensure_family

TOLERANCE = {"qwen3_moe": 1e-4, "qwen3_vl_moe": 1e-4, "qwen3_5_moe": 1e-3}
"""In nats. Delta nets amplify float32 noise, the more so if a prompt is split differently."""
PROMPTS = [np.random.default_rng(seed).integers(0, 400, 30 + 9 * seed).astype(np.int32) for seed in range(4)]


@dataclass
class Served:
    """A model behind a sampler, and the same model in transformers."""

    model: Path
    tolerance: float
    client: SamplerClient
    sender: Sender
    full: Sender
    """Sends full weights: to each of two workers its own parts."""

    async def scored(self, tokens: npt.NDArray[np.int32], snapshot_id: str = "") -> Answer:
        """Returns the prompt's logprobs and a greedy continuation."""
        prompt = rendered([tokens.tolist()])
        return await ask(
            self.client, request_for(prompt, snapshot_id, prompt_logprobs=True, max_tokens=4, temperature=0.0)
        )

    async def gap(self, expected: Reference, snapshot_id: str = "") -> float:
        """Returns the largest difference from transformers over all prompts, which are requested together."""
        answers = await asyncio.gather(*(self.scored(tokens, snapshot_id) for tokens in PROMPTS))
        return max(_gap(answer, expected, tokens) for answer, tokens in zip(answers, PROMPTS, strict=True))


def _gap(answer: Answer, expected: Reference, tokens: npt.NDArray[np.int32]) -> float:
    return float(np.abs(answer.prompt_logprobs - expected.prompt_logprobs(tokens))[1:].max())


SPLIT = ["--tensor-parallel", "2"]
LAYOUTS = {
    "qwen3_moe, a part of every expert": SPLIT,
    "qwen3_moe, whole experts": [*SPLIT, "--expert-parallel"],
    "qwen3_vl_moe": [],
}
ALL = [MIXTURE, *(pytest.param(name, marks=() if "part" in name else pytest.mark.long) for name in LAYOUTS)]
"""tests/e2e/test_split_sampler.py covers unsharded experts (qwen3_vl_moe) in `make test`."""


@pytest.fixture(scope="module", params=ALL)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """A model with three slots, in one worker or split between two.

    Checkpoints of Qwen3 have one tensor per expert; those of Qwen3-VL are transposed.
    """
    name = request.param.partition(",")[0]
    model = ensure_family(name)
    with sampler_of(name, request, *THREE_SLOTS, *LAYOUTS.get(request.param, ())) as sampler:
        async with SamplerClient(sampler.address) as client:
            is_split = request.param in LAYOUTS and "--tensor-parallel" in LAYOUTS[request.param]
            full = await Sender(client, is_split).join()
            yield Served(model, TOLERANCE[name], client, await Sender(client).join(), full)


async def test_base_and_adapters_in_one_batch(served: Served) -> None:
    """Adapters of different ranks, with only experts or without them, and more adapters than slots."""
    base = Reference(served.model)
    whole, small = random_adapter(base, 16, seed=1), random_adapter(base, 4, seed=2)
    adapters = {
        "whole@1": (whole, 16),
        "small@1": (small, 4),
        "experts@1": ({name: tensor for name, tensor in small.items() if ".experts." in name}, 4),
        "rest@1": ({name: tensor for name, tensor in whole.items() if ".experts." not in name}, 16),
    }
    expected = {"": base}
    for name, (adapter, rank) in adapters.items():
        await served.sender.push(name, adapter, rank)
        expected[name] = Reference(served.model).merge(adapter, rank)
        assert await served.gap(expected[name], name) < served.tolerance, name
    assert _gap(await served.scored(PROMPTS[0], "experts@1"), base, PROMPTS[0]) > 0.1, "the experts must be adapted"
    asked = [(name, tokens) for tokens in PROMPTS for name in expected]
    answers = await asyncio.gather(*(served.scored(tokens, name) for name, tokens in asked))
    for answer, (name, tokens) in zip(answers, asked, strict=True):
        assert _gap(answer, expected[name], tokens) < served.tolerance, name


async def test_full_weights_twice(served: Served) -> None:
    """Pushes in the layout of the files. An adapter from before returns with its base."""
    base = Reference(served.model)
    adapter = random_adapter(base, 4, seed=3)
    await served.sender.push("before@1", adapter, 4)
    for number in range(2):
        state, name = trained(base, number), f"full@{number}"
        await served.full.push(name, as_in_files(state, served.model))
        assert await served.gap(Reference(served.model, state), name) < served.tolerance
    await served.full.push("", as_in_files(base.parameters(), served.model))
    assert await served.gap(base) < served.tolerance
    assert await served.gap(Reference(served.model).merge(adapter, 4), "before@1") < served.tolerance


async def test_adapters_that_do_not_fit_are_refused_by_name(served: Served) -> None:
    adapter = random_adapter(Reference(served.model), 4, seed=1)
    first = min(name for name in adapter if ".experts." in name).rpartition(".w1.")[0]
    for_each = adapter[f"{first}.w1.lora_A.weight"].expand(8, -1, -1)
    lacking = {name: tensor for name, tensor in adapter.items() if ".w3." not in name}
    for wrong, problem in (
        (
            adapter | {f"{first}.w1.lora_A.weight": for_each},
            r"w1.lora_A.weight has shape \[8, 4, 128\], must be \[1, 4",
        ),
        (lacking, r"layers.\d.mlp.experts lacks w3"),
        (adapter | {f"{first}.0.gate_proj.lora_A.weight": for_each[0]}, r"experts.0.gate_proj$"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            await served.sender.push("wrong@1", wrong, 4)
    assert await served.gap(Reference(served.model)) < served.tolerance
