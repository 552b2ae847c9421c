"""Prometheus metrics of the renderer."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from fovea.wire.errors import FoveaError

IMAGES_RENDERED = Counter("fovea_renderer_images_rendered_total", "Images that a worker has processed.")
FEATURE_LOOKUPS = Counter(
    "fovea_renderer_feature_lookups_total",
    "Images in Render calls, by outcome: hit (tensors cached), joined (already being processed) or miss.",
    ["outcome"],
)
IMAGES_PENDING = Gauge("fovea_renderer_images_pending", "Images that wait for a worker or are being processed.")
IMAGE_LOOKUPS = Counter(
    "fovea_renderer_image_lookups_total", "Uploaded images to which a Render call refers, by outcome.", ["outcome"]
)
IMAGE_SECONDS = Histogram(
    "fovea_renderer_image_seconds",
    "Seconds that a worker spent on one image: decoding, resizing, patches, digest.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
IMAGE_BYTES = Counter("fovea_renderer_image_bytes_total", "Encoded bytes of the processed images.")
FEATURE_BYTES = Counter("fovea_renderer_feature_bytes_total", "Bytes of the tensors that workers have computed.")
FETCHED_BYTES = Counter("fovea_renderer_fetched_bytes_total", "Bytes of the tensors that FetchFeatures has sent.")
HELD_BYTES = Gauge("fovea_renderer_held_bytes", "Bytes in the caches, by cache: features or images.", ["cache"])
REFUSALS = Counter("fovea_renderer_refusals_total", "Refused inputs, by cause.", ["cause"])


@contextmanager
def refusals_counted() -> Iterator[None]:
    """Counts a FoveaError that leaves the block. The label is its cause or, if it has none, its reason."""
    try:
        yield
    except FoveaError as error:
        REFUSALS.labels(error.metadata.get("cause", error.reason.lower())).inc()
        raise
