"""Loads the base model: from files, from a seed, or shared with the trainer of the same device.

`SharedModelLoader` moves the loaded weights into memory that the trainer maps, one layer after the other, so that at
most one layer is there twice. On a CPU vLLM would multiply by copies of the weights that it packs for oneDNN; with a
shared base it multiplies by the weights themselves. Before the worker measures its memory, it waits until the trainer
has mapped the weights and has taken the memory with which it begins. The trainer trains once the worker has measured.
"""

import gc
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.model_executor.layers import utils as cpu_layers
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from fovea.runtime.model_files import TRANSPOSED_EXPERTS
from fovea_sampler.engine import weight_loading
from fovea_sampler.engine.manifest_check import Shape, checkpoint_directory, checkpoint_shapes
from fovea_sampler.engine.weight_loading import rename_of
from fovea_sampler.settings import SamplerSettings
from fovea_weights import by_layer, is_random, random_slices
from fovea_weights.shared_memory import OwnedBase

logger = logging.getLogger(__name__)

RANDOM_FORMAT = "fovea_random"
"""The `load_format` of a checkpoint that has shapes but no values; see `fovea_weights`."""
SHARED_FORMAT = "fovea_shared"
"""The `load_format` of a shared base. The path of its socket is in `additional_config`."""
_SOCKET_KEY = "fovea_shared_base"
_EXPERT = re.compile(r"(.*\.experts)\.(?:\d+\.\w+\.weight|gate_up_proj|down_proj)")
"""The name of one expert's matrix, or of a layer's stacked experts."""
_STACKED = {"gate_up_proj": "w13", "down_proj": "w2"}
"""Stacked experts: the trainer's names and vLLM's."""
_owned: list[OwnedBase] = []
"""The base of this worker, if it is shared."""


class RandomModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """A loader that draws random weights, on the model's device, for a checkpoint with shapes but no values."""

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all tensors by their names in the checkpoint's files."""
        device = next(model.parameters()).device
        for path in sorted(Path(model_config.model).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name, tensor in random_slices(file, device).items():
                    yield name, tensor[...]


class SharedModelLoader(RandomModelLoader):
    """A loader of checkpoints, also of those without values, that shares the loaded weights with a trainer."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors by their names in the checkpoint's files."""
        loader: Any = super() if is_random(Path(model_config.model)) else super(RandomModelLoader, self)
        yield from loader.get_all_weights(model_config, model)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Loads the weights and moves them into shared memory. Raises ValueError for kernels that would repack them."""
        if methods := weight_loading.repacked(model):
            backend = getattr(methods[0], "unquantized_backend", None)
            raise ValueError(
                "--shared-base: on this device vLLM stores experts for its kernels "
                f"({backend.value if backend else type(methods[0]).__name__}) in a form that the trainer cannot read: "
                "start both services without --shared-base"
            )
        super().load_weights(model, model_config)
        base = OwnedBase(next(model.parameters()).device)
        _owned[:] = [base]
        named = dict(model.named_parameters())
        for names in by_layer(named):
            parameters = [named[name] for name in names]
            for parameter, copy in zip(parameters, base.move([one.data for one in parameters]), strict=True):
                parameter.data = copy
            if parameters[0].is_cuda:
                torch.cuda.empty_cache()  # the driver cannot give torch's unused memory to the next layer

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Returns the model, of which the weights are published for the trainer.

        Raises ValueError if vLLM has moved a weight once more, to store it in another form.
        """
        cpu_layers.dispatch_cpu_unquantized_gemm = _multiply_by_weight
        model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        views = base_views(model, checkpoint_shapes(checkpoint_directory(model_config.model)))
        (base,) = _owned
        base.publish(vllm_config.additional_config[_SOCKET_KEY], views)
        logger.info("the trainer may map %.1f MiB of weights", base.size_bytes / 2**20)
        return model


def base_views(model: Any, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Returns the parts of vLLM's parameters that are tensors of the checkpoint, keyed by the checkpoint's names.

    Experts appear as the trainer holds them: stacked, `experts.gate_up_proj` [E, 2 I, D] and `experts.down_proj`
    [E, D, I], even if the checkpoint stores them one by one or transposed. Tensors that vLLM stores in another shape
    are left out.
    """
    rename, parameters = rename_of(model), dict(model.named_parameters())
    mapping = getattr(model, "packed_modules_mapping", {})
    packed = {part: (whole, parts) for whole, parts in mapping.items() for part in parts}
    views: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if found := _EXPERT.fullmatch(name):
            views |= _views_of_experts(parameters, rename(f"{found[1]}.weight").removesuffix("weight"), found[1])
            continue
        own, first = rename(name), 0
        parent, _, part = own.rpartition(".")[0].rpartition(".")
        if own not in parameters and part in packed:
            whole, parts = packed[part]
            before = [shapes.get(name.replace(f".{part}.", f".{one}.")) for one in parts[: parts.index(part)]]
            if None in before:
                continue
            first = sum(other[0] for other in before if other)
            own = own.replace(f"{parent}.{part}.", f"{parent}.{whole}.")
        parameter = parameters.get(own)
        if parameter is not None and parameter.dim() == len(shape):  # vLLM pads embeddings with further rows
            view = parameter.data[first : first + shape[0]] if shape else parameter.data
            if tuple(view.shape) == shape:
                views[name] = view
    return views


def _views_of_experts(parameters: Mapping[str, Tensor], own: str, prefix: str) -> dict[str, Tensor]:
    found = {}
    for name, stored in _STACKED.items():
        for place in ("", "routed_experts."):
            if (whole := parameters.get(f"{own}{place}{stored}_weight")) is not None:
                found[f"{prefix}.{name}"] = whole.data
    return found


def _multiply_by_weight(layer: Any, remove_weight: bool) -> None:
    """Replaces `dispatch_cpu_unquantized_gemm`, which packs a copy of the weight."""
    layer.cpu_linear = nn.functional.linear


def load_arguments(settings: SamplerSettings) -> dict[str, Any]:
    """Returns vLLM's engine argument that chooses the loader of the weights; empty if vLLM's own loads them."""
    if settings.shared_base:
        return {"load_format": SHARED_FORMAT}
    return {"load_format": RANDOM_FORMAT} if is_random(Path(settings.model)) else {}


def configure(config: Any, settings: SamplerSettings) -> None:
    """Tells the loader the path of the socket. Raises ValueError for a model that the trainer could not map."""
    if settings.shared_base:
        if config.model_config.hf_config.model_type in TRANSPOSED_EXPERTS:
            raise ValueError(
                "--shared-base does not support Llama 4: vLLM stores its experts as [outputs, inputs], but the trainer "
                "and the checkpoint as [inputs, outputs]; start both services without --shared-base"
            )
        config.additional_config[_SOCKET_KEY] = settings.shared_base


def register() -> None:
    """Prepares this process for the loaders, and makes its worker wait for the trainer. It may be called twice."""
    weight_loading.register()
    kind: Any = Worker
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        kind = CPUWorker
    if kind.determine_available_memory.__module__ != __name__:
        register_model_loader(RANDOM_FORMAT)(RandomModelLoader)
        register_model_loader(SHARED_FORMAT)(SharedModelLoader)
        kind.determine_available_memory = _after_trainer(kind.determine_available_memory)


def _after_trainer(measure: Any) -> Any:
    def determine_available_memory(worker: Any) -> int:
        for base in _owned:
            base.wait_until_used()
            if worker.device.type == "cuda":
                # vLLM counts the memory that the trainer has allocated since the first measurement as its own.
                gc.collect()
                torch.cuda.empty_cache()
                own_bytes = torch.cuda.memory_reserved(worker.device) + base.size_bytes
                worker.init_snapshot.free_memory = torch.cuda.mem_get_info(worker.device)[0] + own_bytes
        found = int(measure(worker))
        for base in _owned:
            base.note_measured()
        return found

    return determine_available_memory


def problem() -> str:
    """Returns the reason why no full weights can be loaded into this worker's model; empty if its base is its own."""
    return (
        "a trainer of adapters uses the same base: full weights need a sampler without --shared-base" if _owned else ""
    )
