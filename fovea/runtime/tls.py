"""Mutual TLS between the services of one Fovea: each shows a certificate, and talks only to those that show one too.

A folder holds `ca.crt`, `tls.crt` and `tls.key` (PEM), as secrets of cert-manager do. The CA is this Fovea's own: who
has a certificate of it for the name `fovea` belongs to it, whatever its address: pods have a new one each time.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import grpc

VARIABLE = "FOVEA_TLS_DIR"
"""The same for every service and every client, unlike other settings; unset is off."""

NAME = "fovea"
"""The DNS name in every certificate."""

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"


@dataclass(frozen=True)
class Certificates:
    """What a process shows and whom it believes, as PEM."""

    ca: bytes
    certificate: bytes
    key: bytes

    def for_server(self) -> grpc.ServerCredentials:
        """Of a server that refuses who shows no certificate of the CA, before it reads a byte."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)], self.ca, require_client_auth=True)

    def for_client(self) -> grpc.ChannelCredentials:
        """Of a client."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


CLIENT_OPTIONS: list[tuple[str, object]] = [("grpc.ssl_target_name_override", NAME)]
"""Of a channel: which name the certificate of the service must have."""


def certificates() -> Certificates | None:
    """Those of this process, from the folder that its environment names; None if it names none.

    Raises ValueError for a file that cannot be read or is no PEM.
    """
    folder = os.environ.get(VARIABLE, "")
    return Certificates(*(_read(Path(folder, name)) for name in (CA, CERTIFICATE, KEY))) if folder else None


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{VARIABLE}: {error}; it must hold {CA}, {CERTIFICATE} and {KEY}") from None
    # gRPC would only say at the first handshake, in a log of its own, that it cannot use what it was given.
    if b"-----BEGIN " not in content:
        raise ValueError(f"{VARIABLE}: {path} is no PEM file")
    return content
