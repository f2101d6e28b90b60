"""The transport to a store, as the environment configures it."""

import pytest
from deltashard_checkpoint.stores.abc import RequestRefused
from deltashard_checkpoint.stores.transport import (
    BadTransport,
    checked_endpoint,
    proxy_of,
    via_proxy,
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "ALL_PROXY", "AWS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_proxy_is_chosen_by_scheme_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("http_proxy", "proxy:8080")
    monkeypatch.setenv("NO_PROXY", "minio.example,.svc,10.0.0.7")
    assert proxy_of("https://s3.amazonaws.com") == "http://proxy:3128"
    assert proxy_of("http://elsewhere.example:9000") == "http://proxy:8080"
    for past in ("https://minio.example:9000", "http://minio.minio.svc:9000", "http://10.0.0.7:9000"):
        assert proxy_of(past) is None
    assert via_proxy("https://s3.amazonaws.com") == " through the proxy http://proxy:3128"
    assert via_proxy("https://minio.example") == ""


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "169.254.170.2", "169.254.170.23", "[fd00:ec2::23]", "[fd00:ec2::254]"]
)
def test_credential_endpoints_bypass_the_proxy(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """NO_PROXY does not matter: the request of EKS Pod Identity contains the service account's token."""
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    assert proxy_of(f"http://{host}/v1/credentials") is None


@pytest.mark.parametrize("proxy", ["ftp://proxy", "http://", "http://proxy:0", "http://proxy:99999"])
def test_invalid_proxy_is_refused(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(BadTransport, match="HTTPS_PROXY is not a proxy URL"):
        proxy_of("https://host")


def test_endpoint_is_a_plain_url_without_credentials() -> None:
    assert checked_endpoint("http://127.0.0.1:10000/account", path=True).port == 10000
    for bad, path in (
        ("http://h/account", False),
        ("http://h/account/more", True),
        ("http://h?x=1", True),
        ("http://user:secret@h", True),
        ("ftp://h", True),
        ("http://h:0", True),
        ("http://h:x", True),
        ("h:9000", True),
    ):
        with pytest.raises(RequestRefused) as caught:
            checked_endpoint(bad, path=path)
        assert "secret" not in str(caught.value)
