"""The installed chart: its images as pods of a real node, and the official SDK through the gateway's service."""

from __future__ import annotations

import base64
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker

import fovea_tinyvlm
from benchmarks.client import take_step
from deploy.cluster.node import Node
from tests.e2e.prompts import Prompt
from tests.k8s.cluster import COMPONENTS, Object, Release, fresh_namespace, get, wait_for
from tests.k8s.load import Load, greedy, image_prompts, wait_for_samplers

pytestmark = pytest.mark.slow

_VALUES = Path(__file__).with_name("values-cpu.yaml")
_TAG = "0.1.0"
_BUILT = {component: f"localhost/fovea/{component}:{_TAG}" for component in COMPONENTS}
_BUILT["sampler"] += "-cpu"
_START_S = 1200.0
_MODEL = "tiny"
_STEPS = 5


@dataclass(frozen=True)
class Installed:
    """A release with a gateway that this host can reach.

    Attributes:
        release: All four services.
        base_url: URL of the gateway's service.
        key: The key in its secret.
    """

    release: Release
    base_url: str
    key: str

    def service_client(self) -> tinker.ServiceClient:
        """Creates a client of the official SDK."""
        return tinker.ServiceClient(base_url=self.base_url, api_key=self.key)

    def settled(self, samplers: int) -> None:
        """Waits until the gateway knows exactly this number of samplers and sends requests to all."""
        (pod,) = self.release.get("pods", "gateway")
        wait_for_samplers(samplers, f"http://{pod['status']['podIP']}:9090/metrics", _START_S)

    def kubectl(self, *arguments: str) -> str:
        """Runs kubectl in the release's namespace."""
        return self.release.cluster.kubectl(*arguments, "-n", self.release.namespace)


