"""A real kube-apiserver over a real etcd, for tests: without nodes and controllers, with its own admission.

Both listen on loopback, on free ports, use their own directory, and are ended by pid.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import urllib3
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from deltashard_operator.kube.api_access import ApiAccess, api_access
from kubernetes import client, config

from tests.support.eventually import eventually
from tests.support.server.port import free_port
from tests.support.tool import require_tool


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCertificate:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


class CertificateAuthority:
    """A certificate authority for one test."""

    def __init__(self, name: str = "tests") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key.public_key(), hours=24).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
        )
        self._certificate = builder.sign(self._key, hashes.SHA256())

    def _builder(self, subject: x509.Name, key: Any, *, hours: int) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(hours=hours))
        )

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key(self) -> bytes:
        return pem_of(self._key)

    def issue(
        self,
        name: str = "localhost",
        *,
        organization: str = "",
        hours: int = 2,
        alternatives: Sequence[str] = (),
    ) -> IssuedCertificate:
        """Issue a certificate for loopback and `alternatives` (names, addresses), valid for servers and clients."""
        key = ec.generate_private_key(ec.SECP256R1())
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if organization:
            parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
        certificate = (
            self._builder(x509.Name(parts), key.public_key(), hours=hours)
            .add_extension(
                x509.SubjectAlternativeName(
                    [
                        _alternative(each)
                        for each in dict.fromkeys(("localhost", "127.0.0.1", "::1", *alternatives))
                    ]
                ),
                critical=False,
            )
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return IssuedCertificate(
            certificate=certificate.public_bytes(serialization.Encoding.PEM), key=pem_of(key)
        )


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _alternative(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The API's reply."""

    status: int
    document: dict[str, Any]
    warnings: list[str]


class Rest:
    """Requests to an `ApiServer` without a model in between; use as a context manager."""

    def __init__(self, server: ApiServer, user: str = "") -> None:
        """Act as the administrator, or as a user whose rights come only from roles."""
        self._headers = {"Impersonate-User": user} if user else {}
        folder = server.directory
        self._url = server.url
        self._pool = urllib3.PoolManager(
            maxsize=16,
            retries=False,
            timeout=120.0,
            ca_certs=f"{folder}/ca.crt",
            cert_file=f"{folder}/admin.crt",
            key_file=f"{folder}/admin.key",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.clear()

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        dry_run: bool = False,
        content: str = "application/json",
        accept: str = "application/json",
    ) -> Reply:
        """Send one request; `path` includes its query."""
        if dry_run:
            path += ("&" if "?" in path else "?") + "dryRun=All"
        reply = self._pool.request(
            method,
            self._url + path,
            body=None if body is None else json.dumps(body),
            headers={"Content-Type": content, "Accept": accept, **self._headers},
        )
        return Reply(
            status=reply.status, document=_document(reply.data), warnings=reply.headers.getlist("Warning")
        )

    def text(self, path: str) -> str:
        reply = self._pool.request("GET", self._url + path, headers=self._headers)
        assert reply.status == 200, reply.status
        return reply.data.decode()

    def create(
        self,
        document: dict[str, Any],
        namespace: str = "default",
        *,
        dry_run: bool = False,
        strict: bool = False,
    ) -> Reply:
        """Create an object; `strict` makes an unknown field an error."""
        path = collection(document, namespace if document["kind"].lower() in NAMESPACED else "")
        return self("POST", path + ("?fieldValidation=Strict" if strict else ""), document, dry_run=dry_run)

    def is_allowed(self, user: str, *groups: str, **attributes: str) -> bool:
        """Return whether the API server permits a user what these attributes describe."""
        spec = {"user": user, "groups": groups, "resourceAttributes": attributes}
        reply = self("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec})
        assert reply.status == 201, reply.document
        return bool(reply.document["status"]["allowed"])

    def grant(self, user: str, namespace: str, *rules: dict[str, Any]) -> None:
        """Grant a user in a namespace these rules of RBAC, by a Role of the name `user`."""
        group = "rbac.authorization.k8s.io"
        root, metadata = f"/apis/{group}/v1/namespaces/{namespace}", {"name": "user"}
        reference = {"apiGroup": group, "kind": "Role", "name": "user"}
        bound = {"roleRef": reference, "subjects": [{"apiGroup": group, "kind": "User", "name": user}]}
        assert self("POST", f"{root}/roles", {"metadata": metadata, "rules": rules}).status == 201
        assert self("POST", f"{root}/rolebindings", {"metadata": metadata, **bound}).status == 201

    def namespace(self, name: str, labels: dict[str, str] | None = None) -> None:
        """Create a namespace, with the service account that the controller manager would make."""
        document = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": labels or {}},
        }
        assert self.create(document).status == 201
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        assert self.create(account, name).status == 201


def collection(document: dict[str, Any], namespace: str) -> str:
    group, _, version = document["apiVersion"].rpartition("/")
    kind = document["kind"].lower()
    plural = kind[:-1] + "ies" if kind.endswith("y") else kind + "s"
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"/{'apis/' + group if group else 'api'}/{version}{place}/{plural}"


