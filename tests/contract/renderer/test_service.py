"""The whole service: its self-description, images by URL, and workers that die."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from fovea.api.v1 import model_input_pb2, renderer_pb2_grpc
from fovea.client.inference import RendererClient
from fovea.runtime.server import ServiceServer
from fovea.wire.conventions import RENDERER_SERVICE
from fovea.wire.errors import InvalidInput, Unavailable
from fovea_renderer.renderer_service import RendererServicer
from fovea_renderer.settings import RendererSettings
from tests.contract.renderer.inputs import image, model_input, reference, text
from tests.served_renderer import Served
from tests.unit.renderer.pictures import png


async def test_says_what_it_serves(all_served: dict[str, Served]) -> None:
    for kind, served in all_served.items():
        info = await served.client.info()
        assert (info.family, info.model) == (kind, str(served.directory))
        assert (info.vocabulary_size, info.max_context_length) == (1280, 8192)
        assert info.supports_images == (kind != "qwen3")
        assert len(info.processor_fingerprint) == (0 if kind == "qwen3" else 64)
        assert info.version
        assert await served.client.is_serving(RENDERER_SERVICE)


async def test_fingerprints_tell_processors_apart(all_served: dict[str, Served]) -> None:
    data = model_input(image(png(64, 64)))
    digests = {
        (await all_served[kind].client.render(data)).spans[0].feature.digest for kind in ("qwen3_vl", "qwen2_5_vl")
    }
    assert len(digests) == 2


async def test_until_workers_are_warm_calls_are_told_to_wait() -> None:
    settings = RendererSettings(model="unused", drain_s=0)
    server = ServiceServer(settings, [RENDERER_SERVICE])
    servicer = RendererServicer(asyncio.get_running_loop().create_future())
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    async with RendererClient(server.address) as client:
        assert not await client.is_serving(RENDERER_SERVICE)
        with pytest.raises(Unavailable, match="warming up"):
            await client.render(model_input(text(1)))
    server.request_stop()
    await server.run_until_stopped()


async def test_an_image_by_address_equals_its_bytes(qwen3_vl: Served) -> None:
    data = png(200, 100, seed=31)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(data), data))
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    uri = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/image.png"
    rendered = await qwen3_vl.client.render(model_input(image(data), reference(uri=uri)))
    assert rendered.spans[0].feature == rendered.spans[1].feature
    with pytest.raises(InvalidInput, match=r"chunks\[0\]: the image is declared JPEG but is PNG"):
        await qwen3_vl.client.render(model_input(reference("JPEG", uri=uri)))
    listening.close()


async def test_refusals_are_counted_by_cause(qwen3_vl: Served) -> None:
    def count(cause: str) -> float:
        return REGISTRY.get_sample_value("fovea_renderer_refusals_total", {"cause": cause}) or 0.0

    before = count("vocabulary"), count("chunk")
    for chunk in (text(-5), model_input_pb2.Chunk()):
        with pytest.raises(InvalidInput):
            await qwen3_vl.client.render(model_input(chunk))
    assert (count("vocabulary"), count("chunk")) == (before[0] + 1, before[1] + 1)


async def test_a_killed_worker_costs_no_request(all_served: dict[str, Served]) -> None:
    served = all_served["qwen2_5_vl"]
    (killed,) = worker_ids(served)
    os.kill(killed, signal.SIGKILL)
    rendered = await served.client.render(model_input(text(1), image(png(100, 100, seed=32))))
    assert len(rendered.spans) == 1
    (fresh,) = worker_ids(served)
    assert fresh != killed


def worker_ids(served: Served) -> list[int]:
    """Returns the process ids of this process's image workers of one model."""
    children = {int(child) for file in Path("/proc/self/task").glob("*/children") for child in file.read_text().split()}
    command = f"fovea_renderer.image_worker --connection.* --model {re.escape(str(served.directory))} "
    lines = {child: Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in children}
    return [child for child, line in lines.items() if re.search(command, line)]
