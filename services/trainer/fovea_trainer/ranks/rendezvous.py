"""Connections between the processes of a trainer, and the rendezvous of its nodes.

Each end of a connection first proves that it knows the secret. Later messages are neither signed nor encrypted. The
proof only limits connections: an attacker on the network path could still read or change the traffic.

The nodes meet before any of them starts ranks, so that an error can name the missing nodes.
"""

import errno
import hmac
import json
import logging
import queue
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from fovea.runtime.credentials import service_secret
from fovea.runtime.hosts import listening
from fovea_trainer.settings import TrainerSettings

logger = logging.getLogger(__name__)

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_PROOF_TIMEOUT_S = 5.0
_AT_ONCE = 64


class AuthenticationFailed(OSError):
    """The error for a peer that does not know the secret. The message suggests a cause."""


def connect(address: str | tuple[str, int], secret: bytes, timeout_s: float) -> socket.socket:
    """Connects to an `AuthenticatedListener` at a socket path or at (host, port).

    Args:
        address: Path or (host, port).
        secret: The shared secret.
        timeout_s: Time limit for connecting and for each step of the proof, in seconds.

    Raises:
        OSError: There is no listener.
        AuthenticationFailed: The secrets differ.
    """
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(address)
    else:
        connection = socket.create_connection(address, timeout=timeout_s)
    return _authenticated(connection, secret, connects=True)


class AuthenticatedListener:
    """Accepts connections and authenticates them.

    A peer that is too slow to authenticate is disconnected. It delays no other peer meanwhile.

    Args:
        listener: The listening socket; closed by `close`.
        secret: The shared secret; empty if file permissions already restrict access.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        listener.settimeout(None)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """The address for `connect`, unless it is a path."""
        host, port, *_ = self._listener.getsockname()
        return host, port

    def accept(self, deadline: float | None = None) -> socket.socket:
        """Returns the next authenticated connection.

        Args:
            deadline: A reading of `time.monotonic`; None waits forever.

        Raises:
            TimeoutError: The deadline passed.
        """
        try:
            return self._accepted.get(timeout=None if deadline is None else max(0.001, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("no connection arrived") from None

    def close(self) -> None:
        """Stops listening. Accepted connections stay open."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, which `close` does not
        except OSError as error:
            logger.debug("closing %s: %s", self._listener, error)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # the listener was closed
            threading.Thread(target=self._prove, args=(connection,), daemon=True).start()

    def _prove(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_PROOF_TIMEOUT_S)
            self._accepted.put(_authenticated(connection, self._secret, connects=False))
        except OSError as error:
            logger.debug("rejected %s: %s", connection, error)
        finally:
            self._slots.release()


def _authenticated(connection: socket.socket, secret: bytes, connects: bool) -> socket.socket:
    """Authenticates both ends of a connection. Closes it on failure.

    Each end sends a random number, and then the HMAC of both numbers. The HMACs of the two ends carry different labels,
    so a peer cannot reflect a received HMAC. The connecting end proves itself first.

    Raises:
        OSError: Authentication failed.
    """
    try:
        mine = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(mine)
        theirs = _exactly(connection, _NONCE_BYTES)
        numbers = mine + theirs if connects else theirs + mine
        own, other = (hmac.digest(secret, label + numbers, "sha256") for label in (b"dials", b"accepts"))
        if connects:
            connection.sendall(own)
            _check(_exactly(connection, _PROOF_BYTES), other)
        else:
            own, other = other, own
            _check(_exactly(connection, _PROOF_BYTES), other)
            connection.sendall(own)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise AuthenticationFailed("it has a different service secret: is FOVEA_SERVICE_SECRET the same on both ends?")


def _exactly(connection: socket.socket, size: int) -> bytes:
    try:
        data = connection.recv(size, socket.MSG_WAITALL)
    except ConnectionResetError:
        data = b""
    if len(data) < size:
        raise AuthenticationFailed("it closed the connection: is FOVEA_SERVICE_SECRET the same on both ends?")
    return data


POLL_S = 0.2
_CONNECT_TIMEOUT_S = 5.0
_LINE_BYTES = 65536


class RendezvousFailed(Exception):
    """The error for a rendezvous that did not succeed. The message gives the reason, such as the missing nodes."""


@dataclass(frozen=True)
class Rendezvous:
    """The facts that every node knows after the rendezvous.

    Attributes:
        ranks: Number of ranks on each node.
        address: This node's address on the network of the rendezvous.
        store_port: Port of the ranks' store on node 0.
        store_listener: On node 0, the listening socket of the store, for rank 0.
        door: On node 0, the listening socket of the rendezvous. A thread of the launcher rejects later connections.
    """

    ranks: list[int]
    address: str
    store_port: int
    store_listener: socket.socket | None = None
    door: socket.socket | None = None


def rendezvous(settings: TrainerSettings) -> Rendezvous:
    """Waits for the launchers of all nodes. Each proves that it knows the service secret.

    Raises:
        RendezvousFailed: `rendezvous_timeout_s` passed, or this node cannot be node 0.
    """
    deadline = time.monotonic() + settings.rendezvous_timeout_s
    return _Host(settings, deadline).gather() if settings.node_rank == 0 else _join(settings, deadline)


