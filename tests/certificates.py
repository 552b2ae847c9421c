"""Trusts a single certificate in tests that speak plain HTTP.

Every httpx and SDK client parses all trusted certificates (about 140) when it is created. This costs 50 ms of processor
time, half the cost of a gateway's start, one request and its stop. Do not use it in tests that download from a package
index.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

_END = "-----END CERTIFICATE-----\n"


@contextlib.contextmanager
def one_certificate(folder: Path) -> Iterator[None]:
    """Makes this process and its children trust a single authority for the duration of the context."""
    trusted = Path(certifi.where()).read_text()
    file = folder / "one-authority.pem"
    file.write_text(trusted[trusted.index("-----BEGIN") : trusted.index(_END)] + _END)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield
