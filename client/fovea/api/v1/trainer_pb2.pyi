from fovea.api.v1 import model_input_pb2 as _model_input_pb2
from fovea.api.v1 import tensor_pb2 as _tensor_pb2
from fovea.api.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetTrainerInfoRequest(_message.Message):
    __slots__ = ("with_kept",)
    WITH_KEPT_FIELD_NUMBER: _ClassVar[int]
    with_kept: bool
    def __init__(self, with_kept: bool = ...) -> None: ...

class GetTrainerInfoResponse(_message.Message):
    __slots__ = ("model", "family", "instance_id", "world_size", "max_lora_rank", "max_context_length", "model_ids", "loss_functions", "dtype", "version", "supports_vision_lora", "model_files", "keeps_recovery", "durable_seq_ids", "kept_model_ids", "numerics", "memory_used_bytes", "memory_total_bytes", "memory_kind", "takes_groups", "shared_tokens", "recovery_failure", "recovery_store", "model_bytes", "max_models", "gpu_utilization")
    class ModelFilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class DurableSeqIdsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumericsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ModelBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_VISION_LORA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FILES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_RECOVERY_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_MODEL_IDS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    TAKES_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FAILURE_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_STORE_FIELD_NUMBER: _ClassVar[int]
    MODEL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODELS_FIELD_NUMBER: _ClassVar[int]
    GPU_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    family: str
    instance_id: str
    world_size: int
    max_lora_rank: int
    max_context_length: int
    model_ids: _containers.RepeatedScalarFieldContainer[str]
    loss_functions: _containers.RepeatedScalarFieldContainer[str]
    dtype: str
    version: str
    supports_vision_lora: bool
    model_files: _containers.ScalarMap[str, str]
    keeps_recovery: bool
    durable_seq_ids: _containers.ScalarMap[str, int]
    kept_model_ids: _containers.RepeatedScalarFieldContainer[str]
    numerics: _containers.ScalarMap[str, str]
    memory_used_bytes: int
    memory_total_bytes: int
    memory_kind: str
    takes_groups: bool
    shared_tokens: int
    recovery_failure: str
    recovery_store: str
    model_bytes: _containers.ScalarMap[str, int]
    max_models: int
    gpu_utilization: float
    def __init__(self, model: _Optional[str] = ..., family: _Optional[str] = ..., instance_id: _Optional[str] = ..., world_size: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., max_context_length: _Optional[int] = ..., model_ids: _Optional[_Iterable[str]] = ..., loss_functions: _Optional[_Iterable[str]] = ..., dtype: _Optional[str] = ..., version: _Optional[str] = ..., supports_vision_lora: bool = ..., model_files: _Optional[_Mapping[str, str]] = ..., keeps_recovery: bool = ..., durable_seq_ids: _Optional[_Mapping[str, int]] = ..., kept_model_ids: _Optional[_Iterable[str]] = ..., numerics: _Optional[_Mapping[str, str]] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., memory_kind: _Optional[str] = ..., takes_groups: bool = ..., shared_tokens: _Optional[int] = ..., recovery_failure: _Optional[str] = ..., recovery_store: _Optional[str] = ..., model_bytes: _Optional[_Mapping[str, int]] = ..., max_models: _Optional[int] = ..., gpu_utilization: _Optional[float] = ...) -> None: ...

