"""GPUs by dynamic resource allocation: the scheduler allocates devices, which a driver would publish."""

from deploy.cluster.cluster import Cluster
from tests.k8s.cluster import Object, Release, get, wait_for

_CLASS, _DRIVER = "gpu.example.com", "gpu.example.com"


def _devices(node: str, count: int) -> list[Object]:
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": _CLASS},
            "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{_DRIVER}'"}}]},
        },
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"{node}-gpus"},
            "spec": {
                "driver": _DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": f"gpu-{index}"} for index in range(count)],
            },
        },
    ]


def test_pods_claim_devices_of_a_class(cluster: Cluster, namespace: str) -> None:
    """A trainer with four devices and a sampler with two, all distinct and on the node that has them."""
    cluster.apply(*_devices("cpu-0", 6))
    values = ("--set", f"gpuDeviceClass={_CLASS},trainer.gpus=4,sampler.gpus=2,sampler.replicas=1")
    release = Release(cluster, namespace, "vision", values)
    release.install()
    nodes = {pod["spec"]["nodeName"] for component in ("sampler", "trainer") for pod in release.get("pods", component)}
    assert nodes == {"cpu-0"}
    claims = get(cluster, namespace, "resourceclaims")
    results = [claim["status"]["allocation"]["devices"]["results"] for claim in claims]
    assert sorted(map(len, results)) == [2, 4]
    assert len({result["device"] for found in results for result in found}) == 6
    release.upgrade("--set", "sampler.replicas=2", "--wait=false")
    wait_for(
        "a second sampler waits for devices",
        lambda: sorted(pod["status"]["phase"] for pod in release.get("pods", "sampler")) == ["Pending", "Running"],
    )
    release.uninstall()
