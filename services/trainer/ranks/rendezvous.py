"""Where the nodes of a trainer meet before any of them starts its ranks, so that who is missing has a name."""

import errno
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from fovea.runtime.hosts import listening
from fovea.runtime.secret import service_secret
from services.trainer.ranks.handshake import Door, Stranger, dial
from services.trainer.settings import TrainerSettings

POLL_S = 0.2
_KNOCK_S = 5.0
_LINE_BYTES = 65536


class NodesMissing(Exception):
    """Not all nodes came in time. The message names those that did not."""


@dataclass(frozen=True)
class Meeting:
    """What every node knows once all have met.

    Attributes:
        ranks: How many ranks each node starts.
        address: This node's own address, of the network that they met on.
        store_port: Where on node 0 the ranks' store listens.
        store_listener: On node 0, its socket, for rank 0.
    """

    ranks: list[int]
    address: str
    store_port: int
    store_listener: socket.socket | None = None


def meet(settings: TrainerSettings) -> Meeting:
    """Waits until the launchers of all nodes are here. Each proves that it knows the service secret.

    Raises NodesMissing after `rendezvous_timeout_s`, and if this node cannot be node 0.
    """
    deadline = time.monotonic() + settings.rendezvous_timeout_s
    return _Host(settings, deadline).gather() if settings.node_rank == 0 else _join(settings, deadline)


class _Host:
    """Node 0, which the others come to."""

    def __init__(self, settings: TrainerSettings, deadline: float) -> None:
        self._settings = settings
        self._deadline = deadline
        self._ranks = {0: settings.ranks}
        self._came: dict[int, socket.socket] = {}

    def gather(self) -> Meeting:
        """Waits for the others and tells them the store's port. Turns away who comes later, as long as this runs."""
        listener = _listener(self._settings, self._deadline)
        address = str(listener.getsockname()[0])
        door = Door(listener, service_secret().encode())
        try:
            while missing := self._missing():
                try:
                    self._welcome(door.next(min(self._deadline, time.monotonic() + 1.0)))
                except TimeoutError:
                    if time.monotonic() >= self._deadline:
                        waited = f"within {self._settings.rendezvous_timeout_s:.0f} s"
                        raise NodesMissing(
                            f"of {self._settings.nodes} nodes these did not come {waited}: {missing}"
                        ) from None
        except NodesMissing:
            door.close()
            self._part()
            raise
        store = listening(address)
        meeting = Meeting([self._ranks[node] for node in sorted(self._ranks)], address, store.getsockname()[1], store)
        for connection in self._came.values():
            _say(connection, {"ranks": meeting.ranks, "store_port": meeting.store_port})
        self._part()
        threading.Thread(target=self._turn_away, args=(door,), name="meeting", daemon=True).start()
        return meeting

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._settings.nodes) if _is_gone(self._came.get(node))]

    def _welcome(self, connection: socket.socket) -> None:
        said = _hear(connection)
        node, nodes = said.get("node"), said.get("nodes")
        if not isinstance(node, int) or nodes != self._settings.nodes or not 0 < node < nodes:
            problem = f"is one of {self._settings.nodes}, this is node {node} of {nodes}: give all the same --nodes"
        elif not _is_gone(self._came.get(node)):
            problem = _taken(node)
        else:
            connection.setblocking(False)
            self._came[node] = connection
            self._ranks[node] = int(said["ranks"])
            return
        _turn_away(connection, problem)

    def _turn_away(self, door: Door) -> None:
        while True:
            connection = door.next()
            _turn_away(connection, _taken(_hear(connection).get("node")))

    def _part(self) -> None:
        for connection in self._came.values():
            connection.close()


def _join(settings: TrainerSettings, deadline: float) -> Meeting:
    problem = "cannot be reached"
    while time.monotonic() < deadline:
        try:
            connection = dial((settings.master_addr, settings.master_port), service_secret().encode(), _KNOCK_S)
        except Stranger as error:
            problem = f"sent this one away: {error}"
        except OSError as error:
            problem = f"cannot be reached: {error}"
        else:
            with connection:
                said = _ask(connection, settings, deadline)
                if "ranks" in said:
                    return Meeting(said["ranks"], connection.getsockname()[0], said["store_port"])
                problem = said.get("problem", "has gone again")
        time.sleep(POLL_S)
    place = f"{settings.master_addr}:{settings.master_port}"
    raise NodesMissing(f"node 0 at {place} {problem} ({settings.rendezvous_timeout_s:.0f} s)")


def _ask(connection: socket.socket, settings: TrainerSettings, deadline: float) -> dict[str, Any]:
    """Node 0's answer, once all have come; nothing if it goes. Raises NodesMissing at the deadline."""
    _say(connection, {"node": settings.node_rank, "nodes": settings.nodes, "ranks": settings.ranks})
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    said = _hear(connection)
    if not said and time.monotonic() >= deadline:
        raise NodesMissing(f"node 0 still waits for others after {settings.rendezvous_timeout_s:.0f} s")
    return said


def _listener(settings: TrainerSettings, deadline: float) -> socket.socket:
    """A listener at the master's address alone. A name may take a while to lead here: a pod's does."""
    while True:
        try:
            return listening(settings.master_addr, settings.master_port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NodesMissing(f"--master-port {settings.master_port} cannot be listened on: {error}") from None
            if time.monotonic() >= deadline:
                raise NodesMissing(
                    f"--master-addr {settings.master_addr} is no address of this machine, which is node 0: {error}"
                ) from None
        time.sleep(POLL_S)


def _taken(node: Any) -> str:
    return f"has another node {node} already: an earlier run that does not end, or a mistake"


def _turn_away(connection: socket.socket, problem: str) -> None:
    with connection:
        _say(connection, {"problem": problem})


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a line; who has gone meanwhile will be missed later."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return


def _hear(connection: socket.socket) -> dict[str, Any]:
    """A line that was sent; nothing if the other end has gone, or says nothing in time."""
    try:
        with connection.makefile("rb") as lines:
            said = json.loads(lines.readline(_LINE_BYTES) or b"{}")
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _is_gone(connection: socket.socket | None) -> bool:
    """Whether there is no such connection, or its other end has closed it. It must not be blocking."""
    if connection is None:
        return True
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
