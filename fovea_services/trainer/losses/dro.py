"""The DRO loss: direct reward optimization (Richemond et al., 2024)."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor

from fovea.wire.errors import InvalidInput
from fovea_services.trainer.losses.loss import Loss, LossValue
from fovea_services.trainer.losses.policy_gradient import POLICY_INPUTS


class Dro(Loss):
    """-sum w (lp A - beta / 2 (lp - q)^2) (Richemond et al., 2024); notation in policy_gradient.py.

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
