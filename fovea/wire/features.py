"""Vision tensors in streamed pieces: cut by the renderer, put together and checked by sampler and trainer."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy.typing as npt

from fovea.api.v1 import model_input_pb2, renderer_pb2, tensor_pb2
from fovea.wire import tensors
from fovea.wire.conventions import PIECE_BYTES
from fovea.wire.errors import Internal

FeatureTensors = dict[str, npt.NDArray]
"""Tensors of one image by the names that the model's processor gives them, such as `pixel_values`."""


def tensors_sha256(feature: Mapping[str, npt.NDArray]) -> str:
    """Identity of the tensors themselves, in order of name, lower-case hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(feature):
        array = feature[name]
        digest.update(f"{name}\0{array.dtype.name}\0{','.join(map(str, array.shape))}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def size_bytes(feature: Mapping[str, npt.NDArray]) -> int:
    """Size of all tensors."""
    return sum(array.nbytes for array in feature.values())


def iter_pieces(digest: str, feature: Mapping[str, npt.NDArray]) -> Iterator[renderer_pb2.FetchFeaturesResponse]:
    """Cuts the tensors of one image into messages of at most 1 MiB of data."""
    names = sorted(feature)
    for name in names:
        data = feature[name].tobytes()
        offsets = range(0, max(len(data), 1), PIECE_BYTES)
        for offset in offsets:
            yield renderer_pb2.FetchFeaturesResponse(
                digest=digest,
                name=name,
                header=tensors.header(feature[name]) if offset == 0 else None,
                data=data[offset : offset + PIECE_BYTES],
                feature_complete=name == names[-1] and offset == offsets[-1],
            )


def check_feature(feature: model_input_pb2.VisionFeature, tensors: FeatureTensors | None) -> FeatureTensors:
    """Returns the tensors. Raises Internal unless they are the ones that the renderer promised in `feature`."""
    if tensors is None:
        raise Internal(f"the renderer at {feature.source} sent no tensors for image {feature.digest}")
    if (found := tensors_sha256(tensors)) != feature.tensors_sha256:
        raise Internal(
            f"the tensors of image {feature.digest} from {feature.source} have digest {found}, not "
            f"{feature.tensors_sha256}"
        )
    return tensors


class FeatureAssembler:
    """Puts the pieces of a FetchFeatures stream together."""

    def __init__(self) -> None:
        self._feature: FeatureTensors = {}
        self._header: tensor_pb2.Tensor | None = None
        self._name = ""
        self._data = bytearray()

    def feed(self, piece: renderer_pb2.FetchFeaturesResponse) -> tuple[str, FeatureTensors] | None:
        """Takes the next piece; returns (digest, tensors) when it completes a feature.

        Raises Internal if a stream starts in the middle of a tensor, InvalidInput if a tensor is short.
        """
        if piece.HasField("header"):
            self._finish_tensor()
            self._header, self._name = piece.header, piece.name
        elif self._header is None:
            raise Internal(f"feature stream of {piece.digest} begins without a header")
        self._data += piece.data
        if not piece.feature_complete:
            return None
        self._finish_tensor()
        feature, self._feature = self._feature, {}
        return piece.digest, feature

    def _finish_tensor(self) -> None:
        if self._header is not None:
            self._feature[self._name] = tensors.from_bytes(self._data, self._header, self._name)
        self._header, self._data = None, bytearray()
