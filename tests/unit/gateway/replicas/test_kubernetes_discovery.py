"""EndpointSlices against a real HTTP server that lists and watches as the API does."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from kubernetes.aio import client

from fovea.wire.errors import InvalidInput
from fovea_gateway.replicas.discovery import Addresses, KubernetesDiscovery
from tests.unit.gateway.replicas.api_server import NAMESPACE, ApiServer, endpoint, kubeconfig, serving
from tests.waiting import eventually

READY = {"ready": True, "serving": True, "terminating": False}


class Seen:
    """The latest result of a discovery, and the number of results."""

    def __init__(self) -> None:
        self.addresses: Addresses | None = None
        self.count = 0

    async def follow(self, discovery: KubernetesDiscovery) -> None:
        async with aclosing(discovery.watch()) as changes:
            async for addresses in changes:
                self.addresses = addresses
                self.count += 1

    async def becomes(self, *addresses: str) -> None:
        await eventually(lambda: self.addresses == frozenset(addresses))


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """An API server."""
    async with serving() as running:
        yield running


@asynccontextmanager
async def watching(server: ApiServer, address: str = "s:grpc") -> AsyncIterator[Seen]:
    """A running discovery."""
    seen = Seen()
    discovery = KubernetesDiscovery(address, NAMESPACE, client.Configuration(host=server.url))
    task = asyncio.create_task(seen.follow(discovery))
    try:
        yield seen
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_joins_and_leaves_arrive(server: ApiServer) -> None:
    await server.put("s-1", [endpoint("10.0.0.1", **READY)])
    await server.put("other-1", [endpoint("10.9.9.9", **READY)], service="other")
    async with watching(server) as seen:
        await seen.becomes("10.0.0.1:50052")
        await server.put("s-1", [endpoint("10.0.0.1", **READY), endpoint("10.0.0.2", **READY)])
        await seen.becomes("10.0.0.1:50052", "10.0.0.2:50052")
        await server.put("s-2", [endpoint("10.0.0.3", **READY)])
        await seen.becomes("10.0.0.1:50052", "10.0.0.2:50052", "10.0.0.3:50052")
        await server.delete("s-1")
        await seen.becomes("10.0.0.3:50052")
        await server.put("s-2", None)
        await seen.becomes()
        assert (server.lists, len(server.watches)) == (1, 1)


async def test_only_those_count_that_are_ready_and_stay(server: ApiServer) -> None:
    await server.put(
        "s-1",
        [
            endpoint("10.0.0.1"),
            endpoint("10.0.0.2", ready=False),
            endpoint("10.0.0.3", ready=True, terminating=True),
            endpoint("10.0.0.4", ready=False, serving=True, terminating=True),
        ],
    )
    async with watching(server) as seen:
        await seen.becomes("10.0.0.1:50052")
        count = seen.count
        await server.put("s-1", [endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False)])
        await server.put("s-1", [endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=True)])
        await seen.becomes("10.0.0.1:50052", "10.0.0.2:50052")
        assert seen.count == count + 1, "a watch event without a change must yield nothing"


async def test_ports_go_by_name_or_number_and_families_count_once(
    server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    ports = [{"name": "metrics", "port": 9090}, {"name": "grpc", "port": 7}]
    await server.put("s-4", [endpoint("10.0.0.1")], ports=ports)
    await server.put("s-6", [endpoint("fd00::1")], ports=ports, addressType="IPv6")
    async with watching(server, "s:grpc") as named, watching(server, "s:50052") as numbered:
        await named.becomes("10.0.0.1:7")
        await numbered.becomes("10.0.0.1:50052")
        await server.delete("s-4")
        await named.becomes("[fd00::1]:7")
    async with watching(server, "s:grcp") as wrong:
        await wrong.becomes()
    assert "service s has no port named 'grcp'; it has ['grpc', 'metrics']" in caplog.text


async def test_a_dropped_watch_goes_on_where_it_was(server: ApiServer) -> None:
    await server.put("s-1", [endpoint("10.0.0.1")])
    async with watching(server) as seen:
        await seen.becomes("10.0.0.1:50052")
        await eventually(lambda: server.watching == 1)
        await server.bookmark()
        await server.put("s-1", [endpoint("10.0.0.2")])
        await seen.becomes("10.0.0.2:50052")
        server.drop()
        await server.put("s-1", [endpoint("10.0.0.3")])
        await seen.becomes("10.0.0.3:50052")
        assert server.lists == 1
        assert server.watches == ["101", "103"]


async def test_a_bookmark_moves_the_version(server: ApiServer) -> None:
    async with watching(server) as seen:
        await seen.becomes()
        await eventually(lambda: server.watching == 1)
        await server.bookmark()
        await server.put("s-1", [endpoint("10.0.0.1")], service="another")
        await server.bookmark()
        await server.end_watches()
        await eventually(lambda: len(server.watches) == 2)
        assert server.watches[1] == "103"


async def test_an_expired_version_lists_anew(server: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    await server.put("s-1", [endpoint("10.0.0.1")])
    async with watching(server) as seen:
        await seen.becomes("10.0.0.1:50052")
        await eventually(lambda: server.watching == 1)
        await server.put("s-1", [endpoint("10.0.0.2")])
        await seen.becomes("10.0.0.2:50052")
        server.drop()
        server.compact()
        await eventually(lambda: server.lists == 2)
        await eventually(lambda: server.watching == 1)
        await server.send_error(410)
        await eventually(lambda: server.lists == 3)
        assert seen.addresses == frozenset({"10.0.0.2:50052"})
    assert "too old" not in caplog.text, "an expired version is not an error"


async def test_a_refusal_names_the_rule_that_is_missing_and_is_asked_again(
    server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    await server.put("s-1", [endpoint("10.0.0.1")])
    server.refusal = (403, 'endpointslices.discovery.k8s.io is forbidden: User "x" cannot list resource')
    with caplog.at_level(logging.WARNING):
        async with watching(server) as seen:
            await eventually(lambda: server.lists >= 3)
            assert seen.addresses is None
            server.refusal = None
            await seen.becomes("10.0.0.1:50052")
    (text,) = [record.getMessage() for record in caplog.records if "cannot be watched" in record.getMessage()]
    assert 'apiGroups ["discovery.k8s.io"], resources ["endpointslices"], verbs ["get", "list", "watch"]' in text
    assert f"namespace {NAMESPACE}" in text
    assert 'User "x" cannot list' in text


async def test_known_addresses_stay_while_the_api_server_fails(server: ApiServer) -> None:
    await server.put("s-1", [endpoint("10.0.0.1")])
    async with watching(server) as seen:
        await seen.becomes("10.0.0.1:50052")
        await eventually(lambda: server.watching == 1)
        server.refusal = (500, "etcd is away")
        server.drop()
        await eventually(lambda: server.lists >= 2)
        assert seen.addresses == frozenset({"10.0.0.1:50052"})
        await server.put("s-1", [endpoint("10.0.0.2")])
        server.refusal = None
        await seen.becomes("10.0.0.2:50052")


async def test_kubeconfig_says_where_the_server_is(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.put("s-1", [endpoint("10.0.0.1")])
    with pytest.raises(InvalidInput, match="--kubernetes-namespace is empty"):
        KubernetesDiscovery("s:grpc")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(InvalidInput, match="a pod with a service account, or KUBECONFIG"):
        KubernetesDiscovery("s:grpc", NAMESPACE)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(server, tmp_path)))
    async with aclosing(KubernetesDiscovery("s:grpc", NAMESPACE).watch()) as changes:
        assert await anext(changes) == {"10.0.0.1:50052"}
