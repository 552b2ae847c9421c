"""A trainer with recovery that follows trainer.proto, with fake weights but the real order of commands.

Numbered commands use the trainer's own reply cache. One background writer stores the results of steps and loads on a
disk that outlives the process.
"""

# ruff: noqa: N802 - gRPC names the methods.

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chaos.simulation.event_loop import Process
from chaos.simulation.fake_sampler import FakeSampler
from chaos.simulation.fake_weights import FakeWeights, chained
from chaos.simulation.network import Listener
from fovea.api.v1 import trainer_pb2, trainer_pb2_grpc, weights_pb2
from fovea.wire import tensors
from fovea.wire.errors import DiskFull, InvalidInput, NotFound
from fovea_trainer.recovery.reply_cache import ReplyCache

MODEL = "simulated"
CONTEXT = 4096


@dataclass
class Frozen:
    """A snapshot: its identity and its weights."""

    identity: weights_pb2.Snapshot
    weights: str


@dataclass
class Point:
    """A durable point of a model."""

    seq_id: int
    state: FakeWeights
    answer: Any


@dataclass
class TrainerDisk:
    """Data that outlives a trainer: durable points by model, snapshots for recovery, and saved states and named
    snapshots.

    The latter two are keyed by folder and visible to all services.
    """

    points: dict[str, Point] = field(default_factory=dict)
    snapshots: dict[str, Frozen] = field(default_factory=dict)
    saved: dict[str, FakeWeights | Frozen] = field(default_factory=dict)


class FakeTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """A trainer instance.

    Args:
        samplers: Running samplers, keyed by address.
        chance: Random source of durations.
        slowness: Factor on the writer's durations.
        is_disk_full: Returns whether storage is full.
    """

    def __init__(
        self,
        instance_id: str,
        disk: TrainerDisk,
        samplers: Callable[[], dict[str, FakeSampler]],
        chance: random.Random,
        slowness: float,
        is_disk_full: Callable[[], bool],
    ) -> None:
        self._instance_id, self._disk, self._samplers, self._chance = instance_id, disk, samplers, chance
        self._slowness, self._is_disk_full = slowness, is_disk_full
        self.models: dict[str, FakeWeights] = {}
        self.snapshots: dict[str, Frozen] = {}
        self._replies = ReplyCache()
        self._one_at_a_time = asyncio.Lock()
        self._waiting: dict[tuple[str, str], Point | Frozen] = {}
        self._is_due, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_idle.set()

    def begin(self, listener: Listener, process: Process) -> None:
        """Starts to answer, and to write in the background."""
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, listener)  # type: ignore[no-untyped-call]
        process.start(self._write_forever())

    async def GetTrainerInfo(self, request: Any, context: Any) -> trainer_pb2.GetTrainerInfoResponse:
        points = self._disk.points
        return trainer_pb2.GetTrainerInfoResponse(
            model=MODEL, instance_id=self._instance_id, world_size=1, max_lora_rank=64, max_context_length=CONTEXT,
            model_ids=list(self.models), loss_functions=["cross_entropy"], keeps_recovery=True, recovery_store="disk",
            durable_seq_ids={model_id: points[model_id].seq_id for model_id in self.models if model_id in points},
            kept_model_ids=sorted(self._kept() - self.models.keys()) if request.with_kept else (),
        )  # fmt: skip

    def _kept(self) -> set[str]:
        """Returns the models with data on the disk. A snapshot counts, because it is written before the first point."""
        return {*self._disk.points, *(frozen.identity.model_id for frozen in self._disk.snapshots.values())}

    async def CreateModel(self, request: Any, context: Any) -> trainer_pb2.CreateModelResponse:
        async with self._one_at_a_time:
            await self._work(0.05)
            if request.model_id not in self.models:
                self.models[request.model_id] = FakeWeights.fresh(request.lora.seed)
        return trainer_pb2.CreateModelResponse(adapter=weights_pb2.SnapshotManifest(lora=request.lora))

    async def RestoreModel(self, request: Any, context: Any) -> trainer_pb2.RestoreModelResponse:
        model_id = request.model_id
        async with self._one_at_a_time:
            await self._work(0.2)
            if model_id not in self.models:
                if model_id not in self._disk.points:
                    raise NotFound(f"nothing is kept of {model_id}")
                point = self._disk.points[model_id]
                self.models[model_id] = point.state.copy()
                self._replies.forget(model_id)
                if point.seq_id:
                    self._replies.seed(model_id, point.seq_id, point.answer)
        seq_id = await self._replies.last(model_id)
        return trainer_pb2.RestoreModelResponse(seq_id=seq_id, step=self._model(model_id).step)

    async def ParkModel(self, request: Any, context: Any) -> trainer_pb2.ParkModelResponse:
        await self._is_idle.wait()
        async with self._one_at_a_time:
            self.models.pop(request.model_id, None)
            self._replies.forget(request.model_id)
        point = self._disk.points.get(request.model_id)
        return trainer_pb2.ParkModelResponse(seq_id=point.seq_id if point else 0, size_bytes=1000)

    async def DeleteModel(self, request: Any, context: Any) -> trainer_pb2.DeleteModelResponse:
        async with self._one_at_a_time:
            model_id = request.model_id
            self.models.pop(model_id, None)
            self._replies.forget(model_id)
            self._waiting = {key: what for key, what in self._waiting.items() if key[0] != model_id}
            if request.keeps_recovery:
                return trainer_pb2.DeleteModelResponse()
            self._disk.points.pop(model_id, None)
            kept = self._disk.snapshots
            for snapshot_id in [each for each, one in kept.items() if one.identity.model_id == model_id]:
                del kept[snapshot_id]
        return trainer_pb2.DeleteModelResponse()

    async def ForwardBackward(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[trainer_pb2.ForwardBackwardResponse]:
        records = [record async for record in request_iterator]
        header, datums = records[0].header, [record.datum for record in records[1:]]
        seq_id = header.seq_id if header.backward else 0
        for answer in await self._once(header.model_id, seq_id, lambda: self._compute(header, datums)):
            yield answer

    async def _compute(self, header: Any, datums: list[Any]) -> list[trainer_pb2.ForwardBackwardResponse]:
        model = self._model(header.model_id)
        if header.loss_function != "cross_entropy":
            raise InvalidInput(f"loss_fn {header.loss_function!r} is unknown", field="loss_fn")
        tokens = [datum.input.tokens for datum in datums]
        loss = model.loss(tokens, header.backward, header.drop_gradients)
        answers = []
        for datum in datums:
            logprobs = np.full(len(datum.input.tokens) // 4, loss, np.float32)
            output = trainer_pb2.DatumOutput(tensors={"logprobs": tensors.encode(logprobs)})
            answers.append(trainer_pb2.ForwardBackwardResponse(output=output))
        metrics = trainer_pb2.Metrics(values={"loss:sum": loss})
        return [*answers, trainer_pb2.ForwardBackwardResponse(metrics=metrics)]

    async def ClearGradients(self, request: Any, context: Any) -> trainer_pb2.ClearGradientsResponse:
        async def clear() -> trainer_pb2.ClearGradientsResponse:
            self._model(request.model_id).gradients = []
            return trainer_pb2.ClearGradientsResponse()

        answer: trainer_pb2.ClearGradientsResponse = await self._once(request.model_id, request.seq_id, clear)
        return answer

    async def OptimStep(self, request: Any, context: Any) -> trainer_pb2.OptimStepResponse:
        async def step() -> trainer_pb2.OptimStepResponse:
            model = self._model(request.model_id)
            norm = model.take_step(request.adam.learning_rate)
            answer = trainer_pb2.OptimStepResponse(step=model.step)
            answer.metrics.values["grad_norm:mean"] = norm
            self._keep(request.model_id, request.seq_id, answer)
            return answer

        answer: trainer_pb2.OptimStepResponse = await self._once(request.model_id, request.seq_id, step)
        return answer

    async def SaveState(self, request: Any, context: Any) -> trainer_pb2.SaveStateResponse:
        async with self._one_at_a_time:
            await self._work(0.2)
            state = self._model(request.model_id).copy()
            self._save(request.uri, state)
        return trainer_pb2.SaveStateResponse(size_bytes=100, step=state.step)

    async def LoadState(self, request: Any, context: Any) -> trainer_pb2.LoadStateResponse:
        async def load() -> trainer_pb2.LoadStateResponse:
            state = self._disk.saved.get(request.uri)
            model = self._model(request.model_id)
            if not isinstance(state, FakeWeights):
                raise NotFound(f"there is nothing at {request.uri}")
            model.load(state)
            answer = trainer_pb2.LoadStateResponse(step=model.step)
            self._keep(request.model_id, request.seq_id, answer)
            return answer

        answer: trainer_pb2.LoadStateResponse = await self._once(request.model_id, request.seq_id, load)
        return answer

    async def TakeSnapshot(self, request: Any, context: Any) -> trainer_pb2.TakeSnapshotResponse:
        async with self._one_at_a_time:
            await self._work(0.05)
            model = self._model(request.model_id)
            identity = weights_pb2.Snapshot(
                snapshot_id=request.snapshot_id, model_id=request.model_id, step=model.step, size_bytes=10,
                digest=chained(model.weights), kind=weights_pb2.SNAPSHOT_KIND_ADAPTER,
            )  # fmt: skip
            frozen = self.snapshots[request.snapshot_id] = Frozen(identity, model.weights)
            if request.uri:
                self._save(request.uri, frozen)
            else:
                self._write_soon((request.model_id, request.snapshot_id), frozen)
        return trainer_pb2.TakeSnapshotResponse(snapshot=identity)

    async def PushSnapshot(self, request: Any, context: Any) -> trainer_pb2.PushSnapshotResponse:
        await self._work(0.1)
        held = self.snapshots.get(request.snapshot_id) or self._disk.snapshots.get(request.snapshot_id)
        frozen = held or self._disk.saved.get(request.uri)
        if not isinstance(frozen, Frozen):
            raise NotFound(f"snapshot {request.snapshot_id} is not held")
        answer = trainer_pb2.PushSnapshotResponse(snapshot=frozen.identity)
        there = self._samplers()
        for address in request.samplers:
            if sampler := there.get(address):
                sampler.receive(request.snapshot_id, frozen.weights)
            answer.results.add(sampler=address, error="" if sampler else "it does not answer")
        return answer

    async def CheckAdapter(self, request: Any, context: Any) -> trainer_pb2.CheckAdapterResponse:
        return trainer_pb2.CheckAdapterResponse()

    async def ForgetSnapshot(self, request: Any, context: Any) -> trainer_pb2.ForgetSnapshotResponse:
        self.snapshots.pop(request.snapshot_id, None)
        self._disk.snapshots.pop(request.snapshot_id, None)
        self._waiting = {key: what for key, what in self._waiting.items() if key[1] != request.snapshot_id}
        return trainer_pb2.ForgetSnapshotResponse()

    def _save(self, uri: str, what: FakeWeights | Frozen) -> None:
        if self._is_disk_full():
            raise DiskFull(f"the disk of {uri} is full", place=uri)
        self._disk.saved[uri] = what

    def _model(self, model_id: str) -> FakeWeights:
        if model_id not in self.models:
            raise NotFound(f"there is no model {model_id!r}")
        return self.models[model_id]

    async def _once(self, model_id: str, seq_id: int, run: Callable[[], Awaitable[Any]]) -> Any:
        async def one_at_a_time() -> Any:
            async with self._one_at_a_time:
                await self._work(0.3)
                return await run()

        return await self._replies.once(model_id, seq_id, one_at_a_time)

    async def _work(self, most_s: float) -> None:
        await asyncio.sleep(self._chance.uniform(0.001, most_s))

    def _keep(self, model_id: str, seq_id: int, answer: Any) -> None:
        """Schedules the writing of a state. A state that still waits is replaced."""
        self._waiting.pop((model_id, ""), None)
        self._write_soon((model_id, ""), Point(seq_id, self.models[model_id].copy(), answer))

    def _write_soon(self, key: tuple[str, str], what: Point | Frozen) -> None:
        self._waiting[key] = what
        self._is_due.set()
        self._is_idle.clear()

    async def _write_forever(self) -> None:
        while True:
            await self._is_due.wait()
            while self._waiting:
                key = next(iter(self._waiting))
                what = self._waiting[key]
                await asyncio.sleep(self._slowness * self._chance.uniform(0.01, 1.0))
                if self._waiting.get(key) is not what or self._is_disk_full():
                    continue  # it was replaced, its model was deleted, or it will be retried
                del self._waiting[key]
                if isinstance(what, Point):
                    newest = self._disk.points.get(key[0], what)
                    self._disk.points[key[0]] = max(what, newest, key=lambda point: point.seq_id)
                else:
                    self._disk.snapshots[key[1]] = what
            self._is_due.clear()
            self._is_idle.set()
