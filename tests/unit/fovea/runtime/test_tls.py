"""With certificates, services only talk to peers of the same CA; probes and the gateway's clients need none."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fovea.cli.up_command import make_certificates
from fovea.client.channel import ServiceClient, open_blocking_channel
from fovea.runtime import credentials
from fovea.runtime.server import ServiceServer
from fovea.runtime.settings import ServiceSettings
from fovea_gateway.settings import GatewaySettings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Certificates of this process."""
    made = tmp_path / "tls"
    make_certificates(made)
    monkeypatch.setenv(credentials.TLS_VARIABLE, str(made))
    return made


@asynccontextmanager
async def serving(settings: ServiceSettings | None = None) -> AsyncIterator[ServiceServer]:
    """Runs a server that answers health checks."""
    server = ServiceServer(settings or ServiceSettings(drain_s=0), ["fovea.Part"])
    await server.start()
    await server.set_serving(True)
    yield server
    server.request_stop()
    await server.run_until_stopped()


async def is_serving(address: str, internal: bool = True) -> bool:
    async with ServiceClient(address, internal=internal) as client:
        return await client.is_serving()


async def test_the_right_certificate_is_served_and_none_is_not(folder: Path) -> None:
    async with serving() as server:
        assert await is_serving(server.address)
        assert not await is_serving(server.address, internal=False), "plain text"
        roots = grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes())
        async with grpc.aio.secure_channel(server.address, roots, options=credentials.CLIENT_OPTIONS) as nameless:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health_pb2_grpc.HealthStub(nameless).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_strangers_certificate_is_refused_on_both_sides(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = tmp_path / "stranger"
    make_certificates(stranger)
    async with serving() as server:
        monkeypatch.setenv(credentials.TLS_VARIABLE, str(stranger))
        assert not await is_serving(server.address)
        (stranger / "ca.crt").write_bytes((folder / "ca.crt").read_bytes())
        assert not await is_serving(server.address), "even if it accepts our certificate"
        async with serving() as strange:
            monkeypatch.setenv(credentials.TLS_VARIABLE, str(folder))
            assert not await is_serving(strange.address), "our clients must not talk to a peer of another CA"
        assert await is_serving(server.address)


async def test_a_plain_service_is_not_talked_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(credentials.TLS_VARIABLE)
    async with serving() as server:
        assert await is_serving(server.address)
        monkeypatch.setenv(credentials.TLS_VARIABLE, str(folder))
        assert not await is_serving(server.address)


async def test_probes_have_a_port_with_health_alone(folder: Path) -> None:
    async with serving(ServiceSettings(drain_s=0, health_port=0)) as server:
        address = f"127.0.0.1:{server.health_port}"
        assert await is_serving(address, internal=False)
        async with grpc.aio.insecure_channel(address) as channel:
            method = channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await method(b"", timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_clients_of_the_gateway_need_none(folder: Path, tmp_path: Path) -> None:
    to = {"renderer": ["a:1"], "sampler": ["a:1"], "trainer": "a:1", "model": "m", "model_name": "m"}
    async with serving(GatewaySettings(**to, drain_s=0, state_dir=tmp_path)) as server:
        assert await is_serving(server.address, internal=False)


async def test_threads_have_the_same_channels(folder: Path) -> None:
    async with serving() as server:
        with open_blocking_channel(server.address) as channel:
            ready = grpc.channel_ready_future(channel)
            ready.result(5)


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_what_is_missing_is_said_before_anything_starts(folder: Path, name: str) -> None:
    assert (folder / name).stat().st_mode & 0o777 == 0o600
    (folder / name).write_text("hello")
    with pytest.raises(ValueError, match=rf"FOVEA_TLS_DIR: .*{name} is not a PEM file"):
        ServiceSettings()
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name}.*the folder must contain ca.crt, tls.crt and tls.key"):
        ServiceSettings()
