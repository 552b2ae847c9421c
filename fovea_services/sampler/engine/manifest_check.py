"""Checks a manifest against the model before anything is sent: vLLM leaves a half-loaded model behind otherwise."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fovea.api.v1 import weights_pb2
from fovea.wire.manifest import layout_of

Shape = tuple[int, ...]
Rename = Callable[[str], str]
"""Maps a checkpoint's parameter name to vLLM's, so that old and new spellings of a checkpoint compare equal."""
ExpertSizes = tuple[int, int, int]
"""Number of experts, width of one, width of the model."""

_DTYPES = ("float32", "bfloat16", "float16")
_MAX_PASSED = 256
_PEFT_PREFIX = "base_model.model."
EXPERT_PARTS = ("w1", "w2", "w3")
"""Gate, down and up of experts, as vLLM and adapters call them."""


def checkpoint_shapes(directory: Path) -> dict[str, Shape]:
    """Shapes of all tensors of a checkpoint, read from its safetensors headers.

    Raises FileNotFoundError if there is no safetensors file.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no *.safetensors file")
    shapes: dict[str, Shape] = {}
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def check_biases(names: Iterable[str], rename: Rename, modules: Mapping[str, Any]) -> None:
    """Raises ValueError for a checkpoint with biases that vLLM has no place for: it drops them without a word.

    Args:
        names: Of the checkpoint's tensors.
        modules: vLLM's layers that take LoRA, by name.
    """
    for name in names:
        module = modules.get(rename(name).removesuffix(".bias")) if name.endswith(".bias") else None
        if module is not None and module.base_layer.bias is None:
            raise ValueError(
                f"vLLM leaves out {name}, which the checkpoint has: its config.json lacks what vLLM goes by, mostly "
                "attention_bias or mlp_bias"
            )


class ManifestChecker:
    """Knows the model's parameters and which of its modules an adapter may change.

    Args:
        shapes: Checkpoint shapes by checkpoint name.
        rename: To vLLM's names.
        left_out: Checkpoint names of what vLLM does not load, which need not be sent.
        adaptable: vLLM's names of the modules that take LoRA.
        max_rank: The largest rank; 0 if the engine takes no adapters.
        experts: vLLM's names of those modules among them that are many experts, and their sizes.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        rename: Rename,
        left_out: set[str],
        adaptable: set[str],
        max_rank: int,
        experts: Mapping[str, ExpertSizes] = MappingProxyType({}),
    ) -> None:
        self._rename = rename
        self._shapes = {rename(name): shape for name, shape in shapes.items() if not name.endswith("inv_freq")}
        self._optional = {rename(name) for name in left_out}
        self._max_rank = max_rank
        self._adaptable = adaptable
        self._experts = experts
        self._passed: set[tuple[int, int, bytes]] = set()
        self._tie_head(shapes)

    def problem(self, manifest: weights_pb2.SnapshotManifest) -> str:
        """What is wrong with a manifest, or the empty string."""
        if manifest.bucket_bytes <= 0:
            return f"bucket_bytes is {manifest.bucket_bytes}, must be positive"
        if not manifest.tensors:
            return "the manifest lists no tensors"
        alpha = manifest.lora.alpha
        if manifest.snapshot.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER and not (math.isfinite(alpha) and alpha > 0):
            return f"lora.alpha is {alpha}, must be positive"
        key = (manifest.snapshot.kind, manifest.lora.rank, layout_of(manifest))
        if key in self._passed:  # as each version of an adapter but its first
            return ""
        problem = self._problem_of_tensors(manifest)
        if not problem and len(self._passed) < _MAX_PASSED:
            self._passed.add(key)
        return problem

    def _problem_of_tensors(self, manifest: weights_pb2.SnapshotManifest) -> str:
        names: set[str] = set()
        for spec in manifest.tensors:
            if spec.dtype not in _DTYPES:
                return f"tensor {spec.name} has dtype {spec.dtype!r}, must be one of {', '.join(_DTYPES)}"
            if spec.name in names:
                return f"tensor {spec.name} is listed twice"
            names.add(spec.name)
        if manifest.snapshot.kind == weights_pb2.SNAPSHOT_KIND_FULL:
            return self._problem_of_full(manifest)
        if manifest.snapshot.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER:
            return self._problem_of_adapter(manifest)
        return f"snapshot.kind {manifest.snapshot.kind} is not known"

    def _tie_head(self, shapes: Mapping[str, Shape]) -> None:
        """A tied unembedding is not in the checkpoint, but may be sent, and may be adapted."""
        head = self._rename("lm_head.weight")
        embeddings = [name for name in shapes if name.endswith("embed_tokens.weight")]
        if head not in self._shapes and embeddings:
            self._shapes[head] = shapes[embeddings[0]]
            self._optional.add(head)

    def _problem_of_full(self, manifest: weights_pb2.SnapshotManifest) -> str:
        missing = set(self._shapes) - self._optional
        for spec in manifest.tensors:
            name = self._rename(spec.name)
            expected = self._shapes.get(name)
            if expected is None:
                return f"the model has no parameter {spec.name}"
            if tuple(spec.shape) != expected:
                return f"parameter {spec.name} has shape {list(spec.shape)}, the model's is {list(expected)}"
            missing.discard(name)
        if missing:
            return f"{len(missing)} parameters of the model are missing, among them {min(missing)}"
        return ""

    def _problem_of_adapter(self, manifest: weights_pb2.SnapshotManifest) -> str:
        rank = manifest.lora.rank
        if not self._max_rank:
            return "vLLM has no LoRA for this model; full parameters can be pushed"
        if not 1 <= rank <= self._max_rank:
            return f"lora.rank is {rank}, must be between 1 and {self._max_rank}"
        halves: dict[str, set[str]] = {}
        for spec in manifest.tensors:
            module, _, half = spec.name.removesuffix(".weight").rpartition(".")
            if not spec.name.startswith(_PEFT_PREFIX) or half not in ("lora_A", "lora_B"):
                return f"tensor {spec.name} is no PEFT name such as {_PEFT_PREFIX}<module>.lora_A.weight"
            module = module.removeprefix(_PEFT_PREFIX)
            if problem := self._problem_of_half(spec, module, half, rank):
                return problem
            halves.setdefault(module, set()).add(half)
        for module, found in halves.items():
            if len(found) != 2:
                return f"the adapter of {module} has {next(iter(found))} only"
            parent = module.rpartition(".")[0]
            missing = [part for part in EXPERT_PARTS if f"{parent}.{part}" not in halves]
            if missing and self._sizes_of(module):
                return f"the adapter of {parent} lacks {missing[0]}: experts are adapted as a whole or not at all"
        return ""

    def _problem_of_half(self, spec: weights_pb2.TensorSpec, module: str, half: str, rank: int) -> str:
        name = self._rename(f"{module}.weight")
        shape = self._shapes.get(name)
        if sizes := self._sizes_of(module):
            expected = _shared_outer(sizes, module[-2:], half, rank)
        elif shape is None:
            return f"the model has no module {module}"
        elif name.removesuffix(".weight") not in self._adaptable or len(shape) != 2:
            return f"the engine cannot adapt {module}"
        else:
            expected = [rank, shape[1]] if half == "lora_A" else [shape[0], rank]
        if list(spec.shape) != expected:
            return f"tensor {spec.name} has shape {list(spec.shape)}, must be {expected}"
        return ""

    def _sizes_of(self, module: str) -> ExpertSizes | None:
        """Of the experts of which a module is gate, down or up; None for any other."""
        name, _, part = self._rename(f"{module}.weight").removesuffix(".weight").rpartition(".")
        return self._experts.get(name) if part in EXPERT_PARTS else None


def _shared_outer(sizes: ExpertSizes, part: str, half: str, rank: int) -> list[int]:
    """Shape of a factor of experts: of those at the model's width there is one for all experts."""
    experts, inner, outer = sizes
    if half == "lora_A":
        return [experts, rank, inner] if part == "w2" else [1, rank, outer]
    return [1, outer, rank] if part == "w2" else [experts, inner, rank]
