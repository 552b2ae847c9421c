"""Connections between processes of one trainer: each end proves that it knows the secret before anything is said.

What follows is neither signed nor encrypted: this keeps out who can connect, not who reads or changes what is on the
wire.
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
    """The other end does not know the secret. The message says what to look at."""


def connect(address: str | tuple[str, int], secret: bytes, timeout_s: float) -> socket.socket:
    """A connection to an `AuthenticatedListener` at a path or at (host, port).

    Raises OSError if nobody listens, Stranger if the secrets differ.
    """
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(address)
    else:
        connection = socket.create_connection(address, timeout=timeout_s)
    return _authenticated(connection, secret, connects=True)


class AuthenticatedListener:
    """Accepts connections. Those whose other end does not prove itself within seconds are closed and hold up nobody.

    Args:
        listener: Where to listen; closed by `close`.
        secret: What the others must know; empty where the file system already keeps strangers out.
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
        """Where to `connect`, if it is not a path."""
        host, port, *_ = self._listener.getsockname()
        return host, port

    def accept(self, deadline: float | None = None) -> socket.socket:
        """The next connection. Raises TimeoutError at `deadline`, a time of `time.monotonic`; none waits for ever."""
        try:
            return self._accepted.get(timeout=None if deadline is None else max(0.001, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("nobody came") from None

    def close(self) -> None:
        """Stops listening; what was accepted stays open."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread; `close` alone does not
        except OSError as error:
            logger.debug("closing %s: %s", self._listener, error)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._prove, args=(connection,), daemon=True).start()

    def _prove(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_PROOF_TIMEOUT_S)
            self._accepted.put(_authenticated(connection, self._secret, connects=False))
        except OSError as error:
            logger.debug("turned away %s: %s", connection, error)
        finally:
            self._places.release()


def _authenticated(connection: socket.socket, secret: bytes, connects: bool) -> socket.socket:
    """`connection` once both ends have proven themselves; closed if not. Raises OSError.

    Both send a random number and then the HMAC of both numbers, each under a label of its own: an answer cannot be sent
    back as one's own. Who connects proves itself first.
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
        raise AuthenticationFailed("it does not know this service's secret: is FOVEA_SERVICE_SECRET the same on both?")


def _exactly(connection: socket.socket, size: int) -> bytes:
    try:
        data = connection.recv(size, socket.MSG_WAITALL)
    except ConnectionResetError:
        data = b""
    if len(data) < size:
        raise AuthenticationFailed("it closed the connection: is FOVEA_SERVICE_SECRET the same on both?")
    return data
