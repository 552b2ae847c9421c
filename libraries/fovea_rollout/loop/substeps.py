"""The optimizer steps of one training step, and the rollouts that the server refuses to train on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fovea_rollout.late_sdk import tinker
from fovea_rollout.loop.training_batch import TrainingBatch

Outputs: TypeAlias = "list[tuple[TrainingBatch, tinker.ForwardBackwardOutput]]"

_TRIED_AT_ONCE = 8
"""Number of concurrent single-datum requests, which must stay below a server's limit of pending requests."""
_REFUSED = (400, 413, 422)
"""HTTP statuses of a request that the server rejects because of its content."""


@dataclass(frozen=True)
class Substeps:
    """The training on the parts of a batch, with one optimizer step for each part.

    Attributes:
        client: Client of the model in training.
        loss: Name of the server's loss.
        loss_config: Settings of the loss.
        adam: Parameters of every optimizer step.
    """

    client: tinker.TrainingClient
    loss: tinker.types.LossFnType
    loss_config: Mapping[str, float]
    adam: tinker.AdamParams

    async def run(self, parts: Sequence[TrainingBatch]) -> tuple[Outputs, dict[str, Exception]]:
        """Trains on each part. If the server refuses a datum, trains on the rest of its part, after the other parts.

        Args:
            parts: Batches that are not empty.

        Returns:
            Each trained part with its output, in the order of training; and the server's error for each conversation
            with a refused datum.

        Raises:
            tinker.TinkerError: The server refuses all datums, or a batch but none of its datums alone; or it fails.
        """
        outputs, refused = await self._train(parts)
        errors: dict[str, Exception] = {}
        for part, error in refused:
            found = await self._errors(part)
            if not found:
                raise error
            errors = found | errors
        again = [rest for part, _ in refused if (rest := part.without(errors)).data]
        if again:
            more, still_refused = await self._train(again)
            if still_refused:
                raise still_refused[0][1]
            outputs += more
        if refused and not outputs:
            raise refused[0][1]
        return outputs, errors

    async def _train(self, parts: Sequence[TrainingBatch]) -> tuple[Outputs, list[tuple[TrainingBatch, Exception]]]:
        """Trains on each part; returns outputs, and the parts that the server refused with its error."""
        backwards, steps = [], []
        # All are submitted before the first is awaited, so that the server never waits for this client in between.
        for part in parts:
            backwards.append(self._submit(self.client.forward_backward, part))
            steps.append(self.client.optim_step(self.adam))
        results = await asyncio.gather(*backwards, *steps, return_exceptions=True)
        outputs: Outputs = []
        refused: list[tuple[TrainingBatch, Exception]] = []
        for part, output, step in zip(parts, results[: len(parts)], results[len(parts) :], strict=True):
            if isinstance(output, tinker.ForwardBackwardOutput):
                if isinstance(step, BaseException):
                    raise step
                outputs.append((part, output))
            elif isinstance(output, Exception) and is_refusal(output):
                # The server then also refuses the optimizer step that follows, and keeps no gradients of the part.
                refused.append((part, output))
            else:
                assert isinstance(output, BaseException)
                raise output
        return outputs, refused

    async def _errors(self, part: TrainingBatch) -> dict[str, Exception]:
        """Returns the server's error for each conversation with a datum that the server refuses.

        The server's message gives the position of one datum in its request, and the SDK splits a large batch into
        several requests. So each datum is tried alone, without gradients.
        """
        errors: dict[str, Exception] = {}
        for begin in range(0, len(part.data), _TRIED_AT_ONCE):
            some = part.data[begin : begin + _TRIED_AT_ONCE]
            tries = [self._submit(self.client.forward, TrainingBatch([datum])) for datum in some]
            for datum, found in zip(some, await asyncio.gather(*tries, return_exceptions=True), strict=True):
                if isinstance(found, Exception) and is_refusal(found):
                    errors.setdefault(datum.conversation, found)
                elif isinstance(found, BaseException):
                    raise found
        return errors

    def _submit(
        self, command: Callable[..., tinker.APIFuture[tinker.ForwardBackwardOutput]], batch: TrainingBatch
    ) -> tinker.APIFuture[tinker.ForwardBackwardOutput]:
        return command([datum.datum for datum in batch.data], self.loss, self.loss_config or None)


def is_refusal(error: Exception) -> bool:
    """Returns whether the server rejected a request because of its content, so that other requests can succeed."""
    if isinstance(error, tinker.RequestFailedError):
        return error.category is tinker.types.RequestErrorCategory.User
    return isinstance(error, tinker.APIStatusError) and error.status_code in _REFUSED
