"""Objects of a cluster before Fovea is installed: nodes with GPUs, and volumes for claims."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_STORAGE_CLASS = "simulated"


def base_objects() -> list[dict[str, object]]:
    """Returns a node without GPUs, one with a GPU shared by two pods, two with 8 GPUs, and volumes."""
    nodes = [
        _node("cpu-0"),
        _node("shared-0", {"nvidia.com/gpu.shared": "2"}),
        _node("gpu-0", {"nvidia.com/gpu": "8"}),
        _node("gpu-1", {"nvidia.com/gpu": "8"}),
    ]
    return [*nodes, *volumes(Path("/nowhere"))]


def volumes(folder: Path, count: int = 32) -> list[dict[str, object]]:
    """Returns a default storage class and its volumes. The caller must create their folders."""
    return [_storage_class(), *(_volume(folder / f"volume-{index}") for index in range(count))]


def _node(name: str, devices: Mapping[str, str] = MappingProxyType({})) -> dict[str, object]:
    resources = {"cpu": "128", "memory": "2Ti", "ephemeral-storage": "10Ti", "pods": "110"} | dict(devices)
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


def _volume(folder: Path) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": folder.name},
        "spec": {
            "storageClassName": _STORAGE_CLASS,
            "capacity": {"storage": "10Ti"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(folder)},
        },
    }
