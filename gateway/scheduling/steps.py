"""Commands that compute: forward, forward_backward, optim_step."""

import asyncio

from fovea.api.v1 import gateway_pb2, model_input_pb2, trainer_pb2
from fovea.wire.errors import FailedPrecondition, FeatureEvicted, InvalidInput
from fovea.wire.limits import MESSAGE_BYTES
from gateway.futures import records
from gateway.futures.future import Pending
from gateway.scheduling.context import Context, Done
from gateway.store.models import Model


async def forward_backward(context: Context, model: Model, pending: Pending, blob: bytes) -> Done:
    """Renders the datums and has their loss computed, with gradients or without."""
    first, *rest = records.split(gateway_pb2.SubmitForwardBackwardRequest, blob)
    header = trainer_pb2.ForwardBackwardHeader(
        model_id=model.model_id,
        loss_function=first.header.loss_function,
        loss_config=first.header.loss_config,
        backward=first.header.backward,
        datum_count=len(rest),
    )
    if not rest:
        raise InvalidInput("data is empty; send at least one datum", field="data")
    try:
        answer = await _compute(context, header, [record.datum for record in rest], pending)
    except FeatureEvicted:  # the trainer fetches before it computes: nothing was added yet
        answer = await _compute(context, header, [record.datum for record in rest], pending)
    outputs = [gateway_pb2.WaitFutureResponse(output=output) for output in answer[0]]
    metrics = trainer_pb2.Metrics(values=answer[1])
    return Done([*outputs, gateway_pb2.WaitFutureResponse(metrics=metrics)])


async def _compute(
    context: Context,
    header: trainer_pb2.ForwardBackwardHeader,
    data: list[gateway_pb2.InputDatum],
    pending: Pending,
) -> tuple[list[trainer_pb2.DatumOutput], dict[str, float]]:
    pending.wait_on("rendering")
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(context.renderers.render(datum.input, f"data[{index}].model_input"))
            for index, datum in enumerate(data)
        ]
    datums = [_datum(index, task.result(), data[index]) for index, task in enumerate(tasks)]
    pending.wait_on("computing, or waiting for the trainer")
    return await context.trainer.client.forward_backward(header, datums, context.timeout_s)


def _datum(index: int, rendered: model_input_pb2.RenderedInput, datum: gateway_pb2.InputDatum) -> trainer_pb2.Datum:
    whole = trainer_pb2.Datum(input=rendered, loss_inputs=datum.loss_inputs)
    if (size_bytes := whole.ByteSize()) > MESSAGE_BYTES - 1024:
        raise InvalidInput(
            f"data[{index}] takes {size_bytes} bytes without its images; at most {MESSAGE_BYTES - 1024} fit",
            field=f"data[{index}]",
        )
    return whole


async def optim_step(context: Context, model: Model, pending: Pending, blob: bytes) -> Done:
    """Steps, unless a forward_backward since the last step failed: then the gradients are partial and are dropped."""
    if model.failed_seq_id is not None:
        failed, reason = model.failed_seq_id, model.failed_reason
        await context.trainer.client.clear_gradients(model.model_id, context.timeout_s)
        model.failed_seq_id, model.failed_reason = None, ""
        raise FailedPrecondition(
            f"this optim_step (request {pending.seq_id}) was not taken: forward_backward request {failed} before it "
            f"failed ({reason}), so the gradients were partial. They were dropped; send the forward_backward calls "
            "again, then optim_step"
        )
    request = gateway_pb2.SubmitOptimStepRequest.FromString(blob)
    pending.wait_on("stepping, or waiting for the trainer")
    answer = await context.trainer.client.optim_step(model.model_id, request.adam, context.timeout_s)
    return Done([gateway_pb2.WaitFutureResponse(metrics=answer.metrics)])