@pytest.fixture(scope="module")
def installed(node: Node) -> Iterator[Installed]:
    """The chart, installed with one sampler; the last test uninstalls it."""
    _load_images(node)
    with fresh_namespace(node.cluster) as namespace:
        _claim_model(node, namespace)
        release = Release(node.cluster, namespace, "vision", ("--values", str(_VALUES)), _START_S)
        release.install()
        (service,) = release.get("services", "gateway")
        (secret,) = release.get("secrets")
        (key,) = json.loads(base64.b64decode(secret["data"]["api-keys"]))
        yield Installed(release, f"http://{service['spec']['clusterIP']}:8000", key)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Prompts with one image each."""
    return image_prompts(8)


@pytest.fixture(scope="module")
def service(installed: Installed) -> tinker.ServiceClient:
    """The official SDK. The last test closes it, because closing it without a server would retry for minutes."""
    return installed.service_client()


@pytest.fixture(scope="module")
def sampling(service: tinker.ServiceClient, prompts: list[Prompt]) -> tinker.SamplingClient:
    """Samples from an adapter with other answers than the base model."""
    training = service.create_lora_training_client(base_model=_MODEL, rank=8).result()
    for _ in range(_STEPS):
        output = take_step(training, [prompt.datum() for prompt in prompts], 1e-2)
        assert math.isfinite(output.metrics["loss:sum"])
    trained = training.save_weights_and_get_sampling_client().result()
    base = service.create_sampling_client(base_model=_MODEL).result()
    asked = [prompt.model_input for prompt in prompts]
    assert [greedy(trained, prompt) for prompt in asked] != [greedy(base, prompt) for prompt in asked]
    return trained


def test_an_image_is_sampled(service: tinker.ServiceClient, prompts: list[Prompt]) -> None:
    """Through the gateway, a renderer and vLLM, each in its own pod."""
    base = service.create_sampling_client(base_model=_MODEL).result()
    assert greedy(base, prompts[0].model_input)


def test_samplers_scale_under_load(
    installed: Installed, sampling: tinker.SamplingClient, prompts: list[Prompt]
) -> None:
    """A second pod joins with the trained adapter and leaves: every answer arrives, equal to the one before."""
    expected = {(number, greedy(sampling, prompt.model_input)) for number, prompt in enumerate(prompts)}
    with Load(sampling, [prompt.model_input for prompt in prompts]).running() as load:
        installed.kubectl("scale", "statefulset/vision-fovea-sampler", "--replicas=2")
        installed.settled(2)
        load.wait(100)
        installed.kubectl("scale", "statefulset/vision-fovea-sampler", "--replicas=1")
        installed.settled(1)
        load.wait(50)
    assert load.failures == []
    assert set(load.answers) == expected
    print(f"1 to 2 to 1 pods: {len(load.answers)} answers, 0 failed")


def test_a_deleted_sampler_is_replaced(
    installed: Installed, sampling: tinker.SamplingClient, prompts: list[Prompt]
) -> None:
    """The only sampler, under load: requests wait for the next pod, which gets the adapter."""
    before = installed.release.pods("sampler")
    expected = {(number, greedy(sampling, prompt.model_input)) for number, prompt in enumerate(prompts)}
    with Load(sampling, [prompt.model_input for prompt in prompts]).running() as load:
        load.wait(50)
        installed.kubectl("delete", "pod", "vision-fovea-sampler-0")
        wait_for("another pod", lambda: not before & installed.release.pods("sampler"))
        installed.settled(1)
        load.wait(50)
    assert load.failures == []
    assert set(load.answers) == expected


def test_the_gateway_is_restarted(installed: Installed, sampling: tinker.SamplingClient, prompts: list[Prompt]) -> None:
    """Under load. With SQLite it is down in between: the next pod gets its volume, and the SDK
    repeats broken requests.
    """
    before = installed.release.pods("gateway")
    expected = {(number, greedy(sampling, prompt.model_input)) for number, prompt in enumerate(prompts)}
    with Load(sampling, [prompt.model_input for prompt in prompts]).running() as load:
        load.wait(50)
        installed.kubectl("rollout", "restart", "deployment/vision-fovea-gateway")
        installed.kubectl("rollout", "status", "deployment/vision-fovea-gateway", f"--timeout={_START_S:.0f}s")
        installed.settled(1)
        load.wait(50)
    assert not before & installed.release.pods("gateway")
    assert load.failures == []
    assert set(load.answers) == expected
    print(f"gateway restarted: {len(load.answers)} answers, 0 failed")


def test_it_ends_in_peace(installed: Installed, service: tinker.ServiceClient) -> None:
    """After uninstalling, every container exits in time with status 0; none was restarted before."""
    service.close("success")
    assert _statuses(installed, lambda status: status["restartCount"]) == dict.fromkeys(COMPONENTS, 0)
    names = installed.kubectl("get", "pods", "-o", "name").split()
    for name in names:  # otherwise an ended pod and its exit status disappear at once
        installed.kubectl("patch", name, "--type=merge", "-p", '{"metadata": {"finalizers": ["fovea.test/seen"]}}')
    installed.release.uninstall()
    done = dict.fromkeys(COMPONENTS, 0)
    wait_for("all have ended", lambda: _statuses(installed, _exit_code).keys() == done.keys())
    found = _statuses(installed, _exit_code)
    for name in names:
        installed.kubectl("patch", name, "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
    assert found == done


def _statuses(installed: Installed, fact: Callable[[Object], int | None]) -> dict[str, int]:
    """Returns one field of each component's container, for containers that exist."""
    statuses = [pod["status"]["containerStatuses"][0] for pod in installed.release.get("pods")]
    return {status["name"]: known for status in statuses if (known := fact(status)) is not None}


def _exit_code(status: Object) -> int | None:
    ended = status["state"].get("terminated")
    return int(ended["exitCode"]) if ended else None


def _load_images(node: Node) -> None:
    if not shutil.which("podman"):
        pytest.skip("no images: podman is not installed")
    for image in _BUILT.values():
        if subprocess.run(["podman", "image", "exists", image]).returncode:
            pytest.skip(f"no image {image}: python -m deploy.images build makes it")
    for component, image in _BUILT.items():
        node.load("podman", "save", image)
        wanted = f"localhost/fovea/{component}:{_TAG}"
        if image != wanted:
            node.tag(image, wanted)


def _claim_model(node: Node, namespace: str) -> None:
    """A claim `model`, with the tiny model in the folder of its volume."""
    claim: Object = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "model", "namespace": namespace},
        "spec": {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    node.cluster.apply(claim)
    wait_for("the claim is bound", lambda: get(node.cluster, namespace, "pvc")[0]["status"]["phase"] == "Bound")
    (bound,) = get(node.cluster, namespace, "pvc")
    volume = json.loads(node.cluster.kubectl("get", f"pv/{bound['spec']['volumeName']}", "-o", "json"))
    shutil.copytree(fovea_tinyvlm.ensure(), Path(volume["spec"]["hostPath"]["path"]) / _MODEL)
