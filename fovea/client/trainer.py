"""Client of the trainer."""

from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from fovea.api.v1 import model_input_pb2, trainer_pb2, trainer_pb2_grpc, weights_pb2
from fovea.client.channel import ServiceClient
from fovea.runtime import secret
from fovea.wire.conventions import TRAINER_SERVICE
from fovea.wire.errors import Internal

COMMAND_TIMEOUT_S = 3600.0


class ForwardBackwardResult(NamedTuple):
    """Outputs in datum order, and the metrics of the call."""

    outputs: list[trainer_pb2.DatumOutput]
    metrics: dict[str, float]


class TrainerClient(ServiceClient):
    """Typed calls to one trainer. Never repeats a command by itself: one without `seq_id` could step twice."""

    def __init__(self, address: str) -> None:
        super().__init__(address, retryable=[(TRAINER_SERVICE, "GetTrainerInfo")], metadata=secret.metadata())
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self.channel)

    async def info(self, timeout_s: float = 10.0, with_kept: bool = False) -> trainer_pb2.GetTrainerInfoResponse:
        """What the trainer serves and which models exist; if asked, also which are only kept for recovery."""
        request = trainer_pb2.GetTrainerInfoRequest(with_kept=with_kept)
        response: trainer_pb2.GetTrainerInfoResponse = await self._unary(self._stub.GetTrainerInfo, request, timeout_s)
        return response

    async def create_model(
        self, model_id: str, lora: weights_pb2.LoraConfig | None, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> weights_pb2.SnapshotManifest | None:
        """Makes a model; returns the layout of its snapshots, or None if `lora` is and all parameters are trained."""
        full = trainer_pb2.FullParameterConfig() if lora is None else None
        request = trainer_pb2.CreateModelRequest(model_id=model_id, lora=lora, full=full)
        response: trainer_pb2.CreateModelResponse = await self._unary(self._stub.CreateModel, request, timeout_s)
        return response.adapter if response.HasField("adapter") else None

    async def restore_model(
        self, model_id: str, lora: weights_pb2.LoraConfig | None, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> trainer_pb2.RestoreModelResponse:
        """Makes a model as it was at its newest durable point; one that exists is left alone.

        Args:
            model_id: Which.
            lora: As it was created with; None if all parameters are trained.
            timeout_s: Deadline.

        Raises NotFound if nothing is kept of it.
        """
        full = trainer_pb2.FullParameterConfig() if lora is None else None
        request = trainer_pb2.RestoreModelRequest(model_id=model_id, lora=lora, full=full)
        response: trainer_pb2.RestoreModelResponse = await self._unary(self._stub.RestoreModel, request, timeout_s)
        return response

    async def park_model(self, model_id: str, timeout_s: float = COMMAND_TIMEOUT_S) -> trainer_pb2.ParkModelResponse:
        """Makes the newest weights and snapshots of a model durable, then frees it."""
        request = trainer_pb2.ParkModelRequest(model_id=model_id)
        response: trainer_pb2.ParkModelResponse = await self._unary(self._stub.ParkModel, request, timeout_s)
        return response

    async def delete_model(self, model_id: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Frees a model."""
        await self._unary(self._stub.DeleteModel, trainer_pb2.DeleteModelRequest(model_id=model_id), timeout_s)

    async def forward_backward(
        self,
        header: trainer_pb2.ForwardBackwardHeader,
        datums: Iterable[trainer_pb2.Datum],
        timeout_s: float | None = COMMAND_TIMEOUT_S,
    ) -> ForwardBackwardResult:
        """Computes a loss on `header.datum_count` datums. Raises Internal if the answer is incomplete."""

        async def records() -> AsyncIterator[trainer_pb2.ForwardBackwardRequest]:
            yield trainer_pb2.ForwardBackwardRequest(header=header)
            for datum in datums:
                yield trainer_pb2.ForwardBackwardRequest(datum=datum)

        outputs: list[trainer_pb2.DatumOutput] = []
        metrics: dict[str, float] | None = None
        async for response in self._stream(self._stub.ForwardBackward, records(), timeout_s):
            if response.WhichOneof("record") == "output":
                outputs.append(response.output)
            else:
                metrics = dict(response.metrics.values)
        if metrics is None or len(outputs) != header.datum_count:
            raise Internal(f"the trainer answered {len(outputs)} of {header.datum_count} datums")
        return ForwardBackwardResult(outputs, metrics)

    async def fetch_ahead(
        self, model_id: str, features: Iterable[model_input_pb2.VisionFeature], timeout_s: float = 10.0
    ) -> None:
        """Names images of a `forward_backward` to come, for the trainer to fetch their tensors meanwhile."""
        request = trainer_pb2.FetchAheadRequest(model_id=model_id, features=features)
        await self._unary(self._stub.FetchAhead, request, timeout_s)

    async def clear_gradients(
        self, model_id: str, timeout_s: float | None = COMMAND_TIMEOUT_S, seq_id: int = 0
    ) -> None:
        """Drops the gradients accumulated since the last step."""
        request = trainer_pb2.ClearGradientsRequest(model_id=model_id, seq_id=seq_id)
        await self._unary(self._stub.ClearGradients, request, timeout_s)

    async def optim_step(
        self,
        model_id: str,
        adam: trainer_pb2.AdamParams,
        timeout_s: float | None = COMMAND_TIMEOUT_S,
        seq_id: int = 0,
    ) -> trainer_pb2.OptimStepResponse:
        """Applies the accumulated gradients."""
        request = trainer_pb2.OptimStepRequest(model_id=model_id, adam=adam, seq_id=seq_id)
        response: trainer_pb2.OptimStepResponse = await self._unary(self._stub.OptimStep, request, timeout_s)
        return response

    async def save_state(
        self, model_id: str, uri: str, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> trainer_pb2.SaveStateResponse:
        """Writes weights and optimizer to the folder `uri`."""
        request = trainer_pb2.SaveStateRequest(model_id=model_id, uri=uri)
        response: trainer_pb2.SaveStateResponse = await self._unary(self._stub.SaveState, request, timeout_s)
        return response

    async def load_state(
        self,
        model_id: str,
        uri: str,
        optimizer: bool,
        timeout_s: float | None = COMMAND_TIMEOUT_S,
        seq_id: int = 0,
    ) -> int:
        """Reads a saved state into a model; returns the steps that it had taken."""
        request = trainer_pb2.LoadStateRequest(model_id=model_id, uri=uri, optimizer=optimizer, seq_id=seq_id)
        response: trainer_pb2.LoadStateResponse = await self._unary(self._stub.LoadState, request, timeout_s)
        return response.step

    async def take_snapshot(
        self,
        model_id: str,
        snapshot_id: str,
        uri: str = "",
        timeout_s: float = COMMAND_TIMEOUT_S,
        is_export: bool = False,
    ) -> weights_pb2.Snapshot:
        """Freezes the weights of a model, in storage too if `uri` is given; of an export, in the form that all read."""
        request = trainer_pb2.TakeSnapshotRequest(
            model_id=model_id, snapshot_id=snapshot_id, uri=uri, is_export=is_export
        )
        response: trainer_pb2.TakeSnapshotResponse = await self._unary(self._stub.TakeSnapshot, request, timeout_s)
        return response.snapshot

    async def push_snapshot(
        self, snapshot_id: str, samplers: list[str], uri: str = "", timeout_s: float = 120.0
    ) -> trainer_pb2.PushSnapshotResponse:
        """Broadcasts a snapshot to samplers; an empty id pushes the base weights."""
        request = trainer_pb2.PushSnapshotRequest(
            snapshot_id=snapshot_id, uri=uri, samplers=samplers, timeout_s=timeout_s
        )
        response: trainer_pb2.PushSnapshotResponse = await self._unary(
            self._stub.PushSnapshot, request, timeout_s + COMMAND_TIMEOUT_S
        )
        return response

    async def forget_snapshot(self, snapshot_id: str, timeout_s: float = 60.0) -> None:
        """Forgets a snapshot held in memory."""
        request = trainer_pb2.ForgetSnapshotRequest(snapshot_id=snapshot_id)
        await self._unary(self._stub.ForgetSnapshot, request, timeout_s)
