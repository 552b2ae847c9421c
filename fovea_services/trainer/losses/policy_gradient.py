"""Shared parts of the reinforcement learning losses: inputs from the sampler, advantages, and clipped ratios.

Notation of the formulas (tinker-contract, section 5), with sums over the positions of a datum:

    lp   log-probability of the target under the trained weights
    q    log-probability of the target under the weights that sampled it, input `logprobs`
    r    exp(lp - q)
    A    input `advantages`
    w    input `weights`, all ones by default
    lo, hi    bounds of a ratio: inputs or settings `clip_low_threshold`, `clip_high_threshold`; inputs take precedence
    sg   stop-gradient
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fovea.wire.errors import InvalidInput
from fovea_services.trainer.losses.loss import Loss, LossInput

POLICY_INPUTS = (LossInput("logprobs"), LossInput("advantages"), LossInput("weights", required=False))
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


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


def counts(inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns where w A is nonzero, bool [N]. Ratios elsewhere may overflow and must not become inf * 0."""
    return inputs["weights"] * inputs["advantages"] != 0


def clipped_objective(log_ratio: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the sum of w min(r A, clamp(r, lo, hi) A), and the positions where the bound applies, bool [N].

    This is equation 7 of Schulman et al. (2017) with bounds per position. The branch is chosen before multiplying, so
    that an overflowing ratio affects neither value nor gradient of a clipped position.

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

    These are two sums instead of a share, because the SDK averages the means of a batch's chunks by datums, not by
    tokens.
    """
    matter = counts(inputs)
    return {"clipped_tokens:sum": (clipped & matter).sum(), "policy_tokens:sum": matter.sum()}


def greatest_ratio(log_ratio: Tensor, matter: Tensor) -> Tensor:
    """Returns the greatest ratio among positions that count; 0 if none count."""
    return torch.where(matter, torch.exp(log_ratio.detach()), 0.0).max()
