"""That the cluster is what the other tests take it for: real rules, real scheduling, real endpoints."""

import json

import pytest

from deploy.cluster.cluster import Cluster, CommandFailed
from tests.k8s.cluster import get, ready_addresses, wait_for
from tests.k8s.workers import SERVICE, workers


def test_it_authorizes(cluster: Cluster, namespace: str) -> None:
    """A service account that nobody gave anything may not even list pods."""
    nobody = f"--as=system:serviceaccount:{namespace}:default"
    with pytest.raises(CommandFailed, match=r"pods is forbidden"):
        cluster.kubectl("get", "pods", "-n", namespace, nobody)


def test_it_validates(cluster: Cluster, namespace: str) -> None:
    """A field that the API does not know is refused by name."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "typo"}, "spec": {"prots": []}}
    with pytest.raises(CommandFailed, match=r"unknown field .*prots"):
        cluster.kubectl("create", "-n", namespace, "--validate=strict", "-f", "-", stdin=json.dumps(service))


def test_gpus_are_counted(cluster: Cluster, namespace: str) -> None:
    """Two nodes of eight: the third pod that asks for eight waits, and the others run and are endpoints."""
    cluster.apply(*workers(namespace, replicas=3, gpus=8))
    wait_for("two endpoints", lambda: len(ready_addresses(cluster, namespace, SERVICE)) == 2)
    wait_for("a pod that lacks GPUs", lambda: _reasons(cluster, namespace) == ["Unschedulable"])


def _reasons(cluster: Cluster, namespace: str) -> list[str]:
    """Why pods are not scheduled."""
    conditions = [
        condition for pod in get(cluster, namespace, "pods") for condition in pod["status"].get("conditions", [])
    ]
    return [
        condition["reason"]
        for condition in conditions
        if condition["type"] == "PodScheduled" and condition["status"] == "False"
    ]