def _document(text: bytes) -> dict[str, Any]:
    """Convert the body to a document; a body that is not JSON becomes a message, as in a status."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": text.decode(errors="replace")}


NAMESPACED = {
    "lease", "serviceaccount", "job", "pod", "checkpointpolicy", "checkpointrequest", "checkpointrun", "resourcequota",
    "configmap", "secret", "service", "role", "rolebinding", "cronjob", "deployment", "statefulset",
}  # fmt: skip


def _is_ready(http: Rest) -> bool:
    try:
        return all(http("GET", path).status == 200 for path in ("/readyz", "/api/v1/namespaces/default"))
    except urllib3.exceptions.HTTPError:
        return False


class ApiServer:
    """etcd and kube-apiserver; `start`, use `kubeconfig` or `api`, `stop`."""

    def __init__(self, directory: Path, *flags: str) -> None:
        """Create the servers; `flags` are added to kube-apiserver's constant ones."""
        self.directory = directory
        self._flags = flags
        self.kubeconfig = directory / "kubeconfig"
        self.port = 0
        self._etcd = require_tool("etcd")
        self._apiserver = require_tool("kubernetes") / "kube-apiserver"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def pids(self) -> dict[str, int]:
        return {Path(str(process.args[0])).name: process.pid for process in self._processes}

    def access(self) -> ApiAccess:
        """Return access as the operator's processes use it, with all rights."""
        return api_access(self.kubeconfig, "tests")

    def api(self) -> client.ApiClient:
        configuration = client.Configuration()
        config.load_kube_config(str(self.kubeconfig), client_configuration=configuration)
        return client.ApiClient(configuration)

    def http(self, user: str = "") -> Rest:
        """Send plain requests with the same rights (or a user's): objects are sent and returned as documents."""
        return Rest(self, user)

    def kubeconfig_of(self, namespace: str, account: str, folder: Path) -> Path:
        """Write a kubeconfig into a folder, with only the rights of a service account."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        with self.http() as http:
            reply = http("POST", path, {**request, "spec": {"expirationSeconds": 24 * 3600}})
        assert reply.status == 201, reply.document
        document = yaml.safe_load(self.kubeconfig.read_text())
        document["users"] = [{"name": "admin", "user": {"token": reply.document["status"]["token"]}}]
        written = folder / f"{account}.kubeconfig"
        written.write_text(yaml.safe_dump(document))
        return written

    def start(self) -> None:
        """Start both and wait until the API is ready, with its default namespace and service account."""
        certificates = self._certificates()
        etcd_port, peer_port, self.port = free_port(), free_port(), free_port()
        peer = f"http://127.0.0.1:{peer_port}"
        client_url = f"http://127.0.0.1:{etcd_port}"
        self._spawn(
            self._etcd, f"--data-dir={self.directory}/etcd", "--name=node0", "--unsafe-no-fsync", "--log-level=warn",
            f"--listen-client-urls={client_url}", f"--advertise-client-urls={client_url}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=node0={peer}",
        )  # fmt: skip
        pem = {name: f"{self.directory}/{name}" for name in certificates}
        self._spawn(
            self._apiserver, f"--etcd-servers={client_url}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none", f"--secure-port={self.port}", f"--cert-dir={self.directory}",
            f"--tls-cert-file={pem['server.crt']}", f"--tls-private-key-file={pem['server.key']}",
            f"--client-ca-file={pem['ca.crt']}", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pem['server.key']}", f"--service-account-signing-key-file={pem['server.key']}",
            "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC", "--shutdown-delay-duration=0s",
            *self._flags,
        )  # fmt: skip
        http = self.http()

        def ready() -> bool:
            for process in self._processes:
                if process.poll() is not None:
                    pytest.fail(
                        f"{process.args[0]} ended:\n{(self.directory / 'log').read_text()[-4000:]}",
                        pytrace=False,
                    )
            return _is_ready(http)

        try:
            with http:
                eventually(ready, what="the API server", timeout_s=180)
                for name in ("default", "trainer"):  # without the controller manager no process creates them
                    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
                    assert http.create(account).status == 201
        except BaseException:
            self.stop()
            raise

    def kill_api(self) -> None:
        self._processes[1].kill()
        self._processes[1].wait(30)

    def start_api(self) -> None:
        """Restart it unchanged, and wait until it answers."""
        arguments = [str(each) for each in self._processes.pop(1).args]  # type: ignore[union-attr]
        self._spawn(Path(arguments[0]), *arguments[1:])
        with self.http() as http:
            eventually(lambda: _is_ready(http), what="the API server", timeout_s=180)

    def _certificates(self) -> dict[str, bytes]:
        authority = CertificateAuthority("cluster")
        server = authority.issue("kube-apiserver")
        admin = authority.issue("admin", organization="system:masters")
        files = {
            "ca.crt": authority.pem,
            "server.crt": server.certificate,
            "server.key": server.key,
            "admin.crt": admin.certificate,
            "admin.key": admin.key,
        }
        for name, content in files.items():
            (self.directory / name).write_bytes(content)
        return files

    def _spawn(self, binary: Path, *flags: str) -> None:
        with (self.directory / "log").open("ab") as log:
            process = subprocess.Popen(
                [str(binary), *flags],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._processes.append(process)
        if not self.kubeconfig.exists():
            self._write_kubeconfig()

    def _write_kubeconfig(self) -> None:
        user = {
            "client-certificate": f"{self.directory}/admin.crt",
            "client-key": f"{self.directory}/admin.key",
        }
        cluster = {"server": self.url, "certificate-authority": f"{self.directory}/ca.crt"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "admin"}}],
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": "admin", "user": user}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(document))

    def stop(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(15)
        self._processes.clear()


def put(directory: Path, issued: IssuedCertificate) -> None:
    """Write both files one after the other, not atomically."""
    (directory / "tls.crt").write_bytes(issued.certificate)
    (directory / "tls.key").write_bytes(issued.key)
