"""Fewer trusted certificates for tests that speak plain HTTP.

Each HTTP client, of httpx and of the SDK, reads all that are trusted, some 140: a good twentieth of a second of
processor time, half of what a gateway's start, one request and its stop take. Not for tests that reach for an index.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

_END = "-----END CERTIFICATE-----\n"


@contextlib.contextmanager
def one_certificate(folder: Path) -> Iterator[None]:
    """This process and those it starts trust a single authority meanwhile."""
    trusted = Path(certifi.where()).read_text()
    file = folder / "one-authority.pem"
    file.write_text(trusted[trusted.index("-----BEGIN") : trusted.index(_END)] + _END)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield
