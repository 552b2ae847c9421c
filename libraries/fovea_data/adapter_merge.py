"""Merges an adapter into its base model, as a Hugging Face checkpoint that needs neither PEFT nor Fovea.

The files are processed one after another, so that at most one shard is in memory. Their names and layouts are those of
the base. The conversions of transformers map each tensor of a file to a module. Needs torch and transformers.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from fovea.runtime.model_files import TRANSPOSED_EXPERTS, read_json
from fovea.wire.conventions import EXPERTS_NOTE, PEFT_READS_EXPERTS_OF
from fovea.wire.errors import InvalidInput
from fovea_data.base_model import copy_small_files, is_tied, trained_part

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 4 * 2**30

_PREFIX = "base_model.model."
_SUFFIX = ".weight"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SHARED_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_ITEM_BYTES = _FLOATS | {"I64": 8, "I32": 4, "I16": 2}
"""Bytes of the element types of safetensors files; other types have one byte."""
_OTHER_KINDS = {"use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "bias": "none", "rank_pattern": {}}
"""Entries of a PEFT configuration that change what an adapter computes, and the supported values."""


def merge_adapter(
    adapter: pathlib.Path,
    base: pathlib.Path,
    out: pathlib.Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes W + alpha / rank * B A for each adapted weight W, and the other weights of the base unchanged.

    Sums are float32, rounded once to the base's dtype. An adapted unembedding that the base ties to its embeddings
    becomes a separate tensor, and `tie_word_embeddings` becomes false.

    Args:
        adapter: Folder of a PEFT LoRA: `adapter_config.json` and `adapter_model.safetensors`.
        base: Folder of the base checkpoint, with safetensors files.
        out: An existing folder for the merged checkpoint.
        shard_bytes: The most bytes of a file of weights. A single larger tensor has its own file.
        on_bytes: Called with the size in bytes of each tensor that is written.

    Raises:
        InvalidInput: The adapter has another type or does not fit the base, or the base is quantised or has no
            safetensors files.
    """
    config = read_json(base / "config.json")
    if config.get("quantization_config"):
        raise InvalidInput(
            f"{base} is quantised, so no adapter can be merged into it: give the original checkpoint",
            field="base",
        )
    with ExitStack() as files:
        stored = _Base(base, files)
        factors = _Factors(adapter, files)
        plan = list(stored.plan(factors))
        if left := factors.unused():
            raise InvalidInput(
                f"the adapter adapts {left[0]}, which {base} does not have: give the base model of the adapter",
                field="base",
            )
        shards = list(_shards(plan, shard_bytes))
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        if len(shards) == 1:
            names = [WEIGHTS]
        for name, shard in zip(names, shards, strict=True):
            written = {}
            for each in shard:
                written[each.name] = each.make()
                on_bytes(each.size_bytes)
            save_file(written, out / name, metadata={"format": "pt"})
    copy_small_files(base, out)
    if len(shards) > 1:
        weight_map = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        index = {"metadata": {"total_size": sum(each.size_bytes for each in plan)}, "weight_map": weight_map}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if stored.is_untied(factors):
        config["tie_word_embeddings"] = False
        if isinstance(config.get("text_config"), dict):
            config["text_config"]["tie_word_embeddings"] = False
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def spread_shared_experts(adapter: pathlib.Path) -> None:
    """Rewrites an adapter so that each expert has its own factors, with the names that PEFT and vLLM read.

    Fovea stores the factors of a layer's experts as `experts.w1.lora_A`, [E, R, N], or [1, R, N] if all share one.
    """
    weights = adapter / ADAPTER_WEIGHTS
    tensors = _loaded(weights)
    counts: dict[str, int] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 3:
            parent = name.rsplit(".", 3)[0]
            counts[parent] = max(counts.get(parent, 0), len(tensor))
    if not counts:
        return
    spread: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            spread[name] = tensor
            continue
        parent, part, half, _ = name.rsplit(".", 3)
        for index, factor in enumerate(tensor.expand(counts[parent], -1, -1)):
            spread[f"{parent}.{index}.{_SHARED_NAMES[part]}.{half}.weight"] = factor.clone()
    save_file(spread, weights, metadata={"format": "pt"})
    config = read_json(adapter / ADAPTER_CONFIG)
    suffix = ".lora_A.weight"
    config["target_modules"] = [
        name.removeprefix(_PREFIX).removesuffix(suffix) for name in spread if name.endswith(suffix)
    ]
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


UNTIE = """\
head = model.get_output_embeddings()
head.weight = torch.nn.Parameter(head.weight.detach().clone())
for config in (model.config, model.config.get_text_config()):
    config.tie_word_embeddings = False
"""
"""Code that unties a transformers model's unembedding, so that PEFT merges an adapter of it into nothing else."""


