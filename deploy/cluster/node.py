"""A cluster with one real node: kubelet, containerd, runc, kube-proxy, CoreDNS and Cilium, in a machine of its own."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from deploy.cluster.cluster import Cluster, CommandFailed, Placement, running_cluster
from deploy.cluster.image import IMAGE, write_image
from deploy.cluster.machine import ADDRESS, CNI, PODS, SERVICES, Machine, running_machine
from deploy.cluster.objects import volumes
from deploy.cluster.tools import BIN, CILIUM

NAME = "real-0"
_READY_S = 300
_SOCKET = "/run/containerd/containerd.sock"
CONTAINERD = f"--address={_SOCKET}", "--namespace=k8s.io"
"""Arguments with which `ctr` finds the node's images and containers."""


class Node:
    """A node and its cluster.

    Attributes:
        cluster: The cluster. This host can reach the addresses of its pods and services.
        machine: The machine in which the node's processes and containers run.
    """

    def __init__(self, cluster: Cluster, machine: Machine) -> None:
        self.cluster = cluster
        self.machine = machine
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def load(self, *command: str) -> None:
        """Loads the image of an OCI or Docker archive that a command on this host writes to its standard output.

        Images are never pulled.

        Raises:
            CommandFailed: The archive does not exist or containerd rejects it; the message contains the reason.
        """
        with subprocess.Popen(command, stdout=subprocess.PIPE) as archive:
            # Store the layers only unpacked, because these images take gigabytes.
            self._ctr("images", "import", "--local", "--discard-unpacked-layers", "-", stdin=archive.stdout)
        if archive.returncode:
            raise CommandFailed(f"{' '.join(command)}: exit status {archive.returncode}")

    def tag(self, image: str, name: str) -> None:
        """Adds a name to an image of the node."""
        self._ctr("images", "tag", image, name)

    def kill(self, container: str) -> None:
        """Kills the first process of a container, as if it had crashed. The id is the one in the pod's status."""
        self._ctr("tasks", "kill", "--signal=SIGKILL", container.removeprefix("containerd://"))

    def logs(self, last_lines: int = 20) -> str:
        """Returns the end of the log of every process of the node and the control plane."""
        return f"{tails(self.machine.folder / 'log', last_lines)}\n{self.cluster.logs(last_lines)}"

    def start(self) -> None:
        """Starts the node's processes. Waits until the node is ready and Cilium enforces network policies.

        Raises:
            CommandFailed: It does not become ready. The message ends with the logs.
        """
        files = _configure(self.machine, self.cluster)
        archive = self.machine.folder / "busybox.tar"
        write_image(archive)
        try:
            self._start("containerd", f"--config={files / 'containerd.toml'}")
            self._wait_until(lambda: self._succeeds("ctr", *CONTAINERD, "version"))
            self.load("cat", str(archive))
            config, kubeconfig = files / "kubelet.json", self.cluster.kubeconfig
            self._start(
                "kubelet",
                *(f"--config={config}", f"--kubeconfig={kubeconfig}"),
                *(f"--hostname-override={NAME}", f"--node-ip={ADDRESS}"),
            )
            self._start("kube-proxy", f"--config={files / 'kube-proxy.json'}")
            self._start("dns", f"-conf={files / 'Corefile'}")
            self._wait_until(lambda: _answers(f"http://{ADDRESS}:10256/healthz"))
            self._wait_until(lambda: _answers(f"http://{ADDRESS}:8181/ready"))
            self._wait_until(lambda: NAME in self.cluster.kubectl("get", "nodes"))
            self.cluster.kubectl("patch", "node", NAME, "--patch", json.dumps({"spec": {"podCIDR": PODS}}))
            self.cluster.kubectl("apply", "--server-side", "-f", str(CILIUM / "definitions"))
            self._start("cilium-agent", f"--config={files / 'cilium.json'}", K8S_NODE_NAME=NAME)
            self._wait_until(
                lambda: self._succeeds("busybox", "wget", "-q", "-O", "-", "http://127.0.0.1:9879/healthz")
            )
            self.cluster.kubectl("wait", f"node/{NAME}", "--for=condition=Ready", f"--timeout={_READY_S}s")
        except CommandFailed as failure:
            raise CommandFailed(f"{failure}\n{self.logs()}") from None

    def _start(self, *command: str, **environment: str) -> None:
        self._processes[command[0]] = self.machine.start(*command, **environment)

    def _ctr(self, *arguments: str, stdin: IO[bytes] | None = None) -> None:
        self.machine.run("ctr", *CONTAINERD, *arguments, stdin=stdin)

    def _succeeds(self, *command: str) -> bool:
        try:
            self.machine.run(*command)
        except CommandFailed:
            return False
        return True

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _READY_S
        while not holds():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise CommandFailed(f"{name} ended with status {process.returncode}")
            if time.monotonic() > deadline:
                raise CommandFailed(f"{', '.join(self._processes)} do not answer after {_READY_S} s")
            time.sleep(0.2)


