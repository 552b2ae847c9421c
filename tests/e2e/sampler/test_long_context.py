"""Long prompts, scaled rotary embeddings, and a cache that is too small for all prompts.

The context is the scaled one, log-probabilities equal transformers', and each is returned once although some are
computed twice.
"""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

import fovea_tinyvlm
from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.wire.errors import ContextOverflow
from tests.checkpoints import with_one_processor_file
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import running_sampler
from tests.e2e.sampler.reference import Reference

TOLERANCE = 1e-3
UNSCALED, FACTOR = 950, 4
NEW = 300
LENGTH = UNSCALED * FACTOR - NEW
THROUGH = sampler_pb2.StopCondition(ignore_eos=True)


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """The tiny Qwen3-VL with YaRN."""
    model = with_one_processor_file(fovea_tinyvlm.ensure("qwen3_vl"), tmp_path)
    config = json.loads((model / "config.json").read_text())
    text = config["text_config"]
    text["max_position_embeddings"] = UNSCALED
    text["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": float(FACTOR),
        "original_max_position_embeddings": UNSCALED,
    }
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.slow
async def test_scores_survive_preemptions_up_to_the_end_of_a_scaled_context(scaled: Path) -> None:
    """16 MiB hold about 11,000 tokens of the tiny model, which is three of these prompts."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(100, 1000, (4, LENGTH))
    targets = generator.integers(100, 1000, LENGTH - 1)
    with running_sampler(scaled, "--kv-cache-mib", "16", is_copy=True) as sampler:
        async with SamplerClient(sampler.address) as client:
            assert (await client.info()).max_context_length == UNSCALED * FACTOR
            with pytest.raises(ContextOverflow):
                await ask(client, request_for(rendered([prompts[0].tolist()]), max_tokens=NEW + 1))
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
        assert sampler.metric("vllm:num_preemptions_total") > 0, "the cache must be too small"
    reference, every = Reference(scaled), np.arange(LENGTH - 1)
    for prompt, answer in zip(prompts, answers, strict=True):
        table = reference.table(prompt.astype(np.int32))[:-1]
        assert answer.prompt_logprobs is not None
        assert answer.target_logprobs is not None
        assert answer.alt_ids is not None
        assert np.abs(answer.prompt_logprobs[1:] - table[every, prompt[1:]]).max() < TOLERANCE
        assert np.abs(answer.target_logprobs - table[every, targets]).max() < TOLERANCE
        assert np.abs(answer.alt_logprobs - np.take_along_axis(table, answer.alt_ids, 1)).max() < TOLERANCE
        assert len(answer.sequences[0].tokens) == NEW
