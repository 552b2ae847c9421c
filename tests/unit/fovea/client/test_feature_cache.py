"""Vision tensors are cached under both digests, up to a number of bytes."""

import numpy as np
import pytest

from fovea import vision
from fovea.api.v1 import model_input_pb2
from fovea.client.inference import FeatureCache
from fovea.wire.errors import InvalidInput
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import FeatureTensors, size_bytes

CONFIG = {
    "model_type": "qwen3_vl",
    "image_token_id": 90,
    "vision_config": {"patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3},
}
TENSORS: FeatureTensors = {
    "pixel_values": np.zeros((16, 24), np.uint8),
    "image_grid_thw": np.array([[1, 4, 4]], np.int64),
}
IMAGE_BYTES = 16 * 24 + 24


def cache(limit_bytes: int, default_source: str = "") -> FeatureCache:
    """A cache for images of four-by-four patches."""
    return FeatureCache(vision.bind(CONFIG, {}), limit_bytes, default_source)


def feature(digest: str, tensors_sha256: str = "t", size_bytes: int = IMAGE_BYTES) -> model_input_pb2.VisionFeature:
    """Returns a reference to an image."""
    return model_input_pb2.VisionFeature(digest=digest, tensors_sha256=tensors_sha256, size_bytes=size_bytes)


def test_the_least_recently_used_go_first() -> None:
    assert size_bytes(TENSORS) == IMAGE_BYTES
    kept = cache(2 * IMAGE_BYTES)
    for digest in ("a", "b"):
        kept.put(feature(digest), TENSORS)
    assert kept.get(feature("a")) is TENSORS
    kept.put(feature("c"), TENSORS)
    assert [kept.get(feature(digest)) is None for digest in ("a", "b", "c")] == [False, True, False]
    assert kept.used_bytes == 2 * IMAGE_BYTES


def test_an_image_above_the_limit_is_not_kept() -> None:
    kept = cache(IMAGE_BYTES - 1)
    kept.put(feature("a"), TENSORS)
    assert kept.get(feature("a")) is None


def test_other_tensors_under_a_known_image_are_not_those() -> None:
    kept = cache(IMAGE_BYTES)
    kept.put(feature("a"), TENSORS)
    assert kept.get(feature("a", "other")) is None


def test_the_renderer_to_ask() -> None:
    named = model_input_pb2.VisionFeature(source="renderer:1")
    assert cache(0).source_of(named, "f") == "renderer:1"
    assert cache(0, "renderer:2").source_of(feature("a"), "f") == "renderer:2"
    with pytest.raises(InvalidInput, match=r"^f\.source is empty, and no --renderer is set"):
        cache(0).source_of(feature("a"), "f")


@pytest.mark.parametrize(
    ("is_embedding", "size_bytes", "problem"),
    [
        ([True] * 8, IMAGE_BYTES, "the tensors make 4 ids, but the request has 8"),
        ([True, True, False, True], IMAGE_BYTES, "embedding_mask is not that of the tensors"),
        ([True] * 4, 5, f"size_bytes is 5, the tensors have {IMAGE_BYTES}"),
    ],
)
def test_a_span_of_another_image_is_refused(is_embedding: list[bool], size_bytes: int, problem: str) -> None:
    kept = cache(0)
    kept.check(ImageSpan(0, np.ones(4, np.bool_), feature("a")), TENSORS, "f")
    span = ImageSpan(0, np.array(is_embedding), feature("a", size_bytes=size_bytes))
    with pytest.raises(InvalidInput, match=rf"^f does not fit what the renderer has: {problem}"):
        kept.check(span, TENSORS, "f")
