"""The chart's network policies, enforced by Cilium: allowed connections by source, target and port. Pods of busybox
have its labels.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import yaml

from deploy.cluster.image import IMAGE
from deploy.cluster.machine import HOST_ADDRESS
from deploy.cluster.node import Node
from tests.k8s.cluster import CHART, WAIT_S, Object, fresh_namespace, get, wait_for
from tests.unit.deploy.chart import pods

_METRICS, _CHOSEN = 9090, 40961
_PORTS = (8000, 50050, 50051, 50052, 50053, _METRICS, _CHOSEN)
"""The chart's ports, and one such as NCCL chooses. Every pod listens on all of them."""

_NAME = "vision"
_COMPONENTS = {
    "gateway": "gateway",
    "renderer": "renderer",
    "sampler": "sampler",
    "sampler-1": "sampler",
    "trainer": "trainers",
    "trainer-worker": "trainers",
}
"""Pods of the release, with the suffix of the name of their workload."""

_ENGINES = {"sampler", "sampler-1", "trainer", "trainer-worker"}
_OTHERS = {"client", "other-release", "elsewhere"}
_PODS = {*_COMPONENTS, *_OTHERS}
_SERVE = f"for port in {' '.join(map(str, _PORTS))}; do httpd -p $port -h /tmp; done; exec tail -f /dev/null"

Connection = tuple[str, str, int]
"""Source, target, port."""


