"""Vision tensors of images from renderers, kept by digest. Sampler and trainer fetch each in their own way."""

from cachetools import LRUCache

from fovea.api.v1 import model_input_pb2
from fovea.vision.vision_family import VisionFamily
from fovea.wire.errors import InvalidInput
from fovea.wire.features import FeatureTensors, size_bytes
from fovea.wire.rendered_input import ImageSpan


class FeatureCache:
    """Tensors that were checked against what their renderer promised; the least recently used go first.

    Not safe across threads.

    Args:
        vision: Knows what the tensors of an image must be; None for a model that takes text only.
        limit_bytes: The most memory of kept tensors.
        default_source: Renderer of images that name none; empty refuses them.
    """

    def __init__(self, vision: VisionFamily | None, limit_bytes: int, default_source: str) -> None:
        self._vision = vision
        self._default_source = default_source
        # By both digests: whoever promises other tensors under a known image must not get those of the first.
        self._kept: LRUCache[tuple[str, str], FeatureTensors] = LRUCache(limit_bytes, getsizeof=size_bytes)

    @property
    def used_bytes(self) -> int:
        """Memory of what is kept."""
        return int(self._kept.currsize)

    def source_of(self, feature: model_input_pb2.VisionFeature, field: str) -> str:
        """Address of the renderer to ask. Raises InvalidInput naming `field` if there is none."""
        if not (source := feature.source or self._default_source):
            raise InvalidInput(
                f"{field}.source is empty, and no --renderer is set: name the renderer that holds the tensors",
                field=f"{field}.source",
            )
        return source

    def get(self, feature: model_input_pb2.VisionFeature) -> FeatureTensors | None:
        """The tensors of an image, if they are kept."""
        return self._kept.get((feature.digest, feature.tensors_sha256))

    def put(self, feature: model_input_pb2.VisionFeature, tensors: FeatureTensors) -> None:
        """Keeps the tensors of an image, unless they alone pass the limit."""
        if size_bytes(tensors) <= self._kept.maxsize:
            self._kept[feature.digest, feature.tensors_sha256] = tensors

    def check(self, span: ImageSpan, tensors: FeatureTensors, field: str) -> None:
        """Raises InvalidInput naming `field` for tensors that are not those of the span, kept ones too.

        A digest names one image, but the ids that replace it are the request's own claim.
        """
        assert self._vision is not None  # a text model refuses inputs with images
        problem = self._vision.image_problem(tensors, span.is_embedding)
        if not problem and (found := size_bytes(tensors)) != span.feature.size_bytes:
            problem = f"size_bytes is {span.feature.size_bytes}, the tensors have {found}"
        if problem:
            raise InvalidInput(f"{field} does not fit what the renderer has: {problem}", field=field)
