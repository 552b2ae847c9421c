"""Compares manifests with the model before any tensor is sent.

vLLM would fail with a half-loaded model, so `ManifestChecker` refuses what does not fit. `SplitTable` tells which parts
of each tensor each worker needs, as `weight_loading.LoadTrace` has found them.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fovea.api.v1 import sampler_pb2, weights_pb2
from fovea.wire.manifest import WORD_BYTES, Part, layout_of

Shape = tuple[int, ...]
Rename = Callable[[str], str]
"""Maps a checkpoint's parameter name to vLLM's, so that old and new spellings of one name compare equal."""
ExpertSizes = tuple[int, int, int]
"""The number of experts, the inner width of one expert, and the width of the model."""

Reads = tuple[int, tuple[int, ...]]
"""The elements of a tensor that a worker reads: a dimension, and start and end of each range of its indices in turn."""

_DTYPES = ("float32", "bfloat16", "float16")
_MAX_PASSED = 256
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
_PEFT_PREFIX = "base_model.model."
EXPERT_PARTS = ("w1", "w2", "w3")
"""The gate, down and up projections of experts, as vLLM and adapters name them."""


def checkpoint_directory(model: str) -> Path:
    """Returns the local directory of a model's checkpoint."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def checkpoint_shapes(directory: Path) -> dict[str, Shape]:
    """Returns a mapping from tensor name to shape for a checkpoint, from the headers of its safetensors files.

    Raises FileNotFoundError if there is no safetensors file.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} contains no *.safetensors file")
    shapes: dict[str, Shape] = {}
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def names_after(names: Iterable[str], layer_count: int) -> set[str]:
    """Returns the names of tensors in layers that are numbered `layer_count` or higher."""
    return {name for name in names if (found := _LAYER.match(name)) is not None and int(found[1]) >= layer_count}


def check_biases(names: Iterable[str], rename: Rename, modules: Mapping[str, Any]) -> None:
    """Raises ValueError if the checkpoint has a bias for a layer without one in vLLM, which would drop it silently.

    Args:
        names: The names of the checkpoint's tensors.
        rename: Maps them to vLLM's names.
        modules: vLLM's layers that support LoRA, keyed by their names.
    """
    for name in names:
        module = modules.get(rename(name).removesuffix(".bias")) if name.endswith(".bias") else None
        if module is not None and module.base_layer.bias is None:
            raise ValueError(
                f"vLLM would ignore {name} of the checkpoint, because config.json does not announce biases: set the "
                "entry that does, usually attention_bias or mlp_bias"
            )


class ManifestChecker:
    """A checker of manifests against the model's parameters and the modules that an adapter may change.

    Args:
        shapes: The shapes of the checkpoint's tensors, keyed by their names.
        rename: Maps the checkpoint's names to vLLM's.
        left_out: Checkpoint names of tensors that vLLM does not load; a push may omit them.
        adaptable: vLLM's names of the modules that support LoRA.
        max_rank: The largest rank; 0 if the engine supports no adapters.
        experts: The sizes of experts, or the reason why they cannot be adapted, keyed by vLLM's names of the modules
            that contain them.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        rename: Rename,
        left_out: set[str],
        adaptable: set[str],
        max_rank: int,
        experts: Mapping[str, ExpertSizes | str] = MappingProxyType({}),
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
        """Returns the problem of a manifest, or an empty string."""
        if manifest.bucket_bytes <= 0:
            return f"bucket_bytes is {manifest.bucket_bytes}, must be positive"
        if not manifest.tensors:
            return "the manifest lists no tensors"
        alpha = manifest.lora.alpha
        if manifest.snapshot.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER and not (math.isfinite(alpha) and alpha > 0):
            return f"lora.alpha is {alpha}, must be positive"
        key = (manifest.snapshot.kind, manifest.lora.rank, layout_of(manifest))
        if key in self._passed:  # true for every version of an adapter but the first
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
        """Adds a tied unembedding: it is not in the checkpoint, but it may be sent and adapted."""
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
            return "vLLM does not support LoRA for this model; push full parameters instead"
        if not 1 <= rank <= self._max_rank:
            return f"lora.rank is {rank}, must be between 1 and {self._max_rank}"
        halves: dict[str, set[str]] = {}
        for spec in manifest.tensors:
            module, _, half = spec.name.removesuffix(".weight").rpartition(".")
            if not spec.name.startswith(_PEFT_PREFIX) or half not in ("lora_A", "lora_B"):
                return f"tensor {spec.name} has no PEFT name such as {_PEFT_PREFIX}<module>.lora_A.weight"
            module = module.removeprefix(_PEFT_PREFIX)
            if problem := self._problem_of_half(spec, module, half, rank):
                return problem
            halves.setdefault(module, set()).add(half)
        for module, found in halves.items():
            if len(found) != 2:
                return f"the adapter of {module} has only {next(iter(found))}"
            parent = module.rpartition(".")[0]
            missing = [part for part in EXPERT_PARTS if f"{parent}.{part}" not in halves]
            if missing and self._sizes_of(module):
                return f"the adapter of {parent} lacks {missing[0]}: adapt w1, w2 and w3 of experts together or none"
        return ""

    def _problem_of_half(self, spec: weights_pb2.TensorSpec, module: str, half: str, rank: int) -> str:
        name = self._rename(f"{module}.weight")
        shape = self._shapes.get(name)
        sizes = self._sizes_of(module)
        if isinstance(sizes, str):
            return f"the engine cannot adapt {module}: {sizes}"
        if sizes:
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

    def _sizes_of(self, module: str) -> ExpertSizes | str | None:
        """Returns the entry of the experts to which a gate, down or up module belongs; None for other modules."""
        name, _, part = self._rename(f"{module}.weight").removesuffix(".weight").rpartition(".")
        return self._experts.get(name) if part in EXPERT_PARTS else None


