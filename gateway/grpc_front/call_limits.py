"""What a gRPC call and a connection may take of the gateway."""

from fovea.runtime.server import open_files
from fovea.wire.errors import PayloadTooLarge
from gateway.access.quotas import Holding
from gateway.settings import GatewaySettings

_IDLE_MS = 120_000
_KEEPALIVE_MS = 60_000
_KEEPALIVE_TIMEOUT_MS = 20_000


def channel_limits(settings: GatewaySettings) -> dict[str, int]:
    """Options of gRPC's core for connections of strangers.

    One without a call is closed after a while: clients of gRPC open another with their next call. One whose machine is
    gone is found out by pings.
    """
    return {
        "grpc.max_allowed_incoming_connections": min(settings.max_connections, open_files() // 4),
        "grpc.server_handshake_timeout_ms": int(settings.request_timeout_s * 1000),
        "grpc.max_connection_idle_ms": _IDLE_MS,
        "grpc.keepalive_time_ms": _KEEPALIVE_MS,
        "grpc.keepalive_timeout_ms": _KEEPALIVE_TIMEOUT_MS,
    }


class Weight:
    """How much one call has brought, uploaded images that it names included.

    Args:
        limit: Bytes that it may bring.
        memory: What its owner has of the memory for all requests in progress.
    """

    def __init__(self, limit: int, memory: Holding) -> None:
        self._limit, self._memory, self._bytes = limit, memory, 0

    def add(self, size_bytes: int) -> None:
        """Counts more of it. Raises PayloadTooLarge, and ResourceExhausted if others fill the memory."""
        self._bytes += size_bytes
        if self._bytes > self._limit:
            raise PayloadTooLarge(f"the request, its images included, is above {self._limit} bytes in all")
        self._memory.take(size_bytes)
