"""The recipe: all settings that determine a build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["qwen3_vl", "qwen2_5_vl", "qwen3"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of one build. Equal recipes give identical files on one machine.

    Attributes:
        kind: Architecture of the model.
        seed: Seeds the weights, the invented alphabet, the pictures and their order.
        step_count: Pre-training steps; 0 leaves the weights random. Only `qwen3_vl` is pre-trained.
        batch_size: Pictures per step.
        learning_rate: The peak of the one-cycle schedule.
        thread_count: Torch threads during the build. The rounding of sums depends on it, so it is part of the recipe.
    """

    kind: Kind = "qwen3_vl"
    seed: int = 0
    step_count: int = 0
    batch_size: int = 16
    learning_rate: float = 1e-3
    thread_count: int = 2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")


def default_recipe(kind: Kind = "qwen3_vl", seed: int = 0) -> Recipe:
    """Returns the recipe that `python -m fovea_tinyvlm` and `ensure` build."""
    return Recipe(kind=kind, seed=seed, step_count=220 if kind == "qwen3_vl" else 0)
