"""A small disk for one Fovea, which can be full, and shared memory of its own: mounted for its processes alone."""

import pathlib
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

LEAST_MIB = 512


@cache
def _namespace() -> tuple[str, ...]:
    """What begins a mount namespace: as root, or as a user who is root in it. Empty if neither is allowed here."""
    for namespace in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        with tempfile.TemporaryDirectory() as folder, suppress(FileNotFoundError):
            trial = [*namespace, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
            if subprocess.run(trial, capture_output=True, check=False).returncode == 0:
                return namespace
    return ()


def is_possible() -> bool:
    """Whether this machine lets us mount one."""
    return bool(_namespace())


def limits() -> list[str]:
    """What cannot be done on this machine, or is done in another way."""
    lines = ["partitions and delays are made by proxies between the parts: all parts listen on 127.0.0.1"]
    if not is_possible():
        lines.append("no full disks: this user may not mount a file system (unshare --mount, unshare --user --mount)")
    return lines


class Disk:
    """Mounted at `path` in a mount namespace, which a process keeps until `close`, or until this one ends.

    It is memory, and takes what its files take.
    """

    def __init__(self, path: pathlib.Path, size_mib: int = LEAST_MIB) -> None:
        self._path = path
        mounts = (f'mount -t tmpfs -o size={size_mib}m tmpfs "$1"', "mount -t tmpfs tmpfs /dev/shm")
        script = " && ".join((*mounts, "echo mounted", "exec cat"))
        self._keeper = subprocess.Popen(
            [*_namespace(), "sh", "-c", script, "sh", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._keeper.stdout
        if self._keeper.stdout.readline() != b"mounted\n":
            raise OSError(f"no disk could be mounted at {path}")

    @property
    def path(self) -> pathlib.Path:
        """As processes outside of the namespace see it."""
        return pathlib.Path(f"/proc/{self._keeper.pid}/root{self._path}")

    @property
    def shared_memory(self) -> pathlib.Path:
        """As processes outside of the namespace see it."""
        return pathlib.Path(f"/proc/{self._keeper.pid}/root/dev/shm")

    @property
    def entering(self) -> list[str]:
        """What begins the command of a process that is to have it mounted."""
        as_user = ["--user", "--preserve-credentials"] if "--user" in _namespace() else []
        return ["nsenter", "--target", str(self._keeper.pid), *as_user, "--mount", f"--wd={pathlib.Path.cwd()}"]

    @contextmanager
    def full(self) -> Iterator[None]:
        """Not a byte is free meanwhile."""
        filler = self.path / "filler"
        try:
            for size in (2**20, 1):
                with filler.open("ab", buffering=0) as file, suppress(OSError):
                    while file.write(bytes(size)):
                        pass
            yield
        finally:
            filler.unlink(missing_ok=True)

    def close(self) -> None:
        """The disk goes with all that is on it once nobody has it mounted."""
        self._keeper.communicate(timeout=10.0)
