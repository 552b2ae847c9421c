"""The PPO loss: proximal policy optimization (Schulman et al., 2017)."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from fovea_services.trainer.losses.loss import LossValue
from fovea_services.trainer.losses.policy_gradient import (
    HIGH,
    LOW,
    POLICY_INPUTS,
    ClippedLoss,
    clip_counts,
    clipped_objective,
    counts,
    greatest_ratio,
)


class Ppo(ClippedLoss):
    """-sum w min(r A, clamp(r, lo, hi) A) (Schulman et al., 2017); notation in policy_gradient.py."""

    name = "ppo"
    inputs = POLICY_INPUTS
    settings: ClassVar = {LOW: 0.8, HIGH: 1.2}

    def compute(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> LossValue:
        log_ratio = logprobs - inputs["logprobs"]
        value, clipped = clipped_objective(log_ratio, inputs)
        greatest = greatest_ratio(log_ratio, counts(inputs))
        return LossValue(-value, {**clip_counts(clipped, inputs), "ratio:max": greatest})
