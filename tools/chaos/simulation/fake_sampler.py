"""A sampler and a renderer for text that follow their protos."""

# ruff: noqa: N802 - gRPC names the methods.

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

from chaos.simulation.event_loop import Process
from chaos.simulation.fake_weights import sampled
from chaos.simulation.network import Listener
from fovea.api.v1 import renderer_pb2, renderer_pb2_grpc, sampler_pb2, sampler_pb2_grpc
from fovea.wire import tensors
from fovea.wire.errors import SnapshotNotLoaded

CONTEXT = 4096
VOCABULARY = 1000


class FakeSampler(sampler_pb2_grpc.SamplerServiceServicer):
    """A sampler instance. Its tokens are a function of the weights pushed under the snapshot's name."""

    def __init__(self, instance_id: str, chance: random.Random) -> None:
        self._instance_id, self._chance = instance_id, chance
        self.adapters: dict[str, str] = {}

    def begin(self, listener: Listener, process: Process) -> None:
        """Starts to answer."""
        sampler_pb2_grpc.add_SamplerServiceServicer_to_server(self, listener)  # type: ignore[no-untyped-call]

    def receive(self, snapshot_id: str, weights: str) -> None:
        """Stores weights, as if a trainer had pushed them."""
        self.adapters[snapshot_id] = weights

    async def GetSamplerInfo(self, request: Any, context: Any) -> sampler_pb2.GetSamplerInfoResponse:
        return sampler_pb2.GetSamplerInfoResponse(
            instance_id=self._instance_id, max_context_length=CONTEXT, max_sample_count=16, max_top_logprobs=8,
            max_lora_rank=64, adapter_snapshot_ids=list(self.adapters), transfer_worker_count=1, max_sequences=4,
        )  # fmt: skip

    async def Sample(self, request: Any, context: Any) -> AsyncIterator[sampler_pb2.SampleResponse]:
        self._check(request.snapshot_id)
        await asyncio.sleep(self._chance.uniform(0.01, 1.0))
        self._check(request.snapshot_id)
        weights = self.adapters.get(request.snapshot_id, "base")
        count = request.params.max_tokens
        yield sampler_pb2.SampleResponse(prompt=sampler_pb2.PromptResult())
        for index in range(request.sample_count):
            ids = sampled(weights, request.prompt.tokens, request.params.seed + index, count)
            delta = sampler_pb2.SequenceDelta(index=index, tokens=tensors.encode_tokens(ids))
            delta.logprobs = tensors.encode_floats([-0.25] * count)
            delta.finish_reason, delta.snapshot_id = sampler_pb2.FINISH_REASON_LENGTH, request.snapshot_id
            yield sampler_pb2.SampleResponse(delta=delta)

    async def CheckSnapshot(self, request: Any, context: Any) -> sampler_pb2.CheckSnapshotResponse:
        return sampler_pb2.CheckSnapshotResponse()

    async def DropSnapshot(self, request: Any, context: Any) -> sampler_pb2.DropSnapshotResponse:
        self.adapters.pop(request.snapshot_id, None)
        return sampler_pb2.DropSnapshotResponse()

    def _check(self, snapshot_id: str) -> None:
        if snapshot_id and snapshot_id not in self.adapters:
            raise SnapshotNotLoaded(f"snapshot {snapshot_id} is not loaded")


class FakeRenderer(renderer_pb2_grpc.RendererServiceServicer):
    """A renderer that only describes itself, which is enough for text."""

    def begin(self, listener: Listener, process: Process) -> None:
        """Starts to answer."""
        renderer_pb2_grpc.add_RendererServiceServicer_to_server(self, listener)  # type: ignore[no-untyped-call]

    async def GetRendererInfo(self, request: Any, context: Any) -> renderer_pb2.GetRendererInfoResponse:
        return renderer_pb2.GetRendererInfoResponse(vocabulary_size=VOCABULARY, max_context_length=CONTEXT)
