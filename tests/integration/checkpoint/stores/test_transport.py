"""Transport to a real MinIO: private authorities, proxies, virtual-hosted buckets, and encryption at rest."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltashard_checkpoint.stores.abc import ObjectExists, ObjectNotFound, RequestRefused, StoreUnavailable
from deltashard_checkpoint.stores.retry import RetryPolicy
from deltashard_checkpoint.stores.transport import BadTransport, CertificateRefused
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.store_conformance import get_range
from tests.support.server.apiserver import CertificateAuthority
from tests.support.server.cloud_server import CloudServer
from tests.support.server.faulty_proxy import FixedResponses
from tests.support.server.forward_proxy import ForwardProxy
from tests.support.server.minio_server import MinioServer
from tests.support.server.port import free_port

pytestmark = pytest.mark.minio
ONCE = RetryPolicy(attempts=1)
KEY = "tests-key"


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return CertificateAuthority()


@pytest.fixture(scope="module")
def tls_server(
    tmp_path_factory: pytest.TempPathFactory, authority: CertificateAuthority
) -> Iterator[MinioServer]:
    server = MinioServer(
        tmp_path_factory.mktemp("tls-minio"),
        settings={"MINIO_KMS_SECRET_KEY": f"{KEY}:MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="},
        authority=authority,
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture
def tls_minio(tls_server: MinioServer, monkeypatch: pytest.MonkeyPatch) -> MinioServer:
    for name, value in tls_server.environment.items():
        monkeypatch.setenv(name, value)
    return tls_server


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove proxy and authority variables of the machine."""
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "AWS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def bundle(authority, tmp_path) -> Path:
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    return tmp_path / "ca.crt"


@pytest.fixture
def other_bundle(tmp_path) -> Path:
    (tmp_path / "other.crt").write_bytes(CertificateAuthority("others").pem)
    return tmp_path / "other.crt"


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_private_authority(tls_minio, bundle, other_bundle, variable, monkeypatch):
    """The error for a wrong, missing or malformed authority names the variable."""
    url = tls_minio.url(tls_minio.new_bucket())
    monkeypatch.setenv(variable, str(bundle))
    with open_store(url) as store:
        store.put("a", b"x")
        assert store.get("a") == b"x"
    monkeypatch.setenv(variable, str(other_bundle))
    with (
        open_store(url, policy=ONCE) as store,
        pytest.raises(CertificateRefused, match=f"{variable}={other_bundle}"),
    ):
        store.put("b", b"x")
    monkeypatch.delenv(variable)
    with open_store(url, policy=ONCE) as store, pytest.raises(CertificateRefused, match="public authorities"):
        store.put("b", b"x")
    monkeypatch.setenv(variable, "/no/such/file")
    with pytest.raises(BadTransport, match=f"{variable} cannot be read"):
        open_store(url)


def test_clouds_trust_a_private_authority(authority, bundle, other_bundle, tmp_path, monkeypatch):
    issued = authority.issue()
    (tmp_path / "both.pem").write_bytes(issued.certificate + issued.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "unchecked")
    with FixedResponses(404, b"<Error><Code>NoSuchKey</Code></Error>", tls=context) as answers:
        url = f"gs://some-bucket?endpoint=https://localhost:{answers.port}"
        monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
        with open_store(url, policy=ONCE) as store:
            with pytest.raises(ObjectNotFound):
                store.get("a")
            assert store.now_s() > 0
        monkeypatch.setenv("SSL_CERT_FILE", str(other_bundle))
        with open_store(url, policy=ONCE) as store:
            for ask in (lambda: store.get("a"), store.now_s):
                with pytest.raises(CertificateRefused, match=f"SSL_CERT_FILE={other_bundle}"):
                    ask()


def test_proxy_tunnel(tls_minio, bundle, monkeypatch):
    """All TLS traffic uses CONNECT. NO_PROXY takes precedence, and errors name the proxy."""
    url = tls_minio.url(tls_minio.new_bucket())
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with ForwardProxy(login="user:p%40ss") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:p%2540ss@127.0.0.1:{proxy.port}")
        with open_store(url) as store:
            store.put_if_absent("a", bytes(3_000_000))
            with pytest.raises(ObjectExists):
                store.put_if_absent("a", b"x")
            assert store.get("a") == bytes(3_000_000)
            assert [each.key for each in store.list("")] == ["a"]
        assert set(proxy.tunnels) == {f"127.0.0.1:{tls_minio.port}"}
        count = len(proxy.tunnels)
        monkeypatch.setenv("NO_PROXY", "127.0.0.0/8,127.0.0.1,localhost")
        with open_store(url) as store:
            store.put("b", b"x")
        assert len(proxy.tunnels) == count
        monkeypatch.delenv("NO_PROXY")
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:wrong@127.0.0.1:{proxy.port}")
        with open_store(url, policy=ONCE) as store, pytest.raises(StoreUnavailable) as caught:
            store.put("c", b"x")
    assert f"through the proxy http://127.0.0.1:{proxy.port}" in str(caught.value)
    assert "407" in str(caught.value)
    assert "wrong" not in str(caught.value)


