"""Credentials between the services of one Fovea: a shared secret, and certificates for mutual TLS.

Callers of renderer, sampler and trainer must send the secret with every call. It keeps out other programs that can
connect. It does not protect against readers of the network; mutual TLS does.

With TLS, both ends of a connection must show a certificate. A folder contains `ca.crt`, `tls.crt` and `tls.key` (PEM),
as cert-manager's secrets do. The CA belongs to this Fovea alone. A process with a certificate from it for the name
`fovea` is trusted at any address, because pods get a new address each time.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import grpc

SECRET_VARIABLE = "FOVEA_SERVICE_SECRET"
SECRET_FILE_VARIABLE = "FOVEA_SERVICE_SECRET_FILE"
"""Variables with the secret, or with a file that contains it.

Unlike other settings, they have the same name for every service and client. There is no option, because other users can
read command lines.
"""

SECRET_KEY = "fovea-service-secret"
"""Metadata key that carries the secret."""

_LEAST_SECRET = 16


def service_secret() -> str:
    """Returns the secret of this process, from its environment or a file; empty if there is none.

    Raises ValueError if the secret is too short or not printable ASCII, or the file cannot be read.
    """
    name = SECRET_VARIABLE if os.environ.get(SECRET_VARIABLE) else SECRET_FILE_VARIABLE
    found = os.environ.get(name, "")
    if found and name == SECRET_FILE_VARIABLE:
        try:
            found = Path(found).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{SECRET_FILE_VARIABLE}: {error}") from None
    if found and (len(found) < _LEAST_SECRET or not found.isascii() or not found.isprintable()):
        raise ValueError(f"{name} must have at least {_LEAST_SECRET} printable ASCII characters")
    return found


def metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata that a client of a service sends with every call."""
    secret = service_secret()
    return ((SECRET_KEY, secret),) if secret else ()


TLS_VARIABLE = "FOVEA_TLS_DIR"
"""Variable with the folder of certificates. The same for every service and client, unlike other settings; unset turns
TLS off.
"""

TLS_NAME = "fovea"
"""The DNS name in every certificate."""

CA, CERTIFICATE, PRIVATE_KEY = "ca.crt", "tls.crt", "tls.key"


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


CLIENT_OPTIONS: list[tuple[str, object]] = [("grpc.ssl_target_name_override", TLS_NAME)]
"""Channel options: the name that the service's certificate must have."""


def certificates() -> Certificates | None:
    """Returns the certificates of this process, from the folder in its environment; None if the variable is not set.

    Raises ValueError for a file that cannot be read or is not PEM.
    """
    folder = os.environ.get(TLS_VARIABLE, "")
    return Certificates(*(_read(Path(folder, name)) for name in (CA, CERTIFICATE, PRIVATE_KEY))) if folder else None


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{TLS_VARIABLE}: {error}; the folder must contain {CA}, {CERTIFICATE} and {PRIVATE_KEY}"
        ) from None
    # Check here, because gRPC would report an unusable file only at the first handshake and in its own log.
    if b"-----BEGIN " not in content:
        raise ValueError(f"{TLS_VARIABLE}: {path} is not a PEM file")
    return content
