from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SNAPSHOT_KIND_UNSPECIFIED: _ClassVar[SnapshotKind]
    SNAPSHOT_KIND_FULL: _ClassVar[SnapshotKind]
    SNAPSHOT_KIND_ADAPTER: _ClassVar[SnapshotKind]
SNAPSHOT_KIND_UNSPECIFIED: SnapshotKind
SNAPSHOT_KIND_FULL: SnapshotKind
SNAPSHOT_KIND_ADAPTER: SnapshotKind

class Snapshot(_message.Message):
    __slots__ = ("snapshot_id", "model_id", "step", "digest", "kind", "size_bytes")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    model_id: str
    step: int
    digest: str
    kind: SnapshotKind
    size_bytes: int
    def __init__(self, snapshot_id: _Optional[str] = ..., model_id: _Optional[str] = ..., step: _Optional[int] = ..., digest: _Optional[str] = ..., kind: _Optional[_Union[SnapshotKind, str]] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class LoraConfig(_message.Message):
    __slots__ = ("rank", "alpha", "seed", "train_attention", "train_mlp", "train_unembedding", "train_vision")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TRAIN_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_MLP_FIELD_NUMBER: _ClassVar[int]
    TRAIN_UNEMBEDDING_FIELD_NUMBER: _ClassVar[int]
    TRAIN_VISION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    alpha: float
    seed: int
    train_attention: bool
    train_mlp: bool
    train_unembedding: bool
    train_vision: bool
    def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., seed: _Optional[int] = ..., train_attention: bool = ..., train_mlp: bool = ..., train_unembedding: bool = ..., train_vision: bool = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotManifest(_message.Message):
    __slots__ = ("snapshot", "tensors", "lora", "bucket_bytes")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    lora: LoraConfig
    bucket_bytes: int
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., lora: _Optional[_Union[LoraConfig, _Mapping]] = ..., bucket_bytes: _Optional[int] = ...) -> None: ...

class TensorSplit(_message.Message):
    __slots__ = ("dimension", "parts")
    DIMENSION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    dimension: int
    parts: _containers.RepeatedCompositeFieldContainer[TensorPart]
    def __init__(self, dimension: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[TensorPart, _Mapping]]] = ...) -> None: ...

class TensorPart(_message.Message):
    __slots__ = ("bounds",)
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bounds: _Optional[_Iterable[int]] = ...) -> None: ...
