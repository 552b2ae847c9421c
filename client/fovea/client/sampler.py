"""Client of a sampler."""

from collections.abc import AsyncIterable, AsyncIterator

from fovea.api.v1 import sampler_pb2, sampler_pb2_grpc, weights_pb2
from fovea.client.channel import ServiceClient
from fovea.runtime import credentials
from fovea.wire.conventions import SAMPLER_SERVICE


class SamplerClient(ServiceClient):
    """Typed calls to one sampler."""

    def __init__(self, address: str) -> None:
        super().__init__(address, retryable=[(SAMPLER_SERVICE, "GetSamplerInfo")], metadata=credentials.metadata())
        self._stub = sampler_pb2_grpc.SamplerServiceStub(self.channel)

    async def info(self, timeout_s: float = 10.0) -> sampler_pb2.GetSamplerInfoResponse:
        """Returns the sampler's model and the snapshots that it holds."""
        response: sampler_pb2.GetSamplerInfoResponse = await self._unary(
            self._stub.GetSamplerInfo, sampler_pb2.GetSamplerInfoRequest(), timeout_s
        )
        return response

    def sample(
        self, request: sampler_pb2.SampleRequest, timeout_s: float = 3600.0
    ) -> AsyncIterator[sampler_pb2.SampleResponse]:
        """Streams sampling events. Closing the iterator early cancels the request in the engine.

        Raises SnapshotNotLoaded, FeatureEvicted, InvalidInput and Unavailable, among others.
        """
        return self._stream(self._stub.Sample, request, timeout_s)

    def answer_openai(
        self, requests: AsyncIterable[sampler_pb2.AnswerOpenAIRequest], timeout_s: float = 3600.0
    ) -> AsyncIterator[sampler_pb2.AnswerOpenAIResponse]:
        """Streams a plan, then the response for the samples the caller sends. Raises InvalidInput, Unimplemented."""
        return self._stream(self._stub.AnswerOpenAI, requests, timeout_s)

    async def join_transfer_group(self, request: sampler_pb2.JoinTransferGroupRequest) -> str:
        """Makes the sampler join a transfer group; returns the instance id of the sampler."""
        response: sampler_pb2.JoinTransferGroupResponse = await self._unary(
            self._stub.JoinTransferGroup, request, request.timeout_s + 5.0
        )
        return response.instance_id

    async def leave_transfer_group(self, group_id: str, timeout_s: float = 10.0) -> None:
        """Makes the sampler leave a transfer group."""
        request = sampler_pb2.LeaveTransferGroupRequest(group_id=group_id)
        await self._unary(self._stub.LeaveTransferGroup, request, timeout_s)

    def receive_snapshot(
        self, request: sampler_pb2.ReceiveSnapshotRequest
    ) -> AsyncIterator[sampler_pb2.ReceiveSnapshotResponse]:
        """Makes the sampler receive a snapshot. Streams `ready`, then `loaded`."""
        return self._stream(self._stub.ReceiveSnapshot, request, request.timeout_s + 5.0)

    async def check_snapshot(self, manifest: weights_pb2.SnapshotManifest, timeout_s: float = 60.0) -> None:
        """Raises InvalidInput if the sampler cannot receive snapshots of this layout."""
        request = sampler_pb2.CheckSnapshotRequest(manifest=manifest)
        await self._unary(self._stub.CheckSnapshot, request, timeout_s)

    async def drop_snapshot(self, snapshot_id: str, timeout_s: float = 60.0) -> None:
        """Removes a snapshot from the sampler."""
        await self._unary(self._stub.DropSnapshot, sampler_pb2.DropSnapshotRequest(snapshot_id=snapshot_id), timeout_s)
