"""Two caches between calls, keyed by image digest: the tensors from renderers, and the outputs of the frozen tower.

If the tower is not trained, its output depends on the image alone. Prompts recur (epochs, groups of samples, multi-turn
conversations), so caching saves most of the tower's work. Models that train the tower use no cached outputs.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import torch
from cachetools import LRUCache, TTLCache
from torch import Tensor

from fovea.api.v1 import model_input_pb2
from fovea.client import FeatureFetcher
from fovea.client.inference import FeatureCache
from fovea.vision.vision_family import VisionFamily
from fovea.wire.errors import DeadlineExceeded, FeatureEvicted, FoveaError, NotFound, Unavailable
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import FeatureTensors
from fovea_trainer import trainer_metrics
from fovea_trainer.batches.datum_decoding import Datum

logger = logging.getLogger(__name__)

_MAX_NAMED = 512
"""Maximum number of datums that an error lists. The list travels in trailing gRPC metadata, which is limited in size.
"""


_STAGED_S = 300.0
"""Seconds for which the tensors of a failed call wait for the model's next call, outside the limit of the cache."""


@dataclass(frozen=True)
class _Ahead:
    """An image that is being prefetched, or was prefetched and not used yet.

    Args:
        feature: The image.
        work: The task that fetches this image and others with it.
    """

    feature: model_input_pb2.VisionFeature
    work: "Future[None]"


