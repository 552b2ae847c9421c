"""How far the sampler's log-probabilities are from the trainer's: what a policy gradient takes for off-policy data."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from services.trainer.batches.datum_decoding import Datum

_INPUTS = ("logprobs", "advantages", "weights")


def mean_gap(datums: Iterable[Datum], logprobs: Mapping[int, npt.NDArray[np.float32]]) -> float | None:
    """Mean |lp - q| in nats over all positions with an advantage; None if no datum brings sampled log-probabilities.

    Args:
        datums: Checked examples; those of losses without the inputs of a policy gradient do not count. q is `logprobs`.
        logprobs: The trainer's lp by index of the datum, float32 [N] or [N, K], at the weights before the step.

    Weights that have moved since they sampled are in it too: it is the engines' disagreement alone only in the first
    call after a push.
    """
    total, count = 0.0, 0
    for datum in datums:
        own = logprobs[datum.index]
        given = [values for name in _INPUTS if (values := datum.inputs.get(name)) is not None]
        # A loss that a client traced may use these names for what it likes.
        if len(given) < len(_INPUTS) or any(values.shape != own.shape for values in given):
            continue
        sampled, advantages, weights = given
        matters = advantages * weights != 0
        total += float(np.abs(own - sampled)[matters].sum())
        count += int(matters.sum())
    return total / count if count else None
