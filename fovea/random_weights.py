"""Checkpoints without bytes: a model of any size on a disk that could not hold it, for benchmarks.

The header of such a safetensors file is as always, and `random_seed` stands in its metadata; the data is a hole.
Trainer and sampler draw each tensor on their device when they would read it, from the seed and its name, so both begin
with the same weights: matrices normal with a deviation of 0.02, biases 0, other vectors 1. Devices of different kinds
draw different numbers. `benchmarks/random_checkpoint.py` writes such files.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

SEED_ENTRY = "random_seed"
"""Of the metadata in a file's header; an integer."""

_DEVIATION = 0.02
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class RandomSlice:
    """In place of what safetensors' `get_slice` returns: drawn anew, whole, at each access, the same every time."""

    def __init__(self, name: str, like: Any, seed: int, device: torch.device) -> None:
        self._name = name
        self._like = like
        self._seed = seed
        self._device = device

    def get_shape(self) -> list[int]:
        """As the header has it."""
        return list(self._like.get_shape())

    def get_dtype(self) -> str:
        """As safetensors calls it."""
        return str(self._like.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        whole = torch.empty(self.get_shape(), dtype=_DTYPES[self.get_dtype()], device=self._device)
        if whole.dim() > 1:
            digest = hashlib.sha256(f"{self._seed} {self._name}".encode()).digest()
            generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
            whole.normal_(0.0, _DEVIATION, generator=generator)
        else:
            whole.fill_(0.0 if self._name.endswith("bias") else 1.0)
        return whole if index is Ellipsis else whole[index].clone()  # a view would keep all of it


def random_slices(file: Any, device: torch.device) -> Mapping[str, RandomSlice]:
    """The tensors of an opened safetensors file by their names, if it is one without bytes; empty if it is not."""
    seed = (file.metadata() or {}).get(SEED_ENTRY)
    if seed is None:
        return {}
    return {name: RandomSlice(name, file.get_slice(name), int(seed), device) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def is_random(directory: Path) -> bool:
    """Whether a checkpoint is one without bytes."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            return SEED_ENTRY in (file.metadata() or {})
    return False
