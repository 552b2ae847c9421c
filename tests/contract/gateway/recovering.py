"""A fake trainer with recovery: steps and loads are stored on a disk that survives a restart.

Its weights are a chain of digests over all commands, so two models are equal only if the same commands ran in the same
order.
"""

# ruff: noqa: N802 - gRPC names the methods.

import asyncio
import copy
import hashlib
from collections.abc import Callable
from typing import Any

from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.wire.errors import NotFound
from tests.contract.gateway.fakes import Context, FakeSampler, FakeTrainer


def chained(*parts: object) -> str:
    """Returns a digest over several values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def number_of(weights: str) -> float:
    """Returns a number that identifies the weights."""
    return float(int(weights[:12], 16))


class RecoveringTrainer(FakeTrainer):
    """Writes durable points at once unless the disk is slow.

    Attributes:
        is_disk_slow: Skips durable points for now.
        failure: The reason that points cannot be written.
        answers_lost: Number of coming steps that become durable but end with a broken connection.
        chance: Mixed into results, as by a kernel with nondeterministic rounding.
        numerics: The reported settings that rounding depends on.
    """

    def __init__(self, samplers: Callable[[], list[FakeSampler]]) -> None:
        self.points: dict[str, tuple[int, dict[str, Any], Any]] = {}
        self.kept_snapshots: dict[str, weights_pb2.Snapshot] = {}
        self.is_disk_slow = False
        self.failure = ""
        self.answers_lost = 0
        self.chance = ""
        self.numerics = {"ranks": "2", "dtype": "float32"}
        self.last_seq_ids: dict[str, int] = {}
        super().__init__(samplers)

    def restart(self) -> None:
        super().restart()
        self.last_seq_ids = {}

    async def GetTrainerInfo(self, request: Any, context: Context) -> trainer_pb2.GetTrainerInfoResponse:
        info = await super().GetTrainerInfo(request, context)
        info.keeps_recovery = True
        info.recovery_failure = self.failure
        info.numerics.update(self.numerics)
        for model_id in self.models.keys() & self.points.keys():
            info.durable_seq_ids[model_id] = self.points[model_id][0]
        info.kept_model_ids.extend(self.points.keys() - self.models.keys() if request.with_kept else ())
        return info

    async def CreateModel(self, request: Any, context: Context) -> trainer_pb2.CreateModelResponse:
        known = self.models.get(request.model_id)
        response = await super().CreateModel(request, context)
        self.models[request.model_id] |= {"weights": chained("fresh", request.lora.seed), "sum": []}
        if known is not None:
            self.models[request.model_id] = known
        return response

    async def RestoreModel(self, request: Any, context: Context) -> trainer_pb2.RestoreModelResponse:
        await self.note("RestoreModel", request)
        model_id = request.model_id
        if model_id not in self.models:
            if model_id not in self.points:
                raise NotFound(f"nothing is kept of {model_id}")
            seq_id, model, answer = self.points[model_id]
            self.models[model_id] = copy.deepcopy(model)
            self._replies.forget(model_id)
            self.last_seq_ids[model_id] = seq_id

            async def again() -> Any:
                return answer

            await self._replies.once(model_id, seq_id, again)
        seq_id = self.last_seq_ids.get(model_id, 0)
        return trainer_pb2.RestoreModelResponse(seq_id=seq_id, step=self.models[model_id]["step"])

    async def ParkModel(self, request: Any, context: Context) -> trainer_pb2.ParkModelResponse:
        await self.note("ParkModel", request)
        self.models.pop(request.model_id, None)
        self._replies.forget(request.model_id)
        for snapshot_id in [each for each in self.snapshots if each.startswith(f"{request.model_id}@")]:
            self.kept_snapshots[snapshot_id] = self.snapshots.pop(snapshot_id)
        seq_id = self.points[request.model_id][0] if request.model_id in self.points else 0
        return trainer_pb2.ParkModelResponse(seq_id=seq_id, size_bytes=1000)

    async def DeleteModel(self, request: Any, context: Context) -> trainer_pb2.DeleteModelResponse:
        self.points.pop(request.model_id, None)
        return await super().DeleteModel(request, context)

    async def _computed(self, header: Any, datums: Any) -> list[trainer_pb2.ForwardBackwardResponse]:
        records = await super()._computed(header, datums)
        model = self._model(header.model_id)
        if header.backward:
            kept = [] if header.drop_gradients else model["sum"]
            tokens = [datum.input.tokens for datum in datums]
            model["sum"] = [*kept, chained(model["weights"], header.loss_function, tokens, self.chance)]
            self._note_done(header.model_id, header.seq_id)
        records[-1].metrics.values["weights:sum"] = number_of(model["weights"])
        return records

    async def _cleared(self, request: Any) -> trainer_pb2.ClearGradientsResponse:
        response = await super()._cleared(request)
        self.models[request.model_id]["sum"] = []
        self._note_done(request.model_id, request.seq_id)
        return response

    async def _stepped(self, request: Any) -> trainer_pb2.OptimStepResponse:
        response = await super()._stepped(request)
        model = self.models[request.model_id]
        model["weights"], model["sum"] = chained(model["weights"], model["sum"], request.adam.learning_rate), []
        response.metrics.values["weights:sum"] = number_of(model["weights"])
        self._note_done(request.model_id, request.seq_id)
        self._keep(request.model_id, request.seq_id, response)
        if self.answers_lost:
            self.answers_lost -= 1
            asyncio.get_running_loop().call_soon(self.restart)
            await asyncio.Event().wait()
        return response

    async def _loaded(self, request: Any) -> trainer_pb2.LoadStateResponse:
        response = await super()._loaded(request)
        self.models[request.model_id] |= {"weights": self.saved[request.uri]["weights"], "sum": []}
        self._note_done(request.model_id, request.seq_id)
        self._keep(request.model_id, request.seq_id, response)
        return response

    async def TakeSnapshot(self, request: Any, context: Context) -> trainer_pb2.TakeSnapshotResponse:
        response = await super().TakeSnapshot(request, context)
        response.snapshot.digest = chained(self.models[request.model_id]["weights"])
        if not self.is_disk_slow and response.snapshot.kind == weights_pb2.SNAPSHOT_KIND_ADAPTER:
            self.kept_snapshots[request.snapshot_id] = response.snapshot
        return response

    async def PushSnapshot(self, request: Any, context: Context) -> trainer_pb2.PushSnapshotResponse:
        if request.snapshot_id in self.kept_snapshots:
            self.snapshots.setdefault(request.snapshot_id, self.kept_snapshots[request.snapshot_id])
        return await super().PushSnapshot(request, context)

    def _note_done(self, model_id: str, seq_id: int) -> None:
        self.last_seq_ids[model_id] = max(seq_id, self.last_seq_ids.get(model_id, 0))

    def _keep(self, model_id: str, seq_id: int, answer: Any) -> None:
        if not self.is_disk_slow:
            self.points[model_id] = seq_id, copy.deepcopy(self.models[model_id]), answer
