"""The S3 store against a real MinIO server, and against faulty servers and networks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import minio.time
import pytest
from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.stores.abc import (
    AccessDenied,
    BucketMissing,
    ClockSkew,
    ConditionalPutUnsupported,
    ObjectExists,
    ObjectNotFound,
    RequestRefused,
    Store,
    StoreFull,
    StoreUnavailable,
)
from deltashard_checkpoint.stores.deadline import deadline
from deltashard_checkpoint.stores.probe import probe
from deltashard_checkpoint.stores.retry import RetryPolicy
from deltashard_checkpoint.stores.s3.store import S3Store
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.store_conformance import StoreTests, get_range
from tests.support.server.faulty_proxy import FaultyProxy, FixedResponses, Trickle
from tests.support.server.minio_server import MinioServer

pytestmark = pytest.mark.minio


class TestMinioUnderPrefix(StoreTests):
    """The conformance suite below a prefix of a bucket that has other objects."""

    @pytest.fixture
    def store(self, minio_url: str) -> Iterator[Store]:
        with open_store(minio_url) as whole:
            for key in ("team", "team-a", "team/other", "team/run-x/key", "zzz"):
                whole.put(key, b"not ours")
        with open_store(minio_url.replace("?", "team/run?")) as store:
            yield store


def test_refused_upload_does_not_break_next_request(minio_url: str) -> None:
    """MinIO closes the connection after a refusal without notice. The next request must not see the reset."""
    with open_store(minio_url, policy=RetryPolicy(attempts=1)) as store:
        store.put_if_absent("log/0", b"first")

        def refused(_number: int) -> None:
            for _ in range(60):
                with pytest.raises(ObjectExists):
                    store.put_if_absent("log/0", b"second")
                assert store.get("log/0") == b"first"

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(refused, range(8)))


# -- user errors -----------------------------------------------------------------------------------------------


def test_wrong_secret(minio_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-never-shown")
    with open_store(minio_url) as store:
        for call in (
            lambda: store.put("a", b"x"),
            lambda: store.put_if_absent("a", b"x"),
            lambda: store.get("a"),
            lambda: list(store.list("")),
        ):
            with pytest.raises(AccessDenied, match="SignatureDoesNotMatch.*AWS_ACCESS_KEY_ID") as caught:
                call()
            assert "wrong-secret" not in str(caught.value)
        with pytest.raises(AccessDenied):  # a HEAD response has no body with details
            store.head("a")


def test_clock_skew_is_reported(minio_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reports the difference of the clocks, independent of the store's error code."""
    shifted = lambda: datetime.now(UTC) + timedelta(hours=1)  # noqa: E731
    monkeypatch.setattr(minio.time, "utcnow", shifted)
    monkeypatch.setattr("deltashard_checkpoint.stores.s3.store.utcnow", shifted)
    with open_store(minio_url) as store:
        for call in (lambda: store.put("a", b"x"), lambda: store.get("a"), lambda: list(store.list(""))):
            with pytest.raises(ClockSkew, match=r"(?i)clock"):
                call()


def test_store_without_conditional_put_is_refused(minio_server: MinioServer, minio_url: str) -> None:
    """The probe refuses a store that overwrites in spite of the header."""
    with FaultyProxy(minio_server.port) as proxy:
        through = minio_url.replace(str(minio_server.port), str(proxy.port))
        with open_store(through) as store:
            probe(store, "probe/token")
            proxy.rewrite = lambda chunk: chunk.replace(b"If-None-Match", b"X-None-At-All")
            with pytest.raises(ConditionalPutUnsupported, match="overwrites"):
                probe(store, "probe/token")
            assert list(store.list("")) == []


def test_corrupt_upload_is_refused(minio_server: MinioServer, minio_url: str) -> None:
    """The server verifies the checksum header, so that a flipped bit in transit is never stored."""
    data = b"A" * 500_000 + b"NEEDLE" + b"B" * 500_000
    with FaultyProxy(minio_server.port) as proxy:
        proxy.rewrite = lambda chunk: chunk.replace(b"NEEDLE", b"needle")
        store = S3Store(
            bucket=minio_url.split("/")[2].partition("?")[0], endpoint=f"http://127.0.0.1:{proxy.port}"
        )
        with store:
            with pytest.raises(StoreUnavailable, match="ChecksumMismatch"):
                store.put("damaged", data)
            with pytest.raises(ObjectNotFound):
                store.get("damaged")


