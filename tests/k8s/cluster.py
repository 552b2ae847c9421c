"""Helpers for a cluster, and one release of the chart."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from deploy.cluster.cluster import Cluster

CHART = Path(os.environ.get("FOVEA_CHART", Path(__file__).parents[2] / "deploy" / "helm" / "fovea"))
WAIT_S = 240
"""Time limit for actions that an idle machine completes in seconds."""

COMPONENTS = ("gateway", "renderer", "sampler", "trainer")

Object = dict[str, Any]


@contextmanager
def fresh_namespace(cluster: Cluster) -> Iterator[str]:
    """Creates a namespace and deletes it afterwards without waiting."""
    name = f"test-{uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    wait_for(
        "controllers have filled the namespace",
        lambda: bool(get(cluster, name, "serviceaccounts") and get(cluster, name, "configmaps")),
    )
    try:
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")


def get(cluster: Cluster, namespace: str, kinds: str, selector: str = "") -> list[Object]:
    """Returns objects of one or several kinds, as in "pods,services"."""
    items = json.loads(cluster.kubectl("get", kinds, "-n", namespace, "-l", selector, "-o", "json"))["items"]
    return list(items)


def wait_for(what: str, holds: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Waits until `holds()` is true; raises AssertionError with `what` after the time limit."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s still not: {what}"
        time.sleep(0.3)


@dataclass(frozen=True)
class Release:
    """One installation of the chart with one of its value sets.

    Attributes:
        cluster: The cluster.
        namespace: The release's own namespace.
        name: The name of the release.
        values: Arguments of every install and upgrade.
        patience_s: Time limit for Helm.
    """

    cluster: Cluster
    namespace: str
    name: str
    values: tuple[str, ...] = ()
    patience_s: float = WAIT_S

    def install(self, *arguments: str) -> str:
        """Installs, waits until everything is ready, and returns the notes that Helm prints."""
        return self._helm("install", str(CHART), *self.values, "--wait", *arguments)

    def upgrade(self, *arguments: str) -> None:
        """Upgrades and waits."""
        self._helm("upgrade", str(CHART), *self.values, "--wait", *arguments)

    def rollback(self, revision: int) -> None:
        """Rolls back to a revision and waits."""
        self._helm("rollback", str(revision), "--wait")

    def uninstall(self) -> None:
        """Uninstalls the release; the chart keeps some objects."""
        self._helm("uninstall", "--wait")

    def get(self, kinds: str, component: str = "") -> list[Object]:
        """Returns objects of the release, or of one of its components."""
        selector = f"app.kubernetes.io/instance={self.name}"
        return get(
            self.cluster,
            self.namespace,
            kinds,
            f"{selector},app.kubernetes.io/component={component}" if component else selector,
        )

    @property
    def fullname(self) -> str:
        """Prefix of the names of the release's objects."""
        return self.name if "fovea" in self.name else f"{self.name}-fovea"

    def pods(self, component: str) -> set[str]:
        """Returns the unique ids of a component's pods."""
        return {pod["metadata"]["uid"] for pod in self.get("pods", component)}

    def _helm(self, verb: str, *arguments: str) -> str:
        return self.cluster.helm(verb, self.name, *arguments, "-n", self.namespace, f"--timeout={self.patience_s:.0f}s")


def ready_addresses(cluster: Cluster, namespace: str, service: str) -> set[str]:
    """Returns the ready endpoints in a service's EndpointSlices."""
    slices = get(cluster, namespace, "endpointslices", f"kubernetes.io/service-name={service}")
    endpoints = [endpoint for found in slices for endpoint in found.get("endpoints") or []]
    return {endpoint["addresses"][0] for endpoint in endpoints if endpoint["conditions"].get("ready")}
