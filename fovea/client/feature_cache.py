"""Cache of vision tensors in samplers and trainers, which fetch the tensors from renderers in different ways."""

from cachetools import LRUCache

from fovea.api.v1 import model_input_pb2
from fovea.vision.vision_family import VisionFamily
from fovea.wire.errors import InvalidInput
from fovea.wire.features import FeatureTensors, size_bytes
from fovea.wire.rendered_input import ImageSpan


class FeatureCache:
    """LRU cache of tensors that match what their renderer promised. Not thread-safe.

    Args:
        vision: Vision family that checks tensors of images; None for a text model.
        limit_bytes: Maximum memory of cached tensors.
        default_source: Renderer of images that name none; empty to reject them.
    """

    def __init__(self, vision: VisionFamily | None, limit_bytes: int, default_source: str) -> None:
        self._vision = vision
        self._default_source = default_source
        # Keyed by both digests: a request that promises other tensors for a known image must not get the cached ones.
        self._kept: LRUCache[tuple[str, str], FeatureTensors] = LRUCache(limit_bytes, getsizeof=size_bytes)

    @property
    def used_bytes(self) -> int:
        """Memory of the cached tensors, in bytes."""
        return int(self._kept.currsize)

    def source_of(self, feature: model_input_pb2.VisionFeature, field: str) -> str:
        """Returns the address of the image's renderer. Raises InvalidInput, naming `field`, if there is none."""
        if not (source := feature.source or self._default_source):
            raise InvalidInput(
                f"{field}.source is empty, and no --renderer is set: name the renderer that holds the tensors",
                field=f"{field}.source",
            )
        return source

    def get(self, feature: model_input_pb2.VisionFeature) -> FeatureTensors | None:
        """Returns the cached tensors of an image; None if they are not cached."""
        return self._kept.get((feature.digest, feature.tensors_sha256))

    def put(self, feature: model_input_pb2.VisionFeature, tensors: FeatureTensors) -> None:
        """Caches the tensors of an image, unless they alone exceed the limit."""
        if size_bytes(tensors) <= self._kept.maxsize:
            self._kept[feature.digest, feature.tensors_sha256] = tensors

    def check(self, span: ImageSpan, tensors: FeatureTensors, field: str) -> None:
        """Raises InvalidInput, naming `field`, if the tensors do not fit the span. Cached tensors must be checked too.

        A digest identifies an image, but the ids that replace the image come from the request and may be wrong.
        """
        assert self._vision is not None  # a text model refuses inputs with images
        problem = self._vision.image_problem(tensors, span.is_embedding)
        if not problem and (found := size_bytes(tensors)) != span.feature.size_bytes:
            problem = f"size_bytes is {span.feature.size_bytes}, the tensors have {found}"
        if problem:
            raise InvalidInput(f"{field} does not fit what the renderer has: {problem}", field=field)
