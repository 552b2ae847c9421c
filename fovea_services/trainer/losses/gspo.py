"""The GSPO loss: group sequence policy optimization, the variant with an advantage per token."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fovea.wire.errors import InvalidInput
from fovea_services.trainer.losses.loss import LossInput, LossValue
from fovea_services.trainer.losses.policy_gradient import (
    HIGH,
    LOW,
    POLICY_INPUTS,
    ClippedLoss,
    clip_counts,
    clipped_objective,
)

MASK = "sequence_ratio_mask"


class Gspo(ClippedLoss):
    """-sum w min(s_t A, clamp(s_t, lo, hi) A) with s_t = s exp(lp - sg(lp)), where s is the ratio of the whole datum.

    s = exp(mean of sg(lp) - q over the positions with a nonzero mask) (Zheng et al., 2025, GSPO-token); notation in
    policy_gradient.py.
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
