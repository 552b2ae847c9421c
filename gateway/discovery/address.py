"""host:port, split and joined."""

from fovea.wire.errors import InvalidInput


def split(address: str, field: str) -> tuple[str, str]:
    """Host and port of `host:port`. Raises InvalidInput naming `field`."""
    host, _, port = address.rpartition(":")
    if not host or not port:
        raise InvalidInput(f"{field} is {address!r}; write it as name:port", field=field)
    return host.strip("[]"), port


def join(host: str, port: int | str) -> str:
    """host:port as gRPC reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
