"""What the losses of reinforcement learning share: a sampler's log-probabilities, advantages, and clipped ratios.

Notation of their formulas (tinker-contract, section 5), sums over the positions of a datum:

    lp   log-probability of the target under the weights that are trained
    q    the same under the weights that sampled it, input `logprobs`
    r    exp(lp - q)
    A    input `advantages`
    w    input `weights`, all ones if it is not given
    lo, hi    bounds of a ratio: inputs or settings `clip_low_threshold`, `clip_high_threshold`; an input comes first
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
    """A loss whose ratios have bounds."""

    def __init__(self, given: Mapping[str, float]) -> None:
        super().__init__(given)
        for key, value in self.config.items():
            if not np.isfinite(value):
                raise InvalidInput(f"loss_config.{key} is {value}, needs a finite number", field=f"loss_config.{key}")
        if self.config[LOW] > self.config[HIGH]:
            raise InvalidInput(
                f"loss_config.{LOW} is {self.config[LOW]}, above {HIGH} {self.config[HIGH]}", field=f"loss_config.{LOW}"
            )
        bounds = (LossInput(name, required=False, default=self.config[name]) for name in (LOW, HIGH))
        self.inputs = (*type(self).inputs, *bounds)

    def check(self, inputs: Mapping[str, npt.NDArray]) -> None:
        """Refuses positions where the lower bound is above the upper one."""
        crossed = np.flatnonzero(inputs[LOW] > inputs[HIGH])
        if crossed.size:
            place = int(crossed[0])
            low, high = (float(inputs[name].ravel()[place]) for name in (LOW, HIGH))
            raise InvalidInput(f"is {low:g} at [{place}], above {HIGH} {high:g}", field=LOW)


def counts(inputs: Mapping[str, Tensor]) -> Tensor:
    """bool [N]: where w A is not zero. A ratio elsewhere may be anything: it must not turn into inf * 0."""
    return inputs["weights"] * inputs["advantages"] != 0


def clipped_objective(log_ratio: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """sum w min(r A, clamp(r, lo, hi) A), and of which positions the bound was taken, bool [N].

    Schulman et al. (2017), equation 7, with bounds of its own for each position. The branch is chosen before anything
    is multiplied, so that a ratio that overflows has no part in the value or the gradient of a clipped position.
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
    """Metrics: of the tokens that count, how many there are and how many were clipped.

    Two sums and no share: the SDK joins the means of a batch's parts by their datums, not by their tokens.
    """
    matter = counts(inputs)
    return {"clipped_tokens:sum": (clipped & matter).sum(), "policy_tokens:sum": matter.sum()}


def greatest_ratio(log_ratio: Tensor, matter: Tensor) -> Tensor:
    """The greatest ratio among positions that count; 0 if there is none."""
    return torch.where(matter, torch.exp(log_ratio.detach()), 0.0).max()
