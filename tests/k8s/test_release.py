"""One release over its life: upgrade, rollback, drain, and the cluster rights of its gateway."""

import json
from collections.abc import Iterator

import pytest

from deploy.cluster.cluster import Cluster, CommandFailed
from fovea_gateway.replicas.discovery import KubernetesDiscovery
from tests.k8s.cluster import CHART, COMPONENTS, WAIT_S, Object, Release, fresh_namespace, get, wait_for
from tests.k8s.watching import configuration_of, watching

_VALUES = CHART / "values-eight-gpus.yaml"
_DRAIN = "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--grace-period=0"


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Iterator[Release]:
    """A node of 8 GPUs; four samplers."""
    with fresh_namespace(cluster) as namespace:
        release = Release(cluster, namespace, "vision", ("--values", str(_VALUES)))
        release.install()
        wait_for("the autoscaler starts its second renderer", lambda: len(release.pods("renderer")) == 2)
        yield release
        release.uninstall()


def test_upgrade_and_rollback_roll_only_what_changed(release: Release) -> None:
    """Equal values restart nothing and keep the key; a setting of the gateway restarts the gateway; a rollback undoes
    it.
    """
    pods = {component: release.pods(component) for component in COMPONENTS}
    templates, secrets = _templates(release), _secrets(release)

    release.upgrade()
    assert {component: release.pods(component) for component in COMPONENTS} == pods
    assert _secrets(release) == secrets

    release.upgrade("--set", "gateway.settings.max_pending=1234")
    assert '"1234"' in json.dumps(_templates(release)["gateway"])
    for component in COMPONENTS:
        assert (release.pods(component) == pods[component]) == (component != "gateway"), component

    release.rollback(1)
    assert _templates(release) == templates
    assert _secrets(release) == secrets
    for component in set(COMPONENTS) - {"gateway"}:
        assert release.pods(component) == pods[component], component


def test_scaling_samplers_changes_no_other_pod(release: Release) -> None:
    """One more sampler is one more pod."""
    pods = {component: release.pods(component) for component in COMPONENTS}
    release.upgrade("--set", "sampler.replicas=5")
    assert release.pods("sampler") > pods["sampler"]
    assert all(release.pods(component) == pods[component] for component in set(COMPONENTS) - {"sampler"})
    release.upgrade()
    wait_for("four samplers again", lambda: release.pods("sampler") == pods["sampler"])


def test_a_drain_moves_samplers_but_not_the_trainer(cluster: Cluster, release: Release) -> None:
    """The trainer's disruption budget refuses an eviction, which would lose unsaved work."""
    trainer = release.pods("trainer")
    node = release.get("pods", "trainer")[0]["spec"]["nodeName"]
    selector = f"--pod-selector=app.kubernetes.io/instance={release.name}"
    try:
        with pytest.raises(CommandFailed, match="violate the pod's disruption budget"):
            cluster.kubectl("drain", node, f"{selector},app.kubernetes.io/component=trainer", *_DRAIN, "--timeout=20s")
        cluster.kubectl(
            "drain", node, f"{selector},app.kubernetes.io/component=sampler", *_DRAIN, f"--timeout={WAIT_S}s"
        )
        wait_for(
            "four samplers run elsewhere",
            lambda: [pod["status"]["phase"] for pod in _elsewhere(release, node)] == ["Running"] * 4,
        )
    finally:
        cluster.kubectl("uncordon", node)
    assert release.pods("trainer") == trainer


def test_the_gateway_may_watch_endpoints_and_nothing_else(cluster: Cluster, release: Release) -> None:
    """Compared with a service account without rights. Pods of other components get no token at all."""
    nobody = _rights(cluster, release.namespace, "default")
    gateway = _rights(cluster, release.namespace, f"{release.fullname}-gateway")
    (line,) = gateway - nobody
    assert line.split()[0] == "endpointslices.discovery.k8s.io"
    assert line.endswith("[get list watch]")
    assert _rights(cluster, "default", f"{release.fullname}-gateway", release.namespace) == nobody
    for component in COMPONENTS:
        assert _rights(cluster, release.namespace, f"{release.fullname}-{component}") - nobody == (
            {line} if component == "gateway" else set()
        )
        mounts = [volume["name"] for pod in release.get("pods", component) for volume in pod["spec"]["volumes"]]
        assert any(name.startswith("kube-api-access") for name in mounts) == (component == "gateway"), component


def test_network_policies_select_each_component(cluster: Cluster, release: Release) -> None:
    """Every pod has a policy. kwok carries no packets; enforcing policies is the network plugin's part."""
    covered: set[str] = set()
    policies = release.get("networkpolicies")
    for policy in policies:
        labels = ",".join(f"{name}={value}" for name, value in policy["spec"]["podSelector"]["matchLabels"].items())
        selected = {pod["metadata"]["name"] for pod in get(cluster, release.namespace, "pods", labels)}
        assert selected, policy["metadata"]["name"]
        covered |= selected
    assert covered == {pod["metadata"]["name"] for pod in release.get("pods")}


async def test_the_gateway_sees_samplers_join_and_leave(cluster: Cluster, release: Release) -> None:
    """With its own service account's token and the address from the chart: 4, 6, 1, 4 samplers."""
    (deployment,) = release.get("deployments", "gateway")
    environment = {item["name"]: item.get("value", "") for item in _containers(deployment)[0]["env"]}
    assert environment["FOVEA_GATEWAY_DISCOVERY"] == "kubernetes"
    (address,) = json.loads(environment["FOVEA_GATEWAY_SAMPLER"])
    configuration = configuration_of(cluster, release.namespace, f"{release.fullname}-gateway")
    async with watching(KubernetesDiscovery(address, release.namespace, configuration)) as seen:
        for count in (4, 6, 1, 4):
            scale = f"--replicas={count}"
            cluster.kubectl("scale", f"statefulset/{release.fullname}-sampler", scale, "-n", release.namespace)
            await seen.until(lambda addresses, count=count: len(addresses) == count)
            assert seen.last <= {f"{pod['status']['podIP']}:50052" for pod in release.get("pods", "sampler")}


def _templates(release: Release) -> dict[str, Object]:
    """Returns the pod template of each component."""
    owners = release.get("deployments,statefulsets")
    return {item["metadata"]["labels"]["app.kubernetes.io/component"]: item["spec"]["template"] for item in owners}


def _secrets(release: Release) -> dict[str, Object]:
    return {item["metadata"]["name"]: item["data"] for item in release.get("secrets")}


def _containers(owner: Object) -> list[Object]:
    return list(owner["spec"]["template"]["spec"]["containers"])


def _elsewhere(release: Release, node: str) -> list[Object]:
    return [pod for pod in release.get("pods", "sampler") if pod["spec"].get("nodeName") != node]


def _rights(cluster: Cluster, namespace: str, account: str, account_namespace: str = "") -> set[str]:
    """Returns a service account's rights in a namespace, one line per resource, as the API server reports them."""
    user = f"--as=system:serviceaccount:{account_namespace or namespace}:{account}"
    lines = cluster.kubectl("auth", "can-i", "--list", "--no-headers", "-n", namespace, user).splitlines()
    return {" ".join(line.split()) for line in lines}
