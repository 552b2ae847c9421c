"""AdamW as torch has it, with every hyperparameter given anew at each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import InvalidInput

MOMENTS = ("exp_avg", "exp_avg_sq")

_FAR = 1e38
"""Below the largest float32, 3.4e38: what is bounded by this does not overflow, whatever the order of its sums."""
_SMALLEST_EPS = 1e-37
"""Less may be 0 as a float32, and 0 / 0 is no number."""
_TRIAL_ELEMENTS = 2**24


@dataclass(frozen=True)
class Adam:
    """One step's parameters; as `AdamParams` on the wire, whose defaults these are."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    @classmethod
    def of(cls, given: trainer_pb2.AdamParams) -> "Adam":
        """What a message says, and defaults for what it leaves out. Raises InvalidInput as `check` does."""
        adam = cls(**{field.name: value for field, value in given.ListFields()})
        adam.check()
        return adam

    def check(self) -> None:
        """Raises InvalidInput for values outside what AdamW is defined for."""
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not 0 <= value <= _FAR:
                raise InvalidInput(f"adam.{name} {value} must be in [0, {_FAR:g}]", field=f"adam.{name}")
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

    def cannot_overflow(self, adam: Adam, norm: float) -> Tensor:
        """Whether magnitudes alone show that a step on gradients of that norm stays finite; bool scalar, on the device.

        The numerator of an update is at most the largest of the first moments and the norm, its denominator at least
        eps. Of what is not finite already it says no.
        """
        if adam.eps < _SMALLEST_EPS:
            return torch.tensor(False, device=self._parameters[0].device)
        weight = torch.stack(torch._foreach_norm(self._parameters, math.inf)).amax()
        moment = torch.stack(torch._foreach_norm([values[MOMENTS[0]] for values in self.moments()], math.inf)).amax()
        kept = max(1.0, abs(1.0 - adam.learning_rate * adam.weight_decay))
        rate = adam.learning_rate / (1.0 - adam.beta1) / min(adam.eps, 1.0)
        return weight * kept + moment.clamp(min=max(norm, 1.0)) * rate < _FAR

    def stays_finite(self, adam: Adam) -> Tensor:
        """Whether all parameters are finite after a step, which is tried on copies, a part at a time; bool scalar."""
        finite = torch.tensor(True, device=self._parameters[0].device)
        for parameter in self._parameters:
            state = self._torch.state[parameter]
            rate = adam.learning_rate / (1.0 - adam.beta1 ** (int(state["step"]) + 1))
            if max(rate, adam.learning_rate * adam.weight_decay) > _FAR:  # torch raises for numbers above float32's
                return ~finite
            assert parameter.grad is not None
            whole = (parameter.detach(), parameter.grad, *(state[name] for name in MOMENTS))
            for weight, grad, *moments in zip(*(t.flatten().split(_TRIAL_ELEMENTS) for t in whole), strict=True):
                copy = weight.clone()
                copy.grad = grad
                trial = AdamW([copy])
                trial.load([{name: m.clone() for name, m in zip(MOMENTS, moments, strict=True)}], int(state["step"]))
                trial.step(adam)
                finite &= copy.isfinite().all()
        return finite

    def rehearse(self) -> None:
        """Raises as torch does where a step would run out of memory; on a GPU, where it takes none, never."""
        largest = max(self._parameters, key=Tensor.numel)
        if not largest.is_cuda:
            torch.empty_like(largest, memory_format=torch.contiguous_format).new_empty(3 * largest.numel())

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
