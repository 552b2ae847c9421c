"""Services refuse callers without the secret of their Fovea; beyond loopback, a service does not start without one."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fovea.api.v1 import model_input_pb2, renderer_pb2, renderer_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from fovea.client import FeatureFetcher, RendererClient, TrainerClient
from fovea.runtime.credentials import SECRET_FILE_VARIABLE, SECRET_VARIABLE, service_secret
from fovea.runtime.server import ServiceServer
from fovea.runtime.settings import ServiceSettings
from fovea.wire.conventions import RENDERER_SERVICE
from fovea.wire.errors import BrokenOff, FeatureEvicted, Unauthenticated
from fovea_gateway.settings import GatewaySettings
from fovea_renderer.settings import RendererSettings
from fovea_trainer.settings import TrainerSettings

SECRET = "0123456789abcdef"


ENTERED: list[str] = []
"""Streams that a servicer has started to read."""


class OpenRenderer(renderer_pb2_grpc.RendererServiceServicer):
    """Answers one call of every kind."""

    async def GetRendererInfo(  # noqa: N802
        self, request: renderer_pb2.GetRendererInfoRequest, context: grpc.aio.ServicerContext
    ) -> renderer_pb2.GetRendererInfoResponse:
        return renderer_pb2.GetRendererInfoResponse(model="m")

    async def PutImage(  # noqa: N802
        self, requests: AsyncIterator[renderer_pb2.PutImageRequest], context: grpc.aio.ServicerContext
    ) -> renderer_pb2.PutImageResponse:
        ENTERED.append("PutImage")
        async for _ in requests:
            pass
        return renderer_pb2.PutImageResponse()

    async def FetchFeatures(  # noqa: N802
        self, request: renderer_pb2.FetchFeaturesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[renderer_pb2.FetchFeaturesResponse]:
        raise FeatureEvicted("gone", digest="abc")
        yield


class OpenTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers a stream."""

    async def ForwardBackward(  # noqa: N802
        self, requests: AsyncIterator[trainer_pb2.ForwardBackwardRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[trainer_pb2.ForwardBackwardResponse]:
        ENTERED.append("ForwardBackward")
        async for _ in requests:
            pass
        yield trainer_pb2.ForwardBackwardResponse(metrics=trainer_pb2.Metrics())


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A service with a secret, which the caller does not send yet."""
    ENTERED.clear()
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    server = ServiceServer(ServiceSettings(drain_s=0), [RENDERER_SERVICE])
    renderer_pb2_grpc.add_RendererServiceServicer_to_server(OpenRenderer(), server.grpc)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(OpenTrainer(), server.grpc)
    await server.start()
    await server.set_serving(True)
    monkeypatch.delenv(SECRET_VARIABLE)
    yield server.address
    await server.grpc.stop(0)


async def _put(address: str) -> object:
    async with RendererClient(address) as client:
        return await client.put_image(bytes(8 << 20))


async def _info(address: str) -> object:
    async with RendererClient(address) as client:
        return await client.info()


async def _fetch(address: str) -> object:
    async with RendererClient(address) as client:
        try:
            return await client.fetch_features(["abc"])
        except FeatureEvicted as error:
            return error


async def _stream(address: str) -> object:
    header = trainer_pb2.ForwardBackwardHeader(model_id="m", datum_count=0)
    async with TrainerClient(address) as client:
        return await client.forward_backward(header, [trainer_pb2.Datum()] * 2000)


@pytest.mark.parametrize("call", [_info, _put, _fetch, _stream])
@pytest.mark.parametrize("guess", ["", "another secret of 16"])
async def test_calls_of_every_kind_need_the_secret(
    address: str, call: Callable[[str], Awaitable[object]], guess: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, guess)
    # A caller that still sends when it is refused only learns that the call has ended: grpcio 1.76, see the notes.
    late = (BrokenOff,) if call in (_put, _stream) else ()
    with pytest.raises(
        (Unauthenticated, *late), match=f"{SECRET_VARIABLE}|ended the call before the request was complete"
    ):
        await call(address)
    assert not ENTERED
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert await call(address)


async def test_health_needs_none_and_reflection_does(address: str) -> None:
    async with RendererClient(address) as client:
        assert await client.is_serving(RENDERER_SERVICE)
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest()]))))
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_ranks_fetch_with_the_secret(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feature = model_input_pb2.VisionFeature(digest="abc", source=address)
    for secret, error in (("", Unauthenticated), (SECRET, FeatureEvicted)):
        monkeypatch.setenv(SECRET_VARIABLE, secret)
        fetcher = FeatureFetcher()
        with pytest.raises(error):
            await asyncio.to_thread(fetcher.fetch, [feature], 30.0)
        fetcher.close()


def test_it_may_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    monkeypatch.setenv(SECRET_FILE_VARIABLE, str(file))
    assert service_secret() == SECRET
    file.unlink()
    with pytest.raises(SystemExit, match=f"{SECRET_FILE_VARIABLE}: .*No such file"):
        RendererSettings.from_command_line("renderer", ["--model", "m"])


@pytest.mark.parametrize(
    "secret", ["short", "0123456789abcde\N{LATIN SMALL LETTER E WITH ACUTE}", "0123456789\nabcdef0"]
)
def test_one_that_is_no_good_is_refused_by_name(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(SystemExit, match=f"{SECRET_VARIABLE} must have at least 16 printable ASCII characters"):
        RendererSettings.from_command_line("renderer", ["--model", "m"])


def test_without_one_a_service_is_for_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = ["--model", "m", "--host", "0.0.0.0"]
    with pytest.raises(
        SystemExit, match=f"^renderer: .*other machines can reach --host 0.0.0.0; set {SECRET_VARIABLE}"
    ):
        RendererSettings.from_command_line("renderer", everywhere)
    with pytest.raises(SystemExit, match="other machines can reach --master-addr node-0"):
        TrainerSettings.from_command_line("trainer", ["--model", "m", "--nodes", "2", "--master-addr", "node-0"])
    for host in ("127.0.0.1", "::1", "localhost"):
        RendererSettings.from_command_line("renderer", ["--model", "m", "--host", host])
    to = ["--model-name", "m", "--renderer", "r:1", "--sampler", "s:1", "--trainer", "t:1", "--api-key", "tml-x"]
    GatewaySettings.from_command_line("gateway", [*everywhere, *to])
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert RendererSettings.from_command_line("renderer", everywhere).host == "0.0.0.0"


def test_settings_do_not_show_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with caplog.at_level(logging.DEBUG):
        shown = repr(RendererSettings.from_command_line("renderer", ["--model", "m"]))
    assert SECRET not in shown + caplog.text
