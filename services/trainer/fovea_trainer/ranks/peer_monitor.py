"""Immediate detection of a rank's death: the kernel closes the sockets of a dead process at once.

Collectives are too late for this: gloo notices a death at the next message to the dead rank, NCCL possibly never.
"""

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from fovea.runtime.hosts import listening
from fovea_trainer.ranks.rank_launcher import RankEnvironment
from fovea_trainer.ranks.rendezvous import AuthenticatedListener, connect

logger = logging.getLogger(__name__)

JOIN_S = 120.0
"""Seconds that ranks wait for each other. They start together, but import torch at different speeds."""

_PORT = "fovea/peers"
_SOCKET = "peers"
_STOP = b"s"
_PEER = struct.Struct("<ii")
_KEEPALIVE = {
    socket.SO_KEEPALIVE: (socket.SOL_SOCKET, 1),
    socket.TCP_KEEPIDLE: (socket.IPPROTO_TCP, 10),
    socket.TCP_KEEPINTVL: (socket.IPPROTO_TCP, 5),
    socket.TCP_KEEPCNT: (socket.IPPROTO_TCP, 4),
    socket.TCP_USER_TIMEOUT: (socket.IPPROTO_TCP, 30_000),
}
"""A machine that stops responding closes no socket. With these options the kernel does so after 30 s."""


class Peer(NamedTuple):
    """A rank and its node."""

    rank: int
    node: int


class PeerMonitor:
    """Connections between rank 0 and all other ranks, to detect a death.

    The ranks connect before any operation that could wait forever for a dead rank.

    The connections carry two messages. Rank 0 sends the rank that died. Another rank reports that its node was asked to
    stop.

    Args:
        store: Store in which rank 0 publishes its port.
        rank_env: This rank. Ranks on one node use a socket in its private folder.
        secret: The secret that ranks of several nodes must know.
        on_lost: Called once, from another thread, with the rank that died.
        on_stop: Called on rank 0, from other threads, with a rank on the node that was asked to stop.

    Raises:
        RuntimeError: Some ranks did not connect within `JOIN_S`. The error names them.
        OSError: Rank 0 cannot be reached.
    """

    def __init__(
        self,
        store: Store,
        rank_env: RankEnvironment,
        secret: bytes,
        on_lost: Callable[[Peer], None],
        on_stop: Callable[[Peer], None],
    ) -> None:
        self._on_lost = on_lost
        self._on_stop = on_stop
        self._closing = False
        self._lost = threading.Lock()
        if rank_env.rank == 0:
            listener = _listener(rank_env)
            store.set(_PORT, "" if rank_env.folder else str(listener.getsockname()[1]))
            self._sockets = _accept(AuthenticatedListener(listener, secret), rank_env.world_size)
        else:
            port = store.get(_PORT)  # blocks until rank 0 has set it
            address = str(rank_env.folder / _SOCKET) if rank_env.folder else (rank_env.host, int(port))
            connection = connect(address, secret, JOIN_S)
            connection.sendall(_PEER.pack(rank_env.rank, rank_env.node))
            self._sockets = {Peer(0, 0): connection}
        for peer, connection in self._sockets.items():
            connection.settimeout(None)
            if not rank_env.folder:
                for name, (level, value) in _KEEPALIVE.items():
                    connection.setsockopt(level, name, value)
            watch = self._watch if rank_env.rank == 0 else self._watch_first
            threading.Thread(target=watch, args=(peer, connection), name=f"peer-{peer.rank}", daemon=True).start()

    def report_stop(self) -> None:
        """Reports to rank 0 that this node was asked to stop."""
        for connection in self._sockets.values():
            connection.sendall(_STOP)

    def close(self) -> None:
        """Stops watching: a connection that closes from now on is no death."""
        self._closing = True

    def _watch(self, peer: Peer, connection: socket.socket) -> None:
        with connection:
            while _receive(connection, len(_STOP)) == _STOP:
                self._on_stop(peer)
            self._is_lost(peer)

    def _watch_first(self, first: Peer, connection: socket.socket) -> None:
        with connection:
            message = _receive(connection, _PEER.size)
            self._is_lost(Peer(*_PEER.unpack(message)) if len(message) == _PEER.size else first)

    def _is_lost(self, lost: Peer) -> None:
        if self._closing or not self._lost.acquire(blocking=False):
            return
        for peer, connection in self._sockets.items():
            if lost != peer and peer.rank != 0:
                try:
                    connection.sendall(_PEER.pack(*lost))
                except OSError as error:
                    logger.debug("connection to rank %d: %s", peer.rank, error)
        self._on_lost(lost)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Reads up to `size` bytes; fewer if the peer is gone."""
    try:
        return connection.recv(size, socket.MSG_WAITALL)
    except OSError as error:
        logger.debug("connection to %s: %s", connection, error)
        return b""


def _listener(rank_env: RankEnvironment) -> socket.socket:
    if not rank_env.folder:
        return listening(rank_env.host)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(rank_env.folder / _SOCKET))
    listener.listen()
    return listener


def _accept(guarded: AuthenticatedListener, world_size: int) -> dict[Peer, socket.socket]:
    deadline = time.monotonic() + JOIN_S
    found: dict[Peer, socket.socket] = {}
    try:
        while len(found) < world_size - 1:
            connection = guarded.accept(deadline)
            message = _receive(connection, _PEER.size)
            peer = Peer(*_PEER.unpack(message)) if len(message) == _PEER.size else None
            if peer is not None and 0 < peer.rank < world_size and peer.rank not in {one.rank for one in found}:
                found[peer] = connection
            else:
                logger.warning("a connection that names rank %s of %d is closed", peer and peer.rank, world_size)
                connection.close()
    except TimeoutError:
        for connection in found.values():
            connection.close()
        missing = sorted(set(range(1, world_size)) - {peer.rank for peer in found})
        raise RuntimeError(f"ranks {missing} of {world_size} did not connect within {JOIN_S:.0f} s") from None
    finally:
        guarded.close()
    return found
