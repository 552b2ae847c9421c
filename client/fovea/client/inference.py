"""Clients of renderers and samplers, and a cache of the vision tensors that renderers serve."""

from collections.abc import AsyncIterable, AsyncIterator

import grpc
from cachetools import LRUCache

from fovea.api.v1 import model_input_pb2, renderer_pb2, renderer_pb2_grpc, sampler_pb2, sampler_pb2_grpc, weights_pb2
from fovea.client.channel import ServiceClient, open_blocking_channel
from fovea.runtime import credentials, tracing
from fovea.vision.vision_family import VisionFamily
from fovea.wire.conventions import INLINE_IMAGE_BYTES, RENDERER_SERVICE, SAMPLER_SERVICE
from fovea.wire.errors import InvalidInput, from_rpc_error
from fovea.wire.rendered_input import ImageSpan
from fovea.wire.tensors import FeatureAssembler, FeatureTensors, check_feature, size_bytes


class RendererClient(ServiceClient):
    """Typed calls to one renderer. All are safe to repeat; gRPC retries all but image uploads on UNAVAILABLE."""

    def __init__(self, address: str) -> None:
        super().__init__(
            address,
            retryable=[(RENDERER_SERVICE, name) for name in ("GetRendererInfo", "Render", "FetchFeatures")],
            metadata=credentials.metadata(),
        )
        self._stub = renderer_pb2_grpc.RendererServiceStub(self.channel)

    async def info(self, timeout_s: float = 10.0) -> renderer_pb2.GetRendererInfoResponse:
        """Returns the model and capabilities of the renderer."""
        response: renderer_pb2.GetRendererInfoResponse = await self._unary(
            self._stub.GetRendererInfo, renderer_pb2.GetRendererInfoRequest(), timeout_s
        )
        return response

    async def render(
        self, model_input: model_input_pb2.ModelInput, timeout_s: float = 60.0
    ) -> model_input_pb2.RenderedInput:
        """Renders one model input. Images that are too large for the request are uploaded first.

        Raises InvalidInput, which names the chunk that cannot be rendered.
        """
        slim = await self._put_large_images(model_input, timeout_s)
        response: renderer_pb2.RenderResponse = await self._unary(
            self._stub.Render, renderer_pb2.RenderRequest(input=slim), timeout_s
        )
        return response.rendered

    async def put_image(self, data: bytes, timeout_s: float = 60.0) -> str:
        """Uploads one encoded image and returns its SHA-256 for use in an ImageReference."""
        return await self._send_image(self._stub.PutImage, renderer_pb2.PutImageRequest, data, timeout_s)

    async def fetch_features(self, digests: list[str], timeout_s: float = 60.0) -> dict[str, FeatureTensors]:
        """Returns the tensors of rendered images by digest. Raises FeatureEvicted if one is no longer cached."""
        assembler = FeatureAssembler()
        features: dict[str, FeatureTensors] = {}
        request = renderer_pb2.FetchFeaturesRequest(digests=digests)
        async for piece in self._stream(self._stub.FetchFeatures, request, timeout_s):
            if complete := assembler.feed(piece):
                features[complete[0]] = complete[1]
        return features

    async def _put_large_images(
        self, model_input: model_input_pb2.ModelInput, timeout_s: float
    ) -> model_input_pb2.ModelInput:
        inline_bytes = sum(len(chunk.image.data) for chunk in model_input.chunks)
        if inline_bytes <= INLINE_IMAGE_BYTES:
            return model_input
        slim = model_input_pb2.ModelInput()
        for chunk in model_input.chunks:
            if chunk.WhichOneof("kind") != "image":
                slim.chunks.append(chunk)
                continue
            reference = model_input_pb2.ImageReference(
                sha256=await self.put_image(chunk.image.data, timeout_s), format=chunk.image.format,
                max_side=chunk.image.max_side,
            )  # fmt: skip
            if chunk.image.HasField("expected_token_count"):
                reference.expected_token_count = chunk.image.expected_token_count
            slim.chunks.add(image_reference=reference)
        return slim


