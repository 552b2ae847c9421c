"""The requests with which the KL penalty scores tokens by the base model."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import tinker

from fovea_rollout import Picture
from fovea_rollout.loop.kl_penalty import base_logprobs
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import MODEL


def datum(value: int, answer: int) -> tinker.Datum:
    """One picture, then one sampled token."""
    image = Picture.of_pixels(np.full((4, 4, 3), value, np.uint8))
    chunks = [tinker.types.ImageChunk(data=image.data, format="png"), tinker.EncodedTextChunk(tokens=[1, 2])]
    read = tinker.ModelInput(chunks=list(chunks))
    targets = tinker.TensorData(data=[0] * 5 + [answer], dtype="int64", shape=[6])
    return tinker.Datum(model_input=read, loss_fn_inputs={"target_tokens": targets})


async def test_equal_datums_are_scored_once(tmp_path: Path) -> None:
    async with running(Stand(tmp_path)) as stand, AsyncExitStack() as exits:
        service = await asyncio.to_thread(lambda: tinker.ServiceClient(base_url=stand.url, api_key=KEY))
        exits.push_async_callback(asyncio.to_thread, service.close, "success")
        base = await asyncio.to_thread(lambda: service.create_sampling_client(base_model=MODEL).result())
        data = [datum(value, answer) for value, answer in ((1, 3), (1, 4), (1, 3), (2, 3), (2, 3))]
        scores = await base_logprobs(data, [np.arange(6) == 5] * 5, base)
    assert len(stand.sampler.of("Sample")) == 3
    assert [len(one) for one in scores] == [6] * 5
    np.testing.assert_array_equal(scores[0], scores[2])
