"""Default learning rates, which fall with the width of the model."""

from __future__ import annotations

import asyncio
import logging

import tinker

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
