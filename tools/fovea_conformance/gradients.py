"""Checks gradients from outside: the effect of a step on log-probabilities, and sums of gradients that must cancel.

Cross-entropy with weights w has dL/dlogprob = -w. So for any loss, `cross_entropy` with weights +dL/dlogprob adds
exactly the negative of its gradient. After both calls, a step must change nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

from fovea_conformance.check import expect

Arrays = list[NDArray[np.float64]]
Output = types.ForwardBackwardOutput
TOLERANCE = 0.02
"""Largest share of a gradient's move that may remain after its negative was added."""
_CLEAR = 0.03
_GROWTH, _TRIES = 4.0, 9


def logprobs_of(output: Output) -> Arrays:
    """Returns the `logprobs` of each datum, in the shape of its targets."""
    return [np.asarray(one["logprobs"].to_numpy(), np.float64) for one in output.loss_fn_outputs]


def surrogate(data: Sequence[types.Datum], weights: Sequence[NDArray[np.float64]]) -> list[types.Datum]:
    """Returns datums for cross_entropy with the same inputs and targets, and with these weights."""
    return [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": tensor(weight)},
        )
        for datum, weight in zip(data, weights, strict=True)
    ]


def tensor(values: NDArray[np.float64]) -> types.TensorData:
    """Converts an array to a float32 tensor."""
    return types.TensorData.from_numpy(values.astype(np.float32))


def largest_difference(ours: Arrays, theirs: Arrays) -> float:
    """Returns the largest difference over all positions of all datums. NaN counts as infinite."""
    worst = max(float(np.max(np.abs(a - b), initial=0.0)) for a, b in zip(ours, theirs, strict=True))
    return worst if np.isfinite(worst) else np.inf


class Meter:
    """A LoRA model with steps proportional to its gradient: Adam without memory, and with eps 1.

    The model comes from `warmed_up`, because a new adapter has B = 0 and no gradient in A.

    Args:
        training: The model.
        watched: Datums with log-probabilities that show the effect of a step.
    """

    def __init__(self, training: tinker.TrainingClient, watched: Sequence[types.Datum]) -> None:
        self.training = training
        self._watched = list(watched)
        self._rate = 0.05

    def look(self) -> Arrays:
        """Returns the current log-probabilities of the watched datums."""
        return logprobs_of(self.training.forward(self._watched, "cross_entropy").result(120))

    def step(self) -> None:
        """Takes a step of -rate g / (|g| + 1) for each weight with gradient g."""
        proportional = types.AdamParams(learning_rate=self._rate, beta1=0.0, beta2=0.0, eps=1.0)
        self.training.optim_step(proportional).result(120)

    def moved(self, send: Callable[[], object]) -> float:
        """Returns the change of the watched log-probabilities by one step after `send`."""
        before = self.look()
        send()
        self.step()
        return largest_difference(before, self.look())

    def effect(self, send: Callable[[], object], what: str) -> float:
        """Returns the same with a learning rate that gives a clear change. The rate grows until then.

        Raises Failed if no rate gives one.
        """
        self._rate /= _GROWTH**2
        for _ in range(_TRIES):
            move = self.moved(send)
            if move >= _CLEAR:
                break
            self._rate *= _GROWTH
        expect(_CLEAR <= move < np.inf, f"{what} does not move the weights: a step changes logprobs by {move:.2g}")
        return move

    def expect_nothing_left(self, send: Callable[[], object], alone: Callable[[], object], what: str) -> str:
        """Raises Failed unless the gradients of `send` cancel, so that a step moves almost nothing next to `alone`."""
        move = self.effect(alone, what)
        rest = self.moved(send)
        expect(rest <= TOLERANCE * move, f"{what}: a step that should change nothing moved {rest:.3g} of {move:.3g}")
        return f"{rest / move:.1e} of the move left"


def warmed_up(
    training: tinker.TrainingClient, data: Sequence[types.Datum], rate: float = 0.01
) -> tinker.TrainingClient:
    """Takes one plain Adam step on the datums, so that no matrix of the adapter is zero; returns the client."""
    training.forward_backward(list(data), "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=rate)).result(120)
    return training


def meter(training: tinker.TrainingClient, data: Sequence[types.Datum]) -> Meter:
    """Returns a meter of a warmed-up model that watches the datums."""
    return Meter(warmed_up(training, data), data)
