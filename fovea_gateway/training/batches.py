"""Batches of datums for forward and forward_backward.

A batch is decoded and rendered while its command waits in the queue. The trainer therefore computes one batch while the
gateway renders the next one and the trainer fetches its images.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fovea.api.v1 import gateway_pb2, model_input_pb2, trainer_pb2
from fovea.runtime.tasks import BackgroundTasks
from fovea.wire.conventions import MESSAGE_BYTES
from fovea.wire.errors import FoveaError, InvalidInput
from fovea_gateway.futures.future import Kind, Pending, split_messages
from fovea_gateway.futures.futures import Futures
from fovea_gateway.gateway_metrics import stage
from fovea_gateway.replicas.renderers import Renderers
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.training.custom_losses import CUSTOM, CustomLosses

logger = logging.getLogger(__name__)

BATCH_KINDS = (Kind.FORWARD, Kind.FORWARD_BACKWARD)
_MOST_AHEAD = 8
"""Batches per owner. The limit keeps commands that wait for a missing request from delaying the rendering of others."""


@dataclass(frozen=True)
class Batch:
    """The header and the rendered datums of one call to the trainer."""

    header: trainer_pb2.ForwardBackwardHeader
    datums: list[trainer_pb2.Datum]


class Batches:
    """Decodes and renders the requests of forward and forward_backward.

    Args:
            trainer: Receives hints about images that it will need, so that it can fetch them ahead of the batch.
    """

    def __init__(
        self, futures: Futures, renderers: Renderers, custom_losses: CustomLosses, trainer: TrainerLink
    ) -> None:
        self._futures = futures
        self._renderers = renderers
        self._custom_losses = custom_losses
        self._trainer = trainer
        self._hints = BackgroundTasks()
        self._ahead: defaultdict[str, dict[str, asyncio.Task[Batch]]] = defaultdict(dict)

    def begin(self, pending: Pending) -> None:
        """Starts to prepare a batch in the background, unless its owner has `_MOST_AHEAD` batches under way already.

        Never raises: `take` raises the error of the preparation.
        """
        ahead = self._ahead[pending.submission.owner]
        if pending.submission.rejection is None and len(ahead) < _MOST_AHEAD:
            task = asyncio.create_task(self._prepare_ahead(pending), name=f"render {pending.submission.future_id}")
            task.add_done_callback(_look_at)
            ahead[pending.submission.future_id] = task

    async def take(self, pending: Pending) -> Batch:
        """Returns the batch of a request, prepared in advance or now. Raises InvalidInput that names a bad datum."""
        task = self._ahead[pending.submission.owner].pop(pending.submission.future_id, None)
        return await (self.prepare(pending) if task is None else task)

    def drop(self, pending: Pending) -> None:
        """Cancels the preparation of a request that will not run."""
        task = self._ahead[pending.submission.owner].pop(pending.submission.future_id, None)
        if task is not None:
            task.cancel()

    async def _prepare_ahead(self, pending: Pending) -> Batch:
        batch = await self.prepare(pending)
        if features := _features(batch):
            self._hints.start(self._tell_trainer(batch.header.model_id, features), "telling the trainer of images")
        return batch

    async def _tell_trainer(self, model_id: str, features: list[model_input_pb2.VisionFeature]) -> None:
        try:
            await self._trainer.client.fetch_ahead(model_id, features)
        except FoveaError as error:  # Only a hint: without it the trainer fetches the images when it computes.
            logger.debug("could not announce %d images of model %s to the trainer: %s", len(features), model_id, error)

    async def prepare(self, pending: Pending) -> Batch:
        """Decodes and renders a request now."""
        first, *rest = split_messages(gateway_pb2.SubmitForwardBackwardRequest, await self._futures.request_of(pending))
        if not rest:
            raise InvalidInput("data is empty; send at least one datum", field="data")
        header = trainer_pb2.ForwardBackwardHeader(
            model_id=first.header.model_id,
            loss_function=first.header.loss_function,
            loss_config=first.header.loss_config,
            backward=first.header.backward,
            datum_count=len(rest),
            custom_loss=await self._custom_loss(pending, first.header),
        )
        with stage("render", pending.submission.kind.value):
            rendered = await self._render(
                pending.submission.owner, {i: record.datum.input for i, record in enumerate(rest)}
            )
        return Batch(header, [_datum(index, rendered[index], record.datum) for index, record in enumerate(rest)])

    async def _custom_loss(
        self, pending: Pending, header: gateway_pb2.SubmitForwardBackwardHeader
    ) -> trainer_pb2.CustomLoss | None:
        if header.loss_function == CUSTOM or header.custom_loss_id:
            return await self._custom_losses.get(pending.submission.session_id, header)
        return None

    async def render_again(self, pending: Pending, batch: Batch, indexes: Sequence[int]) -> Batch:
        """Returns a copy of a batch in which the datums at `indexes` are rendered anew."""
        _, *rest = split_messages(gateway_pb2.SubmitForwardBackwardRequest, await self._futures.request_of(pending))
        with stage("render", pending.submission.kind.value):
            rendered = await self._render(pending.submission.owner, {i: rest[i].datum.input for i in indexes})
        datums = list(batch.datums)
        for index, one in rendered.items():
            datums[index] = _datum(index, one, rest[index].datum)
        return Batch(batch.header, datums)

    async def _render(
        self, owner: str, inputs: Mapping[int, model_input_pb2.ModelInput]
    ) -> dict[int, model_input_pb2.RenderedInput]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    index: group.create_task(self._renderers.render(owner, model_input, f"data[{index}].model_input"))
                    for index, model_input in inputs.items()
                }
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return {index: task.result() for index, task in tasks.items()}


def _features(batch: Batch) -> list[model_input_pb2.VisionFeature]:
    """Returns the references with which the trainer fetches the images of a batch, one for each distinct image."""
    spans = (span for datum in batch.datums for span in datum.input.spans)
    return list({span.feature.digest: _slim(span.feature) for span in spans}.values())


def _slim(feature: model_input_pb2.VisionFeature) -> model_input_pb2.VisionFeature:
    return model_input_pb2.VisionFeature(
        digest=feature.digest,
        size_bytes=feature.size_bytes,
        source=feature.source,
        tensors_sha256=feature.tensors_sha256,
    )


def _look_at(task: asyncio.Task[Batch]) -> None:
    """Retrieves the exception of a task that may have no consumer, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _datum(index: int, rendered: model_input_pb2.RenderedInput, datum: gateway_pb2.InputDatum) -> trainer_pb2.Datum:
    whole = trainer_pb2.Datum(input=rendered, loss_inputs=datum.loss_inputs)
    if (size_bytes := whole.ByteSize()) > MESSAGE_BYTES - 1024:
        raise InvalidInput(
            f"data[{index}] has {size_bytes} bytes without its images; the limit is {MESSAGE_BYTES - 1024} bytes",
            field=f"data[{index}]",
        )
    return whole
