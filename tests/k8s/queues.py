"""Objects of Kueue that an administrator makes: a quota, and a queue of a namespace that draws on it."""

from tests.k8s.cluster import Object

_VERSION = "kueue.x-k8s.io/v1beta2"


def queue(namespace: str, name: str, gpus: int) -> list[Object]:
    """A LocalQueue of a namespace with a ClusterQueue of its own.

    Args:
        namespace: Of the queue. It is part of the names of the objects that have no namespace.
        name: Of the queue.
        gpus: The quota. That of processors and memory is never reached.
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
