from fovea.api.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ImageFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMAGE_FORMAT_UNSPECIFIED: _ClassVar[ImageFormat]
    IMAGE_FORMAT_PNG: _ClassVar[ImageFormat]
    IMAGE_FORMAT_JPEG: _ClassVar[ImageFormat]
IMAGE_FORMAT_UNSPECIFIED: ImageFormat
IMAGE_FORMAT_PNG: ImageFormat
IMAGE_FORMAT_JPEG: ImageFormat

class ModelInput(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("tokens", "image", "image_reference")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    tokens: TokenChunk
    image: ImageChunk
    image_reference: ImageReference
    def __init__(self, tokens: _Optional[_Union[TokenChunk, _Mapping]] = ..., image: _Optional[_Union[ImageChunk, _Mapping]] = ..., image_reference: _Optional[_Union[ImageReference, _Mapping]] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    def __init__(self, tokens: _Optional[bytes] = ...) -> None: ...

class ImageChunk(_message.Message):
    __slots__ = ("data", "format", "expected_token_count", "max_side")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_SIDE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    format: ImageFormat
    expected_token_count: int
    max_side: int
    def __init__(self, data: _Optional[bytes] = ..., format: _Optional[_Union[ImageFormat, str]] = ..., expected_token_count: _Optional[int] = ..., max_side: _Optional[int] = ...) -> None: ...

class ImageReference(_message.Message):
    __slots__ = ("sha256", "uri", "format", "expected_token_count", "max_side")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_SIDE_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    uri: str
    format: ImageFormat
    expected_token_count: int
    max_side: int
    def __init__(self, sha256: _Optional[str] = ..., uri: _Optional[str] = ..., format: _Optional[_Union[ImageFormat, str]] = ..., expected_token_count: _Optional[int] = ..., max_side: _Optional[int] = ...) -> None: ...

class RenderedInput(_message.Message):
    __slots__ = ("tokens", "spans", "positions")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VisionSpan]
    positions: _tensor_pb2.Tensor
    def __init__(self, tokens: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VisionSpan, _Mapping]]] = ..., positions: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class VisionSpan(_message.Message):
    __slots__ = ("offset", "length", "feature")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    feature: VisionFeature
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., feature: _Optional[_Union[VisionFeature, _Mapping]] = ...) -> None: ...

class VisionFeature(_message.Message):
    __slots__ = ("digest", "token_count", "size_bytes", "source", "tensors_sha256", "embedding_mask")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_SHA256_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_MASK_FIELD_NUMBER: _ClassVar[int]
    digest: str
    token_count: int
    size_bytes: int
    source: str
    tensors_sha256: str
    embedding_mask: bytes
    def __init__(self, digest: _Optional[str] = ..., token_count: _Optional[int] = ..., size_bytes: _Optional[int] = ..., source: _Optional[str] = ..., tensors_sha256: _Optional[str] = ..., embedding_mask: _Optional[bytes] = ...) -> None: ...
