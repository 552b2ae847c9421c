"""The loss functions and their interface. To add a loss, add its class here and list it in `LOSSES`.

A loss maps the log-probabilities of one datum's targets to a scalar and metrics. The loss of a call is the sum over its
datums. A loss sees each datum separately. It does not see packing, ranks or fillers.

Notation of the policy gradient formulas, with sums over the positions of a datum:

    lp   log-probability of the target under the trained weights
    q    log-probability of the target under the weights that sampled it, input `logprobs`
    r    exp(lp - q)
    A    input `advantages`
    w    input `weights`, all ones by default
    lo, hi    bounds of a ratio: inputs or settings `clip_low_threshold`, `clip_high_threshold`; inputs take precedence
    sg   stop-gradient

Shapes: N positions of a datum, K targets per position.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
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
            min or max. A mean weights all datums equally, also when the SDK merges the chunks of a batch. For a mean
            over tokens, report two sums.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Loss(ABC):
    """One loss function with its settings.

    Args:
        given: The settings that the client sent. All others have their defaults.

    Raises:
        InvalidInput: The loss does not have such a setting, or its value is out of range.
    """

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, float]] = {}
    """Numeric settings besides the temperature, with their defaults."""
    target_ranks: Sequence[int] = (1,)
    """Contains 1 if `target_tokens` may be [N], and 2 if they may be [N, K]."""
    accepts_extra_inputs: ClassVar[bool] = False
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


POLICY_INPUTS = (LossInput("logprobs"), LossInput("advantages"), LossInput("weights", required=False))
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
MASK = "sequence_ratio_mask"
SAMPLED = "sampled"
"""An input of stable_reinforce: 1 where the target was sampled, else 0. The gateway writes it from its records."""


class CrossEntropy(Loss):
    """-sum w logprob. Weights default to ones, may be negative and are never normalised."""

    name = "cross_entropy"
    inputs = (LossInput("weights", required=False),)
    target_ranks = (1, 2)

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        weights = inputs["weights"]
        return LossValue(-(weights * logprobs).sum(), {"weights:sum": weights.sum()})


class ImportanceSampling(Loss):
    """-sum w r A."""

    name = "importance_sampling"
    inputs = POLICY_INPUTS

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        matter = counts(inputs)
        log_ratio = torch.where(matter, logprobs - inputs["logprobs"], 0.0)
        loss = -(torch.exp(log_ratio) * inputs["weights"] * inputs["advantages"]).sum()
        return LossValue(loss, {"ratio:max": greatest_ratio(log_ratio, matter)})


class ClippedLoss(Loss):
    """A loss with bounded ratios."""

    def __init__(self, given: Mapping[str, float]) -> None:
        super().__init__(given)
        for key, value in self.config.items():
            if not np.isfinite(value):
                raise InvalidInput(f"loss_config.{key} is {value}, but must be finite", field=f"loss_config.{key}")
        if self.config[LOW] > self.config[HIGH]:
            raise InvalidInput(
                f"loss_config.{LOW} is {self.config[LOW]}, which is above {HIGH} {self.config[HIGH]}",
                field=f"loss_config.{LOW}",
            )
        bounds = (LossInput(name, required=False, default=self.config[name]) for name in (LOW, HIGH))
        self.inputs = (*type(self).inputs, *bounds)

    def check(self, inputs: Mapping[str, npt.NDArray]) -> None:
        """Rejects positions with a lower bound above the upper bound."""
        crossed = np.flatnonzero(inputs[LOW] > inputs[HIGH])
        if crossed.size:
            place = int(crossed[0])
            low, high = (float(inputs[name].ravel()[place]) for name in (LOW, HIGH))
            raise InvalidInput(f"is {low:g} at [{place}], which is above {HIGH} {high:g}", field=LOW)


class Ppo(ClippedLoss):
    """-sum w min(r A, clamp(r, lo, hi) A) (Schulman et al., 2017)."""

    name = "ppo"
    inputs = POLICY_INPUTS
    settings: ClassVar = {LOW: 0.8, HIGH: 1.2}

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        log_ratio = logprobs - inputs["logprobs"]
        value, clipped = clipped_objective(log_ratio, inputs)
        greatest = greatest_ratio(log_ratio, counts(inputs))
        return LossValue(-value, {**clip_counts(clipped, inputs), "ratio:max": greatest})


class Cispo(ClippedLoss):
    """-sum w sg(clamp(r, lo, hi)) lp A (MiniMax, 2025). A clipped position keeps its gradient."""

    name = "cispo"
    inputs = POLICY_INPUTS
    settings: ClassVar = {LOW: 0.0, HIGH: 4.0}

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        log_ratio = (logprobs - inputs["logprobs"]).detach()
        ratio = torch.exp(log_ratio)
        clipped = ratio.clamp(inputs[LOW], inputs[HIGH])
        loss = -(inputs["weights"] * clipped * logprobs * inputs["advantages"]).sum()
        greatest = greatest_ratio(log_ratio, counts(inputs))
        return LossValue(loss, {**clip_counts(clipped != ratio, inputs), "ratio:max": greatest})


class Dro(Loss):
    """-sum w (lp A - beta / 2 (lp - q)^2) (Richemond et al., 2024).

    The quadratic term applies at every position, including the prompt. Use weights of 0 to exclude positions.
    """

    name = "dro"
    inputs = POLICY_INPUTS
    settings: ClassVar = {"beta": 0.05}

    def __init__(self, given: Mapping[str, float]) -> None:
        super().__init__(given)
        if not (np.isfinite(self.config["beta"]) and self.config["beta"] >= 0):
            raise InvalidInput(
                f"loss_config.beta is {self.config['beta']}, but must be a finite number of 0 or more",
                field="loss_config.beta",
            )

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        penalty = (logprobs - inputs["logprobs"]).square()
        objective = logprobs * inputs["advantages"] - 0.5 * self.config["beta"] * penalty
        return LossValue(
            -(inputs["weights"] * objective).sum(), {"penalty:sum": (inputs["weights"] * penalty.detach()).sum()}
        )


class Gspo(ClippedLoss):
    """-sum w min(s_t A, clamp(s_t, lo, hi) A) with s_t = s exp(lp - sg(lp)), where s is the ratio of the whole datum.

    s = exp(mean of sg(lp) - q over the positions with a nonzero mask) (Zheng et al., 2025, GSPO-token).
    """

    name = "gspo"
    inputs = (*POLICY_INPUTS, LossInput(MASK))
    settings: ClassVar = {LOW: 0.8, HIGH: 1.2}

    def check(self, inputs: Mapping[str, npt.NDArray]) -> None:
        """Rejects a datum that has advantages but no position for the ratio of the sequence."""
        super().check(inputs)
        if not inputs[MASK].any() and np.any(inputs["weights"] * inputs["advantages"]):
            raise InvalidInput("is zero everywhere, so the sequence has no ratio", field=MASK)

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        own = inputs[MASK] != 0
        fixed = logprobs.detach()
        difference = torch.where(own, fixed - inputs["logprobs"], 0.0)
        log_ratio = difference.sum() / own.sum().clamp(min=1)
        value, clipped = clipped_objective(log_ratio + (logprobs - fixed), inputs)
        return LossValue(-value, {**clip_counts(clipped, inputs), "sequence_ratio:max": torch.exp(log_ratio)})


class StableReinforce(ClippedLoss):
    """-sum w sg(m min(r, c) (A - kl_coeff log r)) lp over the sampled positions, with m = 1 if lo <= r <= hi, else 0.

    REINFORCE with an importance weight that is truncated at c, `max_weight` (Ionides, 2008), and without gradient
    through positions with a ratio out of bounds (IcePop: Ling Team, 2025). The term r log r is the gradient of
    KL(trained || sampling policy). q is the sampler's record, not the client's claim. The formula of hosted Tinker is
    not public, so values may differ from its own.
    """

    name = "stable_reinforce"
    inputs = (*POLICY_INPUTS, LossInput(SAMPLED))
    settings: ClassVar = {LOW: 0.5, HIGH: 5.0, "max_weight": 2.0, "kl_coeff": 0.2}

    def __init__(self, given: Mapping[str, float]) -> None:
        super().__init__(given)
        for name in ("max_weight", "kl_coeff"):
            if self.config[name] < 0:
                raise InvalidInput(
                    f"loss_config.{name} is {self.config[name]}, but must be 0 or more", field=f"loss_config.{name}"
                )

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        matter = (inputs[SAMPLED] != 0) & (inputs["weights"] != 0)
        log_ratio = torch.where(matter, logprobs.detach() - inputs["logprobs"], 0.0)
        ratio = torch.exp(log_ratio)
        inside = matter & (ratio >= inputs[LOW]) & (ratio <= inputs[HIGH])
        weight = inputs["weights"] * ratio.clamp(max=self.config["max_weight"])
        signal = torch.where(inside, weight * (inputs["advantages"] - self.config["kl_coeff"] * log_ratio), 0.0)
        metrics = {
            "clipped_tokens:sum": (matter & ~inside).sum(),
            "policy_tokens:sum": matter.sum(),
            "ratio:max": greatest_ratio(log_ratio, matter),
            "sampler_kl:sum": -log_ratio.sum(),
        }
        return LossValue(-(signal * logprobs).sum(), metrics)


def counts(inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns a mask of the positions where w A is not zero, bool [N]. Elsewhere a ratio may overflow: inf * 0."""
    return inputs["weights"] * inputs["advantages"] != 0


