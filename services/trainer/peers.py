"""Notices at once that a rank has died: the kernel closes a dead process's sockets, whatever the ranks are doing.

Collectives cannot be trusted with this: gloo notices only when it next talks to the dead rank, NCCL may never.
"""

import logging
import socket
import threading
from collections.abc import Callable

from services.trainer.control import ControlGroup

logger = logging.getLogger(__name__)


class PeerWatch:
    """One connection between rank 0 and each other rank, on which nothing is ever sent.

    Args:
        control: Used once, to tell the port.
        host: Address of rank 0.
        on_lost: Called once, from another thread, with the rank that is gone.

    Raises OSError if a connection cannot be made within a minute.
    """

    def __init__(self, control: ControlGroup, host: str, on_lost: Callable[[int], None]) -> None:
        self._on_lost = on_lost
        self._closing = False
        self._lost = threading.Lock()
        if control.rank == 0:
            with socket.create_server((host, 0)) as listener:
                listener.settimeout(60)
                control.broadcast(listener.getsockname()[1])
                self._sockets = dict(_accept(listener) for _ in range(control.world_size - 1))
        else:
            port: int = control.broadcast(None)
            connection = socket.create_connection((host, port), timeout=60)
            connection.sendall(control.rank.to_bytes(4, "little"))
            self._sockets = {0: connection}
        for rank, connection in self._sockets.items():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            threading.Thread(target=self._watch, args=(rank, connection), name=f"peer-{rank}", daemon=True).start()

    def close(self) -> None:
        """Ends the watch: connections that close from now on mean nothing."""
        self._closing = True

    def _watch(self, rank: int, connection: socket.socket) -> None:
        try:
            connection.recv(1)
        except OSError as error:
            logger.debug("connection to rank %d: %s", rank, error)
        if not self._closing and self._lost.acquire(blocking=False):
            self._on_lost(rank)


def _accept(listener: socket.socket) -> tuple[int, socket.socket]:
    connection, _ = listener.accept()
    connection.settimeout(60)
    return int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little"), connection
