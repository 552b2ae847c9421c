"""No process of a node's machine outlives it. Runs before the tests that keep a machine, because only one can run."""

from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from deploy.cluster.cluster import CommandFailed
from deploy.cluster.machine import ADDRESS, Machine, NoMachine, running_machine

_PANICS = Path("/proc/sys/kernel/panic_on_oops")


def test_it_is_apart(tmp_path: Path) -> None:
    """It has its own network, processes and kernel settings; a failure ends it with all its processes."""
    panics = _PANICS.read_text()
    with ExitStack() as stack:
        try:
            machine = stack.enter_context(running_machine(tmp_path / "machine"))
        except NoMachine as reason:
            pytest.skip(str(reason))
        assert ADDRESS in machine.run("ip", "-oneline", "address")
        assert (machine.run("cat", str(_PANICS)), _PANICS.read_text()) == ("1\n", panics)
        sleeper = machine.start("sleep", "3600")
        with pytest.raises(CommandFailed, match="false: exit status 1"), stack:
            machine.run("false")
    assert sleeper.wait(60) != 0
    assert _traces(machine) == []


def _traces(machine: Machine) -> list[str]:
    links = [name for name in psutil.net_if_addrs() if name.startswith("fovea-node")]
    groups = [str(folder) for folder in Path("/sys/fs/cgroup").glob(f"*/**/{machine.cgroup}")]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(machine.folder) in line]
    return links + groups + mounts
