from fovea.api.v1 import model_input_pb2 as _model_input_pb2
from fovea.api.v1 import tensor_pb2 as _tensor_pb2
from fovea.api.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class OpenAIRoute(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPEN_AI_ROUTE_UNSPECIFIED: _ClassVar[OpenAIRoute]
    OPEN_AI_ROUTE_CHAT_COMPLETIONS: _ClassVar[OpenAIRoute]
    OPEN_AI_ROUTE_COMPLETIONS: _ClassVar[OpenAIRoute]
    OPEN_AI_ROUTE_RESPONSES: _ClassVar[OpenAIRoute]
    OPEN_AI_ROUTE_MESSAGES: _ClassVar[OpenAIRoute]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
OPEN_AI_ROUTE_UNSPECIFIED: OpenAIRoute
OPEN_AI_ROUTE_CHAT_COMPLETIONS: OpenAIRoute
OPEN_AI_ROUTE_COMPLETIONS: OpenAIRoute
OPEN_AI_ROUTE_RESPONSES: OpenAIRoute
OPEN_AI_ROUTE_MESSAGES: OpenAIRoute

class GetSamplerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSamplerInfoResponse(_message.Message):
    __slots__ = ("model", "instance_id", "max_context_length", "max_sample_count", "max_top_logprobs", "max_lora_rank", "resident_snapshot_id", "adapter_snapshot_ids", "transfer_backend", "transfer_worker_count", "dtype", "version", "max_batched_adapters", "adapter_memory_bytes", "model_files", "max_sequences", "memory_used_bytes", "memory_total_bytes", "memory_kind", "waiting_for_slot", "gpu_utilization", "receives_parts")
    class ModelFilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SNAPSHOT_IDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BACKEND_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FILES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_SLOT_FIELD_NUMBER: _ClassVar[int]
    GPU_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVES_PARTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    instance_id: str
    max_context_length: int
    max_sample_count: int
    max_top_logprobs: int
    max_lora_rank: int
    resident_snapshot_id: str
    adapter_snapshot_ids: _containers.RepeatedScalarFieldContainer[str]
    transfer_backend: str
    transfer_worker_count: int
    dtype: str
    version: str
    max_batched_adapters: int
    adapter_memory_bytes: int
    model_files: _containers.ScalarMap[str, str]
    max_sequences: int
    memory_used_bytes: int
    memory_total_bytes: int
    memory_kind: str
    waiting_for_slot: int
    gpu_utilization: float
    receives_parts: bool
    def __init__(self, model: _Optional[str] = ..., instance_id: _Optional[str] = ..., max_context_length: _Optional[int] = ..., max_sample_count: _Optional[int] = ..., max_top_logprobs: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., resident_snapshot_id: _Optional[str] = ..., adapter_snapshot_ids: _Optional[_Iterable[str]] = ..., transfer_backend: _Optional[str] = ..., transfer_worker_count: _Optional[int] = ..., dtype: _Optional[str] = ..., version: _Optional[str] = ..., max_batched_adapters: _Optional[int] = ..., adapter_memory_bytes: _Optional[int] = ..., model_files: _Optional[_Mapping[str, str]] = ..., max_sequences: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., memory_kind: _Optional[str] = ..., waiting_for_slot: _Optional[int] = ..., gpu_utilization: _Optional[float] = ..., receives_parts: bool = ...) -> None: ...

class StopCondition(_message.Message):
    __slots__ = ("token_ids", "strings", "ignore_eos")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., strings: _Optional[_Iterable[str]] = ..., ignore_eos: bool = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "structured_outputs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: StopCondition
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    structured_outputs: str
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Union[StopCondition, _Mapping]] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., structured_outputs: _Optional[str] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("request_id", "snapshot_id", "prompt", "sample_count", "params", "prompt_logprobs", "top_prompt_logprobs", "top_sample_logprobs", "target_tokens", "alt_token_count", "prompt_logprobs_last_n", "at_once", "answer", "cache_salt", "routed_experts", "sampled_support", "follow_updates")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_SAMPLE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_LAST_N_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_UPDATES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    snapshot_id: str
    prompt: _model_input_pb2.RenderedInput
    sample_count: int
    params: SamplingParams
    prompt_logprobs: bool
    top_prompt_logprobs: int
    top_sample_logprobs: int
    target_tokens: TargetTokens
    alt_token_count: int
    prompt_logprobs_last_n: int
    at_once: bool
    answer: OpenAIAnswer
    cache_salt: str
    routed_experts: bool
    sampled_support: bool
    follow_updates: bool
    def __init__(self, request_id: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., prompt: _Optional[_Union[_model_input_pb2.RenderedInput, _Mapping]] = ..., sample_count: _Optional[int] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., prompt_logprobs: bool = ..., top_prompt_logprobs: _Optional[int] = ..., top_sample_logprobs: _Optional[int] = ..., target_tokens: _Optional[_Union[TargetTokens, _Mapping]] = ..., alt_token_count: _Optional[int] = ..., prompt_logprobs_last_n: _Optional[int] = ..., at_once: bool = ..., answer: _Optional[_Union[OpenAIAnswer, _Mapping]] = ..., cache_salt: _Optional[str] = ..., routed_experts: bool = ..., sampled_support: bool = ..., follow_updates: bool = ...) -> None: ...