class FullParameterConfig(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateModelRequest(_message.Message):
    __slots__ = ("model_id", "lora", "full")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    lora: _weights_pb2.LoraConfig
    full: FullParameterConfig
    def __init__(self, model_id: _Optional[str] = ..., lora: _Optional[_Union[_weights_pb2.LoraConfig, _Mapping]] = ..., full: _Optional[_Union[FullParameterConfig, _Mapping]] = ...) -> None: ...

class CreateModelResponse(_message.Message):
    __slots__ = ("trainable_parameter_count", "adapter")
    TRAINABLE_PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    trainable_parameter_count: int
    adapter: _weights_pb2.SnapshotManifest
    def __init__(self, trainable_parameter_count: _Optional[int] = ..., adapter: _Optional[_Union[_weights_pb2.SnapshotManifest, _Mapping]] = ...) -> None: ...

class RestoreModelRequest(_message.Message):
    __slots__ = ("model_id", "lora", "full")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    lora: _weights_pb2.LoraConfig
    full: FullParameterConfig
    def __init__(self, model_id: _Optional[str] = ..., lora: _Optional[_Union[_weights_pb2.LoraConfig, _Mapping]] = ..., full: _Optional[_Union[FullParameterConfig, _Mapping]] = ...) -> None: ...

class RestoreModelResponse(_message.Message):
    __slots__ = ("seq_id", "step")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    step: int
    def __init__(self, seq_id: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class ParkModelRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class ParkModelResponse(_message.Message):
    __slots__ = ("seq_id", "size_bytes")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    size_bytes: int
    def __init__(self, seq_id: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class DeleteModelRequest(_message.Message):
    __slots__ = ("model_id", "keeps_recovery")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    KEEPS_RECOVERY_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    keeps_recovery: bool
    def __init__(self, model_id: _Optional[str] = ..., keeps_recovery: bool = ...) -> None: ...

class DeleteModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("header", "datum", "group")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATUM_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    header: ForwardBackwardHeader
    datum: Datum
    group: DatumGroup
    def __init__(self, header: _Optional[_Union[ForwardBackwardHeader, _Mapping]] = ..., datum: _Optional[_Union[Datum, _Mapping]] = ..., group: _Optional[_Union[DatumGroup, _Mapping]] = ...) -> None: ...

class DatumGroup(_message.Message):
    __slots__ = ("datums",)
    DATUMS_FIELD_NUMBER: _ClassVar[int]
    datums: _containers.RepeatedCompositeFieldContainer[Datum]
    def __init__(self, datums: _Optional[_Iterable[_Union[Datum, _Mapping]]] = ...) -> None: ...

class ForwardBackwardHeader(_message.Message):
    __slots__ = ("model_id", "loss_function", "loss_config", "backward", "datum_count", "custom_loss", "seq_id", "drop_gradients", "reads_groups", "place")
    class LossConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    LOSS_FUNCTION_FIELD_NUMBER: _ClassVar[int]
    LOSS_CONFIG_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    DATUM_COUNT_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_LOSS_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    DROP_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    READS_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    loss_function: str
    loss_config: _containers.ScalarMap[str, float]
    backward: bool
    datum_count: int
    custom_loss: CustomLoss
    seq_id: int
    drop_gradients: bool
    reads_groups: bool
    place: str
    def __init__(self, model_id: _Optional[str] = ..., loss_function: _Optional[str] = ..., loss_config: _Optional[_Mapping[str, float]] = ..., backward: bool = ..., datum_count: _Optional[int] = ..., custom_loss: _Optional[_Union[CustomLoss, _Mapping]] = ..., seq_id: _Optional[int] = ..., drop_gradients: bool = ..., reads_groups: bool = ..., place: _Optional[str] = ...) -> None: ...

class CustomLoss(_message.Message):
    __slots__ = ("name", "inputs", "graph")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    name: str
    inputs: _containers.RepeatedCompositeFieldContainer[CustomLossInput]
    graph: bytes
    def __init__(self, name: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[CustomLossInput, _Mapping]]] = ..., graph: _Optional[bytes] = ...) -> None: ...

class CustomLossInput(_message.Message):
    __slots__ = ("name", "rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class Datum(_message.Message):
    __slots__ = ("input", "loss_inputs")
    class LossInputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    INPUT_FIELD_NUMBER: _ClassVar[int]
    LOSS_INPUTS_FIELD_NUMBER: _ClassVar[int]
    input: _model_input_pb2.RenderedInput
    loss_inputs: _containers.MessageMap[str, _tensor_pb2.Tensor]
    def __init__(self, input: _Optional[_Union[_model_input_pb2.RenderedInput, _Mapping]] = ..., loss_inputs: _Optional[_Mapping[str, _tensor_pb2.Tensor]] = ...) -> None: ...

class ForwardBackwardResponse(_message.Message):
    __slots__ = ("output", "metrics", "group", "place", "seconds")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    output: DatumOutput
    metrics: Metrics
    group: OutputGroup
    place: str
    seconds: float
    def __init__(self, output: _Optional[_Union[DatumOutput, _Mapping]] = ..., metrics: _Optional[_Union[Metrics, _Mapping]] = ..., group: _Optional[_Union[OutputGroup, _Mapping]] = ..., place: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class OutputGroup(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[DatumOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[DatumOutput, _Mapping]]] = ...) -> None: ...

class DatumOutput(_message.Message):
    __slots__ = ("tensors",)
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.MessageMap[str, _tensor_pb2.Tensor]
    def __init__(self, tensors: _Optional[_Mapping[str, _tensor_pb2.Tensor]] = ...) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class FetchAheadRequest(_message.Message):
    __slots__ = ("model_id", "features")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    features: _containers.RepeatedCompositeFieldContainer[_model_input_pb2.VisionFeature]
    def __init__(self, model_id: _Optional[str] = ..., features: _Optional[_Iterable[_Union[_model_input_pb2.VisionFeature, _Mapping]]] = ...) -> None: ...

class FetchAheadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearGradientsRequest(_message.Message):
    __slots__ = ("model_id", "seq_id")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ...) -> None: ...

class ClearGradientsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdamParams(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    GRAD_CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., grad_clip_norm: _Optional[float] = ...) -> None: ...

class OptimStepRequest(_message.Message):
    __slots__ = ("model_id", "adam", "seq_id")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    adam: AdamParams
    seq_id: int
    def __init__(self, model_id: _Optional[str] = ..., adam: _Optional[_Union[AdamParams, _Mapping]] = ..., seq_id: _Optional[int] = ...) -> None: ...

class OptimStepResponse(_message.Message):
    __slots__ = ("metrics", "step", "durable_seq_id", "seconds")
    METRICS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    metrics: Metrics
    step: int
    durable_seq_id: int
    seconds: float
    def __init__(self, metrics: _Optional[_Union[Metrics, _Mapping]] = ..., step: _Optional[int] = ..., durable_seq_id: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class SaveStateRequest(_message.Message):
    __slots__ = ("model_id", "uri")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    uri: str
    def __init__(self, model_id: _Optional[str] = ..., uri: _Optional[str] = ...) -> None: ...

class SaveStateResponse(_message.Message):
    __slots__ = ("size_bytes", "step")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    step: int
    def __init__(self, size_bytes: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class LoadStateRequest(_message.Message):
    __slots__ = ("model_id", "uri", "optimizer", "seq_id")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    uri: str
    optimizer: bool
    seq_id: int
    def __init__(self, model_id: _Optional[str] = ..., uri: _Optional[str] = ..., optimizer: bool = ..., seq_id: _Optional[int] = ...) -> None: ...

class LoadStateResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class CheckAdapterRequest(_message.Message):
    __slots__ = ("uri", "lora")
    URI_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    uri: str
    lora: _weights_pb2.LoraConfig
    def __init__(self, uri: _Optional[str] = ..., lora: _Optional[_Union[_weights_pb2.LoraConfig, _Mapping]] = ...) -> None: ...

class CheckAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeSnapshotRequest(_message.Message):
    __slots__ = ("model_id", "snapshot_id", "uri", "is_export")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    IS_EXPORT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    snapshot_id: str
    uri: str
    is_export: bool
    def __init__(self, model_id: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., uri: _Optional[str] = ..., is_export: bool = ...) -> None: ...

class TakeSnapshotResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: _weights_pb2.Snapshot
    def __init__(self, snapshot: _Optional[_Union[_weights_pb2.Snapshot, _Mapping]] = ...) -> None: ...

class PushSnapshotRequest(_message.Message):
    __slots__ = ("snapshot_id", "uri", "samplers", "timeout_s")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    SAMPLERS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    uri: str
    samplers: _containers.RepeatedScalarFieldContainer[str]
    timeout_s: float
    def __init__(self, snapshot_id: _Optional[str] = ..., uri: _Optional[str] = ..., samplers: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class PushSnapshotResponse(_message.Message):
    __slots__ = ("snapshot", "results", "total_s")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    snapshot: _weights_pb2.Snapshot
    results: _containers.RepeatedCompositeFieldContainer[PushResult]
    total_s: float
    def __init__(self, snapshot: _Optional[_Union[_weights_pb2.Snapshot, _Mapping]] = ..., results: _Optional[_Iterable[_Union[PushResult, _Mapping]]] = ..., total_s: _Optional[float] = ...) -> None: ...

class PushResult(_message.Message):
    __slots__ = ("sampler", "error", "pause_s")
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    sampler: str
    error: str
    pause_s: float
    def __init__(self, sampler: _Optional[str] = ..., error: _Optional[str] = ..., pause_s: _Optional[float] = ...) -> None: ...

class ForgetSnapshotRequest(_message.Message):
    __slots__ = ("snapshot_id",)
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    def __init__(self, snapshot_id: _Optional[str] = ...) -> None: ...

class ForgetSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
