"""Weights as files: full parameters as a Hugging Face checkpoint, adapters in PEFT's format."""

import json
import math
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fovea.runtime.model_files import UNTRAINED
from fovea.wire.conventions import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fovea.wire.errors import InvalidInput
from fovea_trainer.model.experts import ExpertLayout
from fovea_trainer.model.lora import PEFT_PREFIX, by_own_names
from fovea_trainer.model.sharding import full_of
from fovea_trainer.ranks.control_group import ControlGroup
from fovea_trainer.weights.checkpoint_folder import Chunks, Folder, chunks_of

SHARD_BYTES = 4 * 2**30
EXPERT_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Maps the projection names of expert adapters to the names in checkpoint files."""
_SEPARATE = (ExpertLayout.ONE_BY_ONE, ExpertLayout.NUMBERED)
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 64 * 2**20
"""Limit on the header of a safetensors file, in bytes; enough for an adapter of 300,000 experts."""
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def file_tensors(name: str, tensor: Tensor, layout: ExpertLayout | None) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of each checkpoint file entry that stores a parameter. The tensors are views.

    Args:
        name: Name of the parameter.
        tensor: The parameter; for stacked experts [experts, out, in].
        layout: How the files store the experts of a layer; None for any other parameter.
    """
    if layout in _SEPARATE:
        parent, _, projection = name.rpartition(".")
        for index, expert in enumerate(tensor):
            halves = expert.chunk(2) if projection == "gate_up_proj" else (expert,)
            yield from zip(_expert_files(parent, projection, index, layout), halves, strict=True)
    else:
        yield name, tensor.mT if layout is ExpertLayout.TRANSPOSED else tensor


def _expert_files(parent: str, projection: str, index: int, layout: ExpertLayout) -> list[str]:
    parts = ("w1", "w3") if projection == "gate_up_proj" else ("w2",)
    names = parts if layout is ExpertLayout.NUMBERED else [EXPERT_PROJECTIONS[part] for part in parts]
    return [f"{parent}.{index}.{name}.weight" for name in names]


def in_files(like: Mapping[str, Tensor], layouts: Mapping[str, ExpertLayout]) -> dict[str, Tensor]:
    """Returns meta tensors with the dtype and unsharded shape of each tensor in checkpoint files, in order.

    Args:
        like: The model's parameters, keyed by parameter name.
        layouts: Layouts of the experts, by parameter name.
    """
    return {
        file: part
        for name, tensor in like.items()
        for file, part in file_tensors(
            name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), layouts.get(name)
        )
    }


def gathered(
    locals_: Mapping[str, Tensor], like: Mapping[str, Tensor], layouts: Mapping[str, ExpertLayout]
) -> Iterator[Tensor]:
    """Yields unsharded tensors in the order of `in_files`. Collective.

    A tensor is gathered on the device, and freed when the next one is requested.

    Args:
        locals_: This rank's shards, keyed by parameter name.
        like: The model's parameters, which define how they are sharded.
        layouts: Layouts of the experts, by parameter name.
    """
    for name, local in locals_.items():
        for _, part in file_tensors(name, full_of(local, like[name]), layouts.get(name)):
            yield part


def write_checkpoint(
    tensors: Iterable[tuple[str, Tensor]], folder: Folder, model_dir: Path, control: ControlGroup
) -> None:
    """Writes a Hugging Face checkpoint: the given weights, and copies of the rest of the base checkpoint. Collective.

    An error of the storage on rank 0 is raised on all ranks.
    """
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    files: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        files.update(dict.fromkeys(shard, name))
        if control.rank == 0:
            folder.write(name, save_safetensors(shard, metadata={"format": "pt"}))
        shard.clear()

    for name, tensor in tensors:
        size_bytes = tensor.numel() * tensor.element_size()
        if shard and shard_bytes + size_bytes > SHARD_BYTES:
            control.agree(flush)
            shard_bytes = 0
        # The iteration gathers on all ranks, but only rank 0 writes, so the others keep no data.
        shard[name] = tensor.cpu().contiguous() if control.rank == 0 else torch.empty(0)
        shard_bytes += size_bytes
    control.agree(flush)
    control.on_rank_0(lambda: _write_rest(folder, model_dir, files))


def _write_rest(folder: Folder, model_dir: Path, files: dict[str, str]) -> None:
    for number, path in enumerate(sorted(model_dir.glob("*.safetensors"))):
        with safe_open(path, "pt") as file:
            rest = {name: file.get_tensor(name) for name in file.keys() if name.startswith(UNTRAINED)}  # noqa: SIM118
        if rest:
            files.update(dict.fromkeys(rest, name := f"untrained-{number + 1:05d}.safetensors"))
            folder.write(name, save_safetensors(rest, metadata={"format": "pt"}))
    index = {"metadata": {}, "weight_map": files}
    folder.write(INDEX, json.dumps(index).encode())
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not path.name.endswith((".safetensors", ".bin", ".safetensors.index.json")):
            folder.write(path.name, path.read_bytes())