def clipped_objective(log_ratio: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the sum of w min(r A, clamp(r, lo, hi) A), and the positions where the bound applies, bool [N].

    This is equation 7 of Schulman et al. (2017) with bounds per position. The branch is chosen before the product, so
    an overflowing ratio affects neither the value nor the gradient of a clipped position.

    Args:
        log_ratio: float32 [N], log r with gradient.
        inputs: Inputs of the loss.
    """
    advantages = inputs["advantages"]
    ratio = torch.exp(log_ratio.detach())
    beyond = torch.where(advantages > 0, ratio > inputs[HIGH], ratio < inputs[LOW])
    matter = counts(inputs)
    bound = torch.where(advantages > 0, inputs[HIGH], inputs[LOW])
    moving = torch.exp(torch.where(matter & ~beyond, log_ratio, 0.0))
    chosen = torch.where(beyond, bound, moving)
    value = torch.where(matter, inputs["weights"] * chosen * advantages, 0.0).sum()
    return value, beyond


def clip_counts(clipped: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns metrics: the number of tokens that count, and how many of them were clipped.

    They are two sums, not a share, because the SDK weights the means of a batch's chunks by datums, not by tokens.
    """
    matter = counts(inputs)
    return {"clipped_tokens:sum": (clipped & matter).sum(), "policy_tokens:sum": matter.sum()}


def greatest_ratio(log_ratio: Tensor, matter: Tensor) -> Tensor:
    """Returns the greatest ratio among positions that count; 0 if none count."""
    return torch.where(matter, torch.exp(log_ratio.detach()), 0.0).max()


LOSSES: dict[str, type[Loss]] = {
    loss.name: loss for loss in (CrossEntropy, ImportanceSampling, Ppo, Cispo, Dro, Gspo, StableReinforce)
}
"""The loss functions, keyed by the name that clients use."""
