"""Each loss of one datum in plain float64 numpy, from its formula, position by position.

Written from tinker-contract.md section 5 and the papers; shares no code with services/trainer/fovea_trainer.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Inputs = Mapping[str, Array]
Config = Mapping[str, float]
CLIPS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.8, 1.2), "stable_reinforce": (0.5, 5.0)}


def log_softmax(logits: Array) -> Array:
    """Computes log-softmax over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _weight(given: Inputs, t: int) -> float:
    return float(given["weights"][t]) if "weights" in given else 1.0


def _bounds(name: str, given: Inputs, config: Config, t: int) -> tuple[float, float]:
    keys = ("clip_low_threshold", "clip_high_threshold")
    low, high = (
        float(given[key][t]) if key in given else config.get(key, default)
        for key, default in zip(keys, CLIPS[name], strict=True)
    )
    return low, high


def cross_entropy(lp: Array, given: Inputs, config: Config, frozen: Array) -> float:
    """-sum w lp."""
    return float(-(given["weights"] * lp).sum())


def importance_sampling(lp: Array, given: Inputs, config: Config, frozen: Array) -> float:
    """-sum w r A."""
    terms = [
        _weight(given, t) * math.exp(lp[t] - given["logprobs"][t]) * given["advantages"][t] for t in range(len(lp))
    ]
    return -math.fsum(terms)


def ppo(lp: Array, given: Inputs, config: Config, frozen: Array) -> float:
    """-sum w min(r A, clamp(r) A)."""
    total = 0.0
    for t in range(len(lp)):
        ratio, advantage = math.exp(lp[t] - given["logprobs"][t]), given["advantages"][t]
        low, high = _bounds("ppo", given, config, t)
        total += _weight(given, t) * min(ratio * advantage, min(max(ratio, low), high) * advantage)
    return -total


def cispo(lp: Array, given: Inputs, config: Config, frozen: Array) -> float:
    """-sum w sg(clamp(r)) lp A; `frozen` is lp without gradient."""
    total = 0.0
    for t in range(len(lp)):
        low, high = _bounds("cispo", given, config, t)
        ratio = min(max(math.exp(frozen[t] - given["logprobs"][t]), low), high)
        total += _weight(given, t) * ratio * lp[t] * given["advantages"][t]
    return -total


def dro(lp: Array, given: Inputs, config: Config, frozen: Array) -> float:
    """-sum w (lp A - beta / 2 (lp - q)^2)."""
    beta = config.get("beta", 0.05)
    return -math.fsum(
        _weight(given, t) * (lp[t] * given["advantages"][t] - beta / 2 * (lp[t] - given["logprobs"][t]) ** 2)
        for t in range(len(lp))
    )


def gspo(lp: Array, given: Inputs, config: Config, frozen: Array) -> float:
    """-sum w min(s_t A, clamp(s_t) A), s_t = s exp(lp - sg(lp)); `frozen` is lp without gradient."""
    own = given["sequence_ratio_mask"] != 0
    ratio = math.exp((frozen[own] - given["logprobs"][own]).mean())
    total = 0.0
    for t in range(len(lp)):
        mine, advantage = ratio * math.exp(lp[t] - frozen[t]), given["advantages"][t]
        low, high = _bounds("gspo", given, config, t)
        total += _weight(given, t) * min(mine * advantage, min(max(mine, low), high) * advantage)
    return -total


def stable_reinforce(lp: Array, given: Inputs, config: Config, frozen: Array) -> float:
    """-sum w sg(m min(r, c) (A - kl log r)) lp over sampled positions; m is 0 where r is out of bounds."""
    total = 0.0
    for t in range(len(lp)):
        distance = frozen[t] - given["logprobs"][t]
        low, high = _bounds("stable_reinforce", given, config, t)
        if given["sampled"][t] and low <= math.exp(distance) <= high:
            weight = _weight(given, t) * min(math.exp(distance), config.get("max_weight", 2.0))
            total += weight * (given["advantages"][t] - config.get("kl_coeff", 0.2) * distance) * lp[t]
    return -total


Reference = Callable[[Array, Inputs, Config, Array], float]
REFERENCES: dict[str, Reference] = {
    loss.__name__: loss for loss in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo, stable_reinforce)
}


def value(name: str, logits: Array, targets: npt.NDArray, given: Inputs, config: Config) -> float:
    """Returns the loss of targets [N] or [N, K] at positions with these logits [N, V]."""
    lp = logprobs(logits, targets)
    return REFERENCES[name](lp, given, config, lp)


def logprobs(logits: Array, targets: npt.NDArray) -> Array:
    """Returns float64 log-probabilities, shaped as the targets."""
    rows = targets.reshape(len(targets), -1)
    found: Array = np.take_along_axis(log_softmax(logits), rows, axis=1).reshape(targets.shape)
    return found


def numerical_gradient(
    name: str, logits: Array, targets: npt.NDArray, given: Inputs, config: Config, step: float = 1e-5
) -> Array:
    """Returns d loss / d logits by central differences; values under a stop-gradient stay fixed."""
    frozen = logprobs(logits, targets)
    gradient = np.zeros_like(logits)
    for place in np.ndindex(*logits.shape):
        sides = []
        for sign in (1, -1):
            moved = logits.copy()
            moved[place] += sign * step
            sides.append(REFERENCES[name](logprobs(moved, targets), given, config, frozen))
        gradient[place] = (sides[0] - sides[1]) / (2 * step)
    return gradient
