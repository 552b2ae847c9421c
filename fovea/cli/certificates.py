"""Certificate authority and certificate of `fovea up --tls`, for the services of one machine."""

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fovea.runtime import tls

_VALID = datetime.timedelta(days=365)
_CLOCK_SKEW = datetime.timedelta(minutes=5)


def make_certificates(folder: Path) -> Path:
    """Writes a new CA certificate, a certificate signed by it, and that certificate's private key; returns the folder.

    Both certificates are valid for one year. The CA's private key is not stored. Only this user can read the files.
    Existing files are replaced, so processes that loaded the old ones can no longer connect to those that load the new
    ones.
    """
    now = datetime.datetime.now(datetime.UTC)

    def signed(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _VALID)
            .add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        )
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = {
        tls.CA: signed("fovea-ca", "fovea-ca", ca_key, ca_key),
        tls.CERTIFICATE: signed(tls.NAME, "fovea-ca", key, ca_key),
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in {**files, tls.KEY: encoded}.items():
        (folder / name).unlink(missing_ok=True)
        with open(folder / name, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(content)
    return folder
