from fovea.api.v1 import model_input_pb2 as _model_input_pb2
from fovea.api.v1 import sampler_pb2 as _sampler_pb2
from fovea.api.v1 import tensor_pb2 as _tensor_pb2
from fovea.api.v1 import trainer_pb2 as _trainer_pb2
from fovea.api.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ServedModel]
    def __init__(self, models: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("name", "max_context_length", "supports_images", "max_lora_rank", "is_trained", "is_sampled")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    IS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    IS_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_context_length: int
    supports_images: bool
    max_lora_rank: int
    is_trained: bool
    is_sampled: bool
    def __init__(self, name: _Optional[str] = ..., max_context_length: _Optional[int] = ..., supports_images: bool = ..., max_lora_rank: _Optional[int] = ..., is_trained: bool = ..., is_sampled: bool = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("tags", "user_metadata", "request_id")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TAGS_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    user_metadata: _containers.ScalarMap[str, str]
    request_id: str
    def __init__(self, tags: _Optional[_Iterable[str]] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class FinishSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubmitCreateModelRequest(_message.Message):
    __slots__ = ("session_id", "model_seq_id", "base_model", "lora", "user_metadata", "from_path", "optimizer")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    FROM_PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model_seq_id: int
    base_model: str
    lora: _weights_pb2.LoraConfig
    user_metadata: _containers.ScalarMap[str, str]
    from_path: str
    optimizer: bool
    def __init__(self, session_id: _Optional[str] = ..., model_seq_id: _Optional[int] = ..., base_model: _Optional[str] = ..., lora: _Optional[_Union[_weights_pb2.LoraConfig, _Mapping]] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., from_path: _Optional[str] = ..., optimizer: bool = ...) -> None: ...

class SubmitCreateModelResponse(_message.Message):
    __slots__ = ("future_id",)
    FUTURE_ID_FIELD_NUMBER: _ClassVar[int]
    future_id: str
    def __init__(self, future_id: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("base_model", "lora", "tokenizer")
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    base_model: str
    lora: _weights_pb2.LoraConfig
    tokenizer: str
    def __init__(self, base_model: _Optional[str] = ..., lora: _Optional[_Union[_weights_pb2.LoraConfig, _Mapping]] = ..., tokenizer: _Optional[str] = ...) -> None: ...

class UploadImageRequest(_message.Message):
    __slots__ = ("sha256", "data")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    data: bytes
    def __init__(self, sha256: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadImageResponse(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class SubmitForwardBackwardRequest(_message.Message):
    __slots__ = ("header", "datum")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATUM_FIELD_NUMBER: _ClassVar[int]
    header: SubmitForwardBackwardHeader
    datum: InputDatum
    def __init__(self, header: _Optional[_Union[SubmitForwardBackwardHeader, _Mapping]] = ..., datum: _Optional[_Union[InputDatum, _Mapping]] = ...) -> None: ...

class SubmitForwardBackwardHeader(_message.Message):
    __slots__ = ("model_id", "seq_id", "loss_function", "loss_config", "backward", "custom_loss_id")
    class LossConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    LOSS_FUNCTION_FIELD_NUMBER: _ClassVar[int]
    LOSS_CONFIG_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_LOSS_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    loss_function: str
    loss_config: _containers.ScalarMap[str, float]
    backward: bool
    custom_loss_id: str
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., loss_function: _Optional[str] = ..., loss_config: _Optional[_Mapping[str, float]] = ..., backward: bool = ..., custom_loss_id: _Optional[str] = ...) -> None: ...

class InputDatum(_message.Message):
    __slots__ = ("input", "loss_inputs", "input_spans", "target_spans")
    class LossInputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    INPUT_FIELD_NUMBER: _ClassVar[int]
    LOSS_INPUTS_FIELD_NUMBER: _ClassVar[int]
    INPUT_SPANS_FIELD_NUMBER: _ClassVar[int]
    TARGET_SPANS_FIELD_NUMBER: _ClassVar[int]
    input: _model_input_pb2.ModelInput
    loss_inputs: _containers.MessageMap[str, _tensor_pb2.Tensor]
    input_spans: _containers.RepeatedCompositeFieldContainer[SequenceSpan]
    target_spans: _containers.RepeatedCompositeFieldContainer[SequenceSpan]
    def __init__(self, input: _Optional[_Union[_model_input_pb2.ModelInput, _Mapping]] = ..., loss_inputs: _Optional[_Mapping[str, _tensor_pb2.Tensor]] = ..., input_spans: _Optional[_Iterable[_Union[SequenceSpan, _Mapping]]] = ..., target_spans: _Optional[_Iterable[_Union[SequenceSpan, _Mapping]]] = ...) -> None: ...

class SequenceSpan(_message.Message):
    __slots__ = ("sequence_id", "sampled", "offset", "length")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    sampled: bool
    offset: int
    length: int
    def __init__(self, sequence_id: _Optional[str] = ..., sampled: bool = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class SubmitForwardBackwardResponse(_message.Message):
    __slots__ = ("future_id",)
    FUTURE_ID_FIELD_NUMBER: _ClassVar[int]
    future_id: str
    def __init__(self, future_id: _Optional[str] = ...) -> None: ...

class CreateCustomLossRequest(_message.Message):
    __slots__ = ("session_id", "custom_loss_seq_id", "loss")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_LOSS_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    custom_loss_seq_id: int
    loss: _trainer_pb2.CustomLoss
    def __init__(self, session_id: _Optional[str] = ..., custom_loss_seq_id: _Optional[int] = ..., loss: _Optional[_Union[_trainer_pb2.CustomLoss, _Mapping]] = ...) -> None: ...

class CreateCustomLossResponse(_message.Message):
    __slots__ = ("custom_loss_id",)
    CUSTOM_LOSS_ID_FIELD_NUMBER: _ClassVar[int]
    custom_loss_id: str
    def __init__(self, custom_loss_id: _Optional[str] = ...) -> None: ...

class SubmitOptimStepRequest(_message.Message):
    __slots__ = ("model_id", "seq_id", "adam")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    adam: _trainer_pb2.AdamParams
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., adam: _Optional[_Union[_trainer_pb2.AdamParams, _Mapping]] = ...) -> None: ...

class SubmitOptimStepResponse(_message.Message):
    __slots__ = ("future_id",)
    FUTURE_ID_FIELD_NUMBER: _ClassVar[int]
    future_id: str
    def __init__(self, future_id: _Optional[str] = ...) -> None: ...

class SubmitSaveStateRequest(_message.Message):
    __slots__ = ("model_id", "seq_id", "name", "overwrite", "ttl_s", "user_metadata")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    name: str
    overwrite: bool
    ttl_s: int
    user_metadata: _containers.ScalarMap[str, str]
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., name: _Optional[str] = ..., overwrite: bool = ..., ttl_s: _Optional[int] = ..., user_metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SubmitSaveStateResponse(_message.Message):
    __slots__ = ("future_id",)
    FUTURE_ID_FIELD_NUMBER: _ClassVar[int]
    future_id: str
    def __init__(self, future_id: _Optional[str] = ...) -> None: ...

class SubmitLoadStateRequest(_message.Message):
    __slots__ = ("model_id", "seq_id", "path", "optimizer")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    path: str
    optimizer: bool
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., path: _Optional[str] = ..., optimizer: bool = ...) -> None: ...

class SubmitLoadStateResponse(_message.Message):
    __slots__ = ("future_id",)
    FUTURE_ID_FIELD_NUMBER: _ClassVar[int]
    future_id: str
    def __init__(self, future_id: _Optional[str] = ...) -> None: ...

class SubmitSaveForSamplerRequest(_message.Message):
    __slots__ = ("model_id", "seq_id", "name", "ttl_s", "user_metadata", "inflight")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    name: str
    ttl_s: int
    user_metadata: _containers.ScalarMap[str, str]
    inflight: bool
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., name: _Optional[str] = ..., ttl_s: _Optional[int] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., inflight: bool = ...) -> None: ...

class SubmitSaveForSamplerResponse(_message.Message):
    __slots__ = ("future_id",)
    FUTURE_ID_FIELD_NUMBER: _ClassVar[int]
    future_id: str
    def __init__(self, future_id: _Optional[str] = ...) -> None: ...

class SubmitSaveExternalRequest(_message.Message):
    __slots__ = ("model_id", "seq_id", "name", "ttl_s", "age_recipients")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    AGE_RECIPIENTS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    name: str
    ttl_s: int
    age_recipients: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., name: _Optional[str] = ..., ttl_s: _Optional[int] = ..., age_recipients: _Optional[_Iterable[str]] = ...) -> None: ...

class SubmitSaveExternalResponse(_message.Message):
    __slots__ = ("future_id",)
    FUTURE_ID_FIELD_NUMBER: _ClassVar[int]
    future_id: str
    def __init__(self, future_id: _Optional[str] = ...) -> None: ...

class CreateSamplingSessionRequest(_message.Message):
    __slots__ = ("session_id", "sampling_session_seq_id", "base_model", "model_path")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_SESSION_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    sampling_session_seq_id: int
    base_model: str
    model_path: str
    def __init__(self, session_id: _Optional[str] = ..., sampling_session_seq_id: _Optional[int] = ..., base_model: _Optional[str] = ..., model_path: _Optional[str] = ...) -> None: ...

class CreateSamplingSessionResponse(_message.Message):
    __slots__ = ("sampling_session_id",)
    SAMPLING_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    sampling_session_id: str
    def __init__(self, sampling_session_id: _Optional[str] = ...) -> None: ...

class SampleTokensRequest(_message.Message):
    __slots__ = ("sampling_session_id", "prompt", "sample_count", "params", "prompt_logprobs", "top_prompt_logprobs", "top_sample_logprobs", "target_table", "alt_token_count", "prompt_logprobs_last_n", "routed_experts", "sampled_support", "record_stability_info")
    SAMPLING_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_SAMPLE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TABLE_FIELD_NUMBER: _ClassVar[int]
    ALT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_LAST_N_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    RECORD_STABILITY_INFO_FIELD_NUMBER: _ClassVar[int]
    sampling_session_id: str
    prompt: _model_input_pb2.ModelInput
    sample_count: int
    params: _sampler_pb2.SamplingParams
    prompt_logprobs: bool
    top_prompt_logprobs: int
    top_sample_logprobs: int
    target_table: TargetTable
    alt_token_count: int
    prompt_logprobs_last_n: int
    routed_experts: bool
    sampled_support: bool
    record_stability_info: bool
    def __init__(self, sampling_session_id: _Optional[str] = ..., prompt: _Optional[_Union[_model_input_pb2.ModelInput, _Mapping]] = ..., sample_count: _Optional[int] = ..., params: _Optional[_Union[_sampler_pb2.SamplingParams, _Mapping]] = ..., prompt_logprobs: bool = ..., top_prompt_logprobs: _Optional[int] = ..., top_sample_logprobs: _Optional[int] = ..., target_table: _Optional[_Union[TargetTable, _Mapping]] = ..., alt_token_count: _Optional[int] = ..., prompt_logprobs_last_n: _Optional[int] = ..., routed_experts: bool = ..., sampled_support: bool = ..., record_stability_info: bool = ...) -> None: ...

class TargetTable(_message.Message):
    __slots__ = ("tokens", "column_count", "column_indices", "sparse")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COLUMN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COLUMN_INDICES_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    tokens: _sampler_pb2.TargetTokens
    column_count: int
    column_indices: _tensor_pb2.Tensor
    sparse: bool
    def __init__(self, tokens: _Optional[_Union[_sampler_pb2.TargetTokens, _Mapping]] = ..., column_count: _Optional[int] = ..., column_indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sparse: bool = ...) -> None: ...

class SampleTokensResponse(_message.Message):
    __slots__ = ("prompt", "delta", "target_table")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    TARGET_TABLE_FIELD_NUMBER: _ClassVar[int]
    prompt: _sampler_pb2.PromptResult
    delta: _sampler_pb2.SequenceDelta
    target_table: TargetTable
    def __init__(self, prompt: _Optional[_Union[_sampler_pb2.PromptResult, _Mapping]] = ..., delta: _Optional[_Union[_sampler_pb2.SequenceDelta, _Mapping]] = ..., target_table: _Optional[_Union[TargetTable, _Mapping]] = ...) -> None: ...

class WaitFutureRequest(_message.Message):
    __slots__ = ("future_id", "timeout_s")
    FUTURE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    future_id: str
    timeout_s: float
    def __init__(self, future_id: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class WaitFutureResponse(_message.Message):
    __slots__ = ("pending", "model_created", "output", "metrics", "checkpoint_saved", "state_loaded", "snapshot_saved", "custom_loss_created")
    PENDING_FIELD_NUMBER: _ClassVar[int]
    MODEL_CREATED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SAVED_FIELD_NUMBER: _ClassVar[int]
    STATE_LOADED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SAVED_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_LOSS_CREATED_FIELD_NUMBER: _ClassVar[int]
    pending: FuturePending
    model_created: ModelCreated
    output: _trainer_pb2.DatumOutput
    metrics: _trainer_pb2.Metrics
    checkpoint_saved: CheckpointSaved
    state_loaded: StateLoaded
    snapshot_saved: SnapshotSaved
    custom_loss_created: CreateCustomLossResponse
    def __init__(self, pending: _Optional[_Union[FuturePending, _Mapping]] = ..., model_created: _Optional[_Union[ModelCreated, _Mapping]] = ..., output: _Optional[_Union[_trainer_pb2.DatumOutput, _Mapping]] = ..., metrics: _Optional[_Union[_trainer_pb2.Metrics, _Mapping]] = ..., checkpoint_saved: _Optional[_Union[CheckpointSaved, _Mapping]] = ..., state_loaded: _Optional[_Union[StateLoaded, _Mapping]] = ..., snapshot_saved: _Optional[_Union[SnapshotSaved, _Mapping]] = ..., custom_loss_created: _Optional[_Union[CreateCustomLossResponse, _Mapping]] = ...) -> None: ...

class FuturePending(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ModelCreated(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class CheckpointSaved(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class StateLoaded(_message.Message):
    __slots__ = ("step", "path")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class SnapshotSaved(_message.Message):
    __slots__ = ("path", "sampling_session_id", "snapshot")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    path: str
    sampling_session_id: str
    snapshot: _weights_pb2.Snapshot
    def __init__(self, path: _Optional[str] = ..., sampling_session_id: _Optional[str] = ..., snapshot: _Optional[_Union[_weights_pb2.Snapshot, _Mapping]] = ...) -> None: ...
