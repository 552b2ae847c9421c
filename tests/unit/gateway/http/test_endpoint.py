"""Handles a few requests at a time, in order, with other tasks in between."""

import asyncio

import httpx
import pytest

from fovea_gateway.http.endpoint import SHARD, BurstLimiter, Json, Readiness, ReadyMiddleware, accepted_encoding


async def test_a_crowd_goes_in_order_and_lets_others_through_in_between() -> None:
    limiter, order = BurstLimiter(4), []

    async def one(number: int) -> None:
        await limiter.enter()
        order.append(number)

    async def other() -> int:
        await asyncio.sleep(0)
        return len(order)

    crowd = [asyncio.create_task(one(number)) for number in range(100)]
    seen = await asyncio.create_task(other())
    assert seen <= 8, "an unrelated task must wait for a few requests, not for all"
    await asyncio.gather(*crowd)
    assert order == list(range(100))
    await asyncio.wait_for(limiter.enter(), 5)


async def test_a_cancelled_waiter_blocks_no_other() -> None:
    limiter, passed = BurstLimiter(1), []

    async def one(number: int) -> None:
        await limiter.enter()
        passed.append(number)

    crowd = [asyncio.create_task(one(number)) for number in range(6)]
    await asyncio.sleep(0)
    for number in (2, 4):
        crowd[number].cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert passed == [0, 1, 3, 5]


def test_encodings_are_chosen_from_what_a_client_reads() -> None:
    assert accepted_encoding("gzip, deflate, zstd") == "zstd"
    assert accepted_encoding("gzip;q=1.0, deflate") == "gzip"
    assert accepted_encoding("zstd;q=0, gzip") == "gzip"
    assert accepted_encoding("") is accepted_encoding("br") is accepted_encoding("identity") is None


@pytest.mark.parametrize(
    ("path", "status"),
    [("/base/api/v1/healthz", 200), ("/base/api/v1/models/healthz", 503), ("/healthz", 503), ("/base/x", 503)],
)
async def test_only_health_checks_pass_before_the_gateway_is_ready(path: str, status: int) -> None:
    app = ReadyMiddleware(Json({}), Readiness(), "/base")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        assert (await client.get(path)).status_code == status


async def test_a_request_passes_unless_it_names_another_shard() -> None:
    ready = Readiness()
    ready.shard = 1
    app = ReadyMiddleware(Json({}), ready, "")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        answers = [await client.get("/x", headers=headers) for headers in ({}, {SHARD: "1"}, {SHARD: "0"})]
    assert [answer.status_code for answer in answers] == [200, 200, 503]
