"""Faults of Google's and Azure's storage and of the network, and the resulting errors."""

import json
import random
from collections.abc import Iterator

import pytest
from deltashard_checkpoint.backoff import Backoff
from deltashard_checkpoint.stores.abc import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    ObjectExists,
    RequestRefused,
    StoreFull,
    StoreUnavailable,
)
from deltashard_checkpoint.stores.cloud.account import AzureAccount, GoogleAccount
from deltashard_checkpoint.stores.cloud.store import CloudStore
from deltashard_checkpoint.stores.deadline import deadline, idle_timeout
from deltashard_checkpoint.stores.retry import RetryingStore, RetryPolicy
from deltashard_checkpoint.stores.url import open_store

from tests.support.server.cloud_server import Azurite, CloudServer
from tests.support.server.faulty_proxy import FaultyProxy, FixedResponses

DATA = random.Random(7).randbytes(3_000_000)


def bare(
    server: CloudServer, bucket: str, port: int | None = None, idle_timeout_s: float = 20.0
) -> CloudStore:
    """Return the store without retries. `port` connects through a proxy."""
    endpoint = server.endpoint(port)
    account = (
        AzureAccount(bucket, account=None, endpoint=endpoint, where="az://test")
        if isinstance(server, Azurite)
        else GoogleAccount(bucket, endpoint=endpoint, where="gs://test")
    )
    return CloudStore(account, url=account.where, max_idle_s=idle_timeout_s)


@pytest.fixture
def proxy(cloud: CloudServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(cloud.port) as proxy:
        yield proxy


def test_lost_acknowledgement_is_not_a_conflict(cloud: CloudServer, proxy: FaultyProxy) -> None:
    """A create with a lost response has an unknown outcome. The object exists, and a second create finds it."""
    bucket = cloud.new_bucket()
    with bare(cloud, bucket, proxy.port) as store:
        proxy.lose_acks(1, "PUT")
        with pytest.raises(StoreUnavailable, match="connection broke"):
            store.put_if_absent("log/0", b"mine")
        assert proxy.lost == 1
        assert store.get("log/0") == b"mine"
        with pytest.raises(ObjectExists):
            store.put_if_absent("log/0", b"another's")


def test_interrupted_read_is_resumed(cloud: CloudServer, proxy: FaultyProxy) -> None:
    with bare(cloud, cloud.new_bucket(), proxy.port) as store:
        store.put("a.pack", DATA)
        proxy.truncate(1_000_000, 2)
        assert store.get("a.pack") == DATA
        assert proxy.truncated >= 1
        proxy.truncate(1_000_000, 1)
        out = bytearray(2_000_000)
        store.get_into("a.pack", 500_000, memoryview(out))
        assert out == DATA[500_000:2_500_000]


def test_unresponsive_server_times_out(cloud: CloudServer, proxy: FaultyProxy) -> None:
    """A timed-out transfer releases the caller's memory."""
    bucket = cloud.new_bucket()
    with bare(cloud, bucket, idle_timeout_s=0.3) as direct, bare(cloud, bucket, proxy.port, 0.3) as store:
        direct.put("there", b"x")
        proxy.hang = True
        data = bytearray(100_000)
        with pytest.raises(StoreUnavailable, match="silent"), memoryview(data) as view:
            store.put("k", view)
        data.append(1)  # raises BufferError while the buffer is exported
        with pytest.raises(StoreUnavailable, match="silent"):
            store.get("there")
        with pytest.raises(StoreUnavailable, match="silent"):
            list(store.list(""))


def test_deadline_and_shorter_read_timeout(cloud, proxy):
    with bare(cloud, cloud.new_bucket(), proxy.port) as store:
        proxy.hang = True
        data = bytearray(10_000_000)
        with deadline(0.3), pytest.raises(StoreUnavailable, match="deadline"), memoryview(data) as view:
            store.put_if_absent("k", view)
        data.append(1)
        with idle_timeout(0.2), pytest.raises(StoreUnavailable, match="silent"):
            store.get("k")


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (503, b"<Error><Code>ServerBusy</Code><Message>too much</Message></Error>", StoreUnavailable),
        (
            429,
            b'{"error":{"message":"slow down","errors":[{"reason":"rateLimitExceeded"}]}}',
            StoreUnavailable,
        ),
        (403, b"<Error><Code>AuthorizationFailure</Code><Message>no</Message></Error>", AccessDenied),
        (507, b"", StoreFull),
        (400, b"<Error><Code>InvalidInput</Code><Message>what?</Message></Error>", RequestRefused),
    ],
)
def test_http_status_maps_to_error(
    cloud: CloudServer, status: int, body: bytes, error: type[Exception]
) -> None:
    """Only the store's own retries happen, and the message contains the status code."""
    with FixedResponses(status, body) as answers:
        store = RetryingStore(
            bare(cloud, "bucket", answers.port),
            policy=RetryPolicy(attempts=3, backoff=Backoff(first_s=0.0, longest_s=5.0)),
        )
        with store, pytest.raises(error) as caught:
            list(store.list("x/"))
        assert answers.requests == (3 if error is StoreUnavailable else 1)
        if b"<Code>" in body:
            assert body.split(b"<Code>")[1].split(b"</Code>")[0].decode() in str(caught.value)


