"""The gRPC service of the trainer. A method checks its request, submits a command, and encodes the answer."""

# ruff: noqa: N802 -- methods are named by the proto

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

import fovea
from fovea.api.v1 import trainer_pb2, trainer_pb2_grpc, weights_pb2
from fovea.runtime.machine_memory import memory_use
from fovea.runtime.tasks import SingleFlight
from fovea.wire import tensors
from fovea.wire.conventions import group_by_size
from fovea.wire.errors import FailedPrecondition, InvalidInput
from fovea_trainer import command_queue, trainer_metrics
from fovea_trainer.batches.datum_decoding import check_digests, decode_datum
from fovea_trainer.command_queue import CommandQueue
from fovea_trainer.loss_results import ForwardBackwardResult, mean_logprob_gap
from fovea_trainer.losses import LOSS_NAMES, loss_of
from fovea_trainer.losses.custom import Custom
from fovea_trainer.model.lora import LoraSettings
from fovea_trainer.model.optimizer import Adam
from fovea_trainer.model.sharding import dtype_name
from fovea_trainer.model.trained_model import AdapterModel
from fovea_trainer.rank_worker import RankWorker
from fovea_trainer.recovery.recovery_keeper import RecoveryKeeper
from fovea_trainer.recovery.recovery_writer import RestoredModel
from fovea_trainer.recovery.reply_cache import ReplyCache
from fovea_trainer.settings import TrainerSettings
from fovea_trainer.training_engine import TrainingEngine
from fovea_trainer.weights.pusher import Pusher
from fovea_trainer.weights.snapshot_taker import TakenSnapshot
from fovea_trainer.weights.training_state import PendingSave, check_upload

Context = grpc.aio.ServicerContext

PREPARE_S = 0.1
"""Seconds between checks whether all ranks are ready for traced losses."""