@contextmanager
def running_node(folder: Path) -> Iterator[Node]:
    """Runs a cluster with one real node in `folder`, which is created if needed. Always ends all its containers.

    Raises:
        NoMachine: This host cannot run a node. The message says what is missing.
        CommandFailed: The control plane or the node did not start. The message ends with their logs.
    """
    with running_machine(folder / "machine") as machine:
        place = Placement(address=ADDRESS, inside=machine.command(), services=SERVICES)
        with running_cluster(folder / "cluster", place, _volumes(folder / "volumes")) as cluster:
            node = Node(cluster, machine)
            node.start()
            yield node


def _volumes(folder: Path) -> list[dict[str, object]]:
    """Returns volumes in folders writable by all users: the kubelet sets a pod's group only on volumes of drivers."""
    objects = volumes(folder)
    for item in objects:
        match item:
            case {"spec": {"hostPath": {"path": str(path)}}}:
                Path(path).mkdir(parents=True)
                Path(path).chmod(0o777)
    return objects


def _configure(machine: Machine, cluster: Cluster) -> Path:
    """Writes the configuration of every process and returns the folder."""
    files = machine.folder / "etc"
    files.mkdir()
    network = files / "cni"
    network.mkdir()
    (network / "cilium.conflist").write_text(json.dumps(_NETWORK))
    (files / "containerd.toml").write_text(_CONTAINERD.format(image=IMAGE, cni=CNI, bin=BIN, network=network))
    (files / "cilium.json").write_text(json.dumps(_cilium(cluster.kubeconfig)))
    (files / "Corefile").write_text(_COREFILE.format(address=ADDRESS, kubeconfig=cluster.kubeconfig))
    (files / "kubelet.json").write_text(json.dumps(_kubelet(machine.cgroup, cluster.certificates / "ca.crt")))
    (files / "kube-proxy.json").write_text(json.dumps(_proxy(cluster.kubeconfig)))
    return files


_CONTAINERD = """
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{image}'
[plugins.'io.containerd.cri.v1.runtime']
# The kubelet lowers the OOM score of sandbox containers, which is not allowed without CAP_SYS_RESOURCE.
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['{cni}', '{bin}']
conf_dir = '{network}'
"""

_NETWORK = {"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "cilium-cni"}]}

_COREFILE = """
.:53 {{
  bind {address}
  ready {address}:8181
  errors
  kubernetes cluster.local {{
    kubeconfig {kubeconfig}
    ttl 1
  }}
}}
"""


def _kubelet(cgroup: str, authority: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": ADDRESS,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(authority)},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "clusterDNS": [ADDRESS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{_SOCKET}",
        # The disk is the host's. A nearly full disk must not evict pods or delete images, which cannot be pulled again.
        "evictionHard": {"imagefs.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%"},
        "imageGCHighThresholdPercent": 100,
        "failCgroupV1": False,
        "failSwapOn": False,
        "resolvConf": "/dev/null",
    }


def _proxy(kubeconfig: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "bindAddress": ADDRESS,
        "healthzBindAddress": f"{ADDRESS}:10256",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": PODS,
        "hostnameOverride": NAME,
        "mode": "iptables",
        # These settings belong to the whole kernel; 0 leaves them unchanged.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _cilium(kubeconfig: Path) -> dict[str, object]:
    """Returns Cilium's settings. One node needs no tunnel and no operator; kube-proxy handles services."""
    return {
        "k8s-kubeconfig-path": str(kubeconfig),
        "lib-dir": str(CILIUM),
        "ipam": "kubernetes",
        "k8s-require-ipv4-pod-cidr": True,
        "ipv4-node": ADDRESS,
        "enable-ipv6": False,
        "routing-mode": "native",
        "ipv4-native-routing-cidr": PODS,
        "enable-ipv4-masquerade": False,
        "kube-proxy-replacement": False,
        "enable-l7-proxy": False,
        "enable-cilium-network-policy": False,
        "enable-cilium-clusterwide-network-policy": False,
        "enable-health-checking": False,
        "enable-endpoint-health-checking": False,
        "enable-hubble": False,
    }


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def tails(folder: Path, last_lines: int) -> str:
    """Returns the end of every log in a folder."""
    files = sorted(folder.glob("*.log"))
    return "\n".join(
        f"== {f.name}\n" + "\n".join(f.read_text(errors="replace").splitlines()[-last_lines:]) for f in files
    )
