"""Follows a discovery as the gateway does."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kubernetes.aio import client

from deploy.cluster.cluster import Cluster
from fovea_gateway.replicas.discovery import Addresses, KubernetesDiscovery
from tests.k8s.cluster import WAIT_S


class Seen:
    """The latest result of a discovery."""

    def __init__(self) -> None:
        self.last: Addresses = frozenset()
        self._changed = asyncio.Event()

    async def follow(self, discovery: KubernetesDiscovery) -> None:
        """Stores results forever."""
        async for addresses in discovery.watch():
            self.last = addresses
            self._changed.set()

    async def until(self, holds: Callable[[Addresses], bool]) -> None:
        """Waits until `holds(self.last)`; raises TimeoutError after the time limit."""
        async with asyncio.timeout(WAIT_S):
            while not holds(self.last):
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def watching(discovery: KubernetesDiscovery) -> AsyncIterator[Seen]:
    """Follows a discovery in a task; raises the task's error at the end."""
    seen = Seen()
    task = asyncio.create_task(seen.follow(discovery))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled(), task.exception()


def configuration_of(cluster: Cluster, namespace: str, service_account: str) -> client.Configuration:
    """Returns the API server's configuration for a service account, with its token."""
    server = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))["clusters"][0]["cluster"]
    token = cluster.kubectl("create", "token", service_account, "-n", namespace).strip()
    configuration = client.Configuration()
    configuration.host = server["server"]
    configuration.ssl_ca_cert = server.get("certificate-authority")
    configuration.verify_ssl = not server.get("insecure-skip-tls-verify", False)
    configuration.api_key = {"authorization": f"Bearer {token}"}
    return configuration
