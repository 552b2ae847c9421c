"""The controllers of LeaderWorkerSets and of Kueue, as processes beside the control plane of a simulated cluster."""

import base64
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from deploy.cluster.cluster import Cluster, CommandFailed
from deploy.cluster.tools import BIN, CHARTS
from fovea.runtime.hosts import free_ports

_READY_S = 120
_LOCAL = "127.0.0.1"
_LEFT_OUT = {"Deployment", "ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "APIService"}
"""Kinds of the controllers' charts that a process with the rights of cluster-admin does not need."""

_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"lws": ("--zap-log-level=info",), "kueue": ("--zap-log-level=2", "--feature-gates=VisibilityOnDemand=false")}
)
_PROBES: Mapping[str, dict[str, Any]] = {
    "lws": {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "spec": {
            "leaderWorkerTemplate": {
                "size": 1,
                "workerTemplate": {"spec": {"containers": [{"name": "none", "image": "none"}]}},
            }
        },
    },
    "kueue": {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor"},
}
"""Objects that the API server accepts only once a controller's webhook answers."""


@contextmanager
def running_controllers(cluster: Cluster) -> Iterator[None]:
    """Installs both controllers' charts and runs their programs until the end.

    Raises:
        CommandFailed: A chart was refused, or a program does not answer. The message ends with the program's log.
    """
    with ExitStack() as stack:
        for name in _OPTIONS:
            stack.enter_context(_running(cluster, name))
        yield


@contextmanager
def _running(cluster: Cluster, name: str) -> Iterator[None]:
    folder = cluster.folder / name
    folder.mkdir()
    webhook, health = free_ports(2)
    objects = _objects(cluster, name, webhook)
    (configuration,) = [item["data"] for item in objects if item["kind"] == "ConfigMap"]
    config = yaml.safe_load(configuration["controller_manager_config.yaml"]) | {
        "webhook": {"host": _LOCAL, "port": webhook, "certDir": str(folder / "certificates")},
        "health": {"healthProbeBindAddress": f"{_LOCAL}:{health}"},
        "metrics": {"bindAddress": "0"},
        "leaderElection": {"leaderElect": False},
    }
    (folder / "config.json").write_text(json.dumps(config))
    _install(cluster, name, objects)
    command = [str(BIN / name), f"--config={folder / 'config.json'}", f"--kubeconfig={cluster.kubeconfig}"]
    with (cluster.log_folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*command, *_OPTIONS[name]], stdout=log, stderr=log)
    try:
        _wait_for_webhook(cluster, name, process, folder / "certificates")
        yield
    finally:
        process.terminate()
        process.wait(60)


def _objects(cluster: Cluster, name: str, port: int) -> list[dict[str, Any]]:
    """Renders a controller's chart, with its webhook at a port of this machine."""
    text = cluster.helm("template", name, str(CHARTS / name), f"--namespace={name}-system", "--include-crds")
    objects = [item for item in yaml.safe_load_all(text) if item and item["kind"] not in _LEFT_OUT]
    for item in objects:
        if item["kind"] == "Service":
            item["spec"] = {"type": "ExternalName", "externalName": "localhost"}
        conversion = item.get("spec", {}).get("conversion", {})
        for webhook in [*item.get("webhooks", ()), conversion.get("webhook", {})]:
            if service := webhook.get("clientConfig", {}).get("service"):
                service["port"] = port
    return objects


def _install(cluster: Cluster, name: str, objects: list[dict[str, Any]]) -> None:
    """Creates the objects of a controller; the webhooks refuse much until its program runs."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"{name}-system"}})
    for is_definition in (True, False):
        chosen = [item for item in objects if (item["kind"] == "CustomResourceDefinition") == is_definition]
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin="\n---\n".join(map(json.dumps, chosen)))
    cluster.kubectl("wait", "crd", "--all", "--for=condition=Established", f"--timeout={_READY_S}s")


def _wait_for_webhook(cluster: Cluster, name: str, process: "subprocess.Popen[bytes]", certificates: Path) -> None:
    """Returns once the webhook answers. Copies its certificate from its secret, as a kubelet does."""
    certificates.mkdir()
    probe = json.dumps(_PROBES[name] | {"metadata": {"name": "probe"}})
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            cluster.kubectl("create", "--dry-run=server", "-n", "default", "-f", "-", stdin=probe)
            return
        except CommandFailed as failure:
            secret = f"secret/{name}-webhook-server-cert"
            found = json.loads(cluster.kubectl("get", secret, f"--namespace={name}-system", "-o", "json"))
            for entry, text in found.get("data", {}).items():
                (certificates / entry).write_bytes(base64.b64decode(text))
            if process.poll() is not None or time.monotonic() > deadline:
                log: Path = cluster.log_folder / f"{name}.log"
                raise CommandFailed(f"{name} does not answer: {failure}\n{log.read_text()[-4000:]}") from None
        time.sleep(1)
