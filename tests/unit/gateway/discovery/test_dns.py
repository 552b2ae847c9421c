"""A name that resolves to all replicas, through the system's own resolver over a hosts file of our own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_WATCH = """
import asyncio
from fovea_gateway.discovery.discovery import DnsDiscovery

async def main():
    async for addresses in DnsDiscovery("samplers.test:50052", interval_s=0.05).watch():
        print(" ".join(sorted(addresses)), flush=True)

asyncio.run(main())
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A file to be put in place of /etc/hosts."""
    private = ["unshare", "--mount", "true"]
    if shutil.which("unshare") is None or subprocess.run(private, capture_output=True).returncode:
        pytest.skip("a private /etc/hosts needs `unshare --mount`")
    path = tmp_path / "hosts"
    path.write_text("")
    return path


def test_addresses_follow_the_name(hosts: Path) -> None:
    hosts.write_text("10.0.0.1 samplers.test\n10.0.0.2 samplers.test\nfd00::1 samplers.test\n")
    mount = f'mount --bind {hosts} /etc/hosts && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-c", mount, sys.executable, _WATCH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "10.0.0.1:50052 10.0.0.2:50052\n", "two kinds of address count once"
            hosts.write_text("10.0.0.2 samplers.test\n")
            assert process.stdout.readline() == "10.0.0.2:50052\n"
            hosts.write_text("fd00::1 samplers.test\n")
            assert process.stdout.readline().startswith(("[fd00::1]:50052", "\n")), "the file may be read half written"
        finally:
            process.terminate()
