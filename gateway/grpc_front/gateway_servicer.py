"""Servicer of GatewayService over the use cases that the REST API has."""

# ruff: noqa: N802 - gRPC names the methods.

from collections.abc import AsyncIterator
from typing import Any

import grpc

from fovea.api.v1 import gateway_pb2, gateway_pb2_grpc, model_input_pb2
from fovea.wire.errors import InvalidInput, PayloadTooLarge
from fovea.wire.limits import MAX_IMAGE_BYTES
from gateway.access.keyring import KeyRing
from gateway.access.quotas import Shares
from gateway.futures import records
from gateway.futures.future import Pending
from gateway.futures.futures import FutureBoard
from gateway.grpc_front.call_limits import Weight
from gateway.grpc_front.field_names import named
from gateway.grpc_front.uploaded_images import ImageShelf
from gateway.identity import Caller
from gateway.replicas.capabilities import Capabilities
from gateway.sampling.sampling_sessions import Sampling
from gateway.sessions.sessions import Sessions
from gateway.settings import GatewaySettings
from gateway.training.custom_losses import CustomLosses
from gateway.training.models import Models
from gateway.training.training import Training

Context = grpc.aio.ServicerContext
pb = gateway_pb2

_MOST_WAIT_S = 60.0


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Every method: who calls, one use case, the answer. Errors become statuses in the server's interceptor."""

    def __init__(
        self,
        keys: KeyRing,
        sessions: Sessions,
        models: Models,
        training: Training,
        sampling: Sampling,
        board: FutureBoard,
        capabilities: Capabilities,
        custom_losses: CustomLosses,
        images: ImageShelf,
        settings: GatewaySettings,
        memory: Shares,
    ) -> None:
        self._keys, self._sessions, self._models, self._training = keys, sessions, models, training
        self._sampling, self._board, self._capabilities = sampling, board, capabilities
        self._custom_losses = custom_losses
        self._images, self._settings, self._memory = images, settings, memory

    async def GetCapabilities(self, request: Any, context: Context) -> pb.GetCapabilitiesResponse:
        """The served model."""
        self._caller(context)
        return pb.GetCapabilitiesResponse(models=[await self._capabilities.get()])

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.CreateSessionResponse:
        """Opens a session."""
        session = await self._sessions.create(
            self._caller(context), list(request.tags), dict(request.user_metadata), request.request_id or None
        )
        return pb.CreateSessionResponse(session_id=session.session_id)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        """Keeps a session alive."""
        await self._sessions.require(self._caller(context), request.session_id)
        return pb.HeartbeatResponse()

    async def FinishSession(self, request: pb.FinishSessionRequest, context: Context) -> pb.FinishSessionResponse:
        """Ends a session."""
        await self._sessions.finish(self._caller(context), request.session_id, "success", None)
        return pb.FinishSessionResponse()

    async def SubmitCreateModel(
        self, request: pb.SubmitCreateModelRequest, context: Context
    ) -> pb.SubmitCreateModelResponse:
        """Submits a model."""
        self._sampling.check_base_model(request.base_model)
        future_id, _ = await self._training.submit_create(self._caller(context), request)
        return pb.SubmitCreateModelResponse(future_id=future_id)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describes a model."""
        model = await self._models.get(self._caller(context), request.model_id)
        return pb.GetModelResponse(base_model=model.base_model, lora=model.lora, tokenizer=self._settings.tokenizer_id)

    async def UploadImage(
        self, request_iterator: AsyncIterator[pb.UploadImageRequest], context: Context
    ) -> pb.UploadImageResponse:
        """Holds an image for later inputs."""
        caller = self._caller(context)
        sha256, data = "", bytearray()
        with self._memory.holding(caller.owner) as memory:
            async for piece in request_iterator:
                sha256 = sha256 or piece.sha256
                if len(data) + len(piece.data) > MAX_IMAGE_BYTES:
                    raise PayloadTooLarge(f"an image may have {MAX_IMAGE_BYTES} bytes", field="data")
                memory.take(len(piece.data))
                data += piece.data
            self._images.put(caller.owner, sha256, bytes(data))
        return pb.UploadImageResponse(size_bytes=len(data))

    async def SubmitForwardBackward(
        self, request_iterator: AsyncIterator[pb.SubmitForwardBackwardRequest], context: Context
    ) -> pb.SubmitForwardBackwardResponse:
        """Submits a loss."""
        caller = self._caller(context)
        header: pb.SubmitForwardBackwardHeader | None = None
        data: list[pb.InputDatum] = []
        with self._memory.holding(caller.owner) as memory:
            weight = Weight(self._settings.max_body_bytes, memory)
            async for record in request_iterator:
                weight.add(record.ByteSize())
                if (record.WhichOneof("record") == "header") != (header is None):
                    raise InvalidInput("send one header, first, then the datums", field="record")
                if header is None:
                    header = record.header
                else:
                    self._inline(caller, record.datum.input, f"data[{len(data)}].input", weight)
                    data.append(record.datum)
            if header is None:
                raise InvalidInput("the stream is empty; send a header first", field="header")
            future_id = await self._training.submit_forward_backward(caller, header, data)
        return pb.SubmitForwardBackwardResponse(future_id=future_id)

    async def CreateCustomLoss(
        self, request: pb.CreateCustomLossRequest, context: Context
    ) -> pb.CreateCustomLossResponse:
        """Keeps a traced loss."""
        return pb.CreateCustomLossResponse(
            custom_loss_id=await self._custom_losses.create(self._caller(context), request)
        )

    async def SubmitOptimStep(self, request: pb.SubmitOptimStepRequest, context: Context) -> pb.SubmitOptimStepResponse:
        """Submits a step."""
        future_id = await self._training.submit(self._caller(context), request)
        return pb.SubmitOptimStepResponse(future_id=future_id)

    async def SubmitSaveState(self, request: pb.SubmitSaveStateRequest, context: Context) -> pb.SubmitSaveStateResponse:
        """Submits a checkpoint."""
        future_id = await self._training.submit(self._caller(context), request)
        return pb.SubmitSaveStateResponse(future_id=future_id)

    async def SubmitLoadState(self, request: pb.SubmitLoadStateRequest, context: Context) -> pb.SubmitLoadStateResponse:
        """Submits a load."""
        future_id = await self._training.submit(self._caller(context), request)
        return pb.SubmitLoadStateResponse(future_id=future_id)

    async def SubmitSaveForSampler(
        self, request: pb.SubmitSaveForSamplerRequest, context: Context
    ) -> pb.SubmitSaveForSamplerResponse:
        """Submits a snapshot."""
        future_id = await self._training.submit(self._caller(context), request)
        return pb.SubmitSaveForSamplerResponse(future_id=future_id)

    async def SubmitSaveExternal(
        self, request: pb.SubmitSaveExternalRequest, context: Context
    ) -> pb.SubmitSaveExternalResponse:
        """Submits an export."""
        future_id = await self._training.submit(self._caller(context), request)
        return pb.SubmitSaveExternalResponse(future_id=future_id)

    async def CreateSamplingSession(
        self, request: pb.CreateSamplingSessionRequest, context: Context
    ) -> pb.CreateSamplingSessionResponse:
        """Opens a sampling session."""
        sampling = await self._sampling.open(
            self._caller(context),
            request.session_id,
            request.sampling_session_seq_id,
            request.base_model,
            request.model_path,
        )
        return pb.CreateSamplingSessionResponse(sampling_session_id=sampling.sampling_session_id)

    async def SampleTokens(
        self, request: pb.SampleTokensRequest, context: Context
    ) -> AsyncIterator[pb.SampleTokensResponse]:
        """Streams samples."""
        caller = self._caller(context)
        with self._memory.holding(caller.owner) as memory:
            self._inline(caller, request.prompt, "prompt", Weight(self._settings.max_body_bytes, memory))
        async for event in self._sampling.stream(caller, request):
            yield event

    async def WaitFuture(self, request: pb.WaitFutureRequest, context: Context) -> AsyncIterator[pb.WaitFutureResponse]:
        """Streams the records of a result."""
        timeout_s = min(max(request.timeout_s, 0.0), _MOST_WAIT_S)
        outcome = await self._board.wait(request.future_id, self._caller(context).owner, timeout_s)
        if isinstance(outcome, Pending):
            yield pb.WaitFutureResponse(pending=pb.FuturePending(reason=outcome.waiting_for))
            return
        if outcome.error is not None:
            raise named(outcome.error, outcome.kind)
        for record in records.split(pb.WaitFutureResponse, outcome.result):
            yield record

    def _inline(self, caller: Caller, model_input: model_input_pb2.ModelInput, field: str, weight: Weight) -> None:
        """Puts uploaded images in place of their digests."""
        model_input.CopyFrom(self._images.inline(caller.owner, model_input, field, weight.add))

    def _caller(self, context: Context) -> Caller:
        return self._keys.identify_call(context.invocation_metadata())
