"""Client of the renderer: images go up once, rendered inputs come back."""

import hashlib
from collections.abc import AsyncIterator

from fovea.api.v1 import model_input_pb2, renderer_pb2, renderer_pb2_grpc
from fovea.client.channel import ServiceClient
from fovea.runtime import secret
from fovea.wire.features import FeatureAssembler, FeatureTensors
from fovea.wire.limits import INLINE_IMAGE_BYTES, PIECE_BYTES
from fovea.wire.names import RENDERER_SERVICE


class RendererClient(ServiceClient):
    """Typed calls to one renderer. All of them may be repeated, so gRPC does so on UNAVAILABLE."""

    def __init__(self, address: str) -> None:
        super().__init__(
            address,
            retryable=[(RENDERER_SERVICE, name) for name in ("GetRendererInfo", "Render", "FetchFeatures")],
            metadata=secret.metadata(),
        )
        self._stub = renderer_pb2_grpc.RendererServiceStub(self.channel)

    async def info(self, timeout_s: float = 10.0) -> renderer_pb2.GetRendererInfoResponse:
        """What the renderer serves."""
        response: renderer_pb2.GetRendererInfoResponse = await self._unary(
            self._stub.GetRendererInfo, renderer_pb2.GetRendererInfoRequest(), timeout_s
        )
        return response

    async def render(
        self, model_input: model_input_pb2.ModelInput, timeout_s: float = 60.0
    ) -> model_input_pb2.RenderedInput:
        """Splices one model input. Images too big to ride along are put first.

        Raises InvalidInput naming the chunk for whatever cannot be rendered.
        """
        slim = await self._put_large_images(model_input, timeout_s)
        response: renderer_pb2.RenderResponse = await self._unary(
            self._stub.Render, renderer_pb2.RenderRequest(input=slim), timeout_s
        )
        return response.rendered

    async def put_image(self, data: bytes, timeout_s: float = 60.0) -> str:
        """Uploads one encoded image; returns its SHA-256, to be used in an ImageReference."""
        sha256 = hashlib.sha256(data).hexdigest()

        async def pieces() -> AsyncIterator[renderer_pb2.PutImageRequest]:
            for offset in range(0, max(len(data), 1), PIECE_BYTES):
                yield renderer_pb2.PutImageRequest(sha256=sha256, data=data[offset : offset + PIECE_BYTES])

        await self._send_stream(self._stub.PutImage, pieces(), timeout_s)
        return sha256

    async def fetch_features(self, digests: list[str], timeout_s: float = 60.0) -> dict[str, FeatureTensors]:
        """The tensors of rendered images by digest. Raises FeatureEvicted for a digest that is not held."""
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
                sha256=await self.put_image(chunk.image.data, timeout_s), format=chunk.image.format
            )
            if chunk.image.HasField("expected_token_count"):
                reference.expected_token_count = chunk.image.expected_token_count
            slim.chunks.add(image_reference=reference)
        return slim