class _Host:
    """Node 0, to which the other nodes connect."""

    def __init__(self, settings: TrainerSettings, deadline: float) -> None:
        self._settings = settings
        self._deadline = deadline
        self._ranks = {0: settings.ranks}
        self._connections: dict[int, socket.socket] = {}

    def gather(self) -> Rendezvous:
        """Waits for the other nodes and sends them the store's port.

        Later connections are rejected while this process runs.
        """
        listener = _listener(self._settings, self._deadline)
        address = str(listener.getsockname()[0])
        guarded = AuthenticatedListener(listener, service_secret().encode())
        try:
            while missing := self._missing():
                try:
                    self._admit(guarded.accept(min(self._deadline, time.monotonic() + 1.0)))
                except TimeoutError:
                    if time.monotonic() >= self._deadline:
                        waited = f"within {self._settings.rendezvous_timeout_s:.0f} s"
                        raise RendezvousFailed(
                            f"of {self._settings.nodes} nodes these did not arrive {waited}: {missing}"
                        ) from None
        except RendezvousFailed:
            guarded.close()
            self._close_all()
            raise
        store = listening(address)
        found = Rendezvous(
            [self._ranks[node] for node in sorted(self._ranks)], address, store.getsockname()[1], store, listener
        )
        for connection in self._connections.values():
            _send(connection, {"ranks": found.ranks, "store_port": found.store_port})
        self._close_all()
        threading.Thread(target=self._refuse_all, args=(guarded,), name="rendezvous", daemon=True).start()
        return found

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._settings.nodes) if _is_gone(self._connections.get(node))]

    def _admit(self, connection: socket.socket) -> None:
        message = _receive(connection)
        node, nodes, ranks = message.get("node"), message.get("nodes"), message.get("ranks")
        if type(ranks) is not int or ranks < 1:
            problem = f"expects at least 1 rank on each node, but node {node} has {ranks!r:.20}"
        elif type(node) is not int or nodes != self._settings.nodes or not 0 < node < nodes:
            problem = f"expects {self._settings.nodes} nodes, but this is node {node} of {nodes}: --nodes must be equal"
        elif not _is_gone(self._connections.get(node)):
            problem = _duplicate(node)
        else:
            connection.setblocking(False)
            if earlier := self._connections.get(node):
                earlier.close()
            self._connections[node] = connection
            self._ranks[node] = ranks
            return
        _refuse(connection, problem)

    def _refuse_all(self, guarded: AuthenticatedListener) -> None:
        while True:
            connection = guarded.accept()
            _refuse(connection, _duplicate(_receive(connection).get("node")))

    def _close_all(self) -> None:
        for connection in self._connections.values():
            connection.close()


def _join(settings: TrainerSettings, deadline: float) -> Rendezvous:
    problem = "cannot be reached"
    while time.monotonic() < deadline:
        try:
            address = (settings.master_addr, settings.master_port)
            connection = connect(address, service_secret().encode(), _CONNECT_TIMEOUT_S)
        except AuthenticationFailed as error:
            problem = f"rejected this node: {error}"
        except OSError as error:
            problem = f"cannot be reached: {error}"
        else:
            with connection:
                message = _ask(connection, settings, deadline)
                if "ranks" in message:
                    return Rendezvous(message["ranks"], connection.getsockname()[0], message["store_port"])
                problem = message.get("problem", "closed the connection")
        time.sleep(POLL_S)
    where = f"{settings.master_addr}:{settings.master_port}"
    raise RendezvousFailed(f"node 0 at {where} {problem} ({settings.rendezvous_timeout_s:.0f} s)")


def _ask(connection: socket.socket, settings: TrainerSettings, deadline: float) -> dict[str, Any]:
    """Registers this node and returns node 0's answer once all nodes have arrived.

    Returns an empty dict if node 0 closes the connection.

    Raises:
        RendezvousFailed: The deadline passed.
    """
    _send(connection, {"node": settings.node_rank, "nodes": settings.nodes, "ranks": settings.ranks})
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    message = _receive(connection)
    if not message and time.monotonic() >= deadline:
        raise RendezvousFailed(f"node 0 still waits for other nodes after {settings.rendezvous_timeout_s:.0f} s")
    return message


def _listener(settings: TrainerSettings, deadline: float) -> socket.socket:
    """Listens at the master's address only.

    It retries, because it may take a while until a host name, such as that of a pod, resolves to this machine.
    """
    while True:
        try:
            return listening(settings.master_addr, settings.master_port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RendezvousFailed(f"cannot listen on --master-port {settings.master_port}: {error}") from None
            if time.monotonic() >= deadline:
                raise RendezvousFailed(
                    f"--master-addr {settings.master_addr} is not an address of this machine, which is node 0: {error}"
                ) from None
        time.sleep(POLL_S)


def _duplicate(node: Any) -> str:
    return f"already has a node {node}: an earlier run that has not ended, or a configuration error"


def _refuse(connection: socket.socket, problem: str) -> None:
    with connection:
        _send(connection, {"problem": problem})


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a line. Ignores errors, because a node that is gone is reported as missing later."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Returns a received line; an empty dict if the peer closed the connection or sent nothing in time."""
    try:
        with connection.makefile("rb") as lines:
            message = json.loads(lines.readline(_LINE_BYTES) or b"{}")
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


def _is_gone(connection: socket.socket | None) -> bool:
    """Returns True if there is no connection or its peer has closed it. The socket must be non-blocking."""
    if connection is None:
        return True
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
