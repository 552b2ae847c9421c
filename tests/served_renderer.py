"""A renderer of a model directory behind a real gRPC server in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.api.v1 import renderer_pb2_grpc
from fovea.client.inference import RendererClient
from fovea.runtime.server import ServiceServer
from fovea.vision.vision_family import VisionFamily
from fovea.wire.conventions import RENDERER_SERVICE
from fovea_renderer.renderer_service import RendererServicer, open_renderer
from fovea_renderer.rendering import Renderer
from fovea_renderer.settings import RendererSettings


@dataclass(frozen=True)
class Served:
    """A serving renderer: its client, its parts, and the model directory."""

    client: RendererClient
    renderer: Renderer
    directory: Path

    @property
    def family(self) -> VisionFamily:
        """The served vision-language family."""
        assert self.renderer.model.image_support is not None
        return self.renderer.model.image_support.family


@asynccontextmanager
async def serving(directory: Path, **settings: Any) -> AsyncIterator[Served]:
    """Runs a renderer in this process, as `fovea_renderer.renderer_service.serve` does."""
    chosen = RendererSettings(model=str(directory), drain_s=0, **settings)
    server = ServiceServer(chosen, [RENDERER_SERVICE])
    opened: asyncio.Future[Renderer] = asyncio.get_running_loop().create_future()
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(RendererServicer(opened), server.grpc)
    await server.start()
    async with open_renderer(chosen, server.address) as renderer, RendererClient(server.address) as client:
        opened.set_result(renderer)
        await server.set_serving(True)
        yield Served(client, renderer, directory)
    server.request_stop()
    await server.run_until_stopped()
