"""Renderers of the tiny checkpoints behind real gRPC servers, one of each kind for all tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

import fovea_tinyvlm
from tests.served_renderer import Served, serving

KINDS: tuple[fovea_tinyvlm.Kind, ...] = ("qwen3_vl", "qwen2_5_vl", "qwen3")
# The tensors of the largest input in these tests take 3 MB. The limit holds two of them but not three.
FEATURE_CACHE_BYTES = 8 * 2**20
IMAGE_STORE_BYTES = 6 * 2**20
SETTINGS = {
    "feature_cache_bytes": FEATURE_CACHE_BYTES,
    "image_store_bytes": IMAGE_STORE_BYTES,
    "image_hosts": ["127.0.0.1"],
}


@pytest.fixture(scope="session")
async def all_served() -> AsyncIterator[dict[str, Served]]:
    """Renderers of all kinds. They start side by side, because most of a start is the imports of workers."""
    async with AsyncExitStack() as stack:
        contexts = [serving(fovea_tinyvlm.ensure(kind), **SETTINGS) for kind in KINDS]
        served = await asyncio.gather(*(context.__aenter__() for context in contexts))
        for context in contexts:
            stack.push_async_exit(context.__aexit__)
        yield dict(zip(KINDS, served, strict=True))


@pytest.fixture
def qwen3_vl(all_served: dict[str, Served]) -> Served:
    return all_served["qwen3_vl"]


@pytest.fixture
def qwen3(all_served: dict[str, Served]) -> Served:
    return all_served["qwen3"]


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl"])
def vision(request: pytest.FixtureRequest, all_served: dict[str, Served]) -> Served:
    """Each vision-language renderer in turn."""
    served: Served = all_served[request.param]
    return served
