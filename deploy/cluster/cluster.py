"""A control plane (etcd, API server with RBAC, controllers, scheduler) on 127.0.0.1, with nodes simulated by kwok."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from deploy.cluster.objects import base_objects
from deploy.cluster.tools import BIN, DEFINITIONS

_NAME = "fovea"
_LOCAL = "127.0.0.1"
_READY_S = 300
_PATIENCE = (f"--timeout={_READY_S}s", f"--wait={_READY_S}s")
_SCHEDULER = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    "leaderElection": {"leaderElect": False},
}


class CommandFailed(Exception):
    """A command against the cluster failed. The message contains the command and its output."""


@dataclass(frozen=True)
class Placement:
    """Network location of the control plane's processes.

    Attributes:
        address: Address of the API server for nodes, pods and this host; not the default only inside a network
            namespace.
        inside: Prefix for commands that must run next to these processes.
        services: Address range of services.
    """

    address: str = _LOCAL
    inside: tuple[str, ...] = ()
    services: str = "10.0.0.0/24"


_HERE = Placement()


class Cluster:
    """A running control plane and its kubeconfig. Every command runs as cluster-admin."""

    def __init__(self, folder: Path, place: Placement) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.certificates = folder / "clusters" / _NAME / "pki"
        self._state = folder / "clusters" / _NAME
        self._place = place

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Runs kubectl and returns its standard output.

        Raises:
            CommandFailed: It ended with an error.
        """
        return self._run("kubectl", *arguments, stdin=stdin)

    def helm(self, *arguments: str) -> str:
        """Runs helm and returns its standard output.

        Raises:
            CommandFailed: It ended with an error.
        """
        return self._run("helm", *arguments)

    def apply(self, *objects: object) -> None:
        """Creates or updates objects, given as dictionaries."""
        self.kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(item) for item in objects))

    @property
    def log_folder(self) -> Path:
        """Returns the folder with a log of each process."""
        return self._state / "logs"

    def logs(self, last_lines: int = 40) -> str:
        """Returns the end of the log of every component."""
        files = sorted(self.log_folder.glob("*.log"))
        tails = (file.read_text(errors="replace").splitlines()[-last_lines:] for file in files)
        return "\n".join(f"== {file.name}\n" + "\n".join(tail) for file, tail in zip(files, tails, strict=True))

    def start(self, objects: Sequence[object]) -> None:
        """Starts the processes on free ports, waits for them, creates objects and waits for any nodes among them.

        Raises:
            CommandFailed: A process did not start. The message ends with the logs.
        """
        config, scheduler = self.folder / "kwokctl.json", self.folder / "scheduler.json"
        config.write_text(json.dumps(_configuration(scheduler, self._place, self.certificates)))
        scheduler.write_text(json.dumps(_SCHEDULER))
        try:
            self._kwokctl("create", "cluster", *_PATIENCE, f"--config={config}", f"--kubeconfig={self.kubeconfig}")
            self._point_at(self._place.address)
            self.kubectl("apply", "--server-side", "-f", str(DEFINITIONS))
            self.apply(*objects)
            self.kubectl("wait", "crd", "--all", "--for=condition=Established", f"--timeout={_READY_S}s")
            if "node/" in self.kubectl("get", "nodes", "-o", "name"):
                self.kubectl("wait", "node", "--all", "--for=condition=Ready", f"--timeout={_READY_S}s")
        except CommandFailed as failure:
            raise CommandFailed(f"{failure}\n{self.logs()}") from None

    def restart(self, component: str) -> None:
        """Restarts a process, such as kube-apiserver, and waits until it is ready."""
        process = (self._state / "pids" / f"{component}.pid").read_text()
        subprocess.run([*self._place.inside, "kill", process], check=True)
        deadline = time.monotonic() + _READY_S
        while subprocess.run([*self._place.inside, "kill", "-0", process], stderr=subprocess.DEVNULL).returncode == 0:
            if time.monotonic() > deadline:
                raise CommandFailed(f"{component} does not end")
            time.sleep(0.1)
        self._kwokctl("start", "cluster", *_PATIENCE)

    def stop(self) -> None:
        """Ends the processes and deletes their state. The owner of the folder removes the rest."""
        self._kwokctl("delete", "cluster", f"--kubeconfig={self.kubeconfig}")

    def _point_at(self, address: str) -> None:
        """Sets the server address in the kubeconfig: kwokctl assumes that clients run next to the API server."""
        config = json.loads(self.kubectl("config", "view", "-o", "json"))
        for entry in config["clusters"]:
            server = entry["cluster"]["server"].replace(_LOCAL, address)
            self.kubectl("config", "set", f"clusters.{entry['name']}.server", server)

    def _kwokctl(self, *arguments: str) -> None:
        self._run("kwokctl", f"--name={_NAME}", *arguments, inside=self._place.inside)

    def _run(self, tool: str, *arguments: str, stdin: str | None = None, inside: Sequence[str] = ()) -> str:
        # Helm and kwokctl store caches and state in these folders, so the user's own files are neither read nor
        # written.
        own = {
            "KUBECONFIG": str(self.kubeconfig),
            "KWOK_WORKDIR": str(self.folder),
            "HELM_CACHE_HOME": str(self.folder / "helm"),
            "HELM_CONFIG_HOME": str(self.folder / "helm"),
            "HELM_DATA_HOME": str(self.folder / "helm"),
        }
        done = subprocess.run(
            [*inside, str(BIN / tool), *arguments], env=os.environ | own, input=stdin, capture_output=True, text=True
        )
        if done.returncode:
            raise CommandFailed(
                f"{tool} {' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout


@contextmanager
def running_cluster(
    folder: Path, place: Placement = _HERE, objects: Sequence[object] = base_objects()
) -> Iterator[Cluster]:
    """Runs a cluster with objects in `folder`, which is created if needed. Always stops it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(folder, place)
    try:
        cluster.start(objects)
        yield cluster
    finally:
        cluster.stop()


def _configuration(scheduler: Path, place: Placement, certificates: Path) -> dict[str, object]:
    simulator = ["kwok-controller"] if place == _HERE else []  # kwok would simulate the real nodes too
    binaries = {
        "etcdBinary": "etcd",
        "kubeApiserverBinary": "kube-apiserver",
        "kubeControllerManagerBinary": "kube-controller-manager",
        "kubeSchedulerBinary": "kube-scheduler",
        "kwokControllerBinary": "kwok",
        "kubectlBinary": "kubectl",
    }
    return {
        "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
        "kind": "KwokctlConfiguration",
        "options": {
            "runtime": "binary",
            "bindAddress": _LOCAL if place.address == _LOCAL else "0.0.0.0",
            "kubeApiserverCertSANs": [place.address, _first(place.services)],
            "kubeAuthorization": True,
            "kubeAdmission": True,
            "disableQPSLimits": True,
            "kubeSchedulerConfig": str(scheduler),
            "components": ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", *simulator],
            **{option: str(BIN / name) for option, name in binaries.items()},
        },
        "componentsPatches": [] if place == _HERE else [_patch(place, certificates)],
    }


def _first(network: str) -> str:
    """Returns the address of the service `kubernetes`."""
    return str(next(IPv4Network(network).hosts()))


def _patch(place: Placement, certificates: Path) -> dict[str, object]:
    """Returns the options that an API server with real nodes needs."""
    arguments = {
        "advertise-address": place.address,
        "service-cluster-ip-range": place.services,
        # For logs and exec: how to reach a kubelet, and the certificate for it.
        "kubelet-preferred-address-types": "InternalIP",
        "kubelet-client-certificate": str(certificates / "admin.crt"),
        "kubelet-client-key": str(certificates / "admin.key"),
    }
    return {
        "name": "kube-apiserver",
        "extraArgs": [{"key": key, "value": value} for key, value in arguments.items()],
    }
