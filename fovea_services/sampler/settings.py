"""Settings of the sampler."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from fovea.runtime.settings import ServiceSettings


class SamplerSettings(ServiceSettings):
    """Command line, then `FOVEA_SAMPLER_*`, then these defaults."""

    model_config = SettingsConfigDict(env_prefix="FOVEA_SAMPLER_")

    model: str = Field(description="Checkpoint directory or hub name.")
    renderer: str = Field("", description="host:port to fetch vision tensors from when a request names no source.")
    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="What runs the model; auto asks the vLLM build.")
    dtype: str = Field("auto", description="Element type of the weights; auto is float32 on CPU, the model's on GPU.")
    head_dtype: Literal["float32", "model"] = Field(
        "float32", description="Type of logits, of which probabilities are made; the trainer's must be the same."
    )
    max_context: int | None = Field(
        None, ge=2, description="The most tokens of prompt and completion; none asks the model."
    )
    max_sequences: int = Field(64, ge=1, description="The most sequences in one batch.")
    max_batched_tokens: int = Field(2048, ge=32, description="The most tokens that one engine step computes.")
    kv_cache_mib: int | None = Field(
        None,
        ge=16,
        description="KV cache in MiB; none is what is free on GPU, and on CPU 512, or as much as larger weights take, "
        "within a sixteenth of the memory that is free.",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e5m2"] = Field(
        "auto",
        description="Element type of the KV cache; auto is the model's. fp8 (e4m3) holds twice the tokens, and the "
        "trainer, which rounds nothing there, no longer agrees.",
    )
    block_size: int | None = Field(
        None, ge=16, description="Tokens of one KV block; none is 32 on CPU, vLLM's own on GPU."
    )
    gpu_memory_fraction: float = Field(0.9, gt=0, le=1, description="Share of GPU memory that the engine may take.")
    full_push_room: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether GPU memory is kept free of KV cache, for pushed full weights to wait in beside the model; "
        "else they wait in pinned host memory. auto does so where it takes at most a third of the cache; never suits "
        "those who train adapters alone.",
    )
    transfer: Literal["auto", "gloo", "nccl", "cuda_ipc"] = Field(
        "auto",
        description="What carries weights; auto is nccl on GPU. A GPU shared with the trainer needs cuda_ipc, or gloo "
        "if the two are in containers of their own.",
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share the model; processes on CPU.")
    expert_parallel: bool = Field(
        False, description="Whole experts on each of the tensor-parallel devices, instead of a part of every expert."
    )
    eager: bool = Field(False, description="No CUDA graphs. A CPU engine never has any.")
    max_lora_rank: Annotated[Literal[8, 16, 32, 64, 128, 256, 320, 512], BeforeValidator(int)] = Field(
        64, description="The largest rank of an adapter."
    )
    max_loras: int | None = Field(
        None,
        ge=1,
        description="The most adapters in one batch; requests of further ones wait. Each has a slot of the largest "
        "rank on the device; none is as many as a sixteenth of a GPU's memory holds. On CPU they take as much as the "
        "weights, or 256 MiB if that is more, within a sixteenth of the memory that is free, and are four at least.",
    )
    max_cpu_loras: int | None = Field(None, ge=1, description="Adapters that vLLM keeps built; none is 4 * max-loras.")
    max_adapters: int = Field(
        64, ge=1, description="The most adapters that are held; the least recently used one goes."
    )
    max_adapter_mib: int | None = Field(
        None,
        ge=1,
        description="The most memory of all adapters that each worker holds, in MiB; none is room for max-adapters of "
        "the largest rank, and at most a quarter of the host's memory for all workers.",
    )
    feature_cache_mib: int = Field(1024, ge=0, description="Vision tensors kept for further requests, in MiB.")
    max_images: int = Field(32, ge=1, description="The most images of one prompt.")
    max_sample_count: int = Field(128, ge=1, description="The most sequences of one request.")
    max_top_logprobs: int = Field(64, ge=0, description="The most alternatives of one logprobs row, listed or drawn.")
    max_requests: int = Field(2048, ge=1, description="Requests in flight before further ones are refused.")
    stream_interval: int = Field(8, ge=1, description="Tokens that one streamed event carries, after the first.")
    tool_parser: str = Field(
        "auto",
        min_length=1,
        description="vLLM's parser of tool calls, for OpenAI's API; auto goes by what the chat template writes.",
    )
    engine_arguments: dict[str, Any] = Field(
        {}, description="The rest of vLLM's engine arguments, as a JSON object of its own names (AsyncEngineArgs)."
    )
    engine_timeout_s: float = Field(60, gt=0, description="How long the engine may take to answer a command.")
