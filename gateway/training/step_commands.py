"""Commands that compute: forward, forward_backward, optim_step.

What changes a model has no deadline: to give it up would leave unknown what it did. The trainer knows it by its seq_id,
does it once, and says what came of it however often it is asked.
"""

from fovea.api.v1 import gateway_pb2, trainer_pb2
from fovea.client import ForwardBackwardResult
from fovea.wire.errors import FailedPrecondition, FeatureEvicted
from gateway.futures.future import Pending
from gateway.stages import stage
from gateway.training.batches import Batch
from gateway.training.command_context import Context, Done
from gateway.training.model_rows import Model


async def forward_backward(context: Context, model: Model, pending: Pending, blob: bytes) -> Done:
    """Renders the datums and has their loss computed, with gradients or without."""
    pending.wait_on("rendering")
    batch = await context.batches.take(pending)
    again: list[int] = []
    portion = len(batch.datums)
    while True:
        try:
            answer = await _compute(context, model, batch, pending)
            break
        except FeatureEvicted as error:  # the trainer fetches before it computes: nothing was added yet
            missing = _missing(error, len(batch.datums))
            came = len(set(again).difference(missing))
            if again and not came and portion == 1:
                raise
            # As many as came the last time: more than renderers hold at once would push each other out.
            portion = max(1, came or portion // 4) if again else portion
            again = missing[:portion]
            pending.wait_on("rendering again what the renderers no longer hold")
            batch = await context.batches.render_again(pending, batch, again)
    outputs = [gateway_pb2.WaitFutureResponse(output=output) for output in answer.outputs]
    metrics = trainer_pb2.Metrics(values=answer.metrics)
    return Done([*outputs, gateway_pb2.WaitFutureResponse(metrics=metrics)])


def _missing(error: FeatureEvicted, count: int) -> list[int]:
    """The datums that must be rendered again; all, if the trainer does not say."""
    named = error.metadata.get("datums", "")
    return [int(index) for index in named.split(",") if int(index) < count] if named else list(range(count))


async def _compute(context: Context, model: Model, batch: Batch, pending: Pending) -> ForwardBackwardResult:
    pending.wait_on("computing, or waiting for the trainer")
    batch.header.seq_id = pending.seq_id
    batch.header.drop_gradients = not model.is_accumulating
    with stage("train", pending.kind.value):
        return await context.trainer.settle(
            model.trainer_instance,
            lambda: context.trainer.client.forward_backward(batch.header, batch.datums, timeout_s=None),
        )


async def optim_step(context: Context, model: Model, pending: Pending, blob: bytes) -> Done:
    """Steps, unless a forward_backward since the last step failed: then the gradients are partial and are dropped."""
    trainer, held_by = context.trainer, model.trainer_instance
    if model.failed_seq_id is not None:
        failed, reason = model.failed_seq_id, model.failed_reason
        await trainer.settle(
            held_by, lambda: trainer.client.clear_gradients(model.model_id, timeout_s=None, seq_id=pending.seq_id)
        )
        model.failed_seq_id, model.failed_reason = None, ""
        raise FailedPrecondition(
            f"this optim_step (request {pending.seq_id}) was not taken: forward_backward request {failed} before it "
            f"failed ({reason}), so the gradients were partial. They were dropped; send the forward_backward calls "
            "again, then optim_step"
        )
    request = gateway_pb2.SubmitOptimStepRequest.FromString(blob)
    pending.wait_on("stepping, or waiting for the trainer")
    with stage("train", pending.kind.value):
        answer = await trainer.settle(
            held_by,
            lambda: trainer.client.optim_step(model.model_id, request.adam, timeout_s=None, seq_id=pending.seq_id),
        )
    return Done([gateway_pb2.WaitFutureResponse(metrics=answer.metrics)])
