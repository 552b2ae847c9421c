"""Follows a discovery, as the gateway does."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kubernetes.aio import client

from deploy.cluster.cluster import Cluster
from fovea_gateway.replicas.discovery import Addresses, KubernetesDiscovery
from tests.k8s.cluster import WAIT_S


class Seen:
    """What a discovery yielded last."""

    def __init__(self) -> None:
        self.last: Addresses = frozenset()
        self._changed = asyncio.Event()

    async def follow(self, discovery: KubernetesDiscovery) -> None:
        """Never returns."""
        async for addresses in discovery.watch():
            self.last = addresses
            self._changed.set()

    async def until(self, holds: Callable[[Addresses], bool]) -> None:
        """Returns once `holds(self.last)`; raises TimeoutError if it never does."""
        async with asyncio.timeout(WAIT_S):
            while not holds(self.last):
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def watching(discovery: KubernetesDiscovery) -> AsyncIterator[Seen]:
    """A task that follows a discovery; what it died of is raised at the end."""
    seen = Seen()
    task = asyncio.create_task(seen.follow(discovery))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled(), task.exception()


def configuration_of(cluster: Cluster, namespace: str, service_account: str) -> client.Configuration:
    """The API server as a service account sees it: with a token of its own."""
    server = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))["clusters"][0]["cluster"]
    token = cluster.kubectl("create", "token", service_account, "-n", namespace).strip()
    configuration = client.Configuration()
    configuration.host = server["server"]
    configuration.ssl_ca_cert = server.get("certificate-authority")
    configuration.verify_ssl = not server.get("insecure-skip-tls-verify", False)
    configuration.api_key = {"authorization": f"Bearer {token}"}
    return configuration