def read_shards(folder: Folder, like: Mapping[str, Tensor], layouts: Mapping[str, ExpertLayout]) -> dict[str, Tensor]:
    """Reads this rank's shards of a checkpoint that `write_checkpoint` wrote, and no other rows.

    Args:
        folder: Folder of the checkpoint.
        like: The model's parameters, which define shapes, dtypes and sharding.
        layouts: Layouts of the experts, by parameter name.

    Returns:
        The shards on the host, keyed by parameter name.

    Raises:
        NotFound: There is no checkpoint.
        InvalidInput: The checkpoint lacks a tensor or has other shapes.
    """
    weight_map: dict[str, str] = json.loads(folder.read(INDEX))["weight_map"]
    whole = in_files(like, layouts)
    if missing := [name for name in whole if name not in weight_map]:
        raise InvalidInput(f"{folder.path} has no {missing[0]}", field="uri")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as files:
        sources: dict[str, Any] = {}
        for file in sorted({weight_map[name] for name in whole}):
            path = f"{folder.path if folder.is_local else scratch}/{file}"
            if not folder.is_local:
                folder.files.get_file(f"{folder.path}/{file}", path)
            tensors = files.enter_context(safe_open(path, "pt"))
            sources |= {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
        for name, tensor in whole.items():
            if name not in sources:
                raise InvalidInput(f"{folder.path} has no {name}", field="uri")
            if (shape := list(sources[name].get_shape())) != list(tensor.shape):
                raise InvalidInput(f"{name} has shape {shape}, but the model needs {list(tensor.shape)}", field="uri")
        return {name: _read_shard(sources, name, tensor, layouts.get(name)) for name, tensor in like.items()}


def _read_shard(sources: Mapping[str, Any], name: str, like: Tensor, layout: ExpertLayout | None) -> Tensor:
    """Returns this rank's rows of a parameter, in the dtype of the model. Shards divide the first dimension."""
    first, count = 0, like.shape[0] if like.dim() else 0
    if isinstance(like, DTensor):
        (count, *_), (first, *_) = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    rows = slice(first, first + count)
    if layout in _SEPARATE:
        parent, _, projection = name.rpartition(".")
        named = (_expert_files(parent, projection, i, layout) for i in range(like.shape[0])[rows])
        experts = [[sources[file][...] for file in files] for files in named]
        part = torch.stack([torch.cat(halves) for halves in experts]) if experts else like.new_empty(0, *like.shape[1:])
    elif layout is ExpertLayout.TRANSPOSED:
        part = sources[name][rows].mT.contiguous()
    else:
        part = sources[name][rows] if like.dim() else sources[name][...]
    return part.to(like.dtype)


def one_by_one(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields an adapter with one entry per expert, as PEFT and vLLM read it.

    A stacked factor is [experts, rows, columns]. If its first dimension is 1, all experts share it, and it is repeated
    for each of them.
    """
    counts: dict[str, int] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 3:
            parent = name.rsplit(".", 3)[0]
            counts[parent] = max(counts.get(parent, 0), len(tensor))
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            yield name, tensor
            continue
        parent, part, half, _ = name.rsplit(".", 3)
        for index, factor in enumerate(tensor.expand(counts[parent], -1, -1)):
            yield f"{parent}.{index}.{EXPERT_PROJECTIONS[part]}.{half}.weight", factor


def of_experts(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacks the tensors of single experts: the inverse of `one_by_one`.

    Factors that are already stacked stay as they are. Hosted Tinker's names become the adapter's own.

    Args:
        tensors: Tensors of the file, keyed by tensor name.
        like: The adapter's own tensors, keyed by tensor name.

    Raises:
        InvalidInput: The experts differ in a factor that they share in `like`, or in their shapes.
    """
    found = by_own_names(tensors, like)
    for name, target in like.items():
        if target.dim() != 3 or name in found:
            continue
        parent, part, half, _ = name.rsplit(".", 3)
        experts: list[Tensor] = []
        while (one := found.pop(f"{parent}.{len(experts)}.{EXPERT_PROJECTIONS[part]}.{half}.weight", None)) is not None:
            experts.append(one)
        if not experts:
            continue
        if len(target) == 1:
            if not all(one.equal(experts[0]) for one in experts):
                raise InvalidInput(
                    f"each expert of {parent} has its own {half}, but this model has one that all share", field="uri"
                )
            experts = experts[:1]
        if len({one.shape for one in experts}) > 1:
            raise InvalidInput(f"the experts of {parent} have {half} factors of different shapes", field="uri")
        found[name] = torch.stack(experts)
    return found


def tensor_file(tensors: Iterable[tuple[str, Tensor]]) -> Chunks:
    """Yields a safetensors file in chunks.

    Tensors on the host are not copied, and the GIL is never held for long.

    The format is: length of the header, header as JSON, data (https://github.com/huggingface/safetensors, "Format").
    """
    named = dict(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in named.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    yield from chunks_of(named.values())


def peft_files(
    tensors: Iterable[tuple[str, Tensor]], rank: int, alpha: float, base_model: str, note: str = ""
) -> dict[str, Chunks]:
    """Returns the two files of a PEFT adapter folder.

    Args:
        tensors: Tensors under PEFT's names. They must not change until the files are written.
        rank: LoRA rank.
        alpha: LoRA alpha.
        base_model: Name of the base model.
        note: A note for readers of the configuration. PEFT warns about this unknown entry.
    """
    state = dict(tensors)
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
    if note:
        config["fovea_note"] = note
    return {
        ADAPTER_CONFIG: [json.dumps(config, indent=2).encode()],
        ADAPTER_WEIGHTS: tensor_file(state.items()),
    }


def read_shapes(folder: Folder, name: str) -> dict[str, list[int]]:
    """Returns the shape of each tensor in a safetensors file, keyed by tensor name. Reads only the header.

    Raises:
        NotFound: There is no such file.
        InvalidInput: The file is damaged, or its size does not match its tensors.
    """
    what = f"{folder.path}/{name}"
    try:
        (length,) = struct.unpack("<Q", folder.read(name, 0, 8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes; the limit is {MAX_HEADER_BYTES} bytes")
        header: dict[str, Any] = json.loads(folder.read(name, 8, 8 + length))
        header.pop("__metadata__", None)
        shapes = {tensor: [int(extent) for extent in entry["shape"]] for tensor, entry in header.items()}
        itemsizes = {text: dtype.itemsize for dtype, text in _TYPES.items()}
        need = sum(math.prod(shapes[tensor]) * itemsizes[entry["dtype"]] for tensor, entry in header.items())
        if (has := folder.sizes()[name] - 8 - length) != need:
            raise ValueError(f"its tensors need {need} bytes, but the file has {has} bytes of data")
    except (struct.error, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise InvalidInput(f"{what} is damaged: {error}", field="uri") from None
    return shapes


def check_shapes(shapes: Mapping[str, list[int]], targets: Mapping[str, Tensor], what: str, is_foreign: bool) -> None:
    """Compares the tensors of a file with the tensors that a model expects, before any of them is read.

    Args:
        shapes: Shapes in the file, keyed by tensor name. Experts may be stacked, or separate as `one_by_one` names
            them.
        targets: The model's tensors, which may be on the meta device.
        what: The file, for error messages.
        is_foreign: True if another program wrote the file. It may then lack both factors of a module, but not only
            one of them.

    Raises:
        InvalidInput: Names the first tensor that is missing, unexpected or misshapen.
    """
    left, adapted = by_own_names(shapes, targets) if is_foreign else dict(shapes), set[str]()
    missing: list[str] = []
    for name, target in targets.items():
        found = left.pop(name, None)
        if found is None and is_foreign and target.dim() == 3:
            found = _pop_experts(left, name, target)
        if found is None:
            missing.append(name)
        elif found != list(target.shape):
            raise InvalidInput(
                f"{what} has {name} with shape {found}, but the model needs {list(target.shape)}", field="uri"
            )
        else:
            adapted.add(name.rpartition(".lora_")[0])
    for name in missing:
        if not is_foreign or name.rpartition(".lora_")[0] in adapted:
            raise InvalidInput(f"{what} has no {name}: it was saved from a differently shaped model", field="uri")
    if left:
        raise InvalidInput(f"{what} has {min(left)}, which the model does not train", field="uri")


def _pop_experts(left: dict[str, list[int]], name: str, target: Tensor) -> list[int] | None:
    """Removes the experts of a stacked tensor from the shapes of a file. Returns the shape of the stack, or None."""
    parent, part, half, _ = name.rsplit(".", 3)
    experts: list[list[int]] = []
    while (one := left.pop(f"{parent}.{len(experts)}.{EXPERT_PROJECTIONS[part]}.{half}.weight", None)) is not None:
        experts.append(one)
    if not experts:
        return None
    odd = next((one for one in experts if one != experts[0]), experts[0])
    return [1 if len(target) == 1 else len(experts), *odd]  # the file repeats a shared factor for each expert


def read_tensors(data: bytes, what: str) -> dict[str, Tensor]:
    """Parses a safetensors file.

    Raises:
        InvalidInput: The bytes are not a safetensors file.
    """
    try:
        tensors: dict[str, Tensor] = load_safetensors(data)
    except (SafetensorError, ValueError) as error:
        raise InvalidInput(f"{what} is damaged: {error}", field="uri") from None
    return tensors


def copy_into(targets: Iterable[tuple[str, Tensor]], source: dict[str, Tensor], what: str) -> None:
    """Copies tensors to the targets of the same names, all or none.

    Raises:
        InvalidInput: Names the first tensor that is missing, unexpected or misshapen.
    """
    wanted = dict(targets)
    check_shapes({name: list(tensor.shape) for name, tensor in source.items()}, wanted, what, is_foreign=False)
    with torch.no_grad():
        for name, target in wanted.items():
            target.copy_(source[name])
