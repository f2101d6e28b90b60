"""The cluster's own certificate authority, new for every cluster: certificates, kubeconfigs, the service-account key."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.server import apiserver


class ClusterAuthority:
    """A CA in a folder; it writes what it issues there as `<name>.crt` and `<name>.key`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._authority = apiserver.CertificateAuthority("deltashard test cluster")
        self.file, self.key_file = self._written(
            "ca", apiserver.IssuedCertificate(certificate=self._authority.pem, key=self._authority.key)
        )

    def _written(self, name: str, issued: apiserver.IssuedCertificate) -> tuple[Path, Path]:
        files = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        files[0].write_bytes(issued.certificate)
        files[1].write_bytes(issued.key)
        return files

    def issue(
        self, name: str, *, user: str, group: str = "", alternatives: Sequence[str] = ()
    ) -> tuple[Path, Path]:
        """Files of a certificate (client and server) and its key; `alternatives` are DNS names or addresses."""
        issued = self._authority.issue(user, organization=group, hours=24, alternatives=alternatives)
        return self._written(name, issued)

    def kubeconfig(self, name: str, *, server: str, user: str, group: str = "") -> Path:
        certificate, key = self.issue(name, user=user, group=group)

        def inline(path: Path) -> str:
            return base64.b64encode(path.read_bytes()).decode()

        cluster = {"server": server, "certificate-authority-data": inline(self.file)}
        account = {"client-certificate-data": inline(certificate), "client-key-data": inline(key)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": account}],
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
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
        private.write_bytes(apiserver.pem_of(key))
        return public, private
