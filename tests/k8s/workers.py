"""A small StatefulSet and its headless service, as stand-ins for samplers in tests of discovery and scheduling."""

from typing import Any

from tests.k8s.cluster import Object

SERVICE = "workers"
STATEFUL_SET = "worker"
PORT = 50052


def workers(namespace: str, replicas: int, gpus: int = 0) -> list[Object]:
    """Returns the service and a StatefulSet of `replicas` pods with `gpus` each and a port called grpc."""
    metadata: dict[str, Any] = {"namespace": namespace}
    labels = {"app": STATEFUL_SET}
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    container = {
        "name": "worker",
        "image": "none",
        "ports": [{"name": "grpc", "containerPort": PORT}],
        "resources": {"limits": limits},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SERVICE, **metadata},
        "spec": {"clusterIP": "None", "selector": labels, "ports": [{"name": "grpc", "port": PORT}]},
    }
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": STATEFUL_SET, **metadata},
        "spec": {
            "serviceName": SERVICE,
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }
    return [service, stateful_set]
