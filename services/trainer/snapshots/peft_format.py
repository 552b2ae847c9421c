"""Adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fovea.wire.errors import InvalidInput
from services.trainer.model.lora import PEFT_PREFIX

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def peft_files(tensors: Iterable[tuple[str, Tensor]], rank: int, alpha: float, base_model: str) -> dict[str, bytes]:
    """The two files of an adapter folder; tensors under PEFT's names."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}
    suffix = ".lora_A.weight"
    modules = [name.removeprefix(PEFT_PREFIX).removesuffix(suffix) for name in state if name.endswith(suffix)]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "target_modules": modules,
    }
    return {
        CONFIG: json.dumps(config, indent=2).encode(),
        WEIGHTS: save_safetensors(state, metadata={"format": "pt"}),
    }


def read_tensors(data: bytes, what: str) -> dict[str, Tensor]:
    """Tensors by name. Raises InvalidInput if the bytes are no safetensors file."""
    try:
        tensors: dict[str, Tensor] = load_safetensors(data)
    except (SafetensorError, ValueError) as error:
        raise InvalidInput(f"{what} is damaged: {error}", field="uri") from None
    return tensors


def copy_into(targets: Iterable[tuple[str, Tensor]], source: dict[str, Tensor], what: str) -> None:
    """Copies tensors by name, all or none. Raises InvalidInput naming the first that is missing, extra or misshapen."""
    wanted = dict(targets)
    for name, target in wanted.items():
        if name not in source:
            raise InvalidInput(f"{what} has no {name}: it was saved from a differently shaped model", field="uri")
        if source[name].shape != target.shape:
            raise InvalidInput(
                f"{what} has {name} {list(source[name].shape)}, the model needs {list(target.shape)}", field="uri"
            )
    if extra := sorted(set(source) - set(wanted)):
        raise InvalidInput(f"{what} has {extra[0]}, which the model does not train", field="uri")
    with torch.no_grad():
        for name, target in wanted.items():
            target.copy_(source[name])