def notes_of(adapter: pathlib.Path, base: pathlib.Path) -> dict[str, str]:
    """Returns notes on how PEFT treats an adapter differently than Fovea or vLLM, keyed by `experts` and `tied`.

    Args:
        adapter: Folder of a PEFT LoRA in which each expert has its own factors.
        base: Folder of the base model, for its configuration.
    """
    modules = read_json(adapter / ADAPTER_CONFIG)["target_modules"]
    if isinstance(modules, str):
        return {}
    config = AutoConfig.from_pretrained(base)
    notes = {}
    if any(map(_EXPERT.fullmatch, modules)) and config.model_type not in PEFT_READS_EXPERTS_OF:
        notes["experts"] = EXPERTS_NOTE
    if is_tied(config) and any(name.endswith("lm_head") for name in modules):
        notes["tied"] = (
            "The adapter changes the unembedding, which the base model ties to its embeddings. PEFT's "
            "merge_and_unload would change both: merge it with `fovea export --merged`, or untie the unembedding of "
            "the loaded base model before `PeftModel.from_pretrained`."
        )
    return notes


@dataclass(frozen=True)
class _Planned:
    """A tensor of the merged checkpoint."""

    name: str
    size_bytes: int
    make: Callable[[], Tensor]


class _Factors:
    """The factors of an adapter by module, read from the file when they are needed."""

    def __init__(self, adapter: pathlib.Path, files: ExitStack) -> None:
        config = read_json(adapter / ADAPTER_CONFIG)
        if (kind := config.get("peft_type")) != "LORA":
            raise InvalidInput(f"{adapter} has peft_type {kind}; only LORA can be merged", field="adapter")
        for entry, value in _OTHER_KINDS.items():
            if config.get(entry, value) not in (value, None):
                raise InvalidInput(
                    f"{adapter} has {entry} {config[entry]!r}; only {value!r} can be merged", field=entry
                )
        self._scale = float(config["lora_alpha"]) / int(config["r"])
        self._file: Any = files.enter_context(_opened(adapter / ADAPTER_WEIGHTS))
        self._names: dict[str, str] = {name.removeprefix(_PREFIX): name for name in self._file.keys()}  # noqa: SIM118 - no mapping
        ends = (".lora_A.weight", ".lora_B.weight")
        if odd := [name for name in self._names if not name.endswith(ends)]:
            raise InvalidInput(f"{adapter} has {odd[0]}, which is no LoRA factor", field="adapter")
        self._modules = {name.removesuffix(ends[0]) for name in self._names if name.endswith(ends[0])}
        self._used: set[str] = set()

    def has(self, module: str) -> bool:
        """Returns whether a module is adapted."""
        return module in self._modules

    def shape(self, module: str) -> tuple[int, int]:
        """Returns the shape of a module's change, [out, in]. Marks the module as used."""
        self._used.add(module)
        (_, inputs), (outputs, _) = (self._file.get_slice(self._name(module, half)).get_shape() for half in "AB")
        return outputs, inputs

    def delta(self, module: str) -> Tensor:
        """Returns the change of a module's weight, float32 [out, in]."""
        a, b = (self._file.get_tensor(self._name(module, half)).float() for half in "AB")
        added: Tensor = self._scale * (b @ a)
        return added

    def unused(self) -> list[str]:
        """Returns the adapted modules that the base does not have, in order."""
        return sorted(self._modules - self._used)

    def _name(self, module: str, half: str) -> str:
        return self._names[f"{module}.lora_{half}.weight"]


