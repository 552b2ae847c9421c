"""Kueue objects of an administrator: a quota, and a queue of a namespace that draws on it."""

from tests.k8s.cluster import Object

_VERSION = "kueue.x-k8s.io/v1beta2"


def queue(namespace: str, name: str, gpus: int) -> list[Object]:
    """Creates a LocalQueue of a namespace with its own ClusterQueue.

    Args:
        namespace: The namespace, which is part of the names of cluster-wide objects.
        name: The name of the queue.
        gpus: The quota of GPUs. The quota of processors and memory is never reached.
    """
    shared = f"{namespace}-{name}"
    quotas = {"cpu": "1000", "memory": "100Ti", "nvidia.com/gpu": str(gpus)}
    resources = [{"name": resource, "nominalQuota": quota} for resource, quota in quotas.items()]
    group = {"coveredResources": [*quotas], "flavors": [{"name": shared, "resources": resources}]}
    place = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    return [
        {"apiVersion": _VERSION, "kind": "ResourceFlavor", "metadata": {"name": shared}},
        {
            "apiVersion": _VERSION,
            "kind": "ClusterQueue",
            "metadata": {"name": shared},
            "spec": {"namespaceSelector": place, "resourceGroups": [group]},
        },
        {
            "apiVersion": _VERSION,
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterQueue": shared},
        },
    ]
