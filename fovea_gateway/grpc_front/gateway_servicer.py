"""The servicer of GatewayService, over the same use cases as the REST API."""

# ruff: noqa: N802 - gRPC names the methods.

from collections.abc import AsyncIterator
from typing import Any

import grpc

from fovea.api.v1 import gateway_pb2, gateway_pb2_grpc, model_input_pb2
from fovea.wire.conventions import MAX_IMAGE_BYTES
from fovea.wire.errors import InvalidInput, PayloadTooLarge
from fovea_gateway.grpc_front.call_bounds import CallBudget
from fovea_gateway.grpc_front.field_names import named
from fovea_gateway.grpc_front.uploaded_images import UploadedImages
from fovea_gateway.parts import Parts
from fovea_gateway.sessions.future import Pending, split_messages
from fovea_gateway.settings import GatewaySettings

Context = grpc.aio.ServicerContext
pb = gateway_pb2

_MOST_WAIT_S = 60.0


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """The methods of GatewayService; each identifies the caller and runs one use case.

    The server's interceptor converts errors to gRPC statuses.
    """

    def __init__(self, parts: Parts, settings: GatewaySettings) -> None:
        self._parts, self._settings = parts, settings
        self._images = UploadedImages()

    async def GetCapabilities(self, request: Any, context: Context) -> pb.GetCapabilitiesResponse:
        self._owner(context)
        return pb.GetCapabilitiesResponse(models=await self._parts.health.served_models())

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.CreateSessionResponse:
        session = await self._parts.sessions.create(
            self._owner(context), list(request.tags), dict(request.user_metadata), request.request_id or None
        )
        return pb.CreateSessionResponse(session_id=session.session_id)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        """Keeps a session alive."""
        await self._parts.sessions.require(self._owner(context), request.session_id)
        return pb.HeartbeatResponse()

    async def FinishSession(self, request: pb.FinishSessionRequest, context: Context) -> pb.FinishSessionResponse:
        await self._parts.sessions.finish(self._owner(context), request.session_id, "success", None)
        return pb.FinishSessionResponse()

    async def SubmitCreateModel(
        self, request: pb.SubmitCreateModelRequest, context: Context
    ) -> pb.SubmitCreateModelResponse:
        future_id, _ = await self._parts.training.submit_create(self._owner(context), request)
        return pb.SubmitCreateModelResponse(future_id=future_id)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        model = await self._parts.models.get(self._owner(context), request.model_id)
        tokenizer = self._parts.base_models.get(model.base_model).tokenizer_id
        return pb.GetModelResponse(base_model=model.base_model, lora=model.lora, tokenizer=tokenizer)

    async def UploadImage(
        self, request_iterator: AsyncIterator[pb.UploadImageRequest], context: Context
    ) -> pb.UploadImageResponse:
        """Stores an image for later inputs."""
        owner = self._owner(context)
        sha256, data = "", bytearray()
        with self._parts.request_memory.holding(owner) as memory:
            async for piece in request_iterator:
                sha256 = sha256 or piece.sha256
                if len(data) + len(piece.data) > MAX_IMAGE_BYTES:
                    raise PayloadTooLarge(f"an image may have {MAX_IMAGE_BYTES} bytes", field="data")
                memory.take(len(piece.data))
                data += piece.data
            self._images.put(owner, sha256, bytes(data))
        return pb.UploadImageResponse(size_bytes=len(data))

    async def SubmitForwardBackward(
        self, request_iterator: AsyncIterator[pb.SubmitForwardBackwardRequest], context: Context
    ) -> pb.SubmitForwardBackwardResponse:
        owner = self._owner(context)
        header: pb.SubmitForwardBackwardHeader | None = None
        data: list[pb.InputDatum] = []
        with self._parts.request_memory.holding(owner) as memory:
            weight = CallBudget(self._settings.max_body_bytes, memory)
            async for record in request_iterator:
                await weight.add_message(record)
                if (record.WhichOneof("record") == "header") != (header is None):
                    raise InvalidInput("send one header, first, then the datums", field="record")
                if header is None:
                    header = record.header
                else:
                    self._inline(owner, record.datum.input, f"data[{len(data)}].input", weight)
                    data.append(record.datum)
            if header is None:
                raise InvalidInput("the stream is empty; send a header first", field="header")
            future_id = await self._parts.training.submit_forward_backward(owner, header, data)
        return pb.SubmitForwardBackwardResponse(future_id=future_id)

    async def CreateCustomLoss(
        self, request: pb.CreateCustomLossRequest, context: Context
    ) -> pb.CreateCustomLossResponse:
        """Stores a traced loss."""
        return pb.CreateCustomLossResponse(
            custom_loss_id=await self._parts.custom_losses.create(self._owner(context), request)
        )

    async def SubmitOptimStep(self, request: pb.SubmitOptimStepRequest, context: Context) -> pb.SubmitOptimStepResponse:
        future_id = await self._parts.training.submit(self._owner(context), request)
        return pb.SubmitOptimStepResponse(future_id=future_id)

    async def SubmitSaveState(self, request: pb.SubmitSaveStateRequest, context: Context) -> pb.SubmitSaveStateResponse:
        future_id = await self._parts.training.submit(self._owner(context), request)
        return pb.SubmitSaveStateResponse(future_id=future_id)

    async def SubmitLoadState(self, request: pb.SubmitLoadStateRequest, context: Context) -> pb.SubmitLoadStateResponse:
        future_id = await self._parts.training.submit(self._owner(context), request)
        return pb.SubmitLoadStateResponse(future_id=future_id)

    async def SubmitSaveForSampler(
        self, request: pb.SubmitSaveForSamplerRequest, context: Context
    ) -> pb.SubmitSaveForSamplerResponse:
        future_id = await self._parts.training.submit(self._owner(context), request)
        return pb.SubmitSaveForSamplerResponse(future_id=future_id)

    async def SubmitSaveExternal(
        self, request: pb.SubmitSaveExternalRequest, context: Context
    ) -> pb.SubmitSaveExternalResponse:
        future_id = await self._parts.training.submit(self._owner(context), request)
        return pb.SubmitSaveExternalResponse(future_id=future_id)

    async def CreateSamplingSession(
        self, request: pb.CreateSamplingSessionRequest, context: Context
    ) -> pb.CreateSamplingSessionResponse:
        """Opens a sampling session."""
        sampling = await self._parts.sampling.open(
            self._owner(context),
            request.session_id,
            request.sampling_session_seq_id,
            request.base_model,
            request.model_path,
        )
        return pb.CreateSamplingSessionResponse(sampling_session_id=sampling.sampling_session_id)

    async def SampleTokens(
        self, request: pb.SampleTokensRequest, context: Context
    ) -> AsyncIterator[pb.SampleTokensResponse]:
        owner = self._owner(context)
        with self._parts.request_memory.holding(owner) as memory:
            weight = CallBudget(self._settings.max_body_bytes, memory)
            await weight.add_message(request)
            self._inline(owner, request.prompt, "prompt", weight)
        async for event in self._parts.sampling.stream(owner, request):
            yield event

    async def WaitFuture(self, request: pb.WaitFutureRequest, context: Context) -> AsyncIterator[pb.WaitFutureResponse]:
        """Streams the records of a result."""
        timeout_s = min(max(request.timeout_s, 0.0), _MOST_WAIT_S)
        outcome = await self._parts.futures.wait(request.future_id, self._owner(context), timeout_s)
        if isinstance(outcome, Pending):
            yield pb.WaitFutureResponse(pending=pb.FuturePending(reason=outcome.progress.waiting_for))
            return
        if outcome.error is not None:
            raise named(outcome.error, outcome.kind)
        for record in split_messages(pb.WaitFutureResponse, outcome.result):
            yield record

    def _inline(self, owner: str, model_input: model_input_pb2.ModelInput, field: str, weight: CallBudget) -> None:
        """Replaces the digests of uploaded images with the images."""
        model_input.CopyFrom(self._images.inline(owner, model_input, field, weight.add))

    def _owner(self, context: Context) -> str:
        return self._parts.keys.identify_call(context.invocation_metadata()).owner
