"""Rotary embeddings that are scaled: the context is the scaled one, and its log-probabilities are transformers'."""

import json
from pathlib import Path

import numpy as np
import pytest

import tinyvlm
from fovea.client.sampler import SamplerClient
from fovea.wire.errors import ContextOverflow
from tests.checkpoints import with_one_processor_file
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import running_sampler
from tests.e2e.sampler.reference import Reference

UNSCALED, FACTOR = 64, 4


@pytest.mark.slow
async def test_yarn(tmp_path: Path) -> None:
    model = with_one_processor_file(tinyvlm.ensure("qwen3_vl"), tmp_path)
    config = json.loads((model / "config.json").read_text())
    text = config["text_config"]
    text["max_position_embeddings"] = UNSCALED
    text["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": float(FACTOR),
        "original_max_position_embeddings": UNSCALED,
    }
    (model / "config.json").write_text(json.dumps(config))
    tokens = np.random.default_rng(0).integers(100, 1000, UNSCALED * FACTOR - 1).astype(np.int32)
    with running_sampler(model) as sampler:
        async with SamplerClient(sampler.address) as client:
            assert (await client.info()).max_context_length == UNSCALED * FACTOR
            wire = rendered([tokens.tolist()])
            answer = await ask(client, request_for(wire, prompt_logprobs=True, max_tokens=1))
            with pytest.raises(ContextOverflow):
                await ask(client, request_for(wire, max_tokens=2))
    assert answer.prompt_logprobs is not None
    assert np.abs(answer.prompt_logprobs[1:] - Reference(model).prompt_logprobs(tokens)[1:]).max() < 1e-3
