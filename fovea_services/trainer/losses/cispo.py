"""The CISPO loss: policy gradient with clipped importance weights."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fovea_services.trainer.losses.loss import LossValue
from fovea_services.trainer.losses.policy_gradient import (
    HIGH,
    LOW,
    POLICY_INPUTS,
    ClippedLoss,
    clip_counts,
    counts,
    greatest_ratio,
)


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
