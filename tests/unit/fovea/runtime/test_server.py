"""The server of every service: errors arrive unchanged, health is reported, and a stop drains."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fovea.api.v1 import renderer_pb2, renderer_pb2_grpc
from fovea.client import RendererClient
from fovea.runtime.server import ServiceServer
from fovea.runtime.settings import ServiceSettings
from fovea.wire.conventions import RENDERER_SERVICE
from fovea.wire.errors import FeatureEvicted, Internal, InvalidInput, Unavailable


class FailingRenderer(renderer_pb2_grpc.RendererServiceServicer):
    """Fails in every way; answers GetRendererInfo once its gate is open."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.gate = asyncio.Event()

    async def GetRendererInfo(  # noqa: N802
        self, request: renderer_pb2.GetRendererInfoRequest, context: grpc.aio.ServicerContext
    ) -> renderer_pb2.GetRendererInfoResponse:
        self.is_asked.set()
        await self.gate.wait()
        return renderer_pb2.GetRendererInfoResponse(model="m")

    async def Render(  # noqa: N802
        self, request: renderer_pb2.RenderRequest, context: grpc.aio.ServicerContext
    ) -> renderer_pb2.RenderResponse:
        if request.input.chunks:
            raise InvalidInput("chunks[0] is wrong", field="chunks[0]")
        raise ValueError("/secret/path")

    async def FetchFeatures(  # noqa: N802
        self, request: renderer_pb2.FetchFeaturesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[renderer_pb2.FetchFeaturesResponse]:
        raise FeatureEvicted("gone", digest="abc")
        yield


@pytest.fixture
def renderer() -> FailingRenderer:
    return FailingRenderer()


@pytest.fixture
async def server(renderer: FailingRenderer) -> AsyncIterator[ServiceServer]:
    server = ServiceServer(ServiceSettings(drain_s=5, metrics_port=0), [RENDERER_SERVICE])
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(renderer, server.grpc)
    await server.start()
    yield server
    await server.grpc.stop(0)


async def test_a_raised_error_arrives_as_the_same_class(server: ServiceServer) -> None:
    async with RendererClient(server.address) as client:
        from fovea.api.v1 import model_input_pb2

        chunked = model_input_pb2.ModelInput(chunks=[model_input_pb2.Chunk()])
        with pytest.raises(InvalidInput, match=r"chunks\[0\] is wrong") as caught:
            await client.render(chunked)
        assert caught.value.field == "chunks[0]"
        with pytest.raises(FeatureEvicted) as evicted:
            await client.fetch_features(["abc"])
        assert evicted.value.metadata == {"digest": "abc"}


async def test_an_unmapped_error_shows_no_secret(server: ServiceServer) -> None:
    from fovea.api.v1 import model_input_pb2

    async with RendererClient(server.address) as client:
        with pytest.raises(Internal, match=r"request [0-9a-f]{12}") as caught:
            await client.render(model_input_pb2.ModelInput())
        assert "secret" not in caught.value.message


async def test_health_follows_and_reflection_answers(server: ServiceServer) -> None:
    async with RendererClient(server.address) as client:
        assert not await client.is_serving(RENDERER_SERVICE)
        await server.set_serving(True)
        assert await client.is_serving(RENDERER_SERVICE)
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([asked]))]
        assert RENDERER_SERVICE in {service.name for service in answers[0].list_services_response.service}


async def test_a_server_that_stops_too_early_is_unavailable(server: ServiceServer, renderer: FailingRenderer) -> None:
    async with RendererClient(server.address) as client:
        running = asyncio.create_task(client.info())
        await renderer.is_asked.wait()
        await server.grpc.stop(0)
        with pytest.raises(Unavailable):
            await running


async def test_a_stop_lets_calls_in_flight_end(server: ServiceServer, renderer: FailingRenderer) -> None:
    await server.set_serving(True)
    async with RendererClient(server.address) as client:
        running = asyncio.create_task(client.info())
        await renderer.is_asked.wait()
        server.request_stop()
        stopping = asyncio.create_task(server.run_until_stopped())
        await asyncio.sleep(0)
        renderer.gate.set()
        await stopping
        assert (await running).model == "m"
        assert not await client.is_serving(RENDERER_SERVICE)
