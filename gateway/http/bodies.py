"""The JSON bodies of Tinker's API. Unknown fields are refused by name, so that nothing is silently ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

INT64_MAX = 2**63 - 1
Number = Annotated[int, Field(ge=0, le=INT64_MAX)]
"""What a client counts up: it must fit into a column of the database and a field of our wire."""
ModelNumber = Annotated[int, Field(ge=0, lt=2**31)]
"""The same, of a model."""


class Body(BaseModel):
    """Base of all bodies. `type` tags are constants of the SDK and carry nothing."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CreateSession(Body):
    """POST create_session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: str = ""


class Heartbeat(Body):
    """POST session_heartbeat."""

    session_id: str
    type: str = ""


class FinishReason(Body):
    """Why a session is over."""

    type: Literal["success", "errored", "interrupted"]


class FinishSession(Body):
    """POST sessions/{id}/finish."""

    reason: FinishReason
    detail: str | None = None
    type: str = ""


class LoraConfig(Body):
    """Shape of an adapter; rank 0 trains all parameters."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """POST create_model."""

    session_id: str
    model_seq_id: ModelNumber
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] | None = None
    type: str = ""


class GetInfo(Body):
    """POST get_info."""

    model_id: str
    type: str = ""


class AdamParams(Body):
    """Parameters of one AdamW step, with the SDK's defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    """POST optim_step."""

    model_id: str
    seq_id: Number
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None
    type: str = ""


class SaveWeights(Body):
    """POST save_weights."""

    model_id: str
    seq_id: Number
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str = ""


class SaveWeightsForSampler(Body):
    """POST save_weights_for_sampler."""

    model_id: str
    seq_id: Number
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: str = ""


class SaveWeightsExternal(Body):
    """POST save_weights_external."""

    model_id: str
    seq_id: Number
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: str = ""


class LoadWeights(Body):
    """POST load_weights: form A makes a model (session_id, model_seq_id), form B loads into one (model_id, seq_id)."""

    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: ModelNumber | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None
    type: str = ""


class CopyWeights(Body):
    """POST copy_weights."""

    source_path: str
    session_id: str | None = None
    model_seq_id: ModelNumber | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None
    type: str = ""


class WeightsInfo(Body):
    """POST weights_info."""

    tinker_path: str


class CustomLossInput(Body):
    """What a traced loss takes."""

    name: str
    rank: int = Field(ge=0, le=2)


class CreateCustomLoss(Body):
    """POST create_custom_loss. The graph is checked where it is kept."""

    session_id: str
    custom_loss_seq_id: Number
    name: str
    inputs: list[CustomLossInput]
    graph: dict[str, Any]
    type: str = ""


class CreateSamplingSession(Body):
    """POST create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None
    type: str = ""


class EncodedTextChunk(Body):
    """Token ids."""

    type: Literal["encoded_text"]
    tokens: list[int]


class ImageChunk(Body):
    """An encoded image as base64."""

    type: Literal["image"]
    data: str
    format: str
    expected_tokens: int | None = None


class ImageAssetPointerChunk(Body):
    """An image that is held elsewhere."""

    type: Literal["image_asset_pointer"]
    location: str
    format: str
    expected_tokens: int | None = None


class DmelChunk(Body):
    """Audio."""

    type: Literal["dmel"]
    dmel: str


Chunk = Annotated[EncodedTextChunk | ImageChunk | ImageAssetPointerChunk | DmelChunk, Field(discriminator="type")]


class ModelInput(Body):
    """A prompt."""

    chunks: list[Chunk]


class SamplingParams(Body):
    """How to draw."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorData(Body):
    """Numbers, dense or, with indices, sparse (CSR)."""

    data: list[int] | list[float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(Body):
    """POST asample."""

    num_samples: int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str
    seq_id: Number
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: str = ""


class RetrieveFuture(Body):
    """POST retrieve_future."""

    request_id: str
    allow_metadata_only: bool = False


class FuturesTarget(Body):
    """One client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = Field(0, ge=0, le=INT64_MAX // 10**9)


class RetrieveFutures(Body):
    """POST retrieve_futures."""

    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: float | None = Field(None, ge=0, allow_inf_nan=False)
    retrieved_request_ids: list[str] = []


class JoinSamplingSession(Body):
    """POST join_sampling_session."""

    sampling_session_id: str
    type: str = ""


class CancelFuture(Body):
    """POST cancel_future."""

    request_id: str


class SetTtl(Body):
    """PUT .../ttl."""

    ttl_seconds: int | None
