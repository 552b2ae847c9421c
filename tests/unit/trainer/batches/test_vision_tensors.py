"""Images come from a renderer with a small cache; its gRPC server is real."""

import asyncio
import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

from fovea.api.v1 import model_input_pb2, renderer_pb2, renderer_pb2_grpc
from fovea.wire.errors import FeatureEvicted, to_status
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import FeatureTensors, iter_pieces, size_bytes, tensors_sha256
from fovea_trainer.batches.datum_decoding import Datum
from fovea_trainer.batches.vision_cache import TensorFetcher
from tests.vision_families import small_qwen3_vl
from tests.waiting import eventually

COUNT, HELD = 7, 2


class SmallRenderer(renderer_pb2_grpc.RendererServiceServicer):
    """Holds the last `HELD` rendered images."""

    def __init__(self) -> None:
        self.held: OrderedDict[str, FeatureTensors] = OrderedDict()
        self.asked: list[list[str]] = []
        self.open = threading.Event()
        self.open.set()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        renderer_pb2_grpc.add_RendererServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None)

    def render(self, number: int) -> Datum:
        tensors = {
            "pixel_values": np.full((4, 6), number, np.uint8),
            "image_grid_thw": np.array([[1, 2, 2]], np.int64),
        }
        digest = f"{number:064x}"
        self.held[digest] = tensors
        while len(self.held) > HELD:
            self.held.popitem(last=False)
        feature = model_input_pb2.VisionFeature(
            digest=digest,
            source=self.address,
            tensors_sha256=tensors_sha256(tensors),
            size_bytes=size_bytes(tensors),
        )
        datum = Datum.blank(3)
        object.__setattr__(datum, "index", number)
        object.__setattr__(datum, "spans", (ImageSpan(0, np.ones(1, np.bool_), feature),))
        return datum

    def FetchFeatures(self, request: renderer_pb2.FetchFeaturesRequest, context: Any) -> Any:  # noqa: N802
        self.asked.append(list(request.digests))
        assert self.open.wait(60)
        for digest in request.digests:
            if digest not in self.held:
                status = to_status(FeatureEvicted(f"the tensors of image {digest} are not held"))
                context.abort(grpc.StatusCode.NOT_FOUND, status.message)
        for digest in request.digests:
            yield from iter_pieces(digest, self.held[digest])


@pytest.fixture
def renderer() -> Iterator[SmallRenderer]:
    started = SmallRenderer()
    yield started
    started.close()


def test_a_batch_that_is_more_than_a_renderer_holds_comes_in_portions(renderer: SmallRenderer) -> None:
    cache = TensorFetcher(0, small_qwen3_vl(patch_size=1), 10.0, "")
    datums = [renderer.render(number) for number in range(COUNT)]
    missing = []
    for _ in range(COUNT):
        try:
            found = cache.tensors_of("m", datums, {})
            break
        except FeatureEvicted as error:
            missing.append([int(index) for index in error.metadata["datums"].split(",")])
            for number in missing[-1][:HELD]:
                renderer.render(number)
    assert missing == [[0, 1, 2, 3, 4], [2, 3, 4], [4]]
    assert [int(found[f"{number:064x}"]["pixel_values"][0, 0]) for number in range(COUNT)] == list(range(COUNT))
    with pytest.raises(FeatureEvicted):
        cache.tensors_of("another", datums, {})


def test_staged_tensors_of_a_model_are_dropped_with_it(renderer: SmallRenderer) -> None:
    cache = TensorFetcher(0, small_qwen3_vl(patch_size=1), 10.0, "")
    datums = [renderer.render(number) for number in range(3)]
    with pytest.raises(FeatureEvicted):
        cache.tensors_of("m", datums, {})
    cache.forget("m")
    renderer.held.clear()
    with pytest.raises(FeatureEvicted) as caught:
        cache.tensors_of("m", datums, {})
    assert caught.value.metadata["datums"] == "0,1,2"


