"""The other families, each in a sampler of its own, which is then ended the hard way."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import tinyvlm
from fovea.api.v1 import sampler_pb2
from fovea.client.sampler import SamplerClient
from fovea.wire import tensors
from fovea.wire.errors import InvalidInput, SnapshotNotLoaded, Unavailable
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.conftest import PromptMaker, picture
from tests.e2e.sampler.process import SamplerProcess, running_sampler
from tests.e2e.sampler.reference import Reference, random_adapter
from tests.e2e.sampler.renderer import running_renderer
from tests.e2e.sampler.sender import Sender

TOLERANCE = 1e-3
ENGINE_DIED = 70


@pytest.fixture(scope="module")
def text_sampler() -> Iterator[tuple[Path, SamplerProcess]]:
    """A model without images."""
    model = tinyvlm.ensure("qwen3")
    with running_sampler(model) as sampler:
        yield model, sampler


async def test_a_text_model(text_sampler: tuple[Path, SamplerProcess]) -> None:
    model, sampler = text_sampler
    assert sampler.serving()
    reference = Reference(model)
    prompt = rendered([AutoTokenizer.from_pretrained(model)("A model of text alone.")["input_ids"]])
    ids = tensors.decode_tokens(prompt.tokens)
    adapter = random_adapter(reference, 4, seed=1)
    async with SamplerClient(sampler.address) as client:
        await (await Sender(client).join()).push("text@1", adapter, 4)
        for snapshot_id, expected in (("", reference), ("text@1", Reference(model).merge(adapter, 4))):
            answer = await ask(client, request_for(prompt, snapshot_id, prompt_logprobs=True, max_tokens=2))
            assert np.abs(answer.prompt_logprobs - expected.prompt_logprobs(ids))[1:].max() < TOLERANCE
        prompt.spans.add(offset=0, length=1)
        with pytest.raises(InvalidInput, match="takes no images"):
            await ask(client, request_for(prompt, max_tokens=2))


async def test_a_dead_engine_ends_the_service(text_sampler: tuple[Path, SamplerProcess]) -> None:
    """Requests in flight fail as UNAVAILABLE and the process exits, for its supervisor to start it again."""
    _, sampler = text_sampler
    (engine_pid,) = sampler.engine_pids()
    through = sampler_pb2.StopCondition(ignore_eos=True)
    async with SamplerClient(sampler.address) as client:
        with pytest.raises(Unavailable):  # noqa: PT012 - the engine dies in the middle of the stream
            async with aclosing(client.sample(request_for(rendered([[1, 2, 3]]), stop=through))) as events:
                async for event in events:
                    if event.WhichOneof("event") == "prompt":
                        os.kill(engine_pid, signal.SIGKILL)
    assert await asyncio.to_thread(sampler.process.wait, 60) == ENGINE_DIED
    assert any("the engine has died" in line and "CRITICAL" in line for line in sampler.log)


async def test_qwen2_5_vl_and_a_killed_service() -> None:
    """The numbers agree here too; killed, the service leaves no engine behind."""
    model = tinyvlm.ensure("qwen2_5_vl")
    reference = Reference(model)
    adapter = random_adapter(reference, 4, seed=1)
    with running_renderer(model) as renderer, running_sampler(model) as sampler:
        prompts = PromptMaker(renderer, AutoTokenizer.from_pretrained(model), reference.module.config.image_token_id)
        prompt = prompts.make("See ", picture(1, 140, 112), " and ", picture(2, 56, 84), " there.")
        async with SamplerClient(sampler.address) as client:
            await (await Sender(client).join()).push("vision@1", adapter, 4)
            for snapshot_id, expected in (("", reference), ("vision@1", Reference(model).merge(adapter, 4))):
                answer = await ask(client, request_for(prompt.wire, snapshot_id, prompt_logprobs=True, max_tokens=2))
                wanted = expected.prompt_logprobs(prompt.tokens, prompt.images)
                assert np.abs(answer.prompt_logprobs - wanted)[1:].max() < TOLERANCE
            with pytest.raises(SnapshotNotLoaded):
                await ask(client, request_for(prompt.wire, "elsewhere@1"))
        pids = sampler.engine_pids()
        sampler.process.kill()
        await asyncio.to_thread(sampler.process.wait, 10)
        deadline = time.monotonic() + 20
        while any(_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "the engine outlived its service"
            await asyncio.sleep(0.05)
    assert pids


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
