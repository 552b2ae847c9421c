"""AdamW as torch has it, with every hyperparameter given anew at each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fovea.api.v1 import trainer_pb2
from fovea.wire.errors import InvalidInput

MOMENTS = ("exp_avg", "exp_avg_sq")

LARGEST_WEIGHT = 65504.0
"""The largest float16. A weight beyond it is infinite in a sampler or an export of that type, and the product of a few
such weights, as of an adapter's gate, up and down projections, passes the largest float32, 3.4e38, in any type. Weights
of trained models are below 1,000.
"""
_FAR = 1e38
"""Below the largest float32: what is bounded by this does not overflow, whatever the order of its sums."""
_FAR_NORM = 1e18
"""The square of a gradient of this norm is far below the largest float32."""
_SMALLEST_EPS = 1e-16
"""The smallest that the bound on an update holds for: far above the root of the smallest float32, 1e-19, so that a
square which is rounded to 0 does not matter beside it.
"""
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
        largest: The largest magnitude that `stays_in_bounds` lets a parameter have.
    """

    def __init__(self, parameters: Sequence[Tensor], largest: float = LARGEST_WEIGHT) -> None:
        self._parameters = list(parameters)
        self.largest = largest
        self._ratio: Tensor | None = None
        """See `_next_ratio`; None until it is measured."""
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
        if self._ratio is not None:
            self._ratio = self._next_ratio(adam, self._ratio)

    def is_surely_in_bounds(self, adam: Adam, norm: float) -> Tensor:
        """True if sizes alone show that a step on gradients of that norm leaves all parameters in bounds; bool scalar,
        on the device.

        An update is at most the rate times the ratio of a first moment to the root of its second one. Where anything is
        not finite already, the answer is false.
        """
        if adam.eps < _SMALLEST_EPS or norm > _FAR_NORM:
            return torch.tensor(False, device=self._parameters[0].device)
        weight = torch.stack(torch._foreach_norm(self._parameters, math.inf)).amax()
        kept = max(1.0, abs(1.0 - adam.learning_rate * adam.weight_decay))
        # The first moment's correction divides by at least this; the second one's only makes the update smaller.
        rate = adam.learning_rate / (1.0 - adam.beta1)
        if self._ratio is None:
            self._ratio = self._measured_ratio()
        return weight * kept + self._next_ratio(adam, self._ratio) * rate <= self.largest

    @staticmethod
    def _next_ratio(adam: Adam, ratio: Tensor) -> Tensor:
        """A bound on |m| / (sqrt(v) + eps) of all moments m, v after a step, from that before it; float32 scalar.

        Of the new m both terms are bounded, each by its own term of the new v: the old moments' ratio grows by
        beta1 / sqrt(beta2), and a gradient's own ratio is (1 - beta1) / sqrt(1 - beta2). A hundredth is for rounding.
        """
        grown = adam.beta1 / math.sqrt(adam.beta2) if adam.beta2 else math.inf if adam.beta1 else 0.0
        return 1.01 * (ratio * grown + (1.0 - adam.beta1) / math.sqrt(1.0 - adam.beta2))

    def _measured_ratio(self) -> Tensor:
        """The largest |m| / (sqrt(v) + eps) of all moments m, v as they are, with the smallest eps; float32 scalar."""
        largest = torch.zeros((), device=self._parameters[0].device)
        for moments in self.moments():
            flat: list[Any] = [moments[name].flatten() for name in MOMENTS]
            for first, second in zip(*(one.split(_TRIAL_ELEMENTS) for one in flat), strict=True):
                largest = torch.maximum(largest, (first.abs() / (second.sqrt() + _SMALLEST_EPS)).amax())
        return largest

    def stays_in_bounds(self, adam: Adam) -> Tensor:
        """True if all parameters are in bounds, and all moments finite, after a step; bool scalar, on the device.

        The step is tried on copies, a part at a time.
        """
        finite = torch.tensor(True, device=self._parameters[0].device)
        self._ratio = None  # the bound was of no use: it is measured anew before the next step
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
                finite &= copy.abs().amax() <= self.largest
                for values in trial.moments():
                    finite &= torch.stack([values[name].isfinite().all() for name in MOMENTS]).all()
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
        self._ratio = None


def clip_factor(norm: float, bound: float) -> float:
    """What to multiply gradients of that global norm with; as torch.nn.utils.clip_grad_norm_. A bound of 0 is none."""
    return min(1.0, bound / (norm + 1e-6)) if bound > 0 else 1.0
