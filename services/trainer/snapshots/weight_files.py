"""Weights as files: full parameters as a Hugging Face checkpoint, adapters as PEFT stores them."""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fovea.wire.errors import InvalidInput
from services.trainer.model.lora import PEFT_PREFIX
from services.trainer.model.sharding import full_of
from services.trainer.ranks.control_group import ControlGroup
from services.trainer.snapshots.checkpoint_folder import Folder

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SHARD_BYTES = 4 * 2**30
INDEX = "model.safetensors.index.json"


def gathered(locals_: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Whole tensors in order, each on the device for as long as it is looked at. Collective."""
    for name, local in locals_.items():
        yield full_of(local, like[name])


def write_checkpoint(
    tensors: Iterable[tuple[str, Tensor]], folder: Folder, model_dir: Path, control: ControlGroup
) -> None:
    """Writes a Hugging Face checkpoint: weights by gathering, everything else as the base has it. Collective.

    Raises, on all ranks, what storage raises on rank 0.
    """
    part: dict[str, Tensor] = {}
    part_bytes = 0
    files: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        files.update(dict.fromkeys(part, name))
        if control.rank == 0:
            folder.write(name, save_safetensors(part, metadata={"format": "pt"}))
        part.clear()

    for name, tensor in tensors:
        size_bytes = tensor.numel() * tensor.element_size()
        if part and part_bytes + size_bytes > SHARD_BYTES:
            control.agree(flush)
            part_bytes = 0
        # Only rank 0 writes; the others must not hold gathered tensors that nobody reads.
        part[name] = tensor.cpu().contiguous() if control.rank == 0 else torch.empty(0)
        part_bytes += size_bytes
    control.agree(flush)
    control.on_rank_0(lambda: _write_rest(folder, model_dir, files))


def _write_rest(folder: Folder, model_dir: Path, files: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": files}
    folder.write(INDEX, json.dumps(index).encode())
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not path.name.endswith((".safetensors", ".bin", ".safetensors.index.json")):
            folder.write(path.name, path.read_bytes())


def read_shards(folder: Folder, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's shards of a checkpoint that `write_checkpoint` wrote, on the host; reads only what it needs.

    Raises NotFound if there is none, InvalidInput for one of another shape.
    """
    weight_map: dict[str, str] = json.loads(folder.read(INDEX))["weight_map"]
    shards: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for file in sorted(set(weight_map.values())):
            path = f"{folder.path}/{file}" if _is_local(folder) else f"{scratch}/{file}"
            if not _is_local(folder):
                folder.files.get_file(f"{folder.path}/{file}", path)
            with safe_open(path, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    if name in like:
                        shards[name] = _slice(tensors.get_slice(name), like[name], name)
    if missing := [name for name in like if name not in shards]:
        raise InvalidInput(f"{folder.path} has no {missing[0]}", field="uri")
    return {name: shards[name] for name in like}


def _is_local(folder: Folder) -> bool:
    protocol = folder.files.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def _slice(source: object, like: Tensor, name: str) -> Tensor:
    shape = tuple(source.get_shape())  # type: ignore[attr-defined]
    if shape != tuple(like.shape):
        raise InvalidInput(f"{name} has shape {list(shape)}, the model needs {list(like.shape)}", field="uri")
    if not isinstance(like, DTensor):
        whole: Tensor = source[...]  # type: ignore[index]
        return whole.to(like.dtype)
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    ranges = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    part: Tensor = source[ranges]  # type: ignore[index]
    return part.to(like.dtype)


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
        ADAPTER_CONFIG: json.dumps(config, indent=2).encode(),
        ADAPTER_WEIGHTS: save_safetensors(state, metadata={"format": "pt"}),
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
