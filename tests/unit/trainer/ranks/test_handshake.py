"""Peers without the secret are refused, and do not delay those that have it."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fovea_trainer.ranks.rendezvous import AuthenticatedListener, AuthenticationFailed, connect


@pytest.fixture
def listener() -> Iterator[AuthenticatedListener]:
    listener = AuthenticatedListener(socket.create_server(("127.0.0.1", 0)), b"secret")
    yield listener
    listener.close()


def test_both_ends_know_the_secret(listener: AuthenticatedListener) -> None:
    with connect(listener.address, b"secret", 30.0) as near, listener.accept(time.monotonic() + 30.0) as far:
        near.sendall(b"hello")
        assert far.recv(5, socket.MSG_WAITALL) == b"hello"


def test_another_secret_is_turned_away(listener: AuthenticatedListener) -> None:
    with pytest.raises(AuthenticationFailed, match="FOVEA_SERVICE_SECRET"):
        connect(listener.address, b"other", 30.0)


def test_an_impostor_of_node_0_is_rejected() -> None:
    """An impostor of node 0 echoes each message, which proves nothing."""

    def echo(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(64):
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with pytest.raises(AuthenticationFailed):
            connect(listener.getsockname(), b"secret", 30.0)


def test_silent_connections_delay_no_other(listener: AuthenticatedListener) -> None:
    silent = [socket.create_connection(listener.address) for _ in range(8)]
    with connect(listener.address, b"secret", 30.0), listener.accept(time.monotonic() + 30.0):
        pass
    for connection in silent:
        connection.close()
