"""One image is processed once, for any number of callers and cancellations."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from fovea.wire.errors import FeatureEvicted, ResourceExhausted
from fovea_renderer.image_header import InvalidChunk
from fovea_renderer.image_sources import FeatureCache
from fovea_renderer.worker_pool import ProcessedImage

GRID = np.array([[1, 4, 6]], dtype=np.int64)


def processed(size_bytes: int = 100) -> ProcessedImage:
    pixel_values = np.zeros(size_bytes - GRID.nbytes, dtype=np.uint8)
    return ProcessedImage({"pixel_values": pixel_values, "image_grid_thw": GRID}, "ab" * 32, 0.01)


class Work:
    """Processing that waits until it is released, and counts its calls."""

    def __init__(self, outcome: ProcessedImage | Exception) -> None:
        self.outcome, self.started, self.cancelled = outcome, 0, 0
        self.let_go = asyncio.Event()

    async def __call__(self) -> ProcessedImage:
        self.started += 1
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def at_once(size_bytes: int) -> Callable[[], Awaitable[ProcessedImage]]:
    async def process() -> ProcessedImage:
        return processed(size_bytes)

    return process


async def test_concurrent_callers_share_one_processing() -> None:
    store, work = FeatureCache(1000), Work(processed())
    asking = [asyncio.create_task(store.get("d", work)) for _ in range(5)]
    await asyncio.sleep(0)
    work.let_go.set()
    features = await asyncio.gather(*asking)
    assert work.started == 1
    assert all(feature is store.held("d") for feature in features)
    assert features[0].size_bytes == 100
    assert await store.get("d", work) is features[0]
    assert work.started == 1


async def test_concurrent_callers_share_one_refusal_and_the_next_retries() -> None:
    store, work = FeatureCache(1000), Work(InvalidChunk("corrupt", "broken"))
    asking = [asyncio.create_task(store.get("d", work)) for _ in range(3)]
    await asyncio.sleep(0)
    work.let_go.set()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert work.started == 1
    assert [type(outcome) for outcome in outcomes] == [InvalidChunk] * 3
    assert (await store.get("d", at_once(100))).digest == "d"


async def test_a_cancelled_caller_does_not_affect_the_others() -> None:
    store, work = FeatureCache(1000), Work(processed())
    impatient, patient = (asyncio.create_task(store.get("d", work)) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.sleep(0)
    work.let_go.set()
    assert (await patient).digest == "d"
    assert (work.started, work.cancelled) == (1, 0)


async def test_work_without_callers_is_cancelled() -> None:
    store, work = FeatureCache(1000), Work(processed())
    asking = [asyncio.create_task(store.get("d", work)) for _ in range(2)]
    await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await asyncio.sleep(0)
    assert (work.started, work.cancelled) == (1, 1)
    assert (await store.get("d", at_once(100))).digest == "d"


async def test_the_longest_unused_goes_first() -> None:
    store = FeatureCache(250)
    await store.get("a", at_once(100))
    await store.get("b", at_once(100))
    store.held("a")
    await store.get("c", at_once(100))
    with pytest.raises(FeatureEvicted, match="image b are not held; render the image again"):
        store.held("b")
    assert store.held("a").digest == "a"


async def test_a_feature_above_the_limit_names_the_setting() -> None:
    store = FeatureCache(99)
    with pytest.raises(ResourceExhausted, match=r"100 bytes, above the 99 .*feature_cache_bytes"):
        await store.get("a", at_once(100))
