"""A control plane on 127.0.0.1 (etcd, API server with RBAC, controllers, scheduler) whose nodes kwok simulates."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from deploy.cluster.objects import base_objects
from deploy.cluster.tools import BIN, DEFINITIONS

_NAME = "fovea"
_READY_S = 300
_PATIENCE = (f"--timeout={_READY_S}s", f"--wait={_READY_S}s")
_SCHEDULER = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    # The second name is the one that scheduler-plugins' Helm chart gives its scheduler. Here it places pods one by one.
    "profiles": [{"schedulerName": "default-scheduler"}, {"schedulerName": "scheduler-plugins-scheduler"}],
    "leaderElection": {"leaderElect": False},
}


class CommandFailed(Exception):
    """A command against the cluster failed; the message has the command and what it said."""


class Cluster:
    """A running control plane, by its kubeconfig; every command acts as cluster-admin."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self._state = folder / "clusters" / _NAME

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """The standard output of kubectl.

        Raises:
            CommandFailed: it ended with an error.
        """
        return self._run("kubectl", *arguments, stdin=stdin)

    def helm(self, *arguments: str) -> str:
        """The standard output of helm.

        Raises:
            CommandFailed: it ended with an error.
        """
        return self._run("helm", *arguments)

    def apply(self, *objects: object) -> None:
        """Creates or changes objects, given as dictionaries."""
        self.kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(item) for item in objects))

    def logs(self, last_lines: int = 40) -> str:
        """The end of every component's log."""
        files = sorted((self._state / "logs").glob("*.log"))
        tails = (file.read_text(errors="replace").splitlines()[-last_lines:] for file in files)
        return "\n".join(f"== {file.name}\n" + "\n".join(tail) for file, tail in zip(files, tails, strict=True))

    def start(self) -> None:
        """Starts the five processes on free ports and waits until they answer.

        Raises:
            CommandFailed: a process did not come up; the message ends with their logs.
        """
        config, scheduler = self.folder / "kwokctl.json", self.folder / "scheduler.json"
        config.write_text(json.dumps(_configuration(scheduler)))
        scheduler.write_text(json.dumps(_SCHEDULER))
        try:
            self._kwokctl("create", "cluster", *_PATIENCE, f"--config={config}", f"--kubeconfig={self.kubeconfig}")
            self.kubectl("apply", "--server-side", "-f", str(DEFINITIONS))
            self.apply(*base_objects())
            self.kubectl("wait", "crd", "--all", "--for=condition=Established", f"--timeout={_READY_S}s")
            self.kubectl("wait", "node", "--all", "--for=condition=Ready", f"--timeout={_READY_S}s")
        except CommandFailed as failure:
            raise CommandFailed(f"{failure}\n{self.logs()}") from None

    def restart(self, component: str) -> None:
        """Ends one of the processes, such as kube-apiserver, starts it again and returns once it is ready."""
        process = psutil.Process(int((self._state / "pids" / f"{component}.pid").read_text()))
        process.terminate()
        process.wait(_READY_S)
        self._kwokctl("start", "cluster", *_PATIENCE)

    def stop(self) -> None:
        """Ends the processes and forgets what they kept; the folder's owner removes the rest."""
        self._kwokctl("delete", "cluster", f"--kubeconfig={self.kubeconfig}")

    def _kwokctl(self, *arguments: str) -> None:
        self._run("kwokctl", f"--name={_NAME}", *arguments)

    def _run(self, tool: str, *arguments: str, stdin: str | None = None) -> str:
        # Helm and kwokctl keep caches and state under these; nothing of the user's own is read or written.
        own = {
            "KUBECONFIG": str(self.kubeconfig),
            "KWOK_WORKDIR": str(self.folder),
            "HELM_CACHE_HOME": str(self.folder / "helm"),
            "HELM_CONFIG_HOME": str(self.folder / "helm"),
            "HELM_DATA_HOME": str(self.folder / "helm"),
        }
        done = subprocess.run(
            [str(BIN / tool), *arguments], env=os.environ | own, input=stdin, capture_output=True, text=True
        )
        if done.returncode:
            raise CommandFailed(
                f"{tool} {' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster in `folder` (made if need be), ended whatever happens inside."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _configuration(scheduler: Path) -> dict[str, object]:
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
            "bindAddress": "127.0.0.1",
            "kubeAuthorization": True,
            "kubeAdmission": True,
            "disableQPSLimits": True,
            "kubeSchedulerConfig": str(scheduler),
            "components": ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok-controller"],
            **{option: str(BIN / name) for option, name in binaries.items()},
        },
    }
