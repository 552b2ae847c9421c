"""A sampler over two cards equals one on a single card: base, an adapter of every layer, full weights."""

import os
import pathlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig

from benchmarks.agreement import kl
from fovea.client.inference import SamplerClient
from tests.e2e.sampler.asking import ask, rendered, request_for
from tests.e2e.sampler.process import running_sampler
from tests.e2e.sampler.reference import Reference, random_adapter
from tests.e2e.sampler.sender import Sender, manifest_of
from tests.e2e.sampler.test_weights import trained
from tests.gpu.conftest import FIRST, SECOND
from tests.gpu.test_gpu import LARGEST_KL

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

RANK = 8
ARGUMENTS = ("--transfer", "gloo", "--eager", "--gpu-memory-fraction", "0.3")


@pytest.fixture
async def pair(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[SamplerClient]]:
    """Clients of a sampler on one card and of another over two cards."""
    for name in [name for name in os.environ if name.startswith("FOVEA_SAMPLER_")]:
        monkeypatch.delenv(name)
    async with AsyncExitStack() as stack:
        clients = []
        for devices in (FIRST, f"{FIRST},{SECOND}"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
            count = str(len(devices.split(",")))
            sampler = stack.enter_context(running_sampler(model, "--tensor-parallel", count, *ARGUMENTS))
            clients.append(await stack.enter_async_context(SamplerClient(sampler.address)))
        yield clients


async def scores(client: SamplerClient, model: pathlib.Path, snapshot_id: str) -> npt.NDArray[np.float64]:
    """Returns the scores of 200 random tokens."""
    text = AutoConfig.from_pretrained(model).get_text_config()
    ids = np.random.default_rng(5).integers(10, text.vocab_size // 2, 200).tolist()
    answer = await ask(client, request_for(rendered([ids]), snapshot_id, prompt_logprobs=True, max_tokens=1))
    assert answer.prompt_logprobs is not None
    return answer.prompt_logprobs[1:].astype(np.float64)


async def test_two_cards_are_one(pair: list[SamplerClient], model: pathlib.Path) -> None:
    reference = Reference(model)
    adapter, state = random_adapter(reference, RANK, seed=2, scale=0.02), trained(reference)
    senders = [await Sender(client).join() for client in pair]
    assert [(await client.info()).transfer_worker_count for client in pair] == [1, 2]
    before = [await scores(client, model, "") for client in pair]
    assert kl(before[1] - before[0]) <= LARGEST_KL
    for name, tensors, rank in (("adapter@1", adapter, RANK), ("full@1", state, None)):
        for sender in senders:
            loaded = await sender.push(name, tensors, rank)
            assert loaded.digest == manifest_of(name, tensors, rank).snapshot.digest
        one, two = [await scores(client, model, name) for client in pair]
        assert kl(two - one) <= LARGEST_KL
        assert np.abs(two - before[1]).max() > 0.1, "the push must change the scores"
