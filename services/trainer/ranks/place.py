"""Where a rank stands among all. The launcher tells each one in its environment."""

import ctypes
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LAUNCHER = "FOVEA_LAUNCHER_PID"
_MEETING = "FOVEA_MEETING"
_LISTENER = "FOVEA_STORE_FD"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """One rank's place, and where it meets the others.

    Attributes:
        rank: Among all ranks.
        world_size: How many ranks there are.
        local_rank: Among the ranks of this node, which have a device each.
        node: The node that this rank runs on.
        meeting: A private folder if all ranks are on one node, host:port of node 0 if not.
        launcher: Process id of what started this rank.
        store_fd: On rank 0 of several nodes, the bound socket that listens at `meeting`.
    """

    rank: int
    world_size: int
    local_rank: int
    node: int
    meeting: str
    launcher: int
    store_fd: int | None = None

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """This process's place; None if no launcher started it."""
        if _LAUNCHER not in environment:
            return None
        rank, world_size, local_rank, node, launcher = (
            int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", _LAUNCHER)
        )
        store_fd = int(environment[_LISTENER]) if _LISTENER in environment else None
        return cls(rank, world_size, local_rank, node, environment[_MEETING], launcher, store_fd)

    def environment(self) -> dict[str, str]:
        """What `find` reads, under the names that torch reads too."""
        listener = {} if self.store_fd is None else {_LISTENER: str(self.store_fd)}
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.node),
            _MEETING: self.meeting,
            _LAUNCHER: str(self.launcher),
            **listener,
        }

    @property
    def is_first_of_node(self) -> bool:
        """Whether this rank is the one of its node that shows health and metrics."""
        return self.local_rank == 0

    def die_with_launcher(self) -> None:
        """Has the kernel kill this process when its launcher dies, whatever kills the launcher."""
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.launcher:
            os._exit(1)

    @property
    def folder(self) -> Path | None:
        """The private folder in which the ranks of one node meet; None if there are several nodes."""
        return Path(self.meeting) if self.meeting.startswith("/") else None

    @property
    def host(self) -> str:
        """Address of rank 0 among several nodes."""
        return self.meeting.rpartition(":")[0]

    def open_store(self, timeout: timedelta) -> "Store":
        """The store in which the ranks find each other: a file of the private folder, or served by rank 0."""
        from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

        if self.folder:
            return FileStore(str(self.folder / "store"), self.world_size)
        port = int(self.meeting.rpartition(":")[2])
        return TCPStore(
            self.host, port, None, self.store_fd is not None, timeout, False, master_listen_fd=self.store_fd
        )
