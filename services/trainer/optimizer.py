"""AdamW as torch has it, with every hyperparameter given anew at each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.wire.errors import InvalidInput

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Adam:
    """One step's parameters; as `AdamParams` on the wire."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float

    def check(self) -> None:
        """Raises InvalidInput for values outside what AdamW is defined for."""
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"adam.{name} {value} must be finite and not negative", field=f"adam.{name}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise InvalidInput(f"adam.{name} {value} must be in [0, 1)", field=f"adam.{name}")


class AdamW:
    """torch.optim.AdamW over tensors of this rank. Moments and step count start at zero.

    Args:
        parameters: float tensors, updated in place. Their `grad` must be set when stepping.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        # One kernel that holds no temporary copies of the weights; on a CPU its sums would differ in the last bit.
        on_gpu = self._parameters[0].is_cuda
        self._torch = torch.optim.AdamW(self._parameters, lr=0.0, fused=on_gpu or None)
        self.load([{name: torch.zeros_like(p) for name in MOMENTS} for p in self._parameters], 0)

    def step(self, adam: Adam) -> None:
        """Loshchilov and Hutter (2019), algorithm 2, decay scaled by the learning rate."""
        for group in self._torch.param_groups:
            group.update(
                lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
            )
        self._torch.step()

    def moments(self) -> list[dict[str, Tensor]]:
        """Both moments of each parameter, in order; not copies."""
        return [{name: self._torch.state[p][name] for name in MOMENTS} for p in self._parameters]

    def load(self, moments: Sequence[dict[str, Tensor]], step: int) -> None:
        """Takes moments over, without copying, as of `step` steps taken."""
        for parameter, values in zip(self._parameters, moments, strict=True):
            count = torch.tensor(float(step), device=parameter.device)
            self._torch.state[parameter] = {"step": count, **values}


def clip_factor(norm: float, bound: float) -> float:
    """What to multiply gradients of that global norm with; as torch.nn.utils.clip_grad_norm_. A bound of 0 is none."""
    return min(1.0, bound / (norm + 1e-6)) if bound > 0 else 1.0