class OpenAIAnswer(_message.Message):
    __slots__ = ("answer_id", "prompt_index")
    ANSWER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    answer_id: str
    prompt_index: int
    def __init__(self, answer_id: _Optional[str] = ..., prompt_index: _Optional[int] = ...) -> None: ...

class TargetTokens(_message.Message):
    __slots__ = ("token_ids", "row_offsets")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _tensor_pb2.Tensor
    row_offsets: _tensor_pb2.Tensor
    def __init__(self, token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., row_offsets: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("prompt", "delta", "written")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    prompt: PromptResult
    delta: SequenceDelta
    written: WrittenTokens
    def __init__(self, prompt: _Optional[_Union[PromptResult, _Mapping]] = ..., delta: _Optional[_Union[SequenceDelta, _Mapping]] = ..., written: _Optional[_Union[WrittenTokens, _Mapping]] = ...) -> None: ...

class WrittenTokens(_message.Message):
    __slots__ = ("index", "token_count", "is_last")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_count: int
    is_last: bool
    def __init__(self, index: _Optional[int] = ..., token_count: _Optional[int] = ..., is_last: bool = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _tensor_pb2.Tensor
    logprobs: _tensor_pb2.Tensor
    def __init__(self, token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class PromptResult(_message.Message):
    __slots__ = ("logprobs", "top_logprobs", "cached_token_count", "target_logprobs", "alt_tokens")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TARGET_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    top_logprobs: TopLogprobs
    cached_token_count: int
    target_logprobs: bytes
    alt_tokens: AltTokens
    def __init__(self, logprobs: _Optional[bytes] = ..., top_logprobs: _Optional[_Union[TopLogprobs, _Mapping]] = ..., cached_token_count: _Optional[int] = ..., target_logprobs: _Optional[bytes] = ..., alt_tokens: _Optional[_Union[AltTokens, _Mapping]] = ...) -> None: ...

class AltTokens(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _tensor_pb2.Tensor
    logprobs: _tensor_pb2.Tensor
    def __init__(self, token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class SequenceDelta(_message.Message):
    __slots__ = ("index", "tokens", "logprobs", "top_logprobs", "finish_reason", "snapshot_id", "routed_experts", "sampled_support", "snapshots")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    tokens: bytes
    logprobs: bytes
    top_logprobs: TopLogprobs
    finish_reason: FinishReason
    snapshot_id: str
    routed_experts: _tensor_pb2.Tensor
    sampled_support: bytes
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotTokens]
    def __init__(self, index: _Optional[int] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top_logprobs: _Optional[_Union[TopLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., snapshot_id: _Optional[str] = ..., routed_experts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sampled_support: _Optional[bytes] = ..., snapshots: _Optional[_Iterable[_Union[SnapshotTokens, _Mapping]]] = ...) -> None: ...

class SnapshotTokens(_message.Message):
    __slots__ = ("snapshot_id", "token_count")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    token_count: int
    def __init__(self, snapshot_id: _Optional[str] = ..., token_count: _Optional[int] = ...) -> None: ...

class JoinTransferGroupRequest(_message.Message):
    __slots__ = ("group_id", "master_address", "master_port", "rank_offset", "world_size", "timeout_s", "sender_count", "is_split")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SENDER_COUNT_FIELD_NUMBER: _ClassVar[int]
    IS_SPLIT_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float
    sender_count: int
    is_split: bool
    def __init__(self, group_id: _Optional[str] = ..., master_address: _Optional[str] = ..., master_port: _Optional[int] = ..., rank_offset: _Optional[int] = ..., world_size: _Optional[int] = ..., timeout_s: _Optional[float] = ..., sender_count: _Optional[int] = ..., is_split: bool = ...) -> None: ...

class JoinTransferGroupResponse(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class LeaveTransferGroupRequest(_message.Message):
    __slots__ = ("group_id",)
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    def __init__(self, group_id: _Optional[str] = ...) -> None: ...

class LeaveTransferGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReceiveSnapshotRequest(_message.Message):
    __slots__ = ("group_id", "manifest", "timeout_s")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    manifest: _weights_pb2.SnapshotManifest
    timeout_s: float
    def __init__(self, group_id: _Optional[str] = ..., manifest: _Optional[_Union[_weights_pb2.SnapshotManifest, _Mapping]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ReceiveSnapshotResponse(_message.Message):
    __slots__ = ("ready", "loaded")
    READY_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    ready: SnapshotReady
    loaded: SnapshotLoaded
    def __init__(self, ready: _Optional[_Union[SnapshotReady, _Mapping]] = ..., loaded: _Optional[_Union[SnapshotLoaded, _Mapping]] = ...) -> None: ...

class SnapshotReady(_message.Message):
    __slots__ = ("splits", "split_of")
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_OF_FIELD_NUMBER: _ClassVar[int]
    splits: _containers.RepeatedCompositeFieldContainer[_weights_pb2.TensorSplit]
    split_of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, splits: _Optional[_Iterable[_Union[_weights_pb2.TensorSplit, _Mapping]]] = ..., split_of: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotLoaded(_message.Message):
    __slots__ = ("digest", "pause_s")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    digest: str
    pause_s: float
    def __init__(self, digest: _Optional[str] = ..., pause_s: _Optional[float] = ...) -> None: ...

class CheckSnapshotRequest(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: _weights_pb2.SnapshotManifest
    def __init__(self, manifest: _Optional[_Union[_weights_pb2.SnapshotManifest, _Mapping]] = ...) -> None: ...

class CheckSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropSnapshotRequest(_message.Message):
    __slots__ = ("snapshot_id",)
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    def __init__(self, snapshot_id: _Optional[str] = ...) -> None: ...

class DropSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AnswerOpenAIRequest(_message.Message):
    __slots__ = ("request", "sampled")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    request: OpenAIRequest
    sampled: SampledEvent
    def __init__(self, request: _Optional[_Union[OpenAIRequest, _Mapping]] = ..., sampled: _Optional[_Union[SampledEvent, _Mapping]] = ...) -> None: ...

class OpenAIRequest(_message.Message):
    __slots__ = ("route", "body", "image_count")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    IMAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    route: OpenAIRoute
    body: bytes
    image_count: int
    def __init__(self, route: _Optional[_Union[OpenAIRoute, str]] = ..., body: _Optional[bytes] = ..., image_count: _Optional[int] = ...) -> None: ...

class SampledEvent(_message.Message):
    __slots__ = ("prompt_index", "prompt_tokens", "event")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    prompt_tokens: bytes
    event: SampleResponse
    def __init__(self, prompt_index: _Optional[int] = ..., prompt_tokens: _Optional[bytes] = ..., event: _Optional[_Union[SampleResponse, _Mapping]] = ...) -> None: ...

class AnswerOpenAIResponse(_message.Message):
    __slots__ = ("plan", "answer")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    plan: OpenAIPlan
    answer: bytes
    def __init__(self, plan: _Optional[_Union[OpenAIPlan, _Mapping]] = ..., answer: _Optional[bytes] = ...) -> None: ...

class OpenAIPlan(_message.Message):
    __slots__ = ("prompts", "sample_count", "params", "top_sample_logprobs", "is_stream", "answer_id", "sampled_support")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    TOP_SAMPLE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IS_STREAM_FIELD_NUMBER: _ClassVar[int]
    ANSWER_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SUPPORT_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[_model_input_pb2.ModelInput]
    sample_count: int
    params: SamplingParams
    top_sample_logprobs: int
    is_stream: bool
    answer_id: str
    sampled_support: bool
    def __init__(self, prompts: _Optional[_Iterable[_Union[_model_input_pb2.ModelInput, _Mapping]]] = ..., sample_count: _Optional[int] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., top_sample_logprobs: _Optional[int] = ..., is_stream: bool = ..., answer_id: _Optional[str] = ..., sampled_support: bool = ...) -> None: ...
