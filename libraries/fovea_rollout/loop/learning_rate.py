"""Learning rates: defaults that fall with the width of the model, and the share of the rate for each step."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field

from fovea_rollout.late_sdk import tinker

logger = logging.getLogger(__name__)

FINE_TUNING_RATE, REINFORCING_RATE = 4e-4, 1.3e-4
"""Rates of a LoRA on a language model of width 2,000.

For fine-tuning, 3e-3 was best at width 128 (`make demo`), and recipes for widths of 2,000 to 4,000 use 1e-4 to 5e-4.
Reinforcement learning needs a lower rate, or the model loses the form of long answers. So does its warm-up: a model
that cloned random answers at 3e-3 no longer saw colours."""
_WIDTH, _POWER = 2000, 0.75
"""They give rates of 3e-3 and 1e-3 at width 128, and of 2e-4 and 8e-5 at width 4,096."""


def rate_at(width: int, rate: float) -> float:
    """Scales a rate for models of width 2,000 to another width."""
    return float(rate * (_WIDTH / width) ** _POWER)


async def learning_rate_of(training_client: tinker.TrainingClient, rate: float) -> float:
    """Scales a rate for models of width 2,000 to the width of the model in training."""
    return await asyncio.to_thread(_by_width, str(training_client.get_tokenizer().name_or_path), rate)


def _by_width(name: str, rate: float) -> float:
    """Scales a rate by the `config.json` beside a tokenizer; returns it unchanged if transformers cannot read that."""
    from transformers import AutoConfig  # it takes seconds to load

    try:
        width = int(AutoConfig.from_pretrained(name).get_text_config().hidden_size)
    except (OSError, ValueError, AttributeError, KeyError) as error:
        logger.warning("the width of %s is unknown, so the learning rate is %g: %s", name, rate, error)
        return rate
    return rate_at(width, rate)


FIRST = 0.25
"""Share of the rate in the first step. A first step at the whole rate can undo the whole warm-up."""
_LEAST, _SMALLEST_FACTOR, _LARGEST_FACTOR = 0.01, 1 / 3, 1.2


@dataclass
class StepSize:
    """The share of the learning rate with which a step moves the model by about `target`.

    PPO's clip stops a token's gradient once the token has moved far enough. It does not stop the effect of other
    tokens' gradients on that token, which dominates in long answers. For small rates, a step's KL grows with the square
    of the rate, so the share is multiplied by sqrt(target / moved), within bounds. This is like the `adaptive` rate of
    https://arxiv.org/abs/2109.11978, which uses fixed factors, and like PPO's adaptive KL penalty
    (https://arxiv.org/abs/1707.06347, section 4).

    Attributes:
        target: Target KL of a step in nats per token; None keeps the whole rate.
        share: Share of the next step, 0.01 to 1.
    """

    target: float | None
    share: float = field(init=False)

    def __post_init__(self) -> None:
        self.share = 1.0 if self.target is None else FIRST

    def observe(self, moved_kl: float | None) -> None:
        """Updates the share with the KL by which a step moved the model; None (from one substep) changes nothing."""
        if self.target is None or moved_kl is None:
            return
        factor = math.sqrt(self.target / max(moved_kl, 1e-12))
        factor = min(max(factor, _SMALLEST_FACTOR), _LARGEST_FACTOR)
        self.share = min(max(self.share * factor, _LEAST), 1.0)
