"""Prompts are scored rightly, and once, though the cache is too small for all of them: some are computed twice."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from fovea.api.v1 import sampler_pb2
from fovea.client.sampler import SamplerClient
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import running_sampler
from tests.e2e.sampler.reference import Reference

TOLERANCE = 1e-3
LENGTH, NEW = 3500, 300
THROUGH = sampler_pb2.StopCondition(ignore_eos=True)


@pytest.mark.slow
async def test_scores_survive_preemptions(model: Path, reference: Reference) -> None:
    """16 MiB hold about 11,000 tokens of the tiny model, three of these prompts."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(100, 1000, (4, LENGTH))
    targets = generator.integers(100, 1000, LENGTH - 1)
    with running_sampler(model, "--kv-cache-mib", "16") as sampler:
        async with SamplerClient(sampler.address) as client:
            requests = [
                request_for(
                    rendered([prompt.tolist()]),
                    prompt_logprobs=True,
                    target_rows=targets[:, None].tolist(),
                    alt_token_count=2,
                    max_tokens=NEW,
                    stop=THROUGH,
                )
                for prompt in prompts
            ]
            answers = await asyncio.gather(*(ask(client, request) for request in requests))
        assert sampler.metric("vllm:num_preemptions_total") > 0, "the cache held everything"
    every = np.arange(LENGTH - 1)
    for prompt, answer in zip(prompts, answers, strict=True):
        table = reference.table(prompt.astype(np.int32))[:-1]
        assert answer.prompt_logprobs is not None
        assert answer.target_logprobs is not None
        assert answer.alt_ids is not None
        assert np.abs(answer.prompt_logprobs[1:] - table[every, prompt[1:]]).max() < TOLERANCE
        assert np.abs(answer.target_logprobs - table[every, targets]).max() < TOLERANCE
        assert np.abs(answer.alt_logprobs - np.take_along_axis(table, answer.alt_ids, 1)).max() < TOLERANCE
        assert len(answer.sequences[0].tokens) == NEW