class TensorFetcher:
    """Fetches the tensors of images from renderers and caches them.

    Args:
        max_bytes: Size limit of the cache between calls, in bytes. During a call, the tensors that it needs may exceed
            it.
        vision: The family of a vision-language model; None for a text-only model.
        fetch_timeout_s: Deadline of a fetch from one renderer, in seconds.
        default_source: Renderer for images that name none; if empty, such images are rejected.
        clock: Returns seconds since an arbitrary moment.
    """

    def __init__(
        self,
        max_bytes: int,
        vision: VisionFamily | None,
        fetch_timeout_s: float,
        default_source: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = fetch_timeout_s
        self._fetcher, self._fetcher_ahead = FeatureFetcher(), FeatureFetcher()
        self._kept = FeatureCache(vision, max_bytes, default_source)
        self._max_prefetch_bytes = max_bytes // 2
        self._lock = threading.Lock()  # protects _kept and _ahead
        self._thread = ThreadPoolExecutor(1, "fetch-ahead")
        self._ahead: dict[str, _Ahead] = {}
        self._staged: TTLCache[str, dict[str, FeatureTensors]] = TTLCache(math.inf, _STAGED_S, clock)

    def tensors_of(self, model_id: str, datums: Sequence[Datum], skip: Container[str]) -> dict[str, FeatureTensors]:
        """Returns the tensors of all images of the datums, keyed by digest, except for those in `skip`.

        After FeatureEvicted this object retains the tensors that it has found for the model's next call, for some
        minutes. A client can therefore send a batch larger than the renderers' caches: it renders the missing images
        again and retries.

        Args:
            model_id: The model of the call.
            datums: The datums.
            skip: Digests to leave out.

        Raises:
            FeatureEvicted: A renderer no longer holds an image or does not respond. The metadata lists the datums to
                render again.
            InvalidInput: Tensors do not match their identifiers. The error names the field as `datum[i]...feature`.
        """
        places = [
            (span, f"datum[{datum.index}].input.spans[{number}].feature")
            for datum in datums
            for number, span in enumerate(datum.spans)
            if span.feature.digest not in skip
        ]
        wanted = {span.feature.digest: (span, field) for span, field in places}
        staged = self._unstaged(model_id)
        self._await_prefetches(wanted)
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
        """Starts fetching uncached images for a later call. Callable from any thread.

        Does nothing if the unused prefetched images would then need more than half of the cache.
        """
        with self._lock:
            self._ahead = {
                digest: one for digest, one in self._ahead.items() if not one.work.done() or self._kept.get(one.feature)
            }
            new = [one for one in features if one.digest not in self._ahead and self._kept.get(one) is None]
            waiting = sum(one.feature.size_bytes for one in self._ahead.values())
            if new and waiting + sum(one.size_bytes for one in new) <= self._max_prefetch_bytes:
                work = self._thread.submit(self._prefetch, new)
                self._ahead |= {one.digest: _Ahead(one, work) for one in new}

    def _prefetch(self, features: list[model_input_pb2.VisionFeature]) -> None:
        try:
            fetched = self._fetcher_ahead.fetch([self._sourced(one, "feature") for one in features], self._timeout_s)
        except FoveaError as error:  # a call that still needs these images reports its own error
            logger.debug("%d images could not be fetched ahead: %s", len(features), error)
            return
        with self._lock:
            for one in features:
                self._kept.put(one, fetched[one.digest])

    def _await_prefetches(self, digests: Iterable[str]) -> None:
        """Waits for the prefetches in progress. Cancels the others, because the caller fetches their images now."""
        with self._lock:
            found = {one.work for digest in digests if (one := self._ahead.pop(digest, None))}
        for work in found:
            if not work.cancel():
                work.result()

    def forget(self, model_id: str) -> None:
        """Drops the tensors retained for a model's next call."""
        self._unstaged(model_id)

    def _unstaged(self, model_id: str) -> dict[str, FeatureTensors]:
        """Removes and returns the tensors retained for a model. Frees those that other models left too long ago."""
        self._staged.expire()
        try:
            return self._staged.pop(model_id)
        except KeyError:
            return {}

    def _fetch(self, missing: dict[str, tuple[ImageSpan, str]]) -> tuple[dict[str, FeatureTensors], FoveaError | None]:
        """Fetches all images at once. If some are missing, fetches them one by one and also returns the error."""
        try:
            return self._fetch_all(missing), None
        except NotFound as error:
            found: dict[str, FeatureTensors] = {}
            for digest, place in missing.items() if len(missing) > 1 else ():
                with suppress(NotFound):
                    found |= self._fetch_all({digest: place})
            return found, error
        except (Unavailable, DeadlineExceeded) as error:  # the images of an unreachable renderer count as lost
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
    named = ",".join(map(str, indexes[:_MAX_NAMED]))
    return FeatureEvicted(
        f"{error.message}: render the image again", error.field, **{**error.metadata, "datums": named}
    )


@dataclass(frozen=True)
class VisionOutput:
    """The tower's output for all images of a micro-batch.

    Args:
        embeddings: [M, D], in image order.
        deepstack: Additional [M, D] tensors, added in the first language layers; empty in most families.
    """

    embeddings: Tensor
    deepstack: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """Total size of all tensors in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.embeddings, *self.deepstack))

    @classmethod
    def joined(cls, outputs: Sequence["VisionOutput"]) -> "VisionOutput":
        """Concatenates the outputs of several calls, in order."""
        if len(outputs) == 1:
            return outputs[0]
        levels = zip(*(output.deepstack for output in outputs), strict=True)
        return cls(
            torch.cat([output.embeddings for output in outputs]), tuple(torch.cat(list(level)) for level in levels)
        )

    def first(self, count: int) -> "VisionOutput":
        """Returns the first `count` embeddings, which still depend on the others as `anchored` does."""
        if count == len(self.embeddings):
            return self
        rest = VisionOutput(self.embeddings[count:], tuple(level[count:] for level in self.deepstack))
        return VisionOutput(self.embeddings[:count] + rest.anchored(), tuple(level[:count] for level in self.deepstack))

    def anchored(self) -> Tensor:
        """Returns a scalar zero that depends on all tensors, so that a filler image takes part in the backward pass."""
        return sum((tensor.sum() for tensor in self.deepstack), self.embeddings.sum()) * 0.0


class VisionOutputCache:
    """A least-recently-used cache of tower outputs, keyed by image digest, up to `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._held: LRUCache[str, VisionOutput] = LRUCache(max_bytes, lambda image: image.size_bytes)

    def lookup(self, images: Mapping[str, int]) -> dict[str, VisionOutput]:
        """Returns the cached outputs of images.

        Args:
            images: Expected number of embeddings, keyed by digest. An output with another number is not returned.
        """
        found = {}
        for digest, count in images.items():
            image = self._held.get(digest)
            if image is not None and len(image.embeddings) == count:
                found[digest] = image
        return found

    def holds(self, digest: str) -> bool:
        """Returns True if the output of an image is cached. Callable from any thread."""
        return digest in self._held

    def store_all(self, images: Mapping[str, VisionOutput]) -> None:
        """Caches outputs. Above the limit, the least recently used ones are evicted."""
        for digest, image in images.items():
            if digest not in self._held and image.size_bytes <= self._held.maxsize:
                self._held[digest] = image


def split_output(output: VisionOutput, counts: Sequence[int]) -> list[VisionOutput]:
    """Splits an output into images with the given numbers of embeddings. The copies can be freed separately."""
    embeddings = torch.split(output.embeddings, list(counts))
    deepstack = [torch.split(feature, list(counts)) for feature in output.deepstack]
    return [
        VisionOutput(embeddings[i].clone(), tuple(level[i].clone() for level in deepstack))
        for i in range(len(embeddings))
    ]


def tower_calls(images: Iterable[FeatureTensors]) -> list[list[FeatureTensors]]:
    """Groups consecutive images of which the tensors can be concatenated: one call of the tower computes a group."""

    def row_shapes(image: FeatureTensors) -> dict[str, tuple[int, ...]]:
        return {name: array.shape[1:] for name, array in image.items()}

    return [list(members) for _, members in groupby(images, row_shapes)]