# -- network and server faults --------------------------------------------------------------------------------


def test_lost_acknowledgement_is_ambiguous(minio_server: MinioServer, minio_url: str) -> None:
    """A create-only put with a lost response raises `StoreUnavailable`, is not retried, and has happened."""
    with (
        FaultyProxy(minio_server.port) as proxy,
        open_store(minio_url.replace(str(minio_server.port), str(proxy.port))) as store,
    ):
        proxy.lose_acks(1)
        with pytest.raises(StoreUnavailable):
            store.put_if_absent("log/0", b"mine")
        assert proxy.lost == 1
        assert store.get("log/0") == b"mine"
        with pytest.raises(ObjectExists):
            store.put_if_absent("log/0", b"mine")


def test_truncated_read_resumes_at_offset(minio_server: MinioServer, minio_url: str) -> None:
    """A response that is truncated three times is completed by range requests.

    Only the missing bytes are sent again.
    """
    data = bytes(range(256)) * 20_000
    bucket = minio_url.split("/")[2].partition("?")[0]
    with (
        FaultyProxy(minio_server.port) as proxy,
        S3Store(bucket=bucket, endpoint=f"http://127.0.0.1:{proxy.port}") as store,
    ):
        store.put("cut", data)
        proxy.truncate(1_500_000, 3)
        assert store.get("cut") == data
        assert proxy.truncated == 3
        proxy.truncate(1_000_000, 2)
        out = bytearray(4_000_000)
        store.get_into("cut", 777, memoryview(out))
        assert out == data[777 : 777 + 4_000_000]
        assert proxy.truncated == 5
        proxy.truncate(0, 1000)
        with pytest.raises(StoreUnavailable):
            store.get("cut")


def test_oversized_object_is_not_read(minio_url: str) -> None:
    """The announced length is checked before memory is allocated and the body is read."""
    with (
        FixedResponses(200, headers={"Content-Length": str(1 << 50), "Connection": "close"}) as server,
        S3Store(bucket="some-bucket", endpoint=f"http://127.0.0.1:{server.port}") as store,
        pytest.raises(CorruptObject, match="1125899906842624 bytes exceeds the limit of"),
    ):
        store.get("log/0")
    assert server.requests == 1


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (501, b"<Error><Code>NotImplemented</Code></Error>", ConditionalPutUnsupported, "NotImplemented"),
        (405, b"<html><body>Welcome to nginx</body></html>", RequestRefused, "405"),
        (507, b"<Error><Code>XMinioStorageFull</Code></Error>", StoreFull, "XMinioStorageFull"),
    ],
)
def test_http_status_maps_to_error(minio_url, status, body, error, message):
    """The responses are those of an older gateway, of another web server, and of a full store."""
    with FixedResponses(status, body, {"Content-Type": "text/html"} if b"html" in body else {}) as server:
        url = f"s3://some-bucket?endpoint=http://127.0.0.1:{server.port}"
        with open_store(url) as store, pytest.raises(error, match=message):
            store.put_if_absent("a", b"x")
        assert server.requests == 1


def test_missing_bucket_differs_from_missing_object(minio_server, minio_url):
    with open_store(minio_server.url("no-such-bucket-here", "prefix")) as store:
        for call, *arguments in (
            *(
                (store.put, "a", b"x"),
                (store.put_if_absent, "a", b"x"),
                (store.get, "a"),
                (get_range, store, "a", 0, 1),
            ),
            *((store.head, "a"), (lambda: list(store.list("")),), (store.delete, ["a"]), (store.now_s,)),
        ):
            with pytest.raises(BucketMissing, match="no-such-bucket-here"):
                call(*arguments)


def test_trickling_server_is_stopped_by_deadline_only(minio_url):
    with Trickle(0.05) as server:
        store = S3Store(bucket="some-bucket", endpoint=f"http://127.0.0.1:{server.port}")
        with store, deadline(3.0), pytest.raises(StoreUnavailable, match="deadline"):
            store.get("a")