def _shared_outer(sizes: ExpertSizes, part: str, half: str, rank: int) -> list[int]:
    """Returns the shape of a factor of experts. All experts share one factor on the side of the model's width."""
    experts, inner, outer = sizes
    if half == "lora_A":
        return [experts, rank, inner] if part == "w2" else [1, rank, outer]
    return [1, outer, rank] if part == "w2" else [experts, inner, rank]


class SplitTable:
    """The division of full weights over the workers of an engine.

    Args:
        reads: The elements that each worker reads, by vLLM's names of the checkpoint's tensors.
        rename: Maps the checkpoint's names to vLLM's.
    """

    def __init__(self, reads: Sequence[Mapping[str, Reads]], rename: Rename) -> None:
        self._reads = reads
        self._rename = rename
        self._last: tuple[bytes, sampler_pb2.SnapshotReady] = b"", sampler_pb2.SnapshotReady()

    def ready(self, manifest: weights_pb2.SnapshotManifest) -> sampler_pb2.SnapshotReady:
        """Returns the division of a checked manifest of full weights."""
        key = layout_of(manifest)
        if key != self._last[0]:
            self._last = key, self._divided(manifest)
        return self._last[1]

    def _divided(self, manifest: weights_pb2.SnapshotManifest) -> sampler_pb2.SnapshotReady:
        ready, numbers = sampler_pb2.SnapshotReady(), dict[Any, int]()
        for spec in manifest.tensors:
            split = self._split_of(spec)
            if split is None:
                ready.split_of.append(0)
                continue
            if split not in numbers:
                numbers[split] = len(numbers) + 1
                ready.splits.add(dimension=split[0], parts=[weights_pb2.TensorPart(bounds=one) for one in split[1]])
            ready.split_of.append(numbers[split])
        return ready

    def _split_of(self, spec: weights_pb2.TensorSpec) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
        """Returns the dimension and the bounds of each worker's part; None if every worker must receive all of it.

        The parts must cover the tensor without overlapping, or no digest of the whole could be joined from theirs.
        """
        name, shape = self._rename(spec.name), tuple(spec.shape)
        if not shape or any(name not in reads for reads in self._reads):
            return None
        found = [reads[name] for reads in self._reads]
        divided = {place for place, bounds in found if bounds and bounds != (0, shape[place])}
        place = divided.pop() if divided else 0
        bounds = tuple((0, shape[place]) if own == (0, shape[at]) else own for at, own in found)
        if divided or all(own == (0, shape[place]) for own in bounds):
            return None
        ranges = sorted(pair for own in set(bounds) for pair in zip(own[::2], own[1::2], strict=True))
        ends = [0, *(end for _, end in ranges)]
        inner_bytes, row_bytes = Part(spec, spec, place, (), "").row_bytes
        is_even = not row_bytes % WORD_BYTES and not any(end * inner_bytes % WORD_BYTES for end in ends)
        covers = [start for start, _ in ranges] == ends[:-1] and ends[-1] == shape[place]
        return (place, bounds) if covers and is_even else None
