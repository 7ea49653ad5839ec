"""A certificate authority for tests."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from awex_core.meta.tls import Tls

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates, into files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.key = folder, ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        self.certificate = self._sign(self.name, self.key, x509.BasicConstraints(ca=True, path_length=None))
        (folder / "ca.pem").write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType):
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - DAY)
        builder = builder.not_valid_after(now + DAY).add_extension(extension, critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def issue(self, name: str, address: str = "127.0.0.1", password: bytes = b"") -> Tls:
        """A certificate for an address, its key, and this authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        certificate = self._sign(subject, key, alternative)
        cert, private = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private.touch(mode=0o600)
        encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        form = serialization.PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))
        return Tls(str(self.folder / "ca.pem"), str(cert), str(private))
