"""Stores opened from URLs, and URLs that are refused."""

from pathlib import Path

import pytest
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.stores.abc import BucketMissing
from deltashard_checkpoint.stores.cloud.store import CloudStore
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.key_rule import BadKey
from deltashard_checkpoint.stores.s3.store import S3Store
from deltashard_checkpoint.stores.scheme import BadStoreUrl
from deltashard_checkpoint.stores.url import local_path, open_store


def test_memory_urls_of_one_name_open_the_same_store() -> None:
    open_store("memory://one").put("a", b"x")
    assert open_store("memory://one").get("a") == b"x"
    assert list(open_store("memory://two").list("")) == []


def test_file_urls_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(f"file://{tmp_path}/a%20b").put("k", b"x")
    monkeypatch.chdir(tmp_path)
    for url in (f"{tmp_path}/a b", "./a b", f"file://localhost{tmp_path}/a%20b"):
        store = open_store(url)
        assert isinstance(store.inner, FileStore)
        assert store.get("k") == b"x"
    with pytest.raises(BucketMissing):
        open_store(f"file://{tmp_path}/none", create=False)


def test_s3_urls_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoint and region in the URL take precedence over the environment. The store's own URL has neither."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://from-environment.example")
    with open_store("s3://bucket/pre/fix/") as store:
        assert isinstance(store.inner, S3Store)
        assert store.inner._endpoint == "https://from-environment.example"
        assert store.url == "s3://bucket/pre/fix"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3-only.example")
    with open_store("s3://bucket") as store:
        assert store.inner._endpoint == "https://s3-only.example"  # type: ignore[attr-defined]
    with open_store("s3://bucket?endpoint=http://127.0.0.1:9000&region=eu-west-1") as store:
        assert store.inner._endpoint == "http://127.0.0.1:9000"  # type: ignore[attr-defined]
        assert store.inner._client._base_url.region == "eu-west-1"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url",
    [
        *("", "bucket", "s3://", "s3:///prefix", "file://relative/dir", "gs://", "https://bucket"),
        *("s3://bucket?secret=x", "s3://bucket/p#fragment", "file:relative"),
        *("s3://bucket?endpoint=", "s3://bucket?region=a&region=b", "s3://bucket?region=no%20where"),
        *("gs://Bucket", "gs://bucket?region=a", "az://Ctr", "az://a--b?account=abc", "az://ctr?account=A"),
        *("az://ctr?account=abc&region=a", "s3://bucket?account=abc", "s3://bucket?addressing=dns"),
        *("s3://b", "s3://under..score%", "memory://x?region=a", "file:///tmp?endpoint=http://h"),
    ],
)
def test_invalid_store_urls_are_refused(url: str) -> None:
    with pytest.raises(BadStoreUrl, match="use "):
        open_store(url)


def test_gcs_and_azure_urls_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is the bucket's own unless an endpoint is given. The store's own URL has no options."""
    with open_store("gs://bucket/pre/fix/") as store:
        assert isinstance(store.inner, CloudStore)
        assert store.inner._account.endpoint == "https://storage.googleapis.com"
        assert store.url == "gs://bucket/pre/fix"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "fromenv")
    for url, endpoint in (
        ("az://ctr/x", "https://fromenv.blob.core.windows.net"),
        ("az://ctr/x?account=one", "https://one.blob.core.windows.net"),
        ("az://ctr/x?endpoint=http://127.0.0.1:1/dev", "http://127.0.0.1:1/dev"),
    ):
        with open_store(url) as store:
            assert store.inner._account.endpoint == endpoint  # type: ignore[attr-defined]
            assert store.url == "az://ctr/x"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=other;AccountKey=eA==")
    with pytest.raises(UserError, match="the URL names the account one, the connection string other"):
        open_store("az://ctr/x?account=one")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "malformed-secret")
    with pytest.raises(UserError, match="needs AccountName") as caught:
        open_store("az://ctr/x")
    assert "malformed-secret" not in str(caught.value)
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(UserError, match=r"add \?account=NAME"):
        open_store("az://ctr/x")


def test_credentials_in_a_url_are_refused_and_not_repeated():
    """Credentials would end in logs, so the error does not contain them."""
    with pytest.raises(UserError, match="must not hold credentials") as caught:
        open_store("s3://AKIAKEY:topsecret@bucket/prefix")
    assert "topsecret" not in str(caught.value)
    assert "AKIAKEY" not in str(caught.value)


def test_invalid_prefix_port_and_home_are_refused():
    """The store is refused when it is opened, not at the first save. A container's user may have no passwd entry."""
    for url in ("s3://bucket/a//b", "s3://bucket/../up", "s3://bucket/" + "x" * 900):
        with pytest.raises(BadKey):
            open_store(url)
    for port in ("0", "65536", "many"):
        with pytest.raises(UserError, match="no|not an http"):
            open_store(f"s3://bucket?endpoint=http://host:{port}")
    with pytest.raises(BadStoreUrl, match="cannot be resolved"):
        local_path("~no-such-user/store")
