from fovea.api.v1 import model_input_pb2 as _model_input_pb2
from fovea.api.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetRendererInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRendererInfoResponse(_message.Message):
    __slots__ = ("model", "family", "supports_images", "processor_fingerprint", "vocabulary_size", "max_context_length", "version", "reserved_token_ids", "model_files")
    class ModelFilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_IMAGES_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FILES_FIELD_NUMBER: _ClassVar[int]
    model: str
    family: str
    supports_images: bool
    processor_fingerprint: str
    vocabulary_size: int
    max_context_length: int
    version: str
    reserved_token_ids: _containers.RepeatedScalarFieldContainer[int]
    model_files: _containers.ScalarMap[str, str]
    def __init__(self, model: _Optional[str] = ..., family: _Optional[str] = ..., supports_images: bool = ..., processor_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., max_context_length: _Optional[int] = ..., version: _Optional[str] = ..., reserved_token_ids: _Optional[_Iterable[int]] = ..., model_files: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RenderRequest(_message.Message):
    __slots__ = ("input",)
    INPUT_FIELD_NUMBER: _ClassVar[int]
    input: _model_input_pb2.ModelInput
    def __init__(self, input: _Optional[_Union[_model_input_pb2.ModelInput, _Mapping]] = ...) -> None: ...

class RenderResponse(_message.Message):
    __slots__ = ("rendered",)
    RENDERED_FIELD_NUMBER: _ClassVar[int]
    rendered: _model_input_pb2.RenderedInput
    def __init__(self, rendered: _Optional[_Union[_model_input_pb2.RenderedInput, _Mapping]] = ...) -> None: ...

class PutImageRequest(_message.Message):
    __slots__ = ("sha256", "data")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    data: bytes
    def __init__(self, sha256: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutImageResponse(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class FetchFeaturesRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ...) -> None: ...

class FetchFeaturesResponse(_message.Message):
    __slots__ = ("digest", "name", "header", "data", "feature_complete")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    FEATURE_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    name: str
    header: _tensor_pb2.Tensor
    data: bytes
    feature_complete: bool
    def __init__(self, digest: _Optional[str] = ..., name: _Optional[str] = ..., header: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., data: _Optional[bytes] = ..., feature_complete: bool = ...) -> None: ...
