"""Discovery of the replicas of one service: at fixed addresses, or in a Kubernetes service.

All other code watches the result and follows its changes.
"""

from collections.abc import AsyncGenerator, Iterable
from typing import Protocol

from fovea.wire.errors import InvalidInput

Addresses = frozenset[str]
"""host:port of each replica that accepts requests; [host]:port for IPv6."""


class Discovery(Protocol):
    """The source of one service's addresses."""

    def watch(self) -> AsyncGenerator[Addresses, None]:
        """Yields all addresses as soon as they are known, and again whenever they change.

        After a failure the source is queried again with growing pauses; meanwhile the last yielded set remains valid.
        The generator ends only if the set can no longer change. A replica that is missing from a later set is leaving:
        it finishes its current requests and receives no new ones.
        """
        ...


class StaticDiscovery:
    """Addresses that never change."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = frozenset(addresses)

    async def watch(self) -> AsyncGenerator[Addresses, None]:
        yield self._addresses


def split_address(address: str, field: str) -> tuple[str, str]:
    """Returns host and port of `host:port`. Raises InvalidInput that names `field`."""
    host, _, port = address.rpartition(":")
    if not host or not port:
        raise InvalidInput(f"{field} is {address!r}; write it as name:port", field=field)
    return host.strip("[]"), port


def join_address(host: str, port: int | str) -> str:
    """Returns host:port in the format of gRPC."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