def test_tensors_for_a_call_that_never_comes_are_freed(renderer: SmallRenderer) -> None:
    now = 0.0
    cache = TensorFetcher(0, small_qwen3_vl(patch_size=1), 10.0, "", lambda: now)
    with pytest.raises(FeatureEvicted):
        cache.tensors_of("gone", [renderer.render(number) for number in range(3)], {})
    staged = [weakref.ref(each["pixel_values"]) for each in cache._staged["gone"].values()]
    assert len(staged) == HELD
    now = 1000.0
    cache.tensors_of("other", [renderer.render(9)], {})
    gc.collect()
    assert not [one for one in staged if one() is not None]


def feature(datum: Datum) -> model_input_pb2.VisionFeature:
    """Returns the feature of its one image."""
    return datum.spans[0].feature


async def test_prefetched_tensors_are_available_when_needed(renderer: SmallRenderer) -> None:
    cache = TensorFetcher(2**20, small_qwen3_vl(patch_size=1), 10.0, "")
    datums = [renderer.render(number) for number in (0, 1)]
    renderer.open.clear()
    cache.fetch_ahead(map(feature, datums))
    cache.fetch_ahead(map(feature, datums))
    await eventually(lambda: bool(renderer.asked))
    call = asyncio.create_task(asyncio.to_thread(cache.tensors_of, "m", datums, {}))
    await asyncio.sleep(0.1)  # so that it waits for the fetch in progress
    renderer.open.set()
    found = await call
    renderer.held.clear()
    assert found.keys() == cache.tensors_of("m", datums, {}).keys() == {f"{number:064x}" for number in (0, 1)}
    cache.fetch_ahead(map(feature, datums))
    assert renderer.asked == [[f"{number:064x}" for number in (0, 1)]]


async def test_a_call_waits_for_no_hint_that_was_not_begun(renderer: SmallRenderer) -> None:
    cache = TensorFetcher(2**20, small_qwen3_vl(patch_size=1), 10.0, "")
    first, second = (renderer.render(number) for number in (0, 1))
    renderer.open.clear()
    cache.fetch_ahead([feature(first)])
    await eventually(lambda: bool(renderer.asked))
    cache.fetch_ahead([feature(second)])
    call = asyncio.create_task(asyncio.to_thread(cache.tensors_of, "m", [second], {}))
    await eventually(lambda: len(renderer.asked) == 2)  # beside the one that is held
    renderer.open.set()
    await call
    assert cache.tensors_of("m", [first, second], {}).keys() == {f"{number:064x}" for number in (0, 1)}
    assert len(renderer.asked) == 2


async def test_a_hint_that_comes_to_nothing_does_no_harm(renderer: SmallRenderer) -> None:
    cache = TensorFetcher(2**20, small_qwen3_vl(patch_size=1), 10.0, "")
    datum = renderer.render(0)
    renderer.held.clear()
    cache.fetch_ahead([feature(datum)])
    await eventually(lambda: bool(renderer.asked))
    with pytest.raises(FeatureEvicted):
        cache.tensors_of("m", [datum], {})
    renderer.render(0)
    assert cache.tensors_of("m", [datum], {}).keys() == {"0".zfill(64)}


async def test_prefetching_stops_before_it_evicts_itself(renderer: SmallRenderer) -> None:
    size = feature(renderer.render(0)).size_bytes
    cache = TensorFetcher(4 * size, small_qwen3_vl(patch_size=1), 10.0, "")
    cache.fetch_ahead([feature(renderer.render(number)) for number in (0, 1, 2)])
    datums = [renderer.render(number) for number in (3, 4)]
    cache.fetch_ahead(map(feature, datums))
    await eventually(lambda: bool(renderer.asked))
    cache.fetch_ahead([feature(renderer.render(5))])
    cache.tensors_of("m", datums[1:], {})
    assert renderer.asked == [[f"{number:064x}" for number in (3, 4)]]
