"""Requests of policies over a real gateway: each picture is sent once, requests of one size share one call, and a
cancellation reaches the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from fovea.client import GatewayClient
from fovea.wire.errors import InvalidInput, NotFound
from fovea_rollout import (
    EXPERTS_HEADERS,
    GrpcPolicy,
    Message,
    Picture,
    RolloutSettings,
    SamplingSettings,
    TinkerPolicy,
    Tokens,
    WeightVersions,
    expert_source,
    run_rollout,
)
from fovea_rollout.policies.async_cache import AsyncCache
from tests.contract.gateway.conftest import KEY, Stand, running
from tests.contract.gateway.fakes import IMAGE_TOKENS, MODEL
from tests.waiting import eventually

SETTINGS = SamplingSettings(max_tokens=8, seed=3)


def picture(value: int, size: int = 4) -> Picture:
    return Picture.of_pixels(np.full((size, size, 3), value, np.uint8))


PROMPT = (Tokens((1, 2)), picture(1), Tokens((3,)), picture(2), picture(1))


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with running(Stand(tmp_path)) as stand:
        yield stand


@pytest.fixture
async def exits() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as exits:
        yield exits


async def grpc_policy(stand: Stand, exits: AsyncExitStack) -> GrpcPolicy:
    assert stand.gateway is not None
    client = await exits.enter_async_context(GatewayClient(stand.gateway.grpc.address, KEY))
    return GrpcPolicy(client, await client.create_sampling_session(await client.create_session(), 0, base_model=MODEL))


async def tinker_policy(stand: Stand, exits: AsyncExitStack) -> TinkerPolicy:
    return TinkerPolicy(await base_client(stand, exits))


async def base_client(
    stand: Stand, exits: AsyncExitStack, headers: dict[str, str] | None = None
) -> tinker.SamplingClient:
    connect = partial(tinker.ServiceClient, base_url=stand.url, api_key=KEY, default_headers_overrides=headers)
    service = await asyncio.to_thread(connect)
    exits.push_async_callback(asyncio.to_thread, service.close, "success")
    make = service.create_sampling_client
    return await asyncio.to_thread(lambda: make(base_model=MODEL).result())


POLICIES = [grpc_policy, tinker_policy]


@pytest.mark.parametrize("make", POLICIES)
async def test_the_request_and_the_response_of_a_sample(stand: Stand, exits: AsyncExitStack, make: Any) -> None:
    policy = await make(stand, exits)
    sampled = await policy.sample(PROMPT, SETTINGS, (7, 9), "c")
    (request,) = stand.sampler.of("Sample")
    assert list(request.params.stop.token_ids) == [7, 9]
    assert (request.params.seed, request.params.max_tokens, request.params.top_k) == (3, 8, -1)
    assert sampled.ids == tuple(stand.sampler.tokens_of("", 3, 0, 8))
    assert sampled.logprobs == (-0.25,) * 8
    assert (sampled.stop_reason, sampled.versions) == ("length", WeightVersions(0, 0))


async def test_experts_come_with_a_sample_if_asked_for(stand: Stand, exits: AsyncExitStack) -> None:
    assert stand.gateway is not None
    client = await exits.enter_async_context(GatewayClient(stand.gateway.grpc.address, KEY))
    session = await client.create_sampling_session(await client.create_session(), 0, base_model=MODEL)
    over_grpc = GrpcPolicy(client, session, routed_experts=True)
    by_header = TinkerPolicy(await base_client(stand, exits, EXPERTS_HEADERS), experts=expert_source(stand.url, KEY))
    without = await (await grpc_policy(stand, exits)).sample(PROMPT, SETTINGS, (), "c")
    assert without.experts is None
    for policy in (over_grpc, by_header):
        sampled = await policy.sample(PROMPT, SETTINGS, (), "c")
        assert sampled.experts is not None
        assert sampled.experts.shape == (3 + 3 * IMAGE_TOKENS + 7, 3, 2)


@pytest.mark.parametrize("make", POLICIES)
async def test_token_counts_are_asked_once_a_size(stand: Stand, exits: AsyncExitStack, make: Any) -> None:
    policy = await make(stand, exits)
    pictures = [picture(value, size) for value in range(20) for size in (4, 8)]
    assert await asyncio.gather(*map(policy.token_count, pictures)) == [IMAGE_TOKENS] * 40
    assert len(stand.sampler.of("Sample")) == 2


@pytest.mark.parametrize("make", POLICIES)
async def test_a_deadline_frees_the_engine(stand: Stand, exits: AsyncExitStack, make: Any) -> None:
    policy = await make(stand, exits)
    stand.sampler.open.clear()

    class Template:
        stop_ids = (7,)
        is_append_only = True

        def render(self, history: Any) -> tuple[Tokens, ...]:
            return (Tokens((1, 2)),)

    class Patient:
        def reset(self) -> list[Message]:
            return [Message("user", ("x",))]

        def close(self) -> None:
            pass

    template, environment = Template(), Patient()
    settings = RolloutSettings(SETTINGS, deadline_s=3.0)
    factory: Any = lambda: environment  # noqa: E731
    trajectory = await run_rollout(policy, template, factory, settings, "c")  # type: ignore[arg-type]
    assert trajectory.failure is not None
    assert "in stage 'sample' of turn 0" in trajectory.failure.error
    await eventually(lambda: stand.sampler.cancelled == 1)


@pytest.mark.parametrize("make", POLICIES)
async def test_in_flight_updates_bound_the_versions(stand: Stand, exits: AsyncExitStack, make: Any) -> None:
    policy = await make(stand, exits)
    policy.set_version(4)
    stand.sampler.open.clear()
    task = asyncio.create_task(policy.sample((Tokens((1,)),), SETTINGS, (), "c"))
    await eventually(lambda: stand.sampler.running == 1)
    policy.set_version(5)
    stand.sampler.open.set()
    assert (await task).versions == WeightVersions(4, 5)


@pytest.mark.parametrize("make", POLICIES)
async def test_what_the_server_refuses_is_raised(stand: Stand, exits: AsyncExitStack, make: Any) -> None:
    policy = await make(stand, exits)
    with pytest.raises((InvalidInput, tinker.RequestFailedError), match="1000 at position 0"):
        await policy.sample((Tokens((1000,)),), SETTINGS, (), "c")


class Uploads(GatewayClient):
    """Counts uploads. The first ones may be lost, as if the gateway had dropped them."""

    made = 0
    lost = 0

    async def upload_image(self, data: bytes) -> str:
        self.made += 1
        return hashlib.sha256(data).hexdigest() if self.made <= self.lost else await super().upload_image(data)


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
async def test_a_picture_is_uploaded_once_and_again_if_it_was_dropped(stand: Stand, lost: int) -> None:
    assert stand.gateway is not None
    async with Uploads(stand.gateway.grpc.address, KEY) as client:
        session = await client.create_session()
        policy = GrpcPolicy(client, await client.create_sampling_session(session, 0, base_model=MODEL))
        client.lost = lost
        if lost == 3:
            with pytest.raises(NotFound, match=r"call UploadImage and retry"):
                await policy.sample(PROMPT, SETTINGS, (), "c")
        await asyncio.gather(*(policy.sample(PROMPT, SETTINGS, (), "c") for _ in range(10)))
        assert client.made == {0: 2, 1: 4, 2: 4, 3: 6}[lost]


async def test_other_weights_share_what_is_known_of_pictures(stand: Stand, exits: AsyncExitStack) -> None:
    client = await base_client(stand, exits)
    token_counts: AsyncCache[tuple[int, int], int] = AsyncCache()
    await TinkerPolicy(client, 2, token_counts).token_count(picture(1))
    other = TinkerPolicy(client, 3, token_counts)
    assert await other.token_count(picture(2)) == IMAGE_TOKENS
    assert len(stand.sampler.of("Sample")) == 1
    assert (await other.sample((Tokens((1,)),), SETTINGS, (), "c")).versions == WeightVersions(3, 3)
