"""Streaming of vision tensors: the renderer splits them into chunks; sampler and trainer reassemble and check them."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from fovea.api.v1 import model_input_pb2, renderer_pb2, tensor_pb2
from fovea.wire import tensors
from fovea.wire.conventions import PIECE_BYTES
from fovea.wire.errors import Internal

FeatureTensors = dict[str, npt.NDArray]
"""Tensors of one image, keyed by the names that the model's processor uses, such as `pixel_values`."""


def tensors_sha256(feature: Mapping[str, npt.NDArray]) -> str:
    """Returns the SHA-256 of name, type, shape and bytes of each tensor, in name order, in lower-case hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(feature):
        array = feature[name]
        digest.update(f"{name}\0{array.dtype.name}\0{','.join(map(str, array.shape))}\0".encode())
        digest.update(_flat_bytes(array))
    return digest.hexdigest()


def _flat_bytes(array: npt.NDArray) -> memoryview:
    """Returns the bytes of an array, without a copy if they are contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def size_bytes(feature: Mapping[str, npt.NDArray]) -> int:
    """Returns the total size of the tensors."""
    return sum(array.nbytes for array in feature.values())


def iter_pieces(digest: str, feature: Mapping[str, npt.NDArray]) -> Iterator[renderer_pb2.FetchFeaturesResponse]:
    """Splits the tensors of one image into messages with at most 1 MiB of data each."""
    names = sorted(feature)
    for name in names:
        data = _flat_bytes(feature[name])
        offsets = range(0, max(len(data), 1), PIECE_BYTES)
        for offset in offsets:
            yield renderer_pb2.FetchFeaturesResponse(
                digest=digest,
                name=name,
                header=tensors.header(feature[name]) if offset == 0 else None,
                data=bytes(data[offset : offset + PIECE_BYTES]),
                feature_complete=name == names[-1] and offset == offsets[-1],
            )


def check_feature(feature: model_input_pb2.VisionFeature, tensors: FeatureTensors | None) -> FeatureTensors:
    """Returns the tensors if they match the digest in `feature`. Raises Internal if not."""
    if tensors is None:
        raise Internal(f"the renderer at {feature.source} sent no tensors for image {feature.digest}")
    if (found := tensors_sha256(tensors)) != feature.tensors_sha256:
        raise Internal(
            f"the tensors of image {feature.digest} from {feature.source} have digest {found}, not "
            f"{feature.tensors_sha256}"
        )
    return tensors


class FeatureAssembler:
    """The receiver of a FetchFeatures stream, which joins its chunks into tensors."""

    def __init__(self) -> None:
        self._feature: FeatureTensors = {}
        self._header: tensor_pb2.Tensor | None = None
        self._name = ""
        self._data = bytearray()

    def feed(self, piece: renderer_pb2.FetchFeaturesResponse) -> tuple[str, FeatureTensors] | None:
        """Adds the next chunk. Returns (digest, tensors) when it completes a feature, else None.

        Raises:
            Internal: The stream starts in the middle of a tensor.
            InvalidInput: The bytes of a tensor do not match its type and shape.
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
