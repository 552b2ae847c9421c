"""The JSON bodies of training requests."""

from typing import Any

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from gateway.http.request_body import Body, ModelNumber, Number


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


@with_config(ConfigDict(extra="forbid"))
class AdamParams(TypedDict, total=False):
    """Parameters of one AdamW step. What is left out stays so: trainer.proto names the defaults, the SDK's."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


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
