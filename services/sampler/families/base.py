"""The interface of a model family. Everything is read from the checkpoint's configuration."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FeatureTensors = Mapping[str, npt.NDArray]
"""Tensors of one image by processor name."""


class Family(ABC):
    """Facts about the vision inputs of one checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def describes(cls, config: dict[str, Any]) -> bool:
        """Whether a checkpoint with this configuration is of this family."""

    @property
    @abstractmethod
    def image_token_id(self) -> int | None:
        """The placeholder id of images, or None for a family without them."""

    @property
    @abstractmethod
    def reserved_token_ids(self) -> frozenset[int]:
        """Ids that stand for a piece of an image."""

    @property
    @abstractmethod
    def image_opener_id(self) -> int | None:
        """The id that an image follows, or None."""

    @abstractmethod
    def grid_problem(self, grid: Sequence[int]) -> str:
        """What is wrong with a patch grid, or the empty string."""

    @abstractmethod
    def token_count(self, grid: Sequence[int]) -> int:
        """The number of placeholder tokens that an image of this grid takes. The grid has no problem."""

    @abstractmethod
    def tensor_shapes(self, grid: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """numpy dtype name and shape of each tensor of an image of this grid, by name."""

    @abstractmethod
    def grey_image(self) -> tuple[FeatureTensors, list[int]] | None:
        """Tensors and grid of a small grey image, for the warm-up; None for a family without images."""

    def tensors_problem(self, grid: Sequence[int], tensors: FeatureTensors) -> str:
        """What is wrong with the tensors of an image of this grid, or the empty string."""
        expected = self.tensor_shapes(grid)
        if set(tensors) != set(expected):
            return f"tensors are {sorted(tensors)}, must be {sorted(expected)}"
        for name, (dtype, shape) in expected.items():
            array = tensors[name]
            if array.dtype != np.dtype(dtype):
                return f"{name} is {array.dtype.name}, must be {dtype}"
            if array.shape != shape:
                return f"{name} has shape {list(array.shape)}, must be {list(shape)} for the grid {list(grid)}"
        return self.values_problem(grid, tensors)

    @abstractmethod
    def values_problem(self, grid: Sequence[int], tensors: FeatureTensors) -> str:
        """What is wrong with the values of tensors whose names, types and shapes are right, or the empty string."""
