"""The gRPC GatewayService, over the same use cases as the REST API.

Clients upload images ahead of the inputs that name them, and errors name fields as the protos do."""

import hashlib
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from cachetools import LRUCache

from fovea.api.v1 import gateway_pb2, gateway_pb2_grpc, model_input_pb2
from fovea.wire.conventions import MAX_IMAGE_BYTES
from fovea.wire.errors import FoveaError, InvalidInput, NotFound, PayloadTooLarge
from fovea_gateway.fronts.components import Components
from fovea_gateway.fronts.grpc_interceptors import CallBudget
from fovea_gateway.sessions.future import Kind, Pending, split_messages
from fovea_gateway.settings import GatewaySettings
from fovea_gateway.training.batches import LossRequest

# ruff: noqa: N802 - gRPC names the methods.


Context = grpc.aio.ServicerContext
pb = gateway_pb2

_MOST_WAIT_S = 60.0


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """The methods of GatewayService; each identifies the caller and runs one use case.

    The server's interceptor converts errors to gRPC statuses.
    """

    def __init__(self, components: Components, settings: GatewaySettings) -> None:
        self._components, self._settings = components, settings
        self._images = UploadedImages()

    async def GetCapabilities(self, request: Any, context: Context) -> pb.GetCapabilitiesResponse:
        self._owner(context)
        return pb.GetCapabilitiesResponse(models=await self._components.health.served_models())

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.CreateSessionResponse:
        session = await self._components.sessions.create(
            self._owner(context), list(request.tags), dict(request.user_metadata), request.request_id or None
        )
        return pb.CreateSessionResponse(session_id=session.session_id)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        """Keeps a session alive."""
        await self._components.sessions.require(self._owner(context), request.session_id)
        return pb.HeartbeatResponse()

    async def FinishSession(self, request: pb.FinishSessionRequest, context: Context) -> pb.FinishSessionResponse:
        await self._components.sessions.finish(self._owner(context), request.session_id, "success", None)
        return pb.FinishSessionResponse()

    async def SubmitCreateModel(
        self, request: pb.SubmitCreateModelRequest, context: Context
    ) -> pb.SubmitCreateModelResponse:
        future_id, _ = await self._components.training.submit_create(self._owner(context), request)
        return pb.SubmitCreateModelResponse(future_id=future_id)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        model = await self._components.models.get(self._owner(context), request.model_id)
        tokenizer = self._components.base_models.get(model.base_model).tokenizer_id
        return pb.GetModelResponse(base_model=model.base_model, lora=model.lora, tokenizer=tokenizer)

    async def UploadImage(
        self, request_iterator: AsyncIterator[pb.UploadImageRequest], context: Context
    ) -> pb.UploadImageResponse:
        """Stores an image for later inputs."""
        owner = self._owner(context)
        sha256, data = "", bytearray()
        with self._components.request_memory.holding(owner) as memory:
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
        with self._components.request_memory.holding(owner) as memory:
            weight = CallBudget(self._settings.max_body_bytes, memory)
            async for record in request_iterator:
                await weight.add_message(record)
                if (record.WhichOneof("record") == "header") != (header is None):
                    raise InvalidInput("send one header first, then the datums", field="record")
                if header is None:
                    header = record.header
                else:
                    self._inline(owner, record.datum.input, f"data[{len(data)}].input", weight)
                    data.append(record.datum)
            if header is None:
                raise InvalidInput("the stream is empty; send a header first", field="header")
            future_id = await self._components.training.submit_forward_backward(owner, LossRequest(header, data))
        return pb.SubmitForwardBackwardResponse(future_id=future_id)

    async def CreateCustomLoss(
        self, request: pb.CreateCustomLossRequest, context: Context
    ) -> pb.CreateCustomLossResponse:
        """Stores a traced loss."""
        return pb.CreateCustomLossResponse(
            custom_loss_id=await self._components.custom_losses.create(self._owner(context), request)
        )

    async def SubmitOptimStep(self, request: pb.SubmitOptimStepRequest, context: Context) -> pb.SubmitOptimStepResponse:
        future_id = await self._components.training.submit(self._owner(context), request)
        return pb.SubmitOptimStepResponse(future_id=future_id)

    async def SubmitSaveState(self, request: pb.SubmitSaveStateRequest, context: Context) -> pb.SubmitSaveStateResponse:
        future_id = await self._components.training.submit(self._owner(context), request)
        return pb.SubmitSaveStateResponse(future_id=future_id)

    async def SubmitLoadState(self, request: pb.SubmitLoadStateRequest, context: Context) -> pb.SubmitLoadStateResponse:
        future_id = await self._components.training.submit(self._owner(context), request)
        return pb.SubmitLoadStateResponse(future_id=future_id)

    async def SubmitSaveForSampler(
        self, request: pb.SubmitSaveForSamplerRequest, context: Context
    ) -> pb.SubmitSaveForSamplerResponse:
        future_id = await self._components.training.submit(self._owner(context), request)
        return pb.SubmitSaveForSamplerResponse(future_id=future_id)

    async def SubmitSaveExternal(
        self, request: pb.SubmitSaveExternalRequest, context: Context
    ) -> pb.SubmitSaveExternalResponse:
        future_id = await self._components.training.submit(self._owner(context), request)
        return pb.SubmitSaveExternalResponse(future_id=future_id)

    async def CreateSamplingSession(
        self, request: pb.CreateSamplingSessionRequest, context: Context
    ) -> pb.CreateSamplingSessionResponse:
        """Opens a sampling session."""
        sampling = await self._components.sampling.open(
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
        if request.record_stability_info:
            raise InvalidInput(
                "record_stability_info needs the future of a sample: its id names the sequences. Use POST asample",
                field="record_stability_info",
            )
        with self._components.request_memory.holding(owner) as memory:
            weight = CallBudget(self._settings.max_body_bytes, memory)
            await weight.add_message(request)
            self._inline(owner, request.prompt, "prompt", weight)
            async for event in self._components.sampling.stream(owner, request):
                yield event

    async def WaitFuture(self, request: pb.WaitFutureRequest, context: Context) -> AsyncIterator[pb.WaitFutureResponse]:
        """Streams the records of a result."""
        timeout_s = min(max(request.timeout_s, 0.0), _MOST_WAIT_S)
        outcome = await self._components.futures.wait(request.future_id, self._owner(context), timeout_s)
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
        return self._components.keys.identify_call(context.invocation_metadata()).owner


_CAPACITY_BYTES = 512 * 2**20


class UploadedImages:
    """Uploaded images by owner and SHA-256. When the total is above the capacity, the owner with the most bytes loses
    images.

    An owner cannot see images of others, so that the cache does not reveal what others work on.
    """

    def __init__(self, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._images: defaultdict[str, LRUCache[str, bytes]] = defaultdict(lambda: LRUCache(capacity_bytes, len))

    def put(self, owner: str, sha256: str, data: bytes) -> None:
        """Stores an image. Raises InvalidInput if it is too large or does not match its digest."""
        if len(data) > MAX_IMAGE_BYTES:
            raise InvalidInput(f"the image has {len(data)} bytes; at most {MAX_IMAGE_BYTES}", field="data")
        if hashlib.sha256(data).hexdigest() != sha256:
            raise InvalidInput(f"the image that arrived does not have SHA-256 {sha256}", field="sha256")
        self._images[owner][sha256] = data
        while sum(held.currsize for held in self._images.values()) > self._capacity_bytes:
            max(self._images.values(), key=lambda held: held.currsize).popitem()

    def inline(
        self,
        owner: str,
        model_input: model_input_pb2.ModelInput,
        field: str,
        count: Callable[[int], None] = lambda size_bytes: None,
    ) -> model_input_pb2.ModelInput:
        """Returns the input with the owner's uploaded images in place of their digests, so that the result is
        self-contained.

        Args:
            owner: The owner that uploaded them.
            model_input: The input; it is not changed.
            field: Its name, for errors.
            count: Called with the size of each image before it is copied; an exception ends the call.

        Raises NotFound for an image that the owner did not upload or that was evicted.
        """
        if not any(chunk.image_reference.sha256 for chunk in model_input.chunks):
            return model_input
        whole = model_input_pb2.ModelInput()
        for index, chunk in enumerate(model_input.chunks):
            reference = chunk.image_reference
            if not reference.sha256:
                whole.chunks.append(chunk)
                continue
            data = self._images[owner].get(reference.sha256)
            if data is None:
                name = f"{field}.chunks[{index}].image_reference.sha256"
                raise NotFound(
                    f"{name} {reference.sha256} is not uploaded, or was evicted: call UploadImage and retry", field=name
                )
            count(len(data))
            image = model_input_pb2.ImageChunk(data=data, format=reference.format, max_side=reference.max_side)
            if reference.HasField("expected_token_count"):
                image.expected_token_count = reference.expected_token_count
            whole.chunks.add(image=image)
        return whole


_NAMES = {
    "adam_params": "adam",
    "age_encryption_recipients": "age_recipients",
    "lora_config": "lora",
    "loss_fn": "loss_function",
    "loss_fn_config": "loss_config",
    "loss_fn_config.loss_id": "custom_loss_id",
    "loss_fn_inputs": "loss_inputs",
    "model_input": "input",
    "num_samples": "sample_count",
    "prompt_alt_tokens_k": "alt_token_count",
    "sampling_params": "params",
    "target_prompt_logprobs": "target_table",
    "topk_prompt_logprobs": "top_prompt_logprobs",
    "topk_sample_logprobs": "top_sample_logprobs",
    "train_attn": "train_attention",
    "train_unembed": "train_unembedding",
    "ttl_seconds": "ttl_s",
}
"""The protobuf name of each field that has another name in REST."""

_OF_COMMAND: Mapping[Kind | None, Mapping[str, str]] = {
    None: {"request_id": "future_id"},
    Kind.CREATE_MODEL: {"path": "from_path"},
    Kind.FORWARD: {"data": "datum"},
    Kind.FORWARD_BACKWARD: {"data": "datum"},
    Kind.SAVE_STATE: {"path": "name"},
    Kind.SAVE_FOR_SAMPLER: {"path": "name", "kind": "inflight"},
    Kind.SAVE_EXTERNAL: {"path": "name"},
}
"""Field names that are also English words, by command. They are replaced only where a message begins with them."""

_LISTED = "|".join(re.escape(name) for name in sorted(_NAMES, key=len, reverse=True))
_NAME = re.compile(rf"(?<![\w/'\"])(?:{_LISTED})(?![\w/'\"])")
"""Matches a field name, unless the message quotes it."""

_DATUM = re.compile(r"\bdata(?=\[\d)")


def named(error: FoveaError, kind: Kind | None = None) -> FoveaError:
    """Returns the same error with its fields named as in the protos.

    Args:
        kind: The kind of the command that failed, if it is known.
    """
    own = _OF_COMMAND.get(kind, {})
    return type(error)(_renamed(error.message, own), error.field and _renamed(error.field, own), **error.metadata)


def _renamed(text: str, own: Mapping[str, str]) -> str:
    first, space, rest = text.partition(" ")
    text = _NAME.sub(lambda found: _NAMES[found[0]], own.get(first, first) + space + rest)
    return _DATUM.sub("datum", text)
