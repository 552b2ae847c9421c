"""Every value set of the chart, from `helm install` to `helm uninstall`."""

from functools import partial
from pathlib import Path

import pytest

from deploy.cluster.cluster import Cluster, CommandFailed
from tests.k8s.cluster import CHART, COMPONENTS, Object, Release, get, ready_addresses, wait_for
from tests.k8s.queues import queue

VALUE_SETS = sorted(CHART.glob("values-*.yaml"))
_KEEP = ("helm.sh/resource-policy", "keep")
_OPTIONAL = (
    "gateway.ingress.enabled=true",
    "gateway.ingress.host=fovea.example.com",
    "gateway.grpcRoute.enabled=true",
    "gateway.grpcRoute.gateway=public",
    "monitoring.podMonitor.enabled=true",
    "monitoring.alerts.prometheusRule=true",
)


def test_there_are_value_sets() -> None:
    """Otherwise the tests below would pass without a chart."""
    assert VALUE_SETS


@pytest.mark.parametrize("values", VALUE_SETS, ids=lambda path: path.stem)
def test_a_value_set_installs_and_leaves(cluster: Cluster, namespace: str, values: Path) -> None:
    """All objects are accepted, and all pods run and are endpoints; afterwards only the objects that the chart keeps
    remain.
    """
    prepare(cluster, namespace)
    before = _names(cluster, namespace)
    release = Release(cluster, namespace, "vision", ("--values", str(values)))

    notes = release.install()
    assert "export TINKER_BASE_URL" in notes
    for component in COMPONENTS:
        wait_for(f"all pods of the {component} run and are endpoints", partial(_serves, release, component))
    claims = get(cluster, namespace, "persistentvolumeclaims")
    assert all(claim["status"]["phase"] == "Bound" for claim in claims)
    kept = {
        _name(item) for item in release.get("all,secrets,configmaps,pvc") if _annotation(item, _KEEP[0]) == _KEEP[1]
    }

    release.uninstall()
    wait_for("nothing but what is kept is left", lambda: _names(cluster, namespace) - before == kept)
    release.install()
    assert {claim["metadata"]["uid"] for claim in get(cluster, namespace, "pvc")} == {
        claim["metadata"]["uid"] for claim in claims
    }, "a second install must reuse the old claims"
    release.uninstall()


def test_optional_objects_are_accepted(cluster: Cluster, namespace: str) -> None:
    """Ingress, GRPCRoute, PodMonitor and PrometheusRule, checked by their own definitions."""
    release = Release(cluster, namespace, "vision", tuple(f"--set={value}" for value in _OPTIONAL))
    release.install("--wait=false")
    kinds = {item["kind"] for item in release.get("ingresses,grpcroutes,podmonitors,prometheusrules")}
    assert kinds == {"Ingress", "GRPCRoute", "PodMonitor", "PrometheusRule"}
    release.uninstall()


def test_a_typo_is_refused_by_name(cluster: Cluster, namespace: str) -> None:
    """The refusal names the typo, before anything is created."""
    before = _names(cluster, namespace)
    with pytest.raises(CommandFailed, match="replcas"):
        Release(cluster, namespace, "vision", ("--set", "sampler.replcas=2")).install()
    assert _names(cluster, namespace) == before


def prepare(cluster: Cluster, namespace: str) -> None:
    """Creates the objects that the value sets require first: secrets and a queue."""
    secrets = {
        "fovea-database": "url=postgresql+psycopg://fovea:secret@db/fovea",
        "fovea-bucket": "AWS_ACCESS_KEY_ID=none",
        "fovea-keys": 'api-keys=["admin=tml-key"]',
        "fovea-services": "service-secret=0123456789012345678901234567890123456789",
    }
    for name, entry in secrets.items():
        cluster.kubectl("create", "secret", "generic", name, f"--from-literal={entry}", "-n", namespace)
    cluster.apply(*queue(namespace, "fovea", gpus=16))


def _serves(release: Release, component: str) -> bool:
    """Returns whether all pods of a component run and are ready. Helm does not wait for a LeaderWorkerSet."""
    pods = release.get("pods", component)
    if not pods or any(pod["status"]["phase"] != "Running" for pod in pods):
        return False
    endpoints = ready_addresses(release.cluster, release.namespace, f"{release.fullname}-{component}")
    return endpoints == {pod["status"]["podIP"] for pod in pods}


def _names(cluster: Cluster, namespace: str) -> set[str]:
    """Returns kind and name of all objects in a namespace, except those that controllers create."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    wanted = [kind for kind in kinds if not kind.startswith("events") and not kind.endswith("metrics.k8s.io")]
    found = get(cluster, namespace, ",".join(wanted))
    return {_name(item) for item in found}


def _name(item: Object) -> str:
    return f"{item['kind']}/{item['metadata']['name']}"


def _annotation(item: Object, name: str) -> str:
    return str(item["metadata"].get("annotations", {}).get(name, ""))
