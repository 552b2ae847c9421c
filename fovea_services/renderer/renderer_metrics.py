"""What the renderer counts, for Prometheus."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from fovea.wire.errors import FoveaError

IMAGES_RENDERED = Counter("fovea_renderer_images_rendered_total", "Images processed by a worker.")
FEATURE_LOOKUPS = Counter(
    "fovea_renderer_feature_lookups_total",
    "Images asked for by a Render call: hit (tensors held), joined (being processed already) or miss.",
    ["outcome"],
)
IMAGES_PENDING = Gauge("fovea_renderer_images_pending", "Images that wait for a worker or are in one.")
IMAGE_LOOKUPS = Counter(
    "fovea_renderer_image_lookups_total", "Uploaded images that a Render call named, by outcome.", ["outcome"]
)
IMAGE_SECONDS = Histogram(
    "fovea_renderer_image_seconds",
    "Seconds that a worker spent on one image: decoding, resizing, patches, digest.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
IMAGE_BYTES = Counter("fovea_renderer_image_bytes_total", "Encoded bytes of the images processed.")
FEATURE_BYTES = Counter("fovea_renderer_feature_bytes_total", "Bytes of the tensors made.")
FETCHED_BYTES = Counter("fovea_renderer_fetched_bytes_total", "Bytes of the tensors handed out by FetchFeatures.")
HELD_BYTES = Gauge("fovea_renderer_held_bytes", "Bytes held now, by cache: features or images.", ["cache"])
REFUSALS = Counter("fovea_renderer_refusals_total", "Inputs refused, by cause.", ["cause"])


@contextmanager
def refusals_counted() -> Iterator[None]:
    """Counts an error that leaves the block, by its cause, or its reason if it has none."""
    try:
        yield
    except FoveaError as error:
        REFUSALS.labels(error.metadata.get("cause", error.reason.lower())).inc()
        raise
