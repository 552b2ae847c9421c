"""Learning rates for whoever names none: they fall with the width of the model."""

from __future__ import annotations

import asyncio
import logging

import tinker

logger = logging.getLogger(__name__)

FINE_TUNING_RATE, REINFORCING_RATE = 4e-4, 1.3e-4
"""Of a LoRA on a language model that is 2,000 wide. For fine-tuning 3e-3 was best at 128 (make demo), 1e-4 to 5e-4 are
what recipes for widths of 2,000 to 4,000 have. What learns from rewards moves more slowly, or else it loses the form of
long answers; so does its warm-up: a model that cloned answers at random at 3e-3 did not see colours any more."""
_WIDTH, _POWER = 2000, 0.75
"""At a width of 128 the rates are 3e-3 and 1e-3, at 4,096 2e-4 and 8e-5."""


def rate_at(width: int, rate: float) -> float:
    """A rate for models 2,000 wide, brought to another width."""
    return float(rate * (_WIDTH / width) ** _POWER)


async def learning_rate_of(training_client: tinker.TrainingClient, rate: float) -> float:
    """A rate for models 2,000 wide, brought to the width of the one in training."""
    return await asyncio.to_thread(_by_width, str(training_client.get_tokenizer().name_or_path), rate)


def _by_width(name: str, rate: float) -> float:
    """For the checkpoint whose `config.json` lies beside its tokenizer; as it is if transformers cannot read that."""
    from transformers import AutoConfig  # it takes seconds to load

    try:
        width = int(AutoConfig.from_pretrained(name).get_text_config().hidden_size)
    except (OSError, ValueError, AttributeError, KeyError) as error:
        logger.warning("the width of %s is unknown, so the learning rate is %g: %s", name, rate, error)
        return rate
    return rate_at(width, rate)