def test_clouds_go_through_a_proxy(cloud: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = cloud.url(cloud.new_bucket())
    with ForwardProxy() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        with open_store(url) as store:
            store.put("a", b"x")
            assert store.get("a") == b"x"
            seen = len(proxy.requests)
            assert seen >= 2
            store.now_s()
            assert len(proxy.requests) > seen
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        seen = len(proxy.requests)
        with open_store(url) as store:
            assert store.get("a") == b"x"
            store.now_s()
        assert len(proxy.requests) == seen
    monkeypatch.delenv("NO_PROXY")
    unreachable = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HTTP_PROXY", unreachable)
    with open_store(url, policy=ONCE) as store:
        for ask in (lambda: store.get("a"), store.now_s):
            with pytest.raises(StoreUnavailable, match=f"through the proxy {unreachable}"):
                ask()


def test_virtual_hosted_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`virtual` works with a MinIO that resolves bucket host names. An IP address allows `path` only."""
    server = MinioServer(tmp_path, settings={"MINIO_DOMAIN": "localhost"})
    server.start()
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        bucket = server.new_bucket()
        with ForwardProxy() as proxy:  # which resolves names below localhost
            monkeypatch.setenv("HTTP_PROXY", proxy.url)
            for addressing, host in (("virtual", f"{bucket}.localhost"), ("path", "localhost")):
                url = f"s3://{bucket}?endpoint=http://localhost:{server.port}&addressing={addressing}"
                proxy.requests.clear()
                with open_store(url) as store:
                    store.put_if_absent(f"log/{addressing}", b"x")
                    assert store.get(f"log/{addressing}") == b"x"
                    assert f"log/{addressing}" in [each.key for each in store.list("log/")]
                    assert store.head(f"log/{addressing}").size_bytes == 1
                    assert store.now_s() > 0
                hosts = {each.split("//")[1].split("/")[0].partition(":")[0] for each in proxy.requests}
                assert hosts == {host}
    finally:
        server.stop()
    with pytest.raises(RequestRefused, match="addressing=path"):
        open_store("s3://bucket?endpoint=http://127.0.0.1:9000&addressing=virtual")
    with pytest.raises(RequestRefused, match="dots in the bucket"):
        open_store("s3://a.bucket?endpoint=https://minio.example&addressing=virtual")


@pytest.mark.parametrize(
    ("options", "header"),
    [
        ("sse=AES256", {"x-amz-server-side-encryption": "AES256"}),
        (
            f"sse=aws:kms&kms-key-id={KEY}",
            {
                "x-amz-server-side-encryption": "aws:kms",
                "x-amz-server-side-encryption-aws-kms-key-id": f"arn:aws:kms:{KEY}",
            },
        ),
        ("sse=aws:kms", {"x-amz-server-side-encryption": "aws:kms"}),
    ],
)
def test_encryption_at_rest(tls_minio, bundle, options, header, monkeypatch):
    """The server reports every object as encrypted, and the store can read it."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    bucket = tls_minio.new_bucket()
    with open_store(f"{tls_minio.url(bucket)}&{options}") as store:
        store.put("replaced", b"one")
        store.put_if_absent("created", bytes(2_000_000))
        assert store.get("created") == bytes(2_000_000)
        assert get_range(store, "replaced", 1, 2) == b"ne"
    client = tls_minio.client()
    for key in ("replaced", "created"):
        reported = client.stat_object(bucket, key).metadata or {}
        assert header.items() <= {name.lower(): value for name, value in reported.items()}.items()
    client._http.clear()


def test_unavailable_encryption_is_refused(tls_minio, bundle, minio_server, monkeypatch):
    """The causes are an unknown key, a missing key service, a server without the header, and an invalid URL."""

    def refused(url: str, error: type[Exception], why: str) -> None:
        with open_store(url, policy=ONCE) as store, pytest.raises(error, match=why):
            store.put("a", b"x")

    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    url = tls_minio.url(tls_minio.new_bucket())
    refused(f"{url}&sse=aws:kms&kms-key-id=another", RequestRefused, r"(?i)key")
    for name, value in minio_server.environment.items():
        monkeypatch.setenv(name, value)
    refused(f"{minio_server.url(minio_server.new_bucket())}&sse=AES256", RequestRefused, "key service")
    with FixedResponses(200) as answers:  # accepts every object and ignores unknown headers
        url = f"s3://bucket?endpoint=http://127.0.0.1:{answers.port}"
        refused(f"{url}&sse=AES256", RequestRefused, "returned no encryption header")
        refused(url, StoreUnavailable, "endpoint is not an object store")
    for wrong in ("sse=none", "sse=AES256&kms-key-id=k", "kms-key-id=k", "sse=aws:kms&kms-key-id=a%20b"):
        with pytest.raises(RequestRefused, match="use sse="):
            open_store(f"s3://bucket?endpoint=http://127.0.0.1:1&{wrong}")
