"""A machine inside this one, like kind's nodes: namespaces of its own, and one network link to the host.

Mounts, processes and network end with the namespaces. `running_machine` removes the leftovers of control groups.
Nothing else on the host changes.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from deploy.cluster.cluster import CommandFailed
from deploy.cluster.image import BUSYBOX
from deploy.cluster.tools import BIN

# RFC 2544 reserves 198.18.0.0/15 for benchmarks, so no network of the host uses it.
HOST_ADDRESS = "198.18.7.1"
ADDRESS = "198.18.7.2"
PODS = "198.18.8.0/24"
SERVICES = "198.19.7.0/24"
CNI = Path("/usr/lib/cni")
_COMPILER = Path("/usr/lib/llvm-19/bin")

_LINK = "fovea-node"
_START_S = 60
_COMMANDS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "iptables": "iptables", "runc": "runc"}
_SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
    "kernel/timer_migration": 0,
    "kernel/unprivileged_bpf_disabled": 1,
}
"""Kernel settings that kubelet and Cilium want to change. Mounted files show them as set; the host keeps its own."""

_SETUP = """
umount -R -l /sys
mount -t sysfs sysfs /sys
mount -t tmpfs cgroup /sys/fs/cgroup
cut -d: -f2 /proc/self/cgroup | grep . | while read -r hierarchy; do
  folder=/sys/fs/cgroup/${hierarchy#name=}
  mkdir "$folder"
  case $hierarchy in name=*) hierarchy=none,$hierarchy ;; esac
  mount -t cgroup -o "$hierarchy" cgroup "$folder"
  mkdir "$folder/$CGROUP"
done
for file in cpuset.cpus cpuset.mems; do cat /sys/fs/cgroup/cpuset/$file > "/sys/fs/cgroup/cpuset/$CGROUP/$file"; done
mount -t tmpfs run /run
mount --bind "$FOLDER/lib" /var/lib
mount --bind "$FOLDER/log" /var/log
cd "$FOLDER/sysctl"
find . -type f | while read -r file; do mount --bind "$file" "/proc/sys/$file"; done
ip link set lo up
ip address add "$ADDRESS/30" dev eth0
ip link set eth0 up
ip route add "$SERVICES" via "$HOST_ADDRESS"
echo 1 > /proc/sys/net/ipv4/ip_forward
"""


class NoMachine(Exception):
    """This host cannot run the machine. The message says what is missing."""


class Machine:
    """Namespaces, and commands that enter them.

    Attributes:
        folder: Folder of the machine, at the same path inside. Its `lib` and `log` are /var/lib and /var/log.
        cgroup: Name of its control group, below that of this process.
        pid: Process id of its first process, on the host.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder = folder
        self.cgroup = f"fovea-{pid}"
        self.pid = pid
        self._linked = False

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Returns a command that runs inside; without arguments, the prefix of such a command."""
        return "nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--cgroup", *arguments

    def run(self, *arguments: str, stdin: IO[bytes] | None = None) -> str:
        """Runs a command inside and returns its standard output.

        Raises:
            CommandFailed: It ended with an error. The message contains its output.
        """
        return _run(self.command(*arguments), stdin, PATH=_path())

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """Starts a process inside that ends with the machine. Its output goes to a file in `log` named after the
        program.
        """
        with (self.folder / "log" / f"{Path(arguments[0]).name}.log").open("wb") as log:
            everything = os.environ | {"PATH": _path()} | environment
            return subprocess.Popen(self.command(*arguments), env=everything, stdout=log, stderr=log)

    def prepare(self) -> None:
        """Mounts the machine's own file systems and links it to the host.

        Raises:
            CommandFailed: The kernel refused a step.
        """
        for name, value in _SYSCTLS.items():
            file = self.folder / "sysctl" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
        for name in ("lib", "log"):
            (self.folder / name).mkdir()
        _run(("ip", "link", "add", _LINK, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid)))
        self._linked = True
        _run(("ip", "address", "add", f"{HOST_ADDRESS}/30", "dev", _LINK))
        _run(("ip", "link", "set", _LINK, "up"))
        names = {"ADDRESS": ADDRESS, "HOST_ADDRESS": HOST_ADDRESS, "SERVICES": SERVICES}
        _run(self.command("sh", "-euc", _SETUP), None, FOLDER=str(self.folder), CGROUP=self.cgroup, **names)
        for network in (PODS, SERVICES):
            _run(("ip", "route", "add", network, "via", ADDRESS))

    def unlink(self) -> None:
        """Removes the link now. It would vanish with the other end's network, but only some time later."""
        if self._linked:
            _run(("ip", "link", "delete", _LINK))


