"""Authenticated connections between processes of one trainer: each end first proves that it knows the secret.

Later messages are neither signed nor encrypted. This only restricts connections: an attacker on the network path could
still read or change the traffic.
"""

import hmac
import logging
import queue
import secrets
import socket
import threading
import time

logger = logging.getLogger(__name__)

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_PROOF_TIMEOUT_S = 5.0
_AT_ONCE = 64


class AuthenticationFailed(OSError):
    """The other end does not know the secret. The message suggests a cause."""


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
    """Accepts connections and authenticates them. A peer that does not authenticate within seconds is disconnected and
    delays no other.

    Args:
        listener: The listening socket; closed by `close`.
        secret: The shared secret; empty if file permissions already restrict access.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._places = threading.BoundedSemaphore(_AT_ONCE)
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
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, unlike `close`
        except OSError as error:
            logger.debug("closing %s: %s", self._listener, error)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._places.acquire()
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
            self._places.release()


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
