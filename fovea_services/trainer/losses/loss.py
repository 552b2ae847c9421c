"""The interface of losses: a function of one datum, from the log-probabilities of its targets to a loss and metrics.

The loss of a call is the sum over its datums. A loss sees each datum separately. It does not see packing, ranks or
fillers.

Shapes: N positions of a datum, K targets per position.
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
"""A setting T of every loss: log-probabilities are log softmax(z / T), as in a sampler with temperature T."""


@dataclass(frozen=True)
class LossInput:
    """An input of a loss besides `target_tokens`.

    Args:
        name: Key in `Datum.loss_inputs`.
        required: True if a datum without this input is rejected.
        default: Value of a missing optional input, at every position.
        rank: Number of dimensions if the input has a shape and dtype of its own; None if it is float32 in the shape of
            the targets.
    """

    name: str
    required: bool = True
    default: float = 1.0
    rank: int | None = None


@dataclass(frozen=True)
class LossValue:
    """The loss of one datum.

    Args:
        loss: Scalar with gradient: the sum over the datum's positions.
        metrics: Additional scalars keyed by `name:reduction`. Each is reduced over all datums of the call by sum, mean,
            min or max. A mean is over datums, also when the SDK merges the chunks of a batch: report a mean over
            tokens as two sums.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Loss(ABC):
    """One loss function with its settings.

    Args:
        given: Settings; the others have their defaults.

    Raises:
        InvalidInput: The loss does not have such a setting, or its value is out of range.
    """

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, float]] = {}
    """Numeric settings besides the temperature, with their defaults."""
    target_ranks: Sequence[int] = (1,)
    """Contains 1 if `target_tokens` may be [N], and 2 if they may be [N, K]."""
    takes_others: ClassVar[bool] = False
    """True if a datum may have inputs that the loss does not read."""
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
                f"but must be in {LEAST_TEMPERATURE:g} .. {MOST_TEMPERATURE:g}",
                field=f"loss_config.{TEMPERATURE}",
            )
        self._seconds_left: float | None = None

    @property
    def temperature(self) -> float:
        """Divisor of the logits before the softmax."""
        return self.config[TEMPERATURE]

    @property
    def seconds_left(self) -> float | None:
        """Seconds left for this rank's share of the call; None for a loss without a time limit."""
        return self._seconds_left

    def limit_time(self, seconds: float | None) -> None:
        """Sets `seconds_left`; None removes the limit."""
        self._seconds_left = seconds

    @abstractmethod
    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        """Computes the loss of one datum.

        Args:
            logprobs: float32 [N] or [N, K], finite log-probabilities of the targets.
            inputs: Inputs keyed by input name; float32 in the shape of `logprobs` unless they declare a rank.

        Raises:
            InvalidInput: The loss cannot be computed. The error names no field.
        """

    def compute_each(
        self, indices: Sequence[int], logprobs: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]]
    ) -> list[LossValue]:
        """Computes the losses of the datums of a micro-batch.

        Args:
            indices: Index of each datum in the call.
            logprobs: Log-probabilities of each datum.
            inputs: Inputs of each datum.

        Raises:
            InvalidInput: Names the first datum without a loss.
        """
        values = []
        for index, row, given in zip(indices, logprobs, inputs, strict=True):
            try:
                values.append(self.compute(row, given))
            except InvalidInput as error:
                raise of_datum(index, error) from None
        return values

    def check(self, inputs: Mapping[str, npt.NDArray]) -> None:  # noqa: B027 - most losses take any values
        """Checks the values of the inputs.

        Raises:
            InvalidInput: No loss can be computed from these values. Its field is the name of an input.
        """


def of_datum(index: int, error: InvalidInput) -> InvalidInput:
    """Adds the datum to the error of a loss."""
    return InvalidInput(f"datum[{index}] {error.message}", field=f"datum[{index}]")
