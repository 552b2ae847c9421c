"""Commands that compute: forward, forward_backward and optim_step."""

from google.protobuf.message import Message

from fovea.api.v1 import gateway_pb2, trainer_pb2
from fovea.client import ForwardBackwardResult
from fovea.wire.errors import FailedPrecondition, FeatureEvicted
from fovea_gateway.futures.future import Done, Kind, Pending
from fovea_gateway.futures.futures import Futures
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.training.batches import Batch, Batches
from fovea_gateway.training.journal import TrainerQueue
from fovea_gateway.training.models import Model, Models

COMPUTING = (Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)


class StepCommands:
    """Runs forward, forward_backward and optim_step."""

    def __init__(
        self, futures: Futures, models: Models, batches: Batches, trainer: TrainerLink, trainer_queue: TrainerQueue
    ) -> None:
        self._futures, self._models, self._batches, self._trainer = futures, models, batches, trainer
        self._trainer_queue = trainer_queue

    async def forward_backward(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Renders the datums and computes their loss, with or without gradients."""
        return Done(await self.compute(pending, not model.is_accumulating, model))

    async def compute(self, pending: Pending, drop_gradients: bool, model: Model | None = None) -> list[Message]:
        """Returns the outputs of a forward or forward_backward, then its metrics.

        Args:
            model: A model that must be in the trainer in the state in which its last command left it. None for a
                command that restores a model there.
        """
        pending.progress.wait_on("rendering")
        batch = await self._batches.take(pending)
        again: list[int] = []
        portion = len(batch.datums)
        while True:
            try:
                answer = await self._send(batch, pending, drop_gradients, model)
                break
            except FeatureEvicted as error:  # The trainer fetches images before it computes, so no gradient was added.
                missing = _missing(error, len(batch.datums))
                came = len(set(again).difference(missing))
                if again and not came and portion == 1:
                    raise
                # Render as many at once as arrived last time: more than the renderers can hold would evict one another.
                portion = max(1, came or portion // 4) if again else portion
                again = missing[:portion]
                pending.progress.wait_on("rendering again the images that the renderers no longer hold")
                batch = await self._batches.render_again(pending, batch, again)
        outputs = [gateway_pb2.WaitFutureResponse(output=output) for output in answer.outputs]
        metrics = trainer_pb2.Metrics(values=answer.metrics)
        return [*outputs, gateway_pb2.WaitFutureResponse(metrics=metrics)]

    async def _send(
        self, batch: Batch, pending: Pending, drop_gradients: bool, model: Model | None
    ) -> ForwardBackwardResult:
        batch.header.seq_id = pending.submission.seq_id
        batch.header.drop_gradients = drop_gradients
        tokens = sum(len(datum.input.tokens) // 4 for datum in batch.datums)
        async with self._trainer_queue.admit(
            pending, "computing, or waiting for the trainer", tokens, is_again=model is None
        ):
            client = self._trainer.client if model is None else self._models.client_of(model, self._trainer)
            answer = await client.forward_backward(batch.header, batch.datums, timeout_s=None)
        if pending.submission.kind is Kind.FORWARD_BACKWARD:
            pending.usage.trained_tokens += tokens
        else:
            pending.usage.scored_tokens += tokens
        return answer

    async def optim_step(self, model: Model, pending: Pending, blob: bytes) -> Done:
        """Makes an optimizer step. If a forward_backward failed since the last step, drops the partial gradients
        instead.
        """
        seq_id = pending.submission.seq_id
        if model.failed_seq_id is not None:
            failed, reason = model.failed_seq_id, model.failed_reason
            async with self._trainer_queue.admit(pending, "dropping partial gradients, or waiting for the trainer"):
                client = self._models.client_of(model, self._trainer)
                await client.clear_gradients(model.model_id, timeout_s=None, seq_id=seq_id)
            model.failed_seq_id, model.failed_reason = None, ""
            raise FailedPrecondition(
                f"this optim_step (request {seq_id}) was not taken: forward_backward request {failed} before it "
                f"failed ({reason}), so the gradients were partial. They were dropped; send the forward_backward calls "
                "again, then optim_step"
            )
        request = gateway_pb2.SubmitOptimStepRequest.FromString(blob)
        async with self._trainer_queue.admit(pending, "stepping, or waiting for the trainer"):
            client = self._models.client_of(model, self._trainer)
            answer = await client.optim_step(model.model_id, request.adam, timeout_s=None, seq_id=seq_id)
        return Done([gateway_pb2.WaitFutureResponse(metrics=answer.metrics)])


def _missing(error: FeatureEvicted, count: int) -> list[int]:
    """Returns the indexes of the datums to render again; all of them if the trainer does not name any."""
    named = error.metadata.get("datums", "")
    return [int(index) for index in named.split(",") if int(index) < count] if named else list(range(count))