REFUSED_STREAM_S = 10.0
"""Seconds for which a client may continue to send a stream that was refused."""


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """The service on rank 0. It answers even while a command runs."""

    def __init__(
        self,
        settings: TrainerSettings,
        queue: CommandQueue,
        rank: RankWorker,
        pusher: Pusher,
        keeper: RecoveryKeeper | None,
    ) -> None:
        self._settings, self._queue, self._rank = settings, queue, rank
        self._pusher, self._keeper = pusher, keeper
        self._replies = ReplyCache()
        self._losses_prepared = False
        self._preparing = asyncio.Lock()
        self._whole: SingleFlight[tuple[str, str], Any] = SingleFlight()  # operations that must not stop half-way
        self._saving = asyncio.Lock()  # held by the save that is being written: the host has room for one
        self._instance_id = uuid.uuid4().hex

    async def GetTrainerInfo(
        self, request: trainer_pb2.GetTrainerInfoRequest, context: Context
    ) -> trainer_pb2.GetTrainerInfoResponse:
        engine, memory = self._engine(), memory_use(os.getppid())  # the launcher, the parent of this node's ranks
        return trainer_pb2.GetTrainerInfoResponse(
            model=self._settings.model,
            family=engine.family.model_type,
            instance_id=self._instance_id,
            world_size=engine.world_size,
            max_lora_rank=self._max_lora_rank,
            max_context_length=engine.limits.max_context_length,
            model_ids=sorted(engine.models),
            loss_functions=sorted(LOSS_NAMES),
            dtype=dtype_name(engine.dtype),
            version=fovea.__version__,
            supports_vision_lora=bool(engine.family.tower_roles),
            model_files=engine.model_files,
            keeps_recovery=self._keeper is not None,
            durable_seq_ids=self._keeper.durable_seq_ids if self._keeper else {},
            kept_model_ids=await self._keeper.unloaded(engine.models) if self._keeper and request.with_kept else [],
            numerics=engine.numerics,
            memory_used_bytes=memory.used_bytes,
            memory_total_bytes=memory.total_bytes,
            memory_kind=memory.kind,
            gpu_utilization=memory.utilization,
            takes_groups=True,
            shared_tokens=engine.shared.most_tokens,
            recovery_failure=self._keeper.failure if self._keeper else "",
            recovery_store=engine.recovery.folder.known_id() if engine.recovery else "",
            model_bytes={name: model.state_bytes for name, model in engine.models.copy().items()},
            max_models=self._settings.max_models,
        )

    async def CreateModel(
        self, request: trainer_pb2.CreateModelRequest, context: Context
    ) -> trainer_pb2.CreateModelResponse:
        lora = self._trained_by(request)
        count, specs = await self._queue.submit(command_queue.CreateModel(request.model_id, lora))
        adapter = None
        if lora is not None:
            adapter = weights_pb2.SnapshotManifest(
                snapshot=weights_pb2.Snapshot(kind=weights_pb2.SNAPSHOT_KIND_ADAPTER),
                tensors=specs,
                lora=lora.message(),
                bucket_bytes=self._settings.transfer_bucket_mib * 2**20,
            )
        return trainer_pb2.CreateModelResponse(trainable_parameter_count=count, adapter=adapter)

    async def RestoreModel(
        self, request: trainer_pb2.RestoreModelRequest, context: Context
    ) -> trainer_pb2.RestoreModelResponse:
        command = command_queue.RestoreModel(request.model_id, self._trained_by(request))
        seq_id, step = await self._whole.run(("restore", request.model_id), lambda: self._restored(command))
        return trainer_pb2.RestoreModelResponse(seq_id=seq_id, step=step)

    async def ParkModel(self, request: trainer_pb2.ParkModelRequest, context: Context) -> trainer_pb2.ParkModelResponse:
        _require(request.model_id, "model_id")
        keeper = self._keeper
        if keeper is None:
            raise FailedPrecondition("recovery is disabled on this trainer: set --recovery")
        if request.model_id not in self._engine().models:
            seq_id, size_bytes = await keeper.stored(request.model_id)
        else:
            seq_id, size_bytes = await keeper.flush(request.model_id)
            await self._whole.run(("free", request.model_id), lambda: self._free(request.model_id))
        return trainer_pb2.ParkModelResponse(seq_id=seq_id, size_bytes=size_bytes)

    async def DeleteModel(
        self, request: trainer_pb2.DeleteModelRequest, context: Context
    ) -> trainer_pb2.DeleteModelResponse:
        await self._whole.run(("free", request.model_id), lambda: self._free(request.model_id))
        if self._keeper is not None and not request.keeps_recovery:
            await self._keeper.remove_model(request.model_id)
        return trainer_pb2.DeleteModelResponse()

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[trainer_pb2.ForwardBackwardRequest], context: Context
    ) -> AsyncIterator[trainer_pb2.ForwardBackwardResponse]:
        header, datums = await self._receive_all(request_iterator)
        command = await asyncio.to_thread(self._checked, header, datums)
        seq_id = header.seq_id if header.backward else 0
        seconds: list[float] = []
        outcome = await self._replies.once(
            header.model_id, seq_id, lambda: self._computed(header, command, seconds), lambda found: found.size_bytes
        )
        outputs = (
            trainer_pb2.DatumOutput(tensors={"logprobs": tensors.encode(outcome.logprobs[index])})
            for index in range(len(datums))
        )
        if header.reads_groups:
            for group in group_by_size(outputs):
                yield trainer_pb2.ForwardBackwardResponse(group=trainer_pb2.OutputGroup(outputs=group))
        else:
            for output in outputs:
                yield trainer_pb2.ForwardBackwardResponse(output=output)
        metrics = trainer_pb2.Metrics(values=outcome.metrics)
        yield trainer_pb2.ForwardBackwardResponse(metrics=metrics, place=outcome.place, seconds=sum(seconds))

    async def FetchAhead(
        self, request: trainer_pb2.FetchAheadRequest, context: Context
    ) -> trainer_pb2.FetchAheadResponse:
        self._engine().fetch_ahead(request.model_id, request.features)
        return trainer_pb2.FetchAheadResponse()

    async def ClearGradients(
        self, request: trainer_pb2.ClearGradientsRequest, context: Context
    ) -> trainer_pb2.ClearGradientsResponse:
        command = command_queue.ClearGradients(request.model_id)
        await self._replies.once(request.model_id, request.seq_id, lambda: self._queue.submit(command))
        return trainer_pb2.ClearGradientsResponse()

    async def OptimStep(self, request: trainer_pb2.OptimStepRequest, context: Context) -> trainer_pb2.OptimStepResponse:
        command = command_queue.OptimStep(request.model_id, Adam.of(request.adam), request.seq_id)
        seconds: list[float] = []
        run = partial(self._changed, command, seconds)
        metrics, step = await self._replies.once(request.model_id, request.seq_id, run)
        durable = self._keeper.durable_seq_ids.get(request.model_id, 0) if self._keeper else 0
        return trainer_pb2.OptimStepResponse(
            metrics=trainer_pb2.Metrics(values=metrics), step=step, durable_seq_id=durable, seconds=sum(seconds)
        )

    async def SaveState(self, request: trainer_pb2.SaveStateRequest, context: Context) -> trainer_pb2.SaveStateResponse:
        command = command_queue.SaveState(request.model_id, request.uri)
        size_bytes, step = await self._whole.run(
            (f"save {command.model_id}", command.uri), lambda: self._saved(command)
        )
        return trainer_pb2.SaveStateResponse(size_bytes=size_bytes, step=step)

    async def LoadState(self, request: trainer_pb2.LoadStateRequest, context: Context) -> trainer_pb2.LoadStateResponse:
        command = command_queue.LoadState(request.model_id, request.uri, request.optimizer, request.seq_id)
        step = await self._replies.once(request.model_id, request.seq_id, lambda: self._changed(command, []))
        return trainer_pb2.LoadStateResponse(step=step)

    async def CheckAdapter(
        self, request: trainer_pb2.CheckAdapterRequest, context: Context
    ) -> trainer_pb2.CheckAdapterResponse:
        lora, engine = self._lora(request.lora), self._engine()
        await asyncio.to_thread(engine.roots.check, request.uri)
        await asyncio.to_thread(check_upload, lora, engine.targets, request.uri)
        return trainer_pb2.CheckAdapterResponse()

    async def TakeSnapshot(
        self, request: trainer_pb2.TakeSnapshotRequest, context: Context
    ) -> trainer_pb2.TakeSnapshotResponse:
        _require(request.snapshot_id, "snapshot_id")
        command = command_queue.TakeSnapshot(request.model_id, request.snapshot_id, request.uri, request.is_export)
        model = self._engine().models.get(request.model_id)
        if self._keeper is not None and not request.uri and isinstance(model, AdapterModel):
            async with self._keeper.snapshotting(request.model_id, request.snapshot_id, model.snapshot_bytes):
                taken: TakenSnapshot = await self._queue.submit(command)
        elif request.uri:
            key = f"snapshot {command.snapshot_id}", command.uri
            taken = await self._whole.run(key, lambda: self._saved_snapshot(command))
        else:
            taken = await self._queue.submit(command)
        return trainer_pb2.TakeSnapshotResponse(snapshot=taken.identity)

    async def PushSnapshot(
        self, request: trainer_pb2.PushSnapshotRequest, context: Context
    ) -> trainer_pb2.PushSnapshotResponse:
        return await self._pusher.push(request)

    async def ForgetSnapshot(
        self, request: trainer_pb2.ForgetSnapshotRequest, context: Context
    ) -> trainer_pb2.ForgetSnapshotResponse:
        await self._queue.submit(command_queue.ForgetSnapshot(request.snapshot_id))
        if self._keeper is not None:
            await self._keeper.remove_snapshot(request.snapshot_id)
        return trainer_pb2.ForgetSnapshotResponse()

    async def _restored(self, command: command_queue.RestoreModel) -> tuple[int, int]:
        """Restores a model unless it is loaded. Returns the number of its last command and its step count."""
        restored: RestoredModel | None = await self._queue.submit(command)
        if restored is None:
            seq_id = await self._replies.last(command.model_id)
            return seq_id, self._engine().model(command.model_id).step
        assert self._keeper is not None
        self._replies.seed(command.model_id, restored.seq_id, restored.answer)
        self._keeper.restored(command.model_id, restored.seq_id)
        return restored.seq_id, restored.step

    async def _saved(self, command: command_queue.SaveState) -> tuple[int, int]:
        """Saves a state while other commands run. Returns its size in bytes and the model's step count."""
        async with self._saving:
            pending: PendingSave = await self._queue.submit(command)
            return await asyncio.wrap_future(pending.written), pending.step

    async def _saved_snapshot(self, command: command_queue.TakeSnapshot) -> TakenSnapshot:
        async with self._saving:
            taken: TakenSnapshot = await self._queue.submit(command)
            if taken.written is not None:
                await asyncio.wrap_future(taken.written)
            return taken

    async def _free(self, model_id: str) -> None:
        await self._queue.submit(command_queue.DeleteModel(model_id))
        self._replies.forget(model_id)
        if self._keeper is not None:
            self._keeper.forget(model_id)

    async def _changed(self, command: command_queue.OptimStep | command_queue.LoadState, seconds: list[float]) -> Any:
        if self._keeper is None:
            return await self._queue.submit(command, seconds)
        model = self._engine().models.get(command.model_id)
        if isinstance(command, command_queue.OptimStep) and isinstance(model, AdapterModel):
            async with self._keeper.changing(command.model_id, model.state_bytes):
                return await self._queue.submit(command, seconds)
        answer = await self._queue.submit(command, seconds)
        self._keeper.changed(command.model_id)
        return answer

    async def _computed(
        self, header: trainer_pb2.ForwardBackwardHeader, command: command_queue.ForwardBackward, seconds: list[float]
    ) -> ForwardBackwardResult:
        if header.loss_function == Custom.name:
            await self._prepare_losses()
        outcome: ForwardBackwardResult = await self._queue.submit(command, seconds)
        backward = str(command.backward).lower()
        trainer_metrics.TOKENS.labels(backward).inc(sum(size.token_count for size in command.sizes))
        trainer_metrics.DATUMS.labels(backward).inc(len(command.sizes))
        trainer_metrics.PACKING.set(outcome.packing_efficiency)
        gap = mean_logprob_gap(command.decoded or (), outcome.logprobs)
        if gap is not None and command.model_id in self._engine().models:
            trainer_metrics.LOGPROB_GAP.labels(command.model_id).set(gap)
        return outcome

    async def _prepare_losses(self) -> None:
        """Waits until all ranks have a worker for traced losses. Other commands run meanwhile."""
        async with self._preparing:
            while not self._losses_prepared:
                self._losses_prepared = await self._queue.submit(command_queue.PrepareLosses())
                if not self._losses_prepared:
                    await asyncio.sleep(PREPARE_S)

    def _engine(self) -> TrainingEngine:
        self._queue.check()
        return self._rank.engine

    @property
    def _max_lora_rank(self) -> int:
        vision = self._engine().limits.vision
        return self._settings.max_lora_rank if vision is None or vision.takes_adapters else 0

    def _trained_by(
        self, request: trainer_pb2.CreateModelRequest | trainer_pb2.RestoreModelRequest
    ) -> LoraSettings | None:
        """Returns the adapter's settings of a model to load; None if all parameters are trained."""
        _require(request.model_id, "model_id")
        kind = request.WhichOneof("kind")
        if kind is None:
            raise InvalidInput("kind is not set: set lora or full", field="kind")
        return self._lora(request.lora) if kind == "lora" else None

    def _lora(self, given: weights_pb2.LoraConfig) -> LoraSettings:
        settings = LoraSettings.of(given)
        settings.check(self._max_lora_rank, bool(self._engine().family.tower_roles))
        return settings

    async def _receive_all(
        self, requests: AsyncIterator[trainer_pb2.ForwardBackwardRequest]
    ) -> tuple[trainer_pb2.ForwardBackwardHeader, list[trainer_pb2.Datum]]:
        try:
            return await self._receive(requests)
        except InvalidInput:
            # gRPC would not deliver the status if the server ended the stream while the client is still sending, so
            # read the rest first.
            with suppress(TimeoutError):
                async with asyncio.timeout(REFUSED_STREAM_S):
                    async for _ in requests:
                        pass
            raise

    async def _receive(
        self, requests: AsyncIterator[trainer_pb2.ForwardBackwardRequest]
    ) -> tuple[trainer_pb2.ForwardBackwardHeader, list[trainer_pb2.Datum]]:
        header: trainer_pb2.ForwardBackwardHeader | None = None
        datums: list[trainer_pb2.Datum] = []
        async for request in requests:
            kind = request.WhichOneof("record")
            if (kind == "header") != (header is None):
                raise InvalidInput("record: the stream must consist of one header, then datums", field="record")
            if kind == "header":
                header = self._bounded(request.header)
                continue
            datums += request.group.datums if kind == "group" else [request.datum]
            if header is None or len(datums) > header.datum_count:
                raise InvalidInput(
                    f"datum_count is {header.datum_count if header else 0}, but more datums were sent",
                    field="datum_count",
                )
        if header is None:
            raise InvalidInput("header is missing: the stream was empty", field="header")
        if len(datums) != header.datum_count:
            raise InvalidInput(
                f"datum_count is {header.datum_count}, but {len(datums)} datums were sent", field="datum_count"
            )
        return header, datums

    def _bounded(self, header: trainer_pb2.ForwardBackwardHeader) -> trainer_pb2.ForwardBackwardHeader:
        most = self._settings.max_datums
        if not 1 <= header.datum_count <= most:
            raise InvalidInput(f"datum_count {header.datum_count} is not in 1 .. {most}", field="datum_count")
        return header

    def _checked(
        self, header: trainer_pb2.ForwardBackwardHeader, datums: list[trainer_pb2.Datum]
    ) -> command_queue.ForwardBackward:
        engine = self._engine()
        model = engine.model(header.model_id)
        loss = loss_of(header)
        decoded = [decode_datum(datum, index, loss, engine.limits) for index, datum in enumerate(datums)]
        check_digests(decoded)
        sizes = [datum.size for datum in decoded]
        share = engine.shared.share_of(model, loss, decoded, header.backward)
        return command_queue.ForwardBackward(
            header.model_id,
            header.SerializeToString(),
            header.backward,
            header.drop_gradients,
            [datum.SerializeToString() for datum in datums],
            sizes,
            decoded,
            None if header.place else share,
            engine.shared.place_of(header.place, share),
        )


def _require(value: str, field: str) -> None:
    if not value:
        raise InvalidInput(f"{field} is empty", field=field)
