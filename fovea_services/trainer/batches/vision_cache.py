"""Vision tensors of images by digest, kept between calls: tensors from renderers, outputs of the frozen tower.

While an adapter leaves the tower alone, its output depends on the image only. Prompts come back (epochs, groups of
samples, turns), so remembering it saves most of the tower's work. Models that train the tower have no cached outputs.
"""

import logging
import threading
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from cachetools import LRUCache
from torch import Tensor

from fovea.api.v1 import model_input_pb2
from fovea.client import FeatureFetcher
from fovea.client.feature_cache import FeatureCache
from fovea.vision.vision_family import VisionFamily
from fovea.wire.errors import DeadlineExceeded, FeatureEvicted, FoveaError, NotFound, Unavailable
from fovea.wire.features import FeatureTensors
from fovea.wire.rendered_input import ImageSpan
from fovea_services.trainer import trainer_metrics
from fovea_services.trainer.batches.datum_decoding import Datum

logger = logging.getLogger(__name__)

_MOST_NAMED = 512
"""Datums that an error names: it travels in the trailing metadata of a call, which has a limit."""


@dataclass(frozen=True)
class _Ahead:
    """An image that is fetched ahead, or was and has not been used, and the work that fetches it and its neighbours."""

    feature: model_input_pb2.VisionFeature
    work: "Future[None]"


class TensorFetcher:
    """Fetches the tensors of images from renderers, and keeps them.

    Args:
        max_bytes: What is kept between calls; what a call needs is held for the call in any case.
        vision: The family of a vision-language model; None for one that takes text only.
        fetch_timeout_s: Deadline of a fetch from one renderer.
        default_source: Renderer for images that name none; empty refuses them.
    """

    def __init__(
        self, max_bytes: int, vision: VisionFamily | None, fetch_timeout_s: float, default_source: str
    ) -> None:
        self._timeout_s = fetch_timeout_s
        self._fetcher, self._fetcher_ahead = FeatureFetcher(), FeatureFetcher()
        self._kept = FeatureCache(vision, max_bytes, default_source)
        self._most_ahead = max_bytes // 2
        self._lock = threading.Lock()  # of what is kept, and of what is fetched ahead
        self._thread = ThreadPoolExecutor(1, "fetch-ahead")
        self._ahead: dict[str, _Ahead] = {}
        self._staged: dict[str, dict[str, FeatureTensors]] = {}

    def tensors_of(self, model_id: str, datums: Sequence[Datum], skip: Container[str]) -> dict[str, FeatureTensors]:
        """Tensors by digest for all images of the datums but those in `skip`.

        Raises FeatureEvicted if a renderer no longer holds one or does not answer, InvalidInput naming
        `datum[i]...feature` for tensors that do not fit their ids. The metadata of FeatureEvicted names the datums to
        render again; what came of the others waits here for the model's next call, so that a batch which is more than
        renderers hold at once comes in portions.
        """
        places = [
            (span, f"datum[{datum.index}].input.spans[{number}].feature")
            for datum in datums
            for number, span in enumerate(datum.spans)
            if span.feature.digest not in skip
        ]
        wanted = {span.feature.digest: (span, field) for span, field in places}
        staged = self._staged.pop(model_id, {})
        self._meet_ahead(wanted)
        with self._lock:
            held = {
                digest: image
                for digest, (span, _) in wanted.items()
                if (image := staged.get(digest) or self._kept.get(span.feature))
            }
        trainer_metrics.FEATURES.labels("hit").inc(len(held))
        trainer_metrics.FEATURES.labels("miss").inc(len(wanted) - len(held))
        if missing := {digest: place for digest, place in wanted.items() if digest not in held}:
            found, error = self._fetch(missing)
            held |= found
            if error is not None:
                self._staged[model_id] = held
                raise _evicted(datums, missing.keys() - found.keys(), error)
        for span, field in places:
            self._kept.check(span, held[span.feature.digest], field)
        return held

    def fetch_ahead(self, features: Iterable[model_input_pb2.VisionFeature]) -> None:
        """Begins to fetch what is not kept, for a call to come, to be kept until then. From any thread.

        Does nothing where what was fetched ahead and has not been used would push itself out of what is kept.
        """
        with self._lock:
            self._ahead = {
                digest: one for digest, one in self._ahead.items() if not one.work.done() or self._kept.get(one.feature)
            }
            new = [one for one in features if one.digest not in self._ahead and self._kept.get(one) is None]
            waiting = sum(one.feature.size_bytes for one in self._ahead.values())
            if new and waiting + sum(one.size_bytes for one in new) <= self._most_ahead:
                work = self._thread.submit(self._fetch_beside, new)
                self._ahead |= {one.digest: _Ahead(one, work) for one in new}

    def _fetch_beside(self, features: list[model_input_pb2.VisionFeature]) -> None:
        try:
            fetched = self._fetcher_ahead.fetch([self._sourced(one, "feature") for one in features], self._timeout_s)
        except FoveaError as error:  # told by the call that needs them, if it still is so then
            logger.debug("%d images could not be fetched ahead: %s", len(features), error)
            return
        with self._lock:
            for one in features:
                self._kept.put(one, fetched[one.digest])

    def _meet_ahead(self, digests: Iterable[str]) -> None:
        """Waits for what is being fetched ahead; what was not begun is not any more: it is wanted now."""
        with self._lock:
            found = {one.work for digest in digests if (one := self._ahead.pop(digest, None))}
        for work in found:
            if not work.cancel():
                work.result()

    def forget(self, model_id: str) -> None:
        """Drops what waits for a model's next call."""
        self._staged.pop(model_id, None)

    def _fetch(self, missing: dict[str, tuple[ImageSpan, str]]) -> tuple[dict[str, FeatureTensors], FoveaError | None]:
        """What the renderers hold, all at once or else one by one, and why something is not there."""
        try:
            return self._fetch_all(missing), None
        except NotFound as error:
            found: dict[str, FeatureTensors] = {}
            for digest, place in missing.items() if len(missing) > 1 else ():
                with suppress(NotFound):
                    found |= self._fetch_all({digest: place})
            return found, error
        except (Unavailable, DeadlineExceeded) as error:  # a renderer that is gone has lost its images too
            return {}, error

    def _fetch_all(self, missing: dict[str, tuple[ImageSpan, str]]) -> dict[str, FeatureTensors]:
        fetched = self._fetcher.fetch(
            [self._sourced(span.feature, field) for span, field in missing.values()], self._timeout_s
        )
        for digest, (span, field) in missing.items():
            self._kept.check(span, fetched[digest], field)
            with self._lock:
                self._kept.put(span.feature, fetched[digest])
        return fetched

    def _sourced(self, feature: model_input_pb2.VisionFeature, field: str) -> model_input_pb2.VisionFeature:
        named = model_input_pb2.VisionFeature()
        named.CopyFrom(feature)
        named.source = self._kept.source_of(feature, field)
        return named


