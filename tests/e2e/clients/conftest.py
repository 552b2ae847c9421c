"""Compiled clients, and a TLS proxy in front of the gateway."""

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from examples.clients.toolchain import TOOLCHAINS
from tests.e2e.stack import Stack


@pytest.fixture(scope="package", params=["go", "typescript"])
def client(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The command that starts a client."""
    toolchain = TOOLCHAINS[request.param]
    if toolchain.missing:
        pytest.skip(f"the {request.param} client needs {' and '.join(toolchain.missing)}")
    if not toolchain.is_built:
        # Its packages come from the network, and the tests must run without one.
        pytest.skip(f"the {request.param} client is not built: make clients")
    with toolchain.built() as command:
        yield command


@dataclass(frozen=True)
class TlsFront:
    """A proxy that terminates TLS, as an ingress does."""

    address: str
    certificate: Path
    other_certificate: Path


@pytest.fixture
async def tls_front(stack: Stack, tmp_path: Path) -> AsyncIterator[TlsFront]:
    """A TLS proxy in front of the gateway, with a certificate that `certificate` signs and `other_certificate` does
    not.
    """
    certificate, other, key = tmp_path / "certificate.pem", tmp_path / "other.pem", tmp_path / "key.pem"
    _write_certificate(other, key)
    _write_certificate(certificate, key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    host, port = stack.address("gateway").rsplit(":", 1)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    yield TlsFront(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", certificate, other)
    server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # a client may disconnect abruptly once it has its answer
    finally:
        writer.close()


def _write_certificate(certificate: Path, key: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fovea.test")])
    now = datetime.datetime.now(datetime.UTC)
    hosts = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(hosts, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pkcs8 = serialization.PrivateFormat.PKCS8
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