def test_login_page_is_not_a_store(cloud: CloudServer) -> None:
    """A captive proxy answers 200. No listing is empty and no write succeeds because of it."""
    page = b"<html>log in</html>"
    with FixedResponses(200, page, {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}) as answers:
        with bare(cloud, "bucket", answers.port) as store:
            with pytest.raises((StoreUnavailable, RequestRefused)):
                list(store.list("log/"))
            with pytest.raises((StoreUnavailable, RequestRefused)):
                store.put_if_absent("log/0", b"x")
            with pytest.raises((StoreUnavailable, RequestRefused)):
                store.put("log/0", b"x")


def test_missing_bucket_differs_from_missing_object(cloud: CloudServer) -> None:
    with open_store(cloud.url("test-that-is-not-there")) as store:
        for ask in (
            lambda: store.put("a", b"x"),
            lambda: store.put_if_absent("a", b"x"),
            lambda: store.get("a"),
            lambda: store.head("a"),
            lambda: next(store.list("")),
            lambda: store.delete(["a"]),
        ):
            with pytest.raises(BucketMissing, match="create the bucket"):
                ask()


def test_wrong_key_is_denied(azure: CloudServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azurite checks signatures. The error names the key's source and does not contain the key."""
    wrong = "d3Jvbmcta2V5LXdyb25nLWtleS13cm9uZw=="
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
    with open_store(azure.url(azure.new_bucket())) as store:
        with pytest.raises(AccessDenied, match="AZURE_STORAGE_ACCOUNT_KEY") as caught:
            store.put("a", b"x")
    assert wrong not in str(caught.value)


def test_credentials_file_may_appear_later_and_change(cloud, tmp_path, monkeypatch):
    """A pod's Secret may be mounted late: requests raise `CredentialsMissing` until then."""
    bucket, path = cloud.new_bucket(), tmp_path / "credentials"
    for name in cloud.environment:
        monkeypatch.delenv(name)
    if isinstance(cloud, Azurite):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING_FILE", str(path))
        text = f"AccountName={cloud.account};AccountKey={cloud.key};BlobEndpoint={cloud.endpoint()}"
    else:
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(path))
        text = json.dumps(
            {
                "disable_oauth": True, "gcs_base_url": cloud.endpoint(), "client_email": "",
                "private_key": "", "private_key_id": "",
            }
        )  # fmt: skip
    with open_store(cloud.url(bucket), policy=RetryPolicy(attempts=1)) as store:
        with pytest.raises(CredentialsMissing, match="No such file"):
            store.put("a", b"x")
        path.write_text("")
        with pytest.raises(CredentialsMissing, match="empty"):
            store.put("a", b"x")
        path.write_text("garbage")
        with pytest.raises(AccessDenied, match="cannot be used"):
            store.put("a", b"x")
        path.write_text(text)
        store.put("a", b"x")
        assert store.get("a") == b"x"
