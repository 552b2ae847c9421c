"""The test cluster has real authorization, scheduling and endpoints, as the other tests assume."""

import json

import pytest

from deploy.cluster.cluster import Cluster, CommandFailed
from tests.k8s.cluster import get, ready_addresses, wait_for
from tests.k8s.workers import SERVICE, workers


def test_it_authorizes(cluster: Cluster, namespace: str) -> None:
    """A service account without rights cannot even list pods."""
    nobody = f"--as=system:serviceaccount:{namespace}:default"
    with pytest.raises(CommandFailed, match=r"pods is forbidden"):
        cluster.kubectl("get", "pods", "-n", namespace, nobody)


def test_it_validates(cluster: Cluster, namespace: str) -> None:
    """The API server refuses an unknown field and names it."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "typo"}, "spec": {"prots": []}}
    with pytest.raises(CommandFailed, match=r"unknown field .*prots"):
        cluster.kubectl("create", "-n", namespace, "--validate=strict", "-f", "-", stdin=json.dumps(service))


def test_gpus_are_counted(cluster: Cluster, namespace: str) -> None:
    """Two nodes with eight GPUs each: the third pod that requests eight waits; the others run and become endpoints."""
    cluster.apply(*workers(namespace, replicas=3, gpus=8))
    wait_for("two endpoints", lambda: len(ready_addresses(cluster, namespace, SERVICE)) == 2)
    wait_for("a pod that lacks GPUs", lambda: _reasons(cluster, namespace) == ["Unschedulable"])


def _reasons(cluster: Cluster, namespace: str) -> list[str]:
    """Returns the reasons that pods are not scheduled."""
    conditions = [
        condition for pod in get(cluster, namespace, "pods") for condition in pod["status"].get("conditions", [])
    ]
    return [
        condition["reason"]
        for condition in conditions
        if condition["type"] == "PodScheduled" and condition["status"] == "False"
    ]
