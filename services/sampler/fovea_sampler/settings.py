"""The settings of the sampler."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from fovea.runtime.hosts import check_socket_path
from fovea.runtime.settings import ServiceSettings


class SamplerSettings(ServiceSettings):
    """Fovea's sampler: one vLLM engine that serves base models and pushed snapshots over gRPC."""

    model_config = SettingsConfigDict(env_prefix="FOVEA_SAMPLER_")

    model: str = Field(description="Checkpoint directory or hub name of the model.")
    renderer: str = Field(
        "", description="host:port of the renderer to fetch vision tensors from when a request names none."
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto", description="Device that runs the model; auto is the device for which the installed vLLM was built."
    )
    dtype: str = Field(
        "auto", description="Element type of the weights; auto is float32 on CPU and the checkpoint's own type on GPU."
    )
    head_dtype: Literal["float32", "model"] = Field(
        "float32",
        description="Element type of the logits from which probabilities are computed; the trainer must use the same.",
    )
    max_context: int | None = Field(
        None, ge=2, description="The most tokens of a prompt and its completion; the model's own limit by default."
    )
    max_sequences: int = Field(64, ge=1, description="The most sequences in one batch.")
    max_batched_tokens: int = Field(2048, ge=32, description="The most tokens that one engine step computes.")
    kv_cache_mib: int | None = Field(
        None,
        ge=16,
        description="Size of the KV cache in MiB. By default a GPU uses its free memory, and a CPU uses 512 MiB or the "
        "size of the weights, whichever is larger, but at most a sixteenth of the free memory.",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e5m2"] = Field(
        "auto",
        description="Element type of the KV cache; auto is the model's. fp8 (e4m3) holds twice the tokens, but the "
        "log-probabilities then differ from the trainer's, which does not round keys and values.",
    )
    inflight_cache: Literal["recompute", "keep"] = Field(
        "recompute",
        description="KV cache of answers that continue with newly pushed full weights: recompute computes it again "
        "with the new weights, keep leaves it as the earlier weights computed it, which resumes sooner.",
    )
    block_size: int | None = Field(
        None, ge=16, description="Tokens of one KV cache block; by default 32 on CPU and vLLM's own default on GPU."
    )
    gpu_memory_fraction: float = Field(0.9, gt=0, le=1, description="Fraction of GPU memory that the engine may use.")
    full_push_room: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Reserve GPU memory beside the model for full weights that are being pushed; otherwise they are "
        "received into pinned host memory. auto reserves it if that costs at most a third of the KV cache. Choose "
        "never if you train only adapters.",
    )
    transfer: Literal["auto", "gloo", "nccl", "cuda_ipc"] = Field(
        "auto",
        description="Transport of pushed weights; auto is nccl on GPU and gloo on CPU. A GPU that the sampler shares "
        "with the trainer needs cuda_ipc, or gloo if the two run in separate containers.",
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs over which the model is split; on CPU, processes.")
    expert_parallel: bool = Field(
        False, description="Place whole experts on each tensor-parallel device instead of a slice of every expert."
    )
    shared_base: str = Field(
        "",
        description="Path of a Unix socket through which the trainer on this device maps the weights, so that both use "
        "one copy. The sampler waits for the trainer before it measures its memory. For adapters only, on one device; "
        "empty keeps the weights private.",
    )
    eager: bool = Field(False, description="Run without CUDA graphs. A CPU engine never uses them.")
    fast_start: bool = Field(
        False,
        description="On a GPU, start sooner: do not compile the model, and capture CUDA graphs only for decoding.",
    )
    max_lora_rank: Annotated[Literal[8, 16, 32, 64, 128, 256, 320, 512], BeforeValidator(int)] = Field(
        64, description="The largest rank of an adapter."
    )
    max_loras: int | None = Field(
        None,
        ge=1,
        description="Slots for adapters of one batch, each for the largest rank; adapters of smaller ranks share one "
        "and requests for further ones wait. By default a GPU has as many as fit into a sixth of its memory. A CPU "
        "has as many as fit into the size of the weights or 256 MiB, whichever is larger, but at most a sixteenth of "
        "the free memory, and never fewer than four.",
    )
    max_cpu_loras: int | None = Field(
        None, ge=1, description="Adapters that vLLM keeps in host memory, ready to load; 4 * max-loras by default."
    )
    max_adapters: int = Field(
        1024, ge=1, description="The most adapters that the sampler holds; the least recently used one is evicted."
    )
    max_adapter_mib: int | None = Field(
        None,
        ge=1,
        description="The most memory for adapters in each worker, in MiB. The default is enough for max-adapters of "
        "the largest rank, but at most a quarter of the host's memory for all workers together.",
    )
    feature_cache_mib: int = Field(1024, ge=0, description="Size of the cache of vision tensors, in MiB.")
    max_images: int = Field(32, ge=1, description="The most images in one prompt.")
    max_sample_count: int = Field(128, ge=1, description="The most sequences of one request.")
    max_top_logprobs: int = Field(
        64, ge=0, description="The most alternatives, top or drawn, at one position of the log-probabilities."
    )
    max_requests: int = Field(
        2048, ge=1, description="Requests in flight above which the sampler refuses further requests."
    )
    stream_interval: int = Field(
        8, ge=1, description="Tokens in each streamed event of a sequence, except the first event, which carries one."
    )
    tool_parser: str = Field(
        "auto",
        min_length=1,
        description="vLLM's parser of tool calls for the OpenAI API; auto chooses it from the chat template.",
    )
    engine_arguments: dict[str, Any] = Field(
        {}, description="Further engine arguments of vLLM (AsyncEngineArgs), as a JSON object."
    )
    engine_timeout_s: float = Field(60, gt=0, description="Seconds that the engine may take to answer a command.")

    @field_validator("shared_base")
    @classmethod
    def _check_shared_base(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("tensor_parallel", 1) > 1:
            raise ValueError("only a sampler on one device shares its base: set --tensor-parallel to 1")
        if value:
            check_socket_path(value)
        return value
