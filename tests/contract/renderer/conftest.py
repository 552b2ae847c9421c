"""Renderers of the tiny checkpoints behind real gRPC servers, one of each kind for all tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import tinyvlm
from fovea.api.v1 import renderer_pb2_grpc
from fovea.client.renderer import RendererClient
from fovea.runtime.server import ServiceServer
from fovea.vision.vision_family import VisionFamily
from fovea.wire.conventions import RENDERER_SERVICE
from services.renderer.renderer_service import RendererServicer, open_renderer
from services.renderer.rendering import Renderer
from services.renderer.settings import RendererSettings

KINDS: tuple[tinyvlm.Kind, ...] = ("qwen3_vl", "qwen2_5_vl", "qwen3")
# The largest tensors of one input in these tests have 3 MB; two of them do not fit together with a third.
FEATURE_CACHE_BYTES = 8 * 2**20
IMAGE_STORE_BYTES = 6 * 2**20


@dataclass(frozen=True)
class Served:
    """A renderer that listens: its client, what is behind it, and the model directory."""

    client: RendererClient
    renderer: Renderer
    directory: Path

    @property
    def family(self) -> VisionFamily:
        """Of the vision-language model that is served."""
        assert self.renderer.model.image_support is not None
        return self.renderer.model.image_support.family


@asynccontextmanager
async def serving(kind: tinyvlm.Kind) -> AsyncIterator[Served]:
    """Runs a renderer of one tiny checkpoint in this process, as `services.renderer.renderer_service.serve` does."""
    directory = tinyvlm.ensure(kind)
    settings = RendererSettings(
        model=str(directory),
        drain_s=0,
        feature_cache_bytes=FEATURE_CACHE_BYTES,
        image_store_bytes=IMAGE_STORE_BYTES,
        image_hosts=["127.0.0.1"],
    )
    server = ServiceServer(settings, [RENDERER_SERVICE])
    opened: asyncio.Future[Renderer] = asyncio.get_running_loop().create_future()
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(RendererServicer(opened), server.grpc)
    await server.start()
    async with open_renderer(settings, server.address) as renderer, RendererClient(server.address) as client:
        opened.set_result(renderer)
        await server.set_serving(True)
        yield Served(client, renderer, directory)
    server.request_stop()
    await server.run_until_stopped()


@pytest.fixture(scope="session")
async def all_served() -> AsyncIterator[dict[str, Served]]:
    """All kinds, started side by side: most of a start is a worker's imports."""
    async with AsyncExitStack() as stack:
        contexts = [serving(kind) for kind in KINDS]
        served = await asyncio.gather(*(context.__aenter__() for context in contexts))
        for context in contexts:
            stack.push_async_exit(context.__aexit__)
        yield dict(zip(KINDS, served, strict=True))


@pytest.fixture
def qwen3_vl(all_served: dict[str, Served]) -> Served:
    return all_served["qwen3_vl"]


@pytest.fixture
def qwen3(all_served: dict[str, Served]) -> Served:
    return all_served["qwen3"]


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl"])
def vision(request: pytest.FixtureRequest, all_served: dict[str, Served]) -> Served:
    """Each vision-language renderer in turn."""
    served: Served = all_served[request.param]
    return served