class _Base:
    """The files of a checkpoint, with the place of each of their tensors in the model of transformers."""

    def __init__(self, folder: pathlib.Path, files: ExitStack) -> None:
        self._folder = folder
        self._slices: dict[str, Any] = {}
        for path in weight_files(folder):
            file: Any = files.enter_context(_opened(path))
            self._slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        part = trained_part(AutoConfig.from_pretrained(folder))
        kind: Any = AutoModelForImageTextToText if hasattr(part, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"):
            self._model: Any = kind.from_config(part)
        head = self._model.get_output_embeddings()
        self._head = next(name for name, module in self._model.named_modules() if module is head)
        tied = dict(self._model.all_tied_weights_keys)
        self._embedding = tied.get(f"{self._head}{_SUFFIX}")
        self._find_places()

    def _find_places(self) -> None:
        conversions = get_model_conversion_mapping(self._model)
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        converters = [one for one in conversions if isinstance(one, WeightConverter)]
        steps = {pattern: one.operations for one in converters for pattern in one.source_patterns}
        own = self._model.state_dict()
        self._places: dict[str, str] = {}
        self._steps: dict[str, list[Any]] = {}
        for name in self._slices:
            place, pattern = rename_source_key(name, renamings, converters, self._model.base_model_prefix, own)
            if place not in own and name in own:
                place, pattern = name, None
            self._places[name] = place
            if pattern is not None:
                self._steps[name] = steps[pattern]

    def is_untied(self, factors: _Factors) -> bool:
        """Returns whether merging unties an unembedding that the base ties to its embeddings."""
        return self._embedding is not None and factors.has(self._head)

    def plan(self, factors: _Factors) -> Iterator[_Planned]:
        """Yields the tensors of the merged checkpoint in the base's order. Raises InvalidInput if one does not fit."""
        head = f"{self._head}{_SUFFIX}"
        for name in self._slices:
            yield self._planned(name, name, self._added(name, factors))
        if self.is_untied(factors) and head not in self._places.values():
            source = next(name for name, place in self._places.items() if place == self._embedding)
            ((own_name, _),) = revert_weight_conversion(self._model, {head: torch.empty(0)}).items()
            yield self._planned(own_name, source, self._whole(source, self._head, factors))

    def _planned(self, name: str, source: str, added: Callable[[], Tensor] | None) -> _Planned:
        stored = self._slices[source]
        kind, shape = stored.get_dtype(), stored.get_shape()
        if added is not None and kind not in _FLOATS:
            raise InvalidInput(
                f"{source} of {self._folder} has dtype {kind}, to which no adapter can be added", field="base"
            )

        def make() -> Tensor:
            tensor: Tensor = stored[...] if shape else stored[()]
            return tensor if added is None else (tensor.float() + added()).to(tensor.dtype).contiguous()

        return _Planned(name, math.prod(shape) * _ITEM_BYTES.get(kind, 1), make)

    def _added(self, name: str, factors: _Factors) -> Callable[[], Tensor] | None:
        """Returns a function that makes the change of a tensor of the files; None without a change."""
        place = self._places[name]
        alone = _EXPERT.fullmatch(name.removesuffix(_SUFFIX))
        if (stacked := _STACKED.fullmatch(place)) is not None:
            parent, projection = stacked[1], stacked[2]
            if alone is not None:
                module = f"{parent}.{alone[2]}.{_SHARED_NAMES.get(alone[3], alone[3])}"
                return self._whole(name, module, factors) if factors.has(module) else None
            return self._of_experts(name, parent, _HALVES[projection], factors)
        module = place.removesuffix(_SUFFIX)
        if not place.endswith(_SUFFIX) or not factors.has(module):
            return None
        if name in self._steps:
            raise InvalidInput(f"{name} of {self._folder} has another layout than {module}", field="base")
        return self._whole(name, module, factors)

    def _whole(self, name: str, module: str, factors: _Factors) -> Callable[[], Tensor]:
        self._check(name, [*factors.shape(module)], module)
        return lambda: factors.delta(module)

    def _of_experts(
        self, name: str, parent: str, halves: tuple[str, ...], factors: _Factors
    ) -> Callable[[], Tensor] | None:
        """Does the same as `_added` for the experts of a layer, which are one tensor, [E, out, in] or transposed."""
        (count, *_) = self._slices[name].get_shape()
        modules = [[f"{parent}.{index}.{half}" for half in halves] for index in range(count)]
        if not all(factors.has(module) for of_expert in modules for module in of_expert):
            return None  # if only some are adapted, `unused` reports them
        shapes = [factors.shape(module) for of_expert in modules for module in of_expert]
        outputs, inputs = sum(shape[0] for shape in shapes[: len(halves)]), shapes[0][1]
        is_transposed = self._model.config.model_type in TRANSPOSED_EXPERTS
        is_transposed |= any(isinstance(step, Transpose) for step in self._steps.get(name, ()))
        whole = [count, inputs, outputs] if is_transposed else [count, outputs, inputs]
        self._check(name, whole, f"{parent}.0.{halves[0]}")

        def added() -> Tensor:
            found = torch.stack([torch.cat([factors.delta(module) for module in of_expert]) for of_expert in modules])
            return found.mT if is_transposed else found

        return added

    def _check(self, name: str, wanted: list[int], module: str) -> None:
        if (shape := list(self._slices[name].get_shape())) != wanted:
            raise InvalidInput(
                f"{name} of {self._folder} has shape {shape}, but the adapter of {module} needs {wanted}: give the base"
                " model of the adapter",
                field="base",
            )


def size_bytes(folder: pathlib.Path) -> int:
    """Returns the bytes of a checkpoint's weights. Raises InvalidInput if safetensors files are missing."""
    return sum(path.stat().st_size for path in weight_files(folder))


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the safetensors files of a checkpoint. Raises InvalidInput if it has none, or if some are missing."""
    whole, index = folder / WEIGHTS, folder / INDEX
    names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else [WEIGHTS]
    if whole.is_file():
        names = [WEIGHTS]
    for name in names:
        if not (folder / name).is_file():
            raise InvalidInput(f"{folder} has no {name}; merging needs safetensors files", field="base")
    return [folder / name for name in names]


def _shards(plan: Iterable[_Planned], most: int) -> Iterator[list[_Planned]]:
    shard: list[_Planned] = []
    for each in plan:
        if shard and sum(one.size_bytes for one in shard) + each.size_bytes > most:
            yield shard
            shard = []
        shard.append(each)
    yield shard


def _opened(path: pathlib.Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path} is not a safetensors file: {error}", field=path.name) from None


def _loaded(path: pathlib.Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path} is not a safetensors file: {error}", field=path.name) from None
