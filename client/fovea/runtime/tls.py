"""Mutual TLS between the services of one Fovea: both ends of a connection must show a certificate.

A folder contains `ca.crt`, `tls.crt` and `tls.key` (PEM), as cert-manager's secrets do. The CA belongs to this Fovea
alone. A process with a certificate from it for the name `fovea` is trusted at any address, because pods get a new
address each time.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import grpc

VARIABLE = "FOVEA_TLS_DIR"
"""Variable with the folder of certificates. The same for every service and client, unlike other settings; unset turns
TLS off.
"""

NAME = "fovea"
"""The DNS name in every certificate."""

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"


@dataclass(frozen=True)
class Certificates:
    """Certificate and key of a process, and the CA that it trusts, as PEM."""

    ca: bytes
    certificate: bytes
    key: bytes

    def for_server(self) -> grpc.ServerCredentials:
        """Returns server credentials that reject clients without a certificate of the CA before reading any data."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)], self.ca, require_client_auth=True)

    def for_client(self) -> grpc.ChannelCredentials:
        """Returns client credentials."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


CLIENT_OPTIONS: list[tuple[str, object]] = [("grpc.ssl_target_name_override", NAME)]
"""Channel options: the name that the service's certificate must have."""


def certificates() -> Certificates | None:
    """Returns the certificates of this process, from the folder in its environment; None if the variable is not set.

    Raises ValueError for a file that cannot be read or is not PEM.
    """
    folder = os.environ.get(VARIABLE, "")
    return Certificates(*(_read(Path(folder, name)) for name in (CA, CERTIFICATE, KEY))) if folder else None


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{VARIABLE}: {error}; the folder must contain {CA}, {CERTIFICATE} and {KEY}") from None
    # Check here, because gRPC would report an unusable file only at the first handshake and in its own log.
    if b"-----BEGIN " not in content:
        raise ValueError(f"{VARIABLE}: {path} is not a PEM file")
    return content
