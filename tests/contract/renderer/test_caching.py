"""Images are uploaded once, processed once, and available until eviction."""

import asyncio
import hashlib

import pytest
from prometheus_client import REGISTRY

from fovea.api.v1 import renderer_pb2
from fovea.client import FeatureFetcher
from fovea.wire.conventions import INLINE_IMAGE_BYTES
from fovea.wire.errors import FeatureEvicted, InvalidInput, NotFound, ResourceExhausted
from fovea.wire.tensors import tensors_sha256
from tests.contract.renderer.conftest import FEATURE_CACHE_BYTES, IMAGE_STORE_BYTES
from tests.contract.renderer.inputs import image, model_input, reference, text
from tests.served_renderer import Served
from tests.unit.renderer.pictures import encoded, picture, png


def rendered_count() -> float:
    return REGISTRY.get_sample_value("fovea_renderer_images_rendered_total") or 0.0


async def test_one_image_in_many_requests_at_once_is_processed_once(vision: Served) -> None:
    request = model_input(text(1), image(png(700, 500, seed=21)))
    before = rendered_count()
    answers = await asyncio.gather(*(vision.client.render(request) for _ in range(8)))
    assert rendered_count() - before == 1
    assert all(answer == answers[0] for answer in answers)


async def test_one_image_named_in_three_ways_is_one_feature(qwen3_vl: Served) -> None:
    data = png(100, 100, seed=22)
    sha256 = await qwen3_vl.client.put_image(data)
    assert sha256 == hashlib.sha256(data).hexdigest()
    before = rendered_count()
    rendered = await qwen3_vl.client.render(
        model_input(image(data), reference(sha256=sha256, expected=64), image(data))
    )
    assert rendered_count() - before == 1
    assert len({span.feature.digest for span in rendered.spans}) == 1
    assert [span.offset for span in rendered.spans] == [0, 64, 128]


async def test_large_images_are_put_by_the_client(qwen3_vl: Served) -> None:
    data = encoded(picture(900, 700, seed=23), compress_level=0)
    assert len(data) > INLINE_IMAGE_BYTES
    rendered = await qwen3_vl.client.render(model_input(text(1), image(data, expected=28 * 22)))
    assert rendered.spans[0].length == 28 * 22
    features = await qwen3_vl.client.fetch_features([rendered.spans[0].feature.digest])
    assert features[rendered.spans[0].feature.digest]["pixel_values"].shape == (4 * 28 * 22, 1536)


async def test_fetched_tensors_are_the_promised_ones(vision: Served) -> None:
    rendered = await vision.client.render(model_input(image(png(300, 200, seed=24)), image(png(90, 90, seed=25))))
    promised = {span.feature.digest: span.feature for span in rendered.spans}
    features = await vision.client.fetch_features(list(promised))
    assert {digest: tensors_sha256(tensors) for digest, tensors in features.items()} == {
        digest: feature.tensors_sha256 for digest, feature in promised.items()
    }
    assert all(
        sum(array.nbytes for array in tensors.values()) == promised[digest].size_bytes
        for digest, tensors in features.items()
    )


async def test_trainer_ranks_fetch_without_an_event_loop(qwen3_vl: Served) -> None:
    rendered = await qwen3_vl.client.render(model_input(image(png(300, 200, seed=24)), image(png(90, 90, seed=25))))
    fetcher = FeatureFetcher()
    fetched = await asyncio.to_thread(fetcher.fetch, [span.feature for span in rendered.spans])
    fetcher.close()
    assert fetched.keys() == {span.feature.digest for span in rendered.spans}


async def test_an_evicted_feature_is_named_and_rendered_again(qwen3_vl: Served) -> None:
    request = model_input(image(png(640, 480, seed=26)))
    first = (await qwen3_vl.client.render(request)).spans[0].feature
    others = -(-FEATURE_CACHE_BYTES // first.size_bytes)
    for seed in range(others):
        await qwen3_vl.client.render(model_input(image(png(640, 480, seed=100 + seed))))
    with pytest.raises(FeatureEvicted, match=f"image {first.digest} are not held") as evicted:
        await qwen3_vl.client.fetch_features([first.digest])
    assert evicted.value.metadata["digest"] == first.digest
    again = (await qwen3_vl.client.render(request)).spans[0].feature
    assert again == first
    assert list(await qwen3_vl.client.fetch_features([first.digest])) == [first.digest]


async def test_tensors_above_the_cache_name_the_setting(qwen3_vl: Served) -> None:
    with pytest.raises(ResourceExhausted, match="feature_cache_bytes"):
        await qwen3_vl.client.render(model_input(image(encoded(picture(1600, 1200), "JPEG"), "JPEG")))


async def test_an_evicted_image_is_named(qwen3_vl: Served) -> None:
    first = await qwen3_vl.client.put_image(png(64, 64, seed=27))
    for filler in range(2):
        await qwen3_vl.client.put_image(bytes([filler]) * (IMAGE_STORE_BYTES - 1))
    with pytest.raises(NotFound, match=f"no image with SHA-256 {first} is held"):
        await qwen3_vl.client.render(model_input(reference(sha256=first)))


async def test_bytes_that_differ_from_their_sha256_are_not_held(qwen3_vl: Served) -> None:
    stub = qwen3_vl.client._stub
    data = png(64, 64, seed=28)

    async def put(*pieces: renderer_pb2.PutImageRequest) -> renderer_pb2.PutImageResponse:
        async def requests():  # type: ignore[no-untyped-def]
            for piece in pieces:
                yield piece

        response: renderer_pb2.PutImageResponse = await qwen3_vl.client._unary(stub.PutImage, requests(), 10)
        return response

    with pytest.raises(InvalidInput, match=r"sha256 is .* but the bytes have"):
        await put(renderer_pb2.PutImageRequest(sha256="ab" * 32, data=data))
    with pytest.raises(InvalidInput, match="is not 64 lower-case hexadecimal digits"):
        await put(renderer_pb2.PutImageRequest(sha256="AB" * 32, data=data))
    with pytest.raises(InvalidInput, match="the image has no bytes"):
        await put()
    sha256 = hashlib.sha256(data).hexdigest()
    halves = (renderer_pb2.PutImageRequest(sha256=sha256, data=data[:50]), renderer_pb2.PutImageRequest(data=data[50:]))
    assert (await put(*halves)).size_bytes == len(data)
    await qwen3_vl.client.render(model_input(reference(sha256=sha256)))
