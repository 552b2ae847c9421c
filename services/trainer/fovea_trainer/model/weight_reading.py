"""Reads the weights of a model from the files of its checkpoint, or uses those of a sampler on the same device."""

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    convert_and_load_state_dict_in_model,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from fovea_trainer.model.expert_routing import is_experts
from fovea_trainer.model.experts import transposed_experts
from fovea_weights import by_layer, random_slices
from fovea_weights.shared_memory import MappedBase

_COMPARING_THREADS = 4
_EXPERT = re.compile(r"(.*\.experts)\.(?:\d+|gate_up_proj$|down_proj$)")
"""The name of a tensor with experts."""
_OWN_SHARE = 1 / 16
"""The largest share of the base that the trainer may hold for itself beside a shared one."""


def read_weights(model: Any, model_dir: Path, device: torch.device, base: MappedBase | None = None) -> None:
    """Reads the weights of a model on the meta device. For sharded parameters this reads only the rank's rows.

    Like `from_pretrained`, it applies transformers' conversions of names and layouts, and creates the tensors that no
    file contains (tied parameters, buffers). Call this on all ranks.

    Args:
        model: The model.
        model_dir: Folder of the checkpoint.
        device: Device of the weights.
        base: The base that a sampler shares; the model then uses its tensors if they equal those in the files.

    Raises:
        ValueError: The files do not match the model, or the sampler's base does not match the files.
        OSError: The files cannot be read.
    """
    conversions = get_model_conversion_mapping(model) + transposed_experts(model)
    dtype = model.config.dtype
    config = LoadStateDictConfig(
        device_map={"": device}, dtype=dtype, dtype_plan=model._get_dtype_plan(dtype), weight_mapping=conversions
    )
    tied = dict(model.all_tied_weights_keys)
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for path in _weight_files(model_dir):
            # With mmap, the pages that are read would count as memory of this process until the file is closed.
            file = files.enter_context(safe_open(path, "pt", backend="pread"))
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            tensors |= random_slices(file, device) or stored
        if base is not None:
            tensors |= _shared(tensors, base, device)
        transformers_logging.disable_progress_bar()  # it would print one bar per layer
        loaded, experts = [], [module for module in model.modules() if is_experts(module)]
        for layer in _layers(tensors):
            loaded.append(convert_and_load_state_dict_in_model(model, layer, config)[0])
            if base is not None:
                experts = _share_experts(experts, layer, base)
    found = loaded[0]
    for other in loaded[1:]:
        found.missing_keys &= other.missing_keys
        found.unexpected_keys |= other.unexpected_keys
        found.mismatched_keys |= other.mismatched_keys
        found.conversion_errors |= other.conversion_errors
    errors = [f"{name}: {error}" for name, error in found.conversion_errors.items()]
    errors += [f"{name} has shape {list(there)}, not {list(own)}" for name, there, own in found.mismatched_keys]
    converters = [one for one in model._weight_conversions if isinstance(one, WeightConverter)]
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        mixing = (one for one in converters if not all(map(_keeps_rows, one.operations)))
        errors += [f"{one.source_patterns} cannot be read in shards: run a single rank" for one in mixing]
    if not errors:
        found = model._finalize_model_loading(model, config, found)
        errors = [f"{name} is missing" for name in sorted(found.missing_keys)]
        # Tied parameters are sharded as one, so files with two different tensors cannot be represented.
        untied = tied.keys() - model.all_tied_weights_keys
        errors += [f"{name} differs from {tied[name]}, to which it is tied" for name in untied]
    if errors:
        raise ValueError(f"the weights in {model_dir} do not match its config.json: {errors[0]}")
    if base is not None:
        _check_own(model, base)


def _shared(stored: Mapping[str, Any], base: MappedBase, device: torch.device) -> dict[str, Tensor]:
    """Returns the sampler's tensors except experts, each compared with the files. Raises ValueError if one differs."""
    names = [name for name in stored if name in base.tensors and not _EXPERT.match(name)]

    def is_equal(name: str) -> bool:
        view = base.tensors[name]
        return torch.equal(stored[name][...].to(device, view.dtype), view)

    with ThreadPoolExecutor(_COMPARING_THREADS) as threads:
        for name, equal in zip(names, threads.map(is_equal, names), strict=True):
            if not equal:
                raise ValueError(_different(name))
    return {name: base.tensors[name] for name in names}


def _share_experts(experts: list[nn.Module], layer: Mapping[str, Any], base: MappedBase) -> list[nn.Module]:
    """Replaces the experts of a layer, which loading has stacked or transposed, by the sampler's.

    Experts of another shape or dtype stay as they are.

    Args:
        experts: The experts of this layer and of all layers that are not loaded yet.
        layer: The layer's tensors in the files.
        base: The base that the sampler shares.

    Returns those of `experts` that are not loaded yet. Raises ValueError if values differ.
    """
    prefixes = {found[1] for name in layer if (found := _EXPERT.match(name))}
    shared = {name: tensor for name, tensor in base.tensors.items() if name.rpartition(".")[0] in prefixes}
    later = [module for module in experts if all(own.is_meta for own in module.parameters(recurse=False))]
    for module in (each for each in experts if each not in later):
        for name, own in list(module.named_parameters(recurse=False)):
            for whole, tensor in shared.items():
                if whole.endswith(f".{name}") and own.shape == tensor.shape and own.dtype == tensor.dtype:
                    if not torch.equal(own, tensor):
                        raise ValueError(_different(whole))
                    replacement = nn.Parameter(tensor, requires_grad=False)
                    replacement._is_hf_initialized = True  # type: ignore[attr-defined]
                    setattr(module, name, replacement)
    return later


def _different(name: str) -> str:
    return f"the sampler's {name} differs from the checkpoint's: both must read the same model"


def _check_own(model: nn.Module, base: MappedBase) -> None:
    """Raises ValueError if the trainer would hold a large part of the base itself."""
    parameters = dict(model.named_parameters())
    own = {name: one.nbytes for name, one in parameters.items() if not base.holds(one)}
    whole_bytes = sum(one.nbytes for one in parameters.values())
    if sum(own.values()) > _OWN_SHARE * whole_bytes:
        largest = max(own, key=lambda name: own[name])
        raise ValueError(
            f"the trainer would hold {len(own)} of {len(parameters)} parameters itself, because the sampler lacks them "
            f"or stores them otherwise; the largest is {largest}. Give both services the same model and dtype, or "
            "start them without --shared-base"
        )


def _layers(tensors: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the tensors of one layer after the other, experts included, and those outside of layers together.

    transformers' reader threads run ahead of the step that stacks experts. If they received all layers at once, they
    would hold the model twice.
    """
    for names in by_layer(tensors):
        yield {name: tensors[name] for name in names}


def _weight_files(model_dir: Path) -> list[Path]:
    whole, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole]
    return [model_dir / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _keeps_rows(operation: ConversionOps) -> bool:
    """Returns True if a conversion keeps each row (expert) in place, so that a rank can convert its own rows alone."""
    if isinstance(operation, Transpose):
        return 0 not in (operation.dim0, operation.dim1)
    is_merge = isinstance(operation, MergeModulelist) and operation.dim == 0
    return is_merge or (isinstance(operation, Concatenate) and operation.dim != 0)
