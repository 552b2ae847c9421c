"""What a loss is: a function of one datum, from the log-probabilities of its targets to a number and metrics.

The loss of a call is the sum over its datums. A loss sees each datum by itself: not how datums were packed, on which
rank they are, nor fillers.

Shapes: N positions of a datum, K targets a position.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy.typing as npt
from torch import Tensor

from fovea.wire.conventions import LEAST_TEMPERATURE, MOST_TEMPERATURE
from fovea.wire.errors import InvalidInput

TARGETS = "target_tokens"

TEMPERATURE = "temperature"
"""A setting T of every loss: log-probabilities are those of log softmax(z / T), as a sampler's are at temperature T."""


@dataclass(frozen=True)
class LossInput:
    """An input besides `target_tokens`.

    Args:
        name: As in `Datum.loss_inputs`.
        required: Whether a datum without it is refused.
        default: What a missing optional input is, at every position.
        rank: The number of dimensions if the input has a shape and type of its own; None if it is float32, shaped as
            the targets.
    """

    name: str
    required: bool = True
    default: float = 1.0
    rank: int | None = None


@dataclass(frozen=True)
class LossValue:
    """What a loss makes of one datum.

    Args:
        loss: Scalar with gradient: the sum over the datum's positions.
        metrics: Further scalars by `name:reduction`, reduced over all datums of the call by sum, mean, min or max. A
            mean is one of datums, and the SDK joins those of a batch's parts as such: give a mean of tokens as sums.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Loss(ABC):
    """One loss function with its settings.

    Args:
        given: Settings; the others are at their defaults.

    Raises InvalidInput for settings that the loss does not take.
    """

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, float]] = {}
    """Numbers that the loss takes besides the temperature, with their defaults."""
    target_ranks: Sequence[int] = (1,)
    """1 if `target_tokens` may be [N], 2 if they may be [N, K]."""
    takes_others: ClassVar[bool] = False
    """Whether a datum may bring inputs that the loss does not read."""
    inputs: tuple[LossInput, ...] = ()

    def __init__(self, given: Mapping[str, float]) -> None:
        self.config = {**self.settings, TEMPERATURE: 1.0}
        for key in given:
            if key not in self.config:
                known = ", ".join(self.config)
                raise InvalidInput(
                    f"loss_config.{key} is unknown for {self.name}; known: {known}", field=f"loss_config.{key}"
                )
        self.config |= given
        if not LEAST_TEMPERATURE <= round(self.temperature, 9) <= MOST_TEMPERATURE:
            raise InvalidInput(
                f"loss_config.{TEMPERATURE} is {self.temperature:g}, "
                f"needs {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}",
                field=f"loss_config.{TEMPERATURE}",
            )
        self._seconds_left: float | None = None

    @property
    def temperature(self) -> float:
        """By which logits are divided before the softmax."""
        return self.config[TEMPERATURE]

    @property
    def seconds_left(self) -> float | None:
        """What this rank's part of the call may still take, of a loss that is stopped when it takes too long."""
        return self._seconds_left

    def limit_time(self, seconds: float | None) -> None:
        """Sets `seconds_left`; None is no limit."""
        self._seconds_left = seconds

    @abstractmethod
    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        """The loss of one datum.

        Args:
            logprobs: float32 [N] or [N, K], log-probabilities of the targets, finite.
            inputs: By name; float32 and shaped as `logprobs` unless they have a rank of their own.

        Raises InvalidInput, without a field, if it cannot be computed.
        """

    def compute_each(
        self, indices: Sequence[int], logprobs: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]]
    ) -> list[LossValue]:
        """`compute` of the datums of a micro-batch. Raises InvalidInput naming the first that has no loss."""
        values = []
        for index, row, given in zip(indices, logprobs, inputs, strict=True):
            try:
                values.append(self.compute(row, given))
            except InvalidInput as error:
                raise of_datum(index, error) from None
        return values

    def check(self, inputs: Mapping[str, npt.NDArray]) -> None:  # noqa: B027 - most losses take any values
        """Raises InvalidInput, its field the name of an input, for values from which no loss can be computed."""


def of_datum(index: int, error: InvalidInput) -> InvalidInput:
    """The error of a loss, named by its datum."""
    return InvalidInput(f"datum[{index}] {error.message}", field=f"datum[{index}]")
