"""What a loss is: a sum over positions of a function of the targets' log-probabilities and per-position inputs.

Shapes: T packed positions, K targets a position.
"""

# ruff: noqa: N803 -- the suffix of a tensor's name is its shape

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fovea.wire.errors import InvalidInput

TARGETS = "target_tokens"


@dataclass(frozen=True)
class LossInput:
    """A per-position input besides `target_tokens`.

    Args:
        name: As in `Datum.loss_inputs`.
        required: Whether a datum without it is refused; a missing optional input is all ones.
    """

    name: str
    required: bool = True


@dataclass(frozen=True)
class LossValue:
    """What a loss makes of one micro-batch.

    Args:
        loss: float32 scalar, the sum over all positions.
        metrics: Further scalars by `name:reduction`, reduced over micro-batches and ranks by sum, min or max.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class Loss(ABC):
    """One loss function. Stateless. A filler (all inputs zero) must give zero."""

    name: ClassVar[str]
    inputs: ClassVar[tuple[LossInput, ...]]
    config: ClassVar[Mapping[str, float]] = {}
    """Numbers that the loss takes, with their defaults."""
    many_targets: ClassVar[bool] = False
    """Whether `target_tokens` may be [N, K]; the other inputs then have that shape too."""

    @abstractmethod
    def compute(self, logprobs_TK: Tensor, inputs_TK: Mapping[str, Tensor], config: Mapping[str, float]) -> LossValue:
        """The loss of packed positions.

        Args:
            logprobs_TK: float32, log-probabilities of the targets.
            inputs_TK: float32, by name; zero where a datum has fewer targets than K.
            config: All numbers that the loss takes.
        """

    def resolve_config(self, given: Mapping[str, float]) -> dict[str, float]:
        """Defaults overlaid with what was given. Raises InvalidInput for unknown names."""
        for key in given:
            if key not in self.config:
                known = ", ".join(self.config) or "none"
                raise InvalidInput(
                    f"loss_config.{key} is unknown for {self.name}; known: {known}", field=f"loss_config.{key}"
                )
        return {**self.config, **given}
