"""What a cluster has before Fovea comes: nodes with GPUs, and volumes to claim."""

_STORAGE_CLASS = "simulated"


def base_objects(gpu_nodes: int = 3, gpus: int = 8, volumes: int = 16) -> list[dict[str, object]]:
    """One node without GPUs, `gpu_nodes` with `gpus` each, and a default storage class with `volumes` to bind."""
    nodes = [_node("cpu-0", 0), *(_node(f"gpu-{index}", gpus) for index in range(gpu_nodes))]
    return [*nodes, _storage_class(), *(_volume(f"volume-{index}") for index in range(volumes))]


def _node(name: str, gpus: int) -> dict[str, object]:
    resources = {"cpu": "128", "memory": "2Ti", "ephemeral-storage": "10Ti", "pods": "110"}
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"},
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "status": {"capacity": resources, "allocatable": resources},
    }


def _storage_class() -> dict[str, object]:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": _STORAGE_CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "kubernetes.io/no-provisioner",
    }


def _volume(name: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": _STORAGE_CLASS,
            "capacity": {"storage": "10Ti"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"/nowhere/{name}"},
        },
    }
