"""The cluster's own certificate authority, made anew for every cluster: certificates, kubeconfigs, the service-account key."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Authority:
    """A CA in a folder; what it issues lies there as `<name>.crt` and `<name>.key`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "deltashard test cluster")])
        self._certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / "ca.crt"
        self.key_file = folder / "ca.key"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))
        self.key_file.write_bytes(_pem(self._key))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=2))
        )

    def issue(
        self, name: str, *, user: str, group: str = "", alternatives: Sequence[str] = ()
    ) -> tuple[Path, Path]:
        """Files of a certificate (client and server) and its key; `alternatives` are DNS names or addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        if group:
            parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        builder = self._builder(x509.Name(parts), key).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
            critical=False,
        )
        if alternatives:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_alternative(text) for text in alternatives]), critical=False
            )
        certificate = builder.sign(self._key, hashes.SHA256())
        files = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(_pem(key))
        return files

    def kubeconfig(self, name: str, *, server: str, user: str, group: str = "") -> Path:
        """A kubeconfig of a new client certificate."""
        certificate, key = self.issue(name, user=user, group=group)

        def inline(path: Path) -> str:
            return base64.b64encode(path.read_bytes()).decode()

        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "c", "cluster": {"server": server, "certificate-authority-data": inline(self.file)}}
            ],
            "users": [
                {
                    "name": "u",
                    "user": {"client-certificate-data": inline(certificate), "client-key-data": inline(key)},
                }
            ],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def account_keys(self) -> tuple[Path, Path]:
        """(public, private) key of service-account tokens."""
        key = ec.generate_private_key(ec.SECP256R1())
        public, private = self.folder / "accounts.pub", self.folder / "accounts.key"
        public.write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        private.write_bytes(_pem(key))
        return public, private


def _alternative(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
