"""Vision tensors of this rank's datums: fetched from renderers by digest, checked, and kept for the next epoch."""

from collections.abc import Container, Iterable

import numpy as np

from fovea.api.v1 import model_input_pb2
from fovea.client import FeatureFetcher
from fovea.runtime.byte_lru import ByteLru
from fovea.wire.errors import FeatureEvicted, InvalidInput, NotFound
from fovea.wire.features import FeatureTensors
from services.trainer.batch import Patches
from services.trainer.datums import Datum, Span


class FeatureCache:
    """Least recently used patches, by digest.

    Args:
        max_bytes: What is kept between calls; what a call needs is held for the call in any case.
        patch_bytes: Width of a patch row.
        fetch_timeout_s: Deadline of a fetch from one renderer.
        default_source: Renderer for images that name none; empty refuses them.
    """

    def __init__(self, max_bytes: int, patch_bytes: int, fetch_timeout_s: float, default_source: str) -> None:
        self._patch_bytes = patch_bytes
        self._timeout_s = fetch_timeout_s
        self._default_source = default_source
        self._fetcher = FeatureFetcher()
        self._kept: ByteLru[Patches] = ByteLru(max_bytes)

    def patches_of(self, datums: Iterable[Datum], spare: Container[str]) -> dict[str, Patches]:
        """uint8 [P, W] by digest for all images of the datums but those in `spare`.

        Raises FeatureEvicted if a renderer no longer holds one, InvalidInput naming `datum[i]...feature` for tensors
        that do not fit their grid, Unavailable if a renderer cannot be reached.
        """
        spans = {
            span.feature.digest: (span, f"datum[{datum.index}].input.spans[{number}].feature")
            for datum in datums
            for number, span in enumerate(datum.spans)
            if span.feature.digest not in spare
        }
        held = {digest: patches for digest in spans if (patches := self._kept.get(digest)) is not None}
        missing = {digest: place for digest, place in spans.items() if digest not in held}
        if missing:
            held |= self._fetch(missing)
        for digest, (span, field) in spans.items():
            # A digest names one grid; a datum that says another would read past its patches.
            _check_rows(held[digest], span, self._patch_bytes, field)
        return held

    def _fetch(self, missing: dict[str, tuple[Span, str]]) -> dict[str, Patches]:
        wanted = [self._sourced(span.feature, field) for span, field in missing.values()]
        try:
            fetched = self._fetcher.fetch(wanted, self._timeout_s)
        except NotFound as error:
            raise FeatureEvicted(f"{error.message}: render the image again", error.field, **error.metadata) from None
        patches = {}
        for digest, (span, field) in missing.items():
            patches[digest] = _checked(fetched[digest], span, field)
            if patches[digest].nbytes <= self._kept.limit_bytes:
                self._kept.put(digest, patches[digest], patches[digest].nbytes)
        return patches

    def _sourced(self, feature: model_input_pb2.VisionFeature, field: str) -> model_input_pb2.VisionFeature:
        if feature.source:
            return feature
        if not self._default_source:
            raise InvalidInput(f"{field}.source is empty: name the renderer that holds the tensors", field=field)
        named = model_input_pb2.VisionFeature()
        named.CopyFrom(feature)
        named.source = self._default_source
        return named


def _checked(tensors: FeatureTensors, span: Span, field: str) -> Patches:
    if set(tensors) != {"pixel_values", "image_grid_thw"}:
        raise InvalidInput(f"{field} has tensors {sorted(tensors)}, needs pixel_values and image_grid_thw", field=field)
    grid = tuple(int(extent) for extent in tensors["image_grid_thw"].flatten())
    if grid != span.grid_thw:
        raise InvalidInput(f"{field}.grid_thw is {list(span.grid_thw)}, the renderer has {list(grid)}", field=field)
    patches = tensors["pixel_values"]
    if patches.dtype != np.uint8:
        raise InvalidInput(f"{field} has pixel_values of {patches.dtype.name}, needs uint8", field=field)
    return patches


def _check_rows(patches: Patches, span: Span, patch_bytes: int, field: str) -> None:
    if patches.shape != (span.patch_count, patch_bytes):
        raise InvalidInput(
            f"{field} has pixel_values {list(patches.shape)}, grid {list(span.grid_thw)} needs "
            f"{[span.patch_count, patch_bytes]}",
            field=field,
        )