class FeatureFetcher:
    """A blocking client that fetches vision tensors from renderers, for processes without an event loop."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.Channel] = {}
        self._metadata = credentials.metadata()

    def fetch(
        self, features: list[model_input_pb2.VisionFeature], timeout_s: float = 60.0
    ) -> dict[str, FeatureTensors]:
        """Returns tensors by digest, each checked against its `tensors_sha256`.

        Raises:
            FeatureEvicted: A renderer no longer holds the tensors of an image.
            Internal: Tensors differ from the digest in `features`.
        """
        by_source: dict[str, dict[str, model_input_pb2.VisionFeature]] = {}
        for feature in features:
            by_source.setdefault(feature.source, {})[feature.digest] = feature
        fetched: dict[str, FeatureTensors] = {}
        for source, wanted in by_source.items():
            fetched |= self._fetch_from(source, wanted, timeout_s)
        return fetched

    def close(self) -> None:
        """Closes the channels to all renderers."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _fetch_from(
        self, source: str, wanted: dict[str, model_input_pb2.VisionFeature], timeout_s: float
    ) -> dict[str, FeatureTensors]:
        if source not in self._channels:
            self._channels[source] = open_blocking_channel(source)
        stub = renderer_pb2_grpc.RendererServiceStub(self._channels[source])
        assembler = FeatureAssembler()
        fetched: dict[str, FeatureTensors] = {}
        try:
            request = renderer_pb2.FetchFeaturesRequest(digests=list(wanted))
            for piece in stub.FetchFeatures(request, timeout=timeout_s, metadata=tracing.metadata(self._metadata)):
                if complete := assembler.feed(piece):
                    fetched[complete[0]] = complete[1]
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return {digest: check_feature(feature, fetched.get(digest)) for digest, feature in wanted.items()}


class FeatureCache:
    """LRU cache of the vision tensors of images. Not thread-safe.

    Args:
        vision: Vision family that checks tensors of images; None for a text model.
        limit_bytes: Maximum memory of cached tensors.
        default_source: Renderer of images that name none; empty to reject them.
    """

    def __init__(self, vision: VisionFamily | None, limit_bytes: int, default_source: str) -> None:
        self._vision = vision
        self._default_source = default_source
        # Keyed by both digests: a request that promises other tensors for a known image must not get the cached ones.
        self._kept: LRUCache[tuple[str, str], FeatureTensors] = LRUCache(limit_bytes, getsizeof=size_bytes)

    @property
    def used_bytes(self) -> int:
        """Memory of the cached tensors, in bytes."""
        return int(self._kept.currsize)

    def source_of(self, feature: model_input_pb2.VisionFeature, field: str) -> str:
        """Returns the address of the image's renderer. Raises InvalidInput, naming `field`, if there is none."""
        if not (source := feature.source or self._default_source):
            raise InvalidInput(
                f"{field}.source is empty, and no --renderer is set: name the renderer that holds the tensors",
                field=f"{field}.source",
            )
        return source

    def get(self, feature: model_input_pb2.VisionFeature) -> FeatureTensors | None:
        """Returns the cached tensors of an image; None if they are not cached."""
        return self._kept.get((feature.digest, feature.tensors_sha256))

    def put(self, feature: model_input_pb2.VisionFeature, tensors: FeatureTensors) -> None:
        """Caches the tensors of an image, unless they alone exceed the limit."""
        if size_bytes(tensors) <= self._kept.maxsize:
            self._kept[feature.digest, feature.tensors_sha256] = tensors

    def check(self, span: ImageSpan, tensors: FeatureTensors, field: str) -> None:
        """Raises InvalidInput, naming `field`, if the tensors do not fit the span. Cached tensors must be checked too.

        A digest identifies an image, but the ids that replace the image come from the request and may be wrong.
        """
        assert self._vision is not None  # a text model refuses inputs with images
        problem = self._vision.image_problem(tensors, span.is_embedding)
        if not problem and (found := size_bytes(tensors)) != span.feature.size_bytes:
            problem = f"size_bytes is {span.feature.size_bytes}, the tensors have {found}"
        if problem:
            raise InvalidInput(f"{field} does not fit what the renderer has: {problem}", field=field)


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
