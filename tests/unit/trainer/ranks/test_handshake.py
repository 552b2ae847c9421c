"""Who does not know the secret is turned away, and holds up nobody who does."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from services.trainer.ranks.handshake import Door, Stranger, dial


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(socket.create_server(("127.0.0.1", 0)), b"secret")
    yield door
    door.close()


def test_both_ends_know_the_secret(door: Door) -> None:
    with dial(door.address, b"secret", 30.0) as near, door.next(time.monotonic() + 30.0) as far:
        near.sendall(b"hello")
        assert far.recv(5, socket.MSG_WAITALL) == b"hello"


def test_another_secret_is_turned_away(door: Door) -> None:
    with pytest.raises(Stranger, match="FOVEA_SERVICE_SECRET"):
        dial(door.address, b"other", 30.0)


def test_who_took_the_place_of_node_0_is_left() -> None:
    """It repeats what it hears, which proves nothing."""

    def echo(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(64):
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with pytest.raises(Stranger):
            dial(listener.getsockname(), b"secret", 30.0)


def test_the_silent_hold_up_nobody(door: Door) -> None:
    silent = [socket.create_connection(door.address) for _ in range(8)]
    with dial(door.address, b"secret", 30.0), door.next(time.monotonic() + 30.0):
        pass
    for connection in silent:
        connection.close()
