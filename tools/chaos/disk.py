"""A small disk that can fill up, and private shared memory, mounted only for the processes of one Fovea."""

import pathlib
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

LEAST_MIB = 512


@cache
def _namespace() -> tuple[str, ...]:
    """Returns the command that starts a mount namespace, as root or as a user mapped to root. Empty if not allowed
    here.
    """
    for namespace in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        with tempfile.TemporaryDirectory() as folder, suppress(FileNotFoundError):
            trial = [*namespace, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
            if subprocess.run(trial, capture_output=True, check=False).returncode == 0:
                return namespace
    return ()


def is_possible() -> bool:
    """Returns whether this machine allows such mounts."""
    return bool(_namespace())


def limits() -> list[str]:
    """Returns what this machine cannot do, or does in another way."""
    lines = ["proxies between the services simulate partitions and delays, because all services listen on 127.0.0.1"]
    if not is_possible():
        lines.append(
            "no full disks, because this user may not mount a file system (unshare --mount, unshare --user --mount)"
        )
    return lines


class Disk:
    """A tmpfs mounted at `path` in a mount namespace. A process holds the namespace until `close` or until this process
    ends.

    It uses as much memory as its files need.
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
            raise OSError(f"could not mount a disk at {path}")

    @property
    def path(self) -> pathlib.Path:
        """The mount point as seen from outside the namespace."""
        return pathlib.Path(f"/proc/{self._keeper.pid}/root{self._path}")

    @property
    def shared_memory(self) -> pathlib.Path:
        """The shared memory as seen from outside the namespace."""
        return pathlib.Path(f"/proc/{self._keeper.pid}/root/dev/shm")

    @property
    def entering(self) -> list[str]:
        """Prefix for the command of a process that should see the mounts."""
        as_user = ["--user", "--preserve-credentials"] if "--user" in _namespace() else []
        return ["nsenter", "--target", str(self._keeper.pid), *as_user, "--mount", f"--wd={pathlib.Path.cwd()}"]

    @contextmanager
    def full(self) -> Iterator[None]:
        """Fills the disk completely inside the context."""
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
        """Ends the namespace. The disk disappears when no process uses it any more."""
        self._keeper.communicate(timeout=10.0)
