"""Weights that trainer and sampler share: transfers in `weight_transfer`, and here layers and checkpoints without data.

Benchmarks use the latter for models of any size, even if the disk is too small for them. Such a safetensors file has
the usual header, with `random_seed` in its metadata, and a hole instead of data. Trainer and sampler do not read a
tensor: they draw it on their device from the seed and its name, so both start with the same weights. Matrices are
normal with a standard deviation of 0.02, biases are 0, and other vectors are 1. Different kinds of devices draw
different numbers. `tools/benchmarks/random_checkpoint.py` writes such files.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

SEED_ENTRY = "random_seed"
"""Key in the metadata of a file's header; the value is an integer."""

_DEVIATION = 0.02
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def by_layer(names: Iterable[str]) -> list[list[str]]:
    """Returns the names of tensors grouped by layer, in their order; those outside of layers form one group."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found = re.match(r"\D*\d+\.", name)
        layers[found.group() if found else ""].append(name)
    return list(layers.values())


class RandomSlice:
    """A replacement for safetensors' slices. Each access draws the whole tensor again, with the same result."""

    def __init__(self, name: str, like: Any, seed: int, device: torch.device) -> None:
        self._name = name
        self._like = like
        self._seed = seed
        self._device = device

    def get_shape(self) -> list[int]:
        """Returns the shape in the header."""
        return list(self._like.get_shape())

    def get_dtype(self) -> str:
        """Returns the dtype, as safetensors names it."""
        return str(self._like.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        whole = torch.empty(self.get_shape(), dtype=_DTYPES[self.get_dtype()], device=self._device)
        if whole.dim() > 1:
            digest = hashlib.sha256(f"{self._seed} {self._name}".encode()).digest()
            generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
            whole.normal_(0.0, _DEVIATION, generator=generator)
        else:
            whole.fill_(0.0 if self._name.endswith("bias") else 1.0)
        return whole if index is Ellipsis else whole[index].clone()  # a view would keep the whole tensor in memory


def random_slices(file: Any, device: torch.device) -> Mapping[str, RandomSlice]:
    """Returns the tensors of an open file without data, keyed by their names; empty for a file with data."""
    seed = (file.metadata() or {}).get(SEED_ENTRY)
    if seed is None:
        return {}
    names = file.keys()
    return {name: RandomSlice(name, file.get_slice(name), int(seed), device) for name in names}


def is_random(directory: Path) -> bool:
    """Returns whether a checkpoint has no data."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            return SEED_ENTRY in (file.metadata() or {})
    return False