@contextmanager
def running_machine(folder: Path) -> Iterator[Machine]:
    """Runs a machine with `folder` as its disk, which is created if needed. Always ends it.

    Raises:
        NoMachine: This host lacks a permission, a package or a feature, or a machine already runs.
        CommandFailed: The kernel refused a step; the message names it.
    """
    _check()
    folder.mkdir(parents=True, exist_ok=True)
    flags = ("--mount", "--net", "--pid", "--cgroup", "--fork", "--kill-child", "--mount-proc")
    # The first process ends when its standard input closes, and so when this process ends. Ignoring SIGCHLD avoids
    # zombies.
    first = ("sh", "-c", "trap '' CHLD; exec cat")
    with subprocess.Popen(("unshare", *flags, *first), stdin=subprocess.PIPE, stderr=subprocess.PIPE) as outer:
        machine = None
        try:
            machine = Machine(folder, _first_process(outer))
            machine.prepare()
            yield machine
        finally:
            if machine:
                machine.unlink()
            assert outer.stdin
            outer.stdin.close()
            outer.wait(_START_S)
            if machine:
                _remove_cgroups(machine.cgroup)
            if (folder / "lib").exists():
                shutil.rmtree(folder / "lib")  # images take gigabytes; the logs are kept


def _check() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoMachine("a real node needs Linux and root")
    packages = {package for command, package in _COMMANDS.items() if not shutil.which(command)}
    if not (CNI / "loopback").exists():
        packages.add("containernetworking-plugins")
    if not (_COMPILER / "clang").exists():
        packages.add("clang-19")
    # The start of a dynamically linked file names its loader.
    if not BUSYBOX.exists() or b"ld-linux" in BUSYBOX.read_bytes()[:4096]:
        packages.add("busybox-static")
    if packages:
        raise NoMachine(f"a real node needs packages that are not installed: {', '.join(sorted(packages))}")
    if "cpuset" not in Path("/proc/self/cgroup").read_text():
        raise NoMachine("a real node needs cgroup version 1, but this host has version 2")
    if _LINK in psutil.net_if_addrs():
        raise NoMachine(f"another node already runs on this host (network link {_LINK})")


def _path() -> str:
    return f"{BIN}:{_COMPILER}:{os.environ['PATH']}"


def _first_process(outer: subprocess.Popen[bytes]) -> int:
    """Returns the process that `unshare` forks and that holds the namespaces."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and outer.poll() is None:
        for child in psutil.Process(outer.pid).children():
            # The process exists before it is ready: /proc is mounted last.
            if child.name() == "cat":
                return child.pid
        time.sleep(0.05)
    outer.kill()
    assert outer.stderr
    raise NoMachine(f"unshare: {outer.stderr.read().decode().strip() or 'no namespaces in time'}")


def _remove_cgroups(name: str) -> None:
    """Removes the control groups, which are folders that can be removed only after their last process has ended."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, hierarchy, path = line.split(":", 2)
        top = Path("/sys/fs/cgroup", hierarchy.removeprefix("name="), path.strip("/"), name)
        if hierarchy and top.exists():
            for folder, _, _ in os.walk(top, topdown=False):
                _remove(Path(folder))


def _remove(cgroup: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            return cgroup.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _run(command: Sequence[str], stdin: IO[bytes] | None = None, **environment: str) -> str:
    done = subprocess.run(command, env=os.environ | environment, stdin=stdin, capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(
            f"{' '.join(command)[:300]}: exit status {done.returncode}\n{done.stdout}{done.stderr}".strip()
        )
    return done.stdout
