"""A text model of gated delta nets: states of a prompt are computed in parts, cached, and dropped with the weights.

The last test kills its engine.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3_5TextConfig

import fovea_tinyvlm
from fovea.api.v1 import sampler_pb2
from fovea.client.inference import SamplerClient
from fovea.wire.errors import InvalidInput, Unavailable
from tests.checkpoints import save_random
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import SamplerProcess, running_sampler
from tests.e2e.sampler.reference import Reference, random_adapter
from tests.e2e.sampler.sender import Sender
from tests.e2e.sampler.test_weights import trained

TOLERANCE = 1e-3
LENGTH, NEW = 300, 12
ENGINE_DIED = 70
THROUGH = sampler_pb2.StopCondition(ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a text-only Qwen3.5, with one speculative (MTP) layer, which Fovea ignores."""
    directory = tmp_path_factory.mktemp("hybrid")
    tokenizer = AutoTokenizer.from_pretrained(fovea_tinyvlm.ensure("qwen3"))
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
    )
    save_random(config, tokenizer, directory)
    weights = load_file(directory / "model.safetensors") | {"mtp.fc.weight": torch.ones(128, 256)}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def text_sampler(hybrid: Path) -> Iterator[SamplerProcess]:
    """A sampler with steps of two blocks of the smallest size, so a prompt is computed in three parts."""
    with running_sampler(hybrid, "--max-batched-tokens", "128", is_copy=True) as sampler:
        yield sampler


async def test_states_are_those_of_the_prompt_and_the_weights(hybrid: Path, text_sampler: SamplerProcess) -> None:
    ids = np.random.default_rng(3).integers(100, 1000, LENGTH, dtype=np.int32)
    base = Reference(hybrid)
    adapter, state = random_adapter(base, 4, seed=1), trained(base)
    assert text_sampler.serving()
    async with SamplerClient(text_sampler.address) as client:
        sender = await Sender(client).join()
        await sender.push("text@1", adapter, 4)
        await check(client, ids, "", base)
        await check(client, ids, "text@1", Reference(hybrid).merge(adapter, 4))
        await sender.push("full@1", state)
        await check(client, ids, "full@1", Reference(hybrid, state))
    assert text_sampler.metric("vllm:prefix_cache_hits_total") > 0


async def check(client: SamplerClient, ids: np.ndarray, snapshot_id: str, expected: Reference) -> None:
    """Checks the scores of the prompt and of its continuation twice: with a computed prompt and with a cached one."""
    scored = await ask(client, request_for(rendered([ids.tolist()]), snapshot_id, prompt_logprobs=True, max_tokens=1))
    assert np.abs(scored.prompt_logprobs - expected.prompt_logprobs(ids))[1:].max() < TOLERANCE
    for _ in range(2):
        drawn = await ask(
            client, request_for(rendered([ids.tolist()]), snapshot_id, max_tokens=NEW, stop=THROUGH, temperature=1.0)
        )
        (sequence,) = drawn.sequences
        wanted = expected.prompt_logprobs(np.array([*ids, *sequence.tokens], dtype=np.int32))[LENGTH:]
        assert np.abs(np.array(sequence.logprobs) - wanted).max() < TOLERANCE


async def test_images_are_refused(text_sampler: SamplerProcess) -> None:
    prompt = rendered([[1, 2, 3]])
    prompt.spans.add(offset=0, length=1)
    async with SamplerClient(text_sampler.address) as client:
        with pytest.raises(InvalidInput, match="does not accept images"):
            await ask(client, request_for(prompt, max_tokens=2))


async def test_a_dead_engine_ends_the_service(text_sampler: SamplerProcess) -> None:
    """Requests in flight fail as UNAVAILABLE and the process exits, so that its supervisor restarts it."""
    (engine_pid,) = text_sampler.engine_pids()
    async with SamplerClient(text_sampler.address) as client:
        with pytest.raises(Unavailable):  # noqa: PT012 - the engine dies in the middle of the stream
            async with aclosing(client.sample(request_for(rendered([[1, 2, 3]]), "full@1", stop=THROUGH))) as events:
                async for event in events:
                    if event.WhichOneof("event") == "prompt":
                        os.kill(engine_pid, signal.SIGKILL)
    assert await asyncio.to_thread(text_sampler.process.wait, 60) == ENGINE_DIED
    assert any("the engine has died" in line and "CRITICAL" in line for line in text_sampler.log)
