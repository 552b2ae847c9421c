"""The gateway's discovery against a real API server, as a service account with the one right that it needs."""

import asyncio

from deploy.cluster.cluster import Cluster
from fovea_gateway.replicas.discovery import KubernetesDiscovery
from tests.k8s.cluster import ready_addresses
from tests.k8s.watching import configuration_of, watching
from tests.k8s.workers import PORT, SERVICE, STATEFUL_SET, workers

_ROLE = "--verb=get,list,watch", "--resource=endpointslices.discovery.k8s.io"


async def test_pods_join_and_leave(cluster: Cluster, namespace: str) -> None:
    """1 to 3 to 1 replicas: discovery follows the EndpointSlices, with the port's name and with its number."""
    cluster.apply(*workers(namespace, replicas=1))
    for port in ("grpc", str(PORT)):
        async with watching(_discovery(cluster, namespace, port)) as seen:
            for count in (1, 3, 1):
                _scale(cluster, namespace, count)
                await seen.until(lambda addresses, count=count: len(addresses) == count)
                assert seen.last == {f"{ip}:{PORT}" for ip in ready_addresses(cluster, namespace, SERVICE)}


async def test_a_full_slice_is_read(cluster: Cluster, namespace: str) -> None:
    """A hundred replicas are one line of the watch, which is longer than the default buffer of a stream reader."""
    cluster.apply(*workers(namespace, replicas=1))
    async with watching(_discovery(cluster, namespace, "grpc")) as seen:
        _scale(cluster, namespace, 100)
        await seen.until(lambda addresses: len(addresses) == 100)


async def test_it_survives_a_restart_of_the_api_server(cluster: Cluster, namespace: str) -> None:
    """Discovery keeps its replicas while the server is down, and sees the changes once it is back."""
    cluster.apply(*workers(namespace, replicas=2))
    async with watching(_discovery(cluster, namespace, "grpc")) as seen:
        await seen.until(lambda addresses: len(addresses) == 2)
        await asyncio.to_thread(cluster.restart, "kube-apiserver")
        assert len(seen.last) == 2
        _scale(cluster, namespace, 3)
        await seen.until(lambda addresses: len(addresses) == 3)


def _discovery(cluster: Cluster, namespace: str, port: str) -> KubernetesDiscovery:
    """Returns a discovery with a service account that may only read EndpointSlices here."""
    if "watcher" not in cluster.kubectl("get", "serviceaccounts", "-n", namespace):
        cluster.kubectl("create", "serviceaccount", "watcher", "-n", namespace)
        cluster.kubectl("create", "role", "watcher", *_ROLE, "-n", namespace)
        subject = f"--serviceaccount={namespace}:watcher"
        cluster.kubectl("create", "rolebinding", "watcher", "--role=watcher", subject, "-n", namespace)
    return KubernetesDiscovery(f"{SERVICE}:{port}", namespace, configuration_of(cluster, namespace, "watcher"))


def _scale(cluster: Cluster, namespace: str, replicas: int) -> None:
    cluster.kubectl("scale", f"statefulset/{STATEFUL_SET}", f"--replicas={replicas}", "-n", namespace)