def _evicted(datums: Sequence[Datum], lost: Set[str], error: FoveaError) -> FeatureEvicted:
    indexes = [datum.index for datum in datums if any(span.feature.digest in lost for span in datum.spans)]
    named = ",".join(map(str, indexes[:_MOST_NAMED]))
    return FeatureEvicted(
        f"{error.message}: render the image again", error.field, **{**error.metadata, "datums": named}
    )


@dataclass(frozen=True)
class VisionOutput:
    """What the tower made of all images of a micro-batch.

    Args:
        embeddings: [M, D], in image order.
        deepstack: Further [M, D] tensors that are added in the first language layers; empty in most families.
    """

    embeddings: Tensor
    deepstack: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.embeddings, *self.deepstack))

    @classmethod
    def joined(cls, outputs: Sequence["VisionOutput"]) -> "VisionOutput":
        """For several images, in order."""
        if len(outputs) == 1:
            return outputs[0]
        levels = zip(*(output.deepstack for output in outputs), strict=True)
        return cls(
            torch.cat([output.embeddings for output in outputs]), tuple(torch.cat(list(level)) for level in levels)
        )

    def anchored(self) -> Tensor:
        """A scalar zero that depends on everything, so that a filler image joins the backward pass too."""
        return sum((tensor.sum() for tensor in self.deepstack), self.embeddings.sum()) * 0.0


class VisionOutputCache:
    """Least recently used outputs by image digest, up to `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._held: LRUCache[str, VisionOutput] = LRUCache(max_bytes, lambda image: image.size_bytes)

    def lookup(self, images: Mapping[str, int]) -> dict[str, VisionOutput]:
        """Those of the images (digest to number of embeddings) that are held, with so many."""
        found = {}
        for digest, count in images.items():
            image = self._held.get(digest)
            if image is not None and len(image.embeddings) == count:
                found[digest] = image
        return found

    def holds(self, digest: str) -> bool:
        """Whether the outputs of an image are held. From any thread."""
        return digest in self._held

    def store_all(self, images: Mapping[str, VisionOutput]) -> None:
        """Holds outputs, dropping the least recently used above the limit."""
        for digest, image in images.items():
            if digest not in self._held and image.size_bytes <= self._held.maxsize:
                self._held[digest] = image


def split_output(output: VisionOutput, counts: Sequence[int]) -> list[VisionOutput]:
    """One entry an image of so many embeddings, in order; copies, so that dropping one frees its memory."""
    embeddings = torch.split(output.embeddings, list(counts))
    deepstack = [torch.split(feature, list(counts)) for feature in output.deepstack]
    return [
        VisionOutput(embeddings[i].clone(), tuple(level[i].clone() for level in deepstack))
        for i in range(len(embeddings))
    ]
