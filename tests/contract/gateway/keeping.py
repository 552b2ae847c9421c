"""A fake trainer that writes checkpoints to disk with the layout of the real one."""

# ruff: noqa: N802 - gRPC names the methods.

import json
from collections.abc import Callable
from typing import Any

import fsspec
from google.protobuf import json_format

from fovea.api.v1 import trainer_pb2, weights_pb2
from fovea.wire.errors import InvalidInput, Unavailable
from tests.contract.gateway.fakes import Context, FakeSampler, FakeTrainer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
IDENTITY, LORA, STATE = "fovea_snapshot.json", "fovea_lora.json", "state.json"
WEIGHT_BYTES = 3 * 2**20 + 17


class KeepingTrainer(FakeTrainer):
    """Writes folders of small JSON files, and weights that depend only on the step.

    Attributes:
        elsewhere: Prefix of every folder that it writes to.
        breaks_off: Writes only a draft and then fails.
    """

    def __init__(self, samplers: Callable[[], list[FakeSampler]]) -> None:
        super().__init__(samplers)
        self.elsewhere = ""
        self.breaks_off = False

    async def TakeSnapshot(self, request: Any, context: Context) -> trainer_pb2.TakeSnapshotResponse:
        response = await super().TakeSnapshot(request, context)
        if request.uri:
            self._write(request.uri, CONFIG, json.dumps({"peft_type": "LORA"}).encode())
            self._write(request.uri, WEIGHTS, weights(response.snapshot.step))
            self._write(request.uri, LORA, b"{}")
            self._write(request.uri, IDENTITY, json_format.MessageToJson(response.snapshot).encode())
        return response

    async def SaveState(self, request: Any, context: Context) -> trainer_pb2.SaveStateResponse:
        response = await super().SaveState(request, context)
        self._write(request.uri, STATE, json.dumps({"step": response.step}).encode())
        self._write(request.uri, "dcp/part", weights(response.step))
        return response

    async def LoadState(self, request: Any, context: Context) -> trainer_pb2.LoadStateResponse:
        self.saved.setdefault(request.uri, json.loads(_read(request.uri, STATE)))
        return await super().LoadState(request, context)

    async def PushSnapshot(self, request: Any, context: Context) -> trainer_pb2.PushSnapshotResponse:
        if request.uri:
            kept = json_format.Parse(_read(request.uri, IDENTITY), weights_pb2.Snapshot())
            if kept.snapshot_id != request.snapshot_id:
                raise InvalidInput(f"{request.uri} holds {kept.snapshot_id}, not {request.snapshot_id}")
            self.saved[request.uri] = {"snapshot": kept}
        return await super().PushSnapshot(request, context)

    def _write(self, uri: str, name: str, data: bytes) -> None:
        if self.breaks_off:
            self.breaks_off = False
            self._write(f"{uri}.tmp-0", name, data)
            raise Unavailable("rank 1 of the trainer died")
        with fsspec.open(f"{self.elsewhere}{uri}/{name}", "wb", auto_mkdir=True) as file:
            file.write(data)


def weights(step: int) -> bytes:
    """Returns the content of the weights file after a number of steps."""
    return bytes([step + 1]) * WEIGHT_BYTES


def _read(uri: str, name: str) -> bytes:
    with fsspec.open(f"{uri}/{name}", "rb") as file:
        return bytes(file.read())
