"""Adapters of many ranks in one batch: each request gets the same tokens and log-probabilities as alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from tests.e2e.sampler.asking import Answer, ask, request_for
from tests.e2e.sampler.conftest import PromptMaker, picture
from tests.e2e.sampler.process import SamplerProcess, running_sampler
from tests.e2e.sampler.reference import Reference, random_adapter
from tests.e2e.sampler.sender import Sender

THROUGH = sampler_pb2.StopCondition(ignore_eos=True)
RANKS = (64, 4, 8, 12, 16, 24, 32, 8, 48, 4, 16, 32)
TOLERANCE = 1e-4
"""Tolerance of log-probabilities in nats: float32 sums depend on their order."""


@pytest.fixture(scope="module")
def crowded(model: Path) -> Iterator[SamplerProcess]:
    """A sampler with memory for four adapters of rank 64, half of what the ranks above need."""
    with running_sampler(model, "--max-loras", "4", "--max-sequences", "16", is_copy=True) as sampler:
        yield sampler


async def test_mixed_ranks_in_one_batch_equal_each_alone(
    crowded: SamplerProcess, prompts: PromptMaker, reference: Reference
) -> None:
    """Every second adapter also changes the tower and the unembedding. The ranks sum to 408 of 256,
    so some must wait.
    """
    async with SamplerClient(crowded.address) as client:
        sender = await Sender(client).join()
        names = [f"crowd-{number}@1" for number in range(len(RANKS))]
        for number, (name, rank) in enumerate(zip(names, RANKS, strict=True)):
            adapter = random_adapter(reference, rank, number, scale=0.05)
            if number % 2:
                adapter = {key: tensor for key, tensor in adapter.items() if ".language_model.layers." in key}
            await sender.push(name, adapter, rank)

        async def of(name: str, salt: str) -> Answer:
            wire = prompts.make("Together ", picture(1), "and alone").wire
            return await ask(
                client,
                request_for(
                    wire, name, max_tokens=12, temperature=0.0, prompt_logprobs=True, cache_salt=salt, stop=THROUGH
                ),
            )

        alone = {name: await of(name, "alone") for name in ("", *names)}
        for salt in ("once", "twice"):
            together = await asyncio.gather(*(of(name, salt) for name in ("", *names)))
            for name, answer in zip(("", *names), together, strict=True):
                assert answer.sequences[0].tokens == alone[name].sequences[0].tokens, name
                assert np.allclose(answer.sequences[0].logprobs, alone[name].sequences[0].logprobs, atol=TOLERANCE)
                difference = np.abs(np.subtract(answer.prompt_logprobs, alone[name].prompt_logprobs))
                assert np.nanmax(difference) < TOLERANCE, name
        assert crowded.metric("fovea_sampler_slot_wait_seconds_count") > 0
        assert crowded.metric("fovea_sampler_requests_waiting_for_slot") == 0
        scores = {tuple(np.nan_to_num(answer.prompt_logprobs).round(2)) for answer in alone.values()}
        assert len(scores) == 1 + len(names), "adapters must have an effect"
