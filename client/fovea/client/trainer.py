"""Client of a trainer."""

from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from fovea.api.v1 import model_input_pb2, trainer_pb2, trainer_pb2_grpc, weights_pb2
from fovea.client.channel import ServiceClient
from fovea.runtime import credentials
from fovea.wire.conventions import TRAINER_SERVICE, group_by_size
from fovea.wire.errors import Internal

COMMAND_TIMEOUT_S = 3600.0


class ForwardBackwardResult(NamedTuple):
    """Outputs in datum order, the metrics of the call, its `place`, with which it can be repeated bit for bit, and the
    seconds for which it occupied the ranks.
    """

    outputs: list[trainer_pb2.DatumOutput]
    metrics: dict[str, float]
    place: str = ""
    seconds: float = 0.0


class TrainerClient(ServiceClient):
    """Typed calls to one trainer. It never retries a command, because one without `seq_id` could step twice."""

    def __init__(self, address: str) -> None:
        super().__init__(address, retryable=[(TRAINER_SERVICE, "GetTrainerInfo")], metadata=credentials.metadata())
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self.channel)

    async def info(self, timeout_s: float = 10.0, with_kept: bool = False) -> trainer_pb2.GetTrainerInfoResponse:
        """Returns the base model and the models in training; with `with_kept`, also those stored only for recovery."""
        request = trainer_pb2.GetTrainerInfoRequest(with_kept=with_kept)
        response: trainer_pb2.GetTrainerInfoResponse = await self._unary(self._stub.GetTrainerInfo, request, timeout_s)
        return response

    async def create_model(
        self, model_id: str, lora: weights_pb2.LoraConfig | None, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> weights_pb2.SnapshotManifest | None:
        """Creates a model, and returns the layout of its snapshots.

        If `lora` is None, all parameters are trained, and the result is None.
        """
        full = trainer_pb2.FullParameterConfig() if lora is None else None
        request = trainer_pb2.CreateModelRequest(model_id=model_id, lora=lora, full=full)
        response: trainer_pb2.CreateModelResponse = await self._unary(self._stub.CreateModel, request, timeout_s)
        return response.adapter if response.HasField("adapter") else None

    async def restore_model(
        self, model_id: str, lora: weights_pb2.LoraConfig | None, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> trainer_pb2.RestoreModelResponse:
        """Restores a model from its newest durable state. A model that is in memory stays as it is.

        Args:
            model_id: Id of the model.
            lora: The model's configuration at its creation; None if all parameters are trained.
            timeout_s: Deadline in seconds.

        Raises NotFound if nothing is stored for the model.
        """
        full = trainer_pb2.FullParameterConfig() if lora is None else None
        request = trainer_pb2.RestoreModelRequest(model_id=model_id, lora=lora, full=full)
        response: trainer_pb2.RestoreModelResponse = await self._unary(self._stub.RestoreModel, request, timeout_s)
        return response

    async def park_model(self, model_id: str, timeout_s: float = COMMAND_TIMEOUT_S) -> trainer_pb2.ParkModelResponse:
        """Makes the newest weights and snapshots of a model durable, then frees its memory."""
        request = trainer_pb2.ParkModelRequest(model_id=model_id)
        response: trainer_pb2.ParkModelResponse = await self._unary(self._stub.ParkModel, request, timeout_s)
        return response

    async def delete_model(
        self, model_id: str, timeout_s: float = COMMAND_TIMEOUT_S, *, keeps_recovery: bool = False
    ) -> None:
        """Deletes a model from memory and, unless `keeps_recovery`, from recovery storage."""
        request = trainer_pb2.DeleteModelRequest(model_id=model_id, keeps_recovery=keeps_recovery)
        await self._unary(self._stub.DeleteModel, request, timeout_s)

    async def forward_backward(
        self,
        header: trainer_pb2.ForwardBackwardHeader,
        datums: Iterable[trainer_pb2.Datum],
        timeout_s: float | None = COMMAND_TIMEOUT_S,
        in_groups: bool = False,
    ) -> ForwardBackwardResult:
        """Computes a loss on `header.datum_count` datums. Raises Internal if the answer is incomplete.

        Args:
            header: The loss and its model; `reads_groups` is set here.
            datums: The training examples, in order.
            timeout_s: Deadline in seconds.
            in_groups: Send many datums per message. Each message of a stream costs the event loops of both processes
                about 0.2 ms, which is more than its bytes cost. Requires a trainer with `takes_groups`.
        """
        header.reads_groups = True

        async def records() -> AsyncIterator[trainer_pb2.ForwardBackwardRequest]:
            yield trainer_pb2.ForwardBackwardRequest(header=header)
            if in_groups:
                for group in group_by_size(datums):
                    yield trainer_pb2.ForwardBackwardRequest(group=trainer_pb2.DatumGroup(datums=group))
            else:
                for datum in datums:
                    yield trainer_pb2.ForwardBackwardRequest(datum=datum)

        outputs: list[trainer_pb2.DatumOutput] = []
        metrics: dict[str, float] | None = None
        place, seconds = "", 0.0
        async for response in self._stream(self._stub.ForwardBackward, records(), timeout_s):
            match response.WhichOneof("record"):
                case "group":
                    outputs += response.group.outputs
                case "output":
                    outputs.append(response.output)
                case _:
                    metrics, place, seconds = dict(response.metrics.values), response.place, response.seconds
        if metrics is None or len(outputs) != header.datum_count:
            raise Internal(f"the trainer answered {len(outputs)} of {header.datum_count} datums")
        return ForwardBackwardResult(outputs, metrics, place, seconds)

    async def fetch_ahead(
        self, model_id: str, features: Iterable[model_input_pb2.VisionFeature], timeout_s: float = 10.0
    ) -> None:
        """Announces the images of a future `forward_backward`, so that the trainer can prefetch their tensors."""
        request = trainer_pb2.FetchAheadRequest(model_id=model_id, features=features)
        await self._unary(self._stub.FetchAhead, request, timeout_s)

    async def clear_gradients(
        self, model_id: str, timeout_s: float | None = COMMAND_TIMEOUT_S, seq_id: int = 0
    ) -> None:
        """Discards the gradients accumulated since the last step."""
        request = trainer_pb2.ClearGradientsRequest(model_id=model_id, seq_id=seq_id)
        await self._unary(self._stub.ClearGradients, request, timeout_s)

    async def optim_step(
        self,
        model_id: str,
        adam: trainer_pb2.AdamParams,
        timeout_s: float | None = COMMAND_TIMEOUT_S,
        seq_id: int = 0,
    ) -> trainer_pb2.OptimStepResponse:
        """Performs an optimizer step with the accumulated gradients."""
        request = trainer_pb2.OptimStepRequest(model_id=model_id, adam=adam, seq_id=seq_id)
        response: trainer_pb2.OptimStepResponse = await self._unary(self._stub.OptimStep, request, timeout_s)
        return response

    async def save_state(
        self, model_id: str, uri: str, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> trainer_pb2.SaveStateResponse:
        """Writes weights and optimizer state to the folder `uri`."""
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
        """Loads a saved state into a model and returns the number of steps in that state."""
        request = trainer_pb2.LoadStateRequest(model_id=model_id, uri=uri, optimizer=optimizer, seq_id=seq_id)
        response: trainer_pb2.LoadStateResponse = await self._unary(self._stub.LoadState, request, timeout_s)
        return response.step

    async def check_adapter(self, uri: str, lora: weights_pb2.LoraConfig, timeout_s: float | None = None) -> None:
        """Compares the header of an uploaded adapter with the model. Raises InvalidInput for the first wrong tensor."""
        await self._unary(self._stub.CheckAdapter, trainer_pb2.CheckAdapterRequest(uri=uri, lora=lora), timeout_s)

    async def take_snapshot(
        self,
        model_id: str,
        snapshot_id: str,
        uri: str = "",
        timeout_s: float = COMMAND_TIMEOUT_S,
        is_export: bool = False,
    ) -> weights_pb2.Snapshot:
        """Takes a snapshot of the weights. With `uri`, also stores it; an export is stored in a portable format."""
        request = trainer_pb2.TakeSnapshotRequest(
            model_id=model_id, snapshot_id=snapshot_id, uri=uri, is_export=is_export
        )
        response: trainer_pb2.TakeSnapshotResponse = await self._unary(self._stub.TakeSnapshot, request, timeout_s)
        return response.snapshot

    async def push_snapshot(
        self, snapshot_id: str, samplers: list[str], uri: str = "", timeout_s: float = 120.0
    ) -> trainer_pb2.PushSnapshotResponse:
        """Broadcasts a snapshot to samplers. An empty id broadcasts the base weights."""
        request = trainer_pb2.PushSnapshotRequest(
            snapshot_id=snapshot_id, uri=uri, samplers=samplers, timeout_s=timeout_s
        )
        response: trainer_pb2.PushSnapshotResponse = await self._unary(
            self._stub.PushSnapshot, request, timeout_s + COMMAND_TIMEOUT_S
        )
        return response

    async def forget_snapshot(self, snapshot_id: str, timeout_s: float = 60.0) -> None:
        """Removes a snapshot from memory."""
        request = trainer_pb2.ForgetSnapshotRequest(snapshot_id=snapshot_id)
        await self._unary(self._stub.ForgetSnapshot, request, timeout_s)