@dataclass(frozen=True)
class Network:
    """Listening pods, and the sources that try to reach them.

    Attributes:
        node: The node that runs them.
        namespaces: The namespace of each pod.
        addresses: The address of each pod.
    """

    node: Node
    namespaces: Mapping[str, str]
    addresses: Mapping[str, str]

    @contextmanager
    def policies(self, *values: str) -> Iterator[None]:
        """Applies the chart's policies, with `values` as arguments of Helm."""
        namespace = self.namespaces["gateway"]
        rendered = [item for item in _rendered(self.node, *values) if item["kind"] == "NetworkPolicy"]
        self.node.cluster.apply(*(_placed(policy, namespace) for policy in rendered))
        try:
            yield
        finally:
            self.node.cluster.kubectl("delete", "networkpolicies", "--all", "-n", namespace)

    def run(self, source: str, script: str) -> str:
        """Runs a shell script in a pod, on the node, or outside of it on this machine; returns its output."""
        shell = ("sh", "-c", script)
        if source == "outside":
            return subprocess.check_output(shell, text=True)
        if source == "node":
            return self.node.machine.run(*shell)
        return self.node.cluster.kubectl("exec", source, "-n", self.namespaces[source], "--", *shell)

    def comes_to(self, expected: Set[Connection]) -> None:
        """Waits until exactly these connections succeed, which takes a moment after policies change.

        All policies of one pod change at once, so allowed connections are tried after all others are refused.
        """
        refused = _connections(lambda *_: True) - expected
        missing = expected
        deadline = time.monotonic() + WAIT_S
        while (made := self._made(refused)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert made == set(), "these succeed but should be refused"
        while (missing := missing - self._made(missing)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert missing == set(), "these should succeed"
        assert self._made(refused) == set()

    def all_ready(self) -> bool:
        """Returns whether the kubelet's last probe of every pod succeeded."""
        pods = [pod for namespace in {*self.namespaces.values()} for pod in get(self.node.cluster, namespace, "pods")]
        conditions = [condition for pod in pods for condition in pod["status"].get("conditions", [])]
        ready = [condition["status"] for condition in conditions if condition["type"] == "Ready"]
        return ready == ["True"] * len(self.namespaces)

    def _made(self, tried: Set[Connection]) -> set[Connection]:
        """Returns the connections that succeed, of some that are tried concurrently."""
        sources = {source for source, _, _ in tried}
        scripts = {source: self._script({(to, port) for who, to, port in tried if who == source}) for source in sources}
        with ThreadPoolExecutor(len(scripts) + 1) as pool:
            said = zip(scripts, pool.map(self.run, scripts, scripts.values()), strict=True)
        words = [(source, *line.split()) for source, lines in said for line in lines.splitlines()]
        return {(source, target, int(port)) for source, target, port in words}

    def _script(self, tried: Set[tuple[str, int]]) -> str:
        """Returns a script that prints the connections that succeed."""
        tries = (
            f'(busybox nc -w 5 {self.addresses[to]} {port} </dev/null >/dev/null 2>&1 && echo "{to} {port}") &'
            for to, port in tried
        )
        return "\n".join((*tries, "wait"))


@pytest.fixture(scope="module")
def network(node: Node) -> Iterator[Network]:
    """The pods without policies."""
    templates = pods(_rendered(node))
    labels = {pod: templates[f"{_NAME}-fovea-{suffix}"]["metadata"]["labels"] for pod, suffix in _COMPONENTS.items()}
    labels["client"] = {"app": "client"}
    labels["other-release"] = labels["sampler"] | {"app.kubernetes.io/instance": "other"}
    labels["elsewhere"] = labels["trainer"]
    with fresh_namespace(node.cluster) as namespace, fresh_namespace(node.cluster) as other:
        namespaces = dict.fromkeys(labels, namespace) | {"elsewhere": other}
        node.cluster.apply(*(_placed(_pod(pod, labels[pod]), namespaces[pod]) for pod in labels))
        wait_for("every pod is ready", Network(node, namespaces, {}).all_ready)
        found = [pod for place in (namespace, other) for pod in get(node.cluster, place, "pods")]
        yield Network(node, namespaces, {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in found})


def test_only_the_gateway_is_reached_from_outside(network: Network) -> None:
    """Every other pod may read metrics, and engines may connect to each other on every port. Without policies all
    connections are allowed.

    Probes reach every pod; pods connect to the API server and resolve names.
    """
    network.comes_to(_connections(lambda *_: True))
    slices = ("get", "endpointslices", "-n", "default", "-l", "kubernetes.io/service-name=kubernetes")
    # The API server of this cluster has a random port, and the policy applies to that port, not to its service's.
    api_port = int(network.node.cluster.kubectl(*slices, "-o", "jsonpath={.items[0].ports[0].port}"))
    rules = [{"ports": [{"port": 443}, {"port": api_port}]}]
    with network.policies(f"--set-json=networkPolicy.egress.rules={json.dumps(rules)}"):
        network.comes_to(_documented(clients={*_PODS, "outside"}, readers=_PODS))
        assert network.all_ready()
        for source in _PODS:
            assert "198.19.7.1" in network.run(source, "nslookup -type=a kubernetes.default.svc.cluster.local")
            said = network.run(source, "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc kubernetes.default 443")
            assert "HTTP request to an HTTPS server" in said
    network.comes_to(_connections(lambda *_: True))


def test_values_select_clients_of_the_gateway_and_readers_of_metrics(network: Network) -> None:
    """By labels, address or namespace, as in the peers of a policy."""
    clients = [{"podSelector": {"matchLabels": {"app": "client"}}}, {"ipBlock": {"cidr": f"{HOST_ADDRESS}/32"}}]
    place = {"kubernetes.io/metadata.name": network.namespaces["elsewhere"]}
    monitoring = [{"namespaceSelector": {"matchLabels": place}}]
    values = json.dumps({"clients": clients, "monitoring": monitoring})
    with network.policies(f"--set-json=networkPolicy={values}"):
        network.comes_to(_documented(clients={"client", "outside"}, readers={"elsewhere"}))


def test_they_can_be_left_out(node: Node) -> None:
    """For clusters with their own rules."""
    kinds = {item["kind"] for item in _rendered(node, "--set=networkPolicy.enabled=false")}
    assert "StatefulSet" in kinds
    assert "NetworkPolicy" not in kinds


def _documented(clients: Set[str], readers: Set[str]) -> set[Connection]:
    """Returns the connections that docs/guides/operations.md documents, for the given clients and
    readers of metrics.
    """
    callers: dict[tuple[str, int], Set[str]] = {
        ("gateway", 8000): clients,
        ("gateway", 50050): clients,
        ("renderer", 50051): {"gateway", *_ENGINES},
        ("sampler", 50052): {"gateway"},
        ("sampler-1", 50052): {"gateway"},
        ("trainer", 50053): {"gateway"},
        ("trainer-worker", 50053): {"gateway"},
    }

    def is_allowed(source: str, target: str, port: int) -> bool:
        if source in _COMPONENTS:  # its own policy only allows connections to the release
            own_calls = port in (50051, 50052, 50053) and source in callers.get((target, port), ())
            return {source, target} <= _ENGINES or own_calls
        return (
            source == "node"  # the kubelet's probes come from there
            or target in _OTHERS
            or (port == _METRICS and source in readers)
            or source in callers.get((target, port), ())
        )

    return _connections(is_allowed)


def _connections(is_allowed: Callable[[str, str, int], bool]) -> set[Connection]:
    sources = (*_PODS, "outside", "node")
    everything = {(source, target, port) for source in sources for target in _PODS for port in _PORTS}
    return {connection for connection in everything if connection[0] != connection[1] and is_allowed(*connection)}


def _rendered(node: Node, *values: str) -> list[Object]:
    """Returns the chart's objects for two nodes, so that the trainer has a worker."""
    file = CHART / "values-two-nodes.yaml"
    text = node.cluster.helm("template", _NAME, str(CHART), f"--values={file}", *values)
    return [item for item in yaml.safe_load_all(text) if item]


def _placed(item: Object, namespace: str) -> Object:
    return {**item, "metadata": {**item["metadata"], "namespace": namespace}}


def _pod(name: str, labels: Mapping[str, str]) -> Object:
    probe = {"tcpSocket": {"port": _CHOSEN}, "periodSeconds": 1, "timeoutSeconds": 10, "failureThreshold": 1}
    container = {"name": "busybox", "image": IMAGE, "command": ["sh", "-c", _SERVE], "readinessProbe": probe}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }
