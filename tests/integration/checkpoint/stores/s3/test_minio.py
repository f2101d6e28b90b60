"""The S3 store against a real MinIO server, and against servers and networks that fail."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import minio.time
import pytest
from deltashard_checkpoint.backoff import Backoff
from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.stores import transport
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
from deltashard_checkpoint.stores.retry import RetryingStore, RetryPolicy
from deltashard_checkpoint.stores.s3.store import S3Store
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.store_conformance import StoreTests, get_range
from tests.support.server.faulty_proxy import FaultyProxy, FixedAnswers, Trickle
from tests.support.server.minio_server import MinioServer
from tests.support.server.troubled_s3 import Request, Trouble, TroubledS3

pytestmark = pytest.mark.minio

QUICK = RetryPolicy(deadline_s=120, backoff=Backoff(first_s=0.02, longest_s=0.2), attempts=1000)


class TestMinioUnderPrefix(StoreTests):
    """The same below a prefix of a bucket that holds more."""

    @pytest.fixture
    def store(self, minio_url: str) -> Iterator[Store]:
        with open_store(minio_url) as whole:
            for key in ("team", "team-a", "team/other", "team/run-x/key", "zzz"):
                whole.put(key, b"not ours")
        with open_store(minio_url.replace("?", "team/run?")) as store:
            yield store


def test_a_refused_upload_breaks_no_later_request(minio_url: str) -> None:
    """MinIO hangs up after a refusal without announcing it; whoever comes next must get an answer, not the reset."""
    with open_store(minio_url, policy=RetryPolicy(attempts=1)) as store:
        store.put_if_absent("log/0", b"first")

        def refused(_number: int) -> None:
            for _ in range(60):
                with pytest.raises(ObjectExists):
                    store.put_if_absent("log/0", b"second")
                assert store.get("log/0") == b"first"

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(refused, range(8)))


# -- what the user got wrong -----------------------------------------------------------------------------------


def test_wrong_secret(minio_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-nobody-may-see")
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
        with pytest.raises(AccessDenied):  # a HEAD has no body to say more
            store.head("a")


def test_no_credentials_at_all(minio_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with (
        open_store(minio_url) as store,
        pytest.raises(AccessDenied, match="no store credentials.*AWS_ACCESS_KEY_ID"),
    ):
        store.get("a")


def test_a_shifted_clock(minio_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature an hour off is a clock's fault, and the error says by how much, whatever the store called it."""
    shifted = lambda: datetime.now(UTC) + timedelta(hours=1)  # noqa: E731
    monkeypatch.setattr(minio.time, "utcnow", shifted)
    monkeypatch.setattr("deltashard_checkpoint.stores.s3.store.utcnow", shifted)
    with open_store(minio_url) as store:
        for call in (lambda: store.put("a", b"x"), lambda: store.get("a"), lambda: list(store.list(""))):
            with pytest.raises(ClockSkew, match=r"(?i)clock"):
                call()


def test_a_store_without_conditional_put(minio_server: MinioServer, minio_url: str) -> None:
    """A store that overwrites is refused by the probe; the header is what makes the difference."""
    with FaultyProxy(minio_server.port) as proxy:
        through = minio_url.replace(str(minio_server.port), str(proxy.port))
        with open_store(through) as store:
            probe(store, "probe/token")
            proxy.rewrite = lambda chunk: chunk.replace(b"If-None-Match", b"X-None-At-All")
            with pytest.raises(ConditionalPutUnsupported, match="overwrites"):
                probe(store, "probe/token")
            assert list(store.list("")) == []


def test_a_damaged_upload_is_refused(minio_server: MinioServer, minio_url: str) -> None:
    """The server checks what arrives against the checksum header: one flipped bit on the way never becomes an object."""
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


# -- what the network and the server do -----------------------------------------------------------------------


def test_a_lost_acknowledgement_is_ambiguous(minio_server: MinioServer, minio_url: str) -> None:
    """A create-only put whose answer is lost raises `StoreUnavailable`, is not tried again, and did happen."""
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


def test_a_truncated_read_goes_on_where_it_stopped(minio_server: MinioServer, minio_url: str) -> None:
    """An answer cut three times is completed by range, byte for byte, in one attempt; only what is missing is sent."""
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


def test_a_listing_goes_on_when_its_token_expired(minio_server: MinioServer, minio_url: str) -> None:
    """The second page is refused with ExpiredToken: it is asked for again from the last key, and nothing is left out."""
    with open_store(minio_url) as store, ThreadPoolExecutor(8) as pool:
        keys = [f"many/{number:04d}" for number in range(1100)]
        list(pool.map(lambda key: store.put(key, b""), keys))

        def second_page(request: Request) -> Trouble | None:
            return Trouble.EXPIRED if request.kind == "list" and request.continued else None

        with (
            TroubledS3(minio_server.port, second_page) as proxy,
            open_store(minio_url.replace(str(minio_server.port), str(proxy.port))) as troubled,
        ):
            assert [found.key for found in troubled.list("many/")] == keys
            assert proxy.met == {("list", Trouble.EXPIRED): 1}
            assert proxy.requests[-1].start_after == keys[999]


def test_an_object_too_large_to_be_read_whole_is_not_read(minio_url: str) -> None:
    """The length an answer announces is judged before memory is taken for it, and before the body is read."""
    with (
        FixedAnswers(200, headers={"Content-Length": str(1 << 50), "Connection": "close"}) as server,
        S3Store(bucket="some-bucket", endpoint=f"http://127.0.0.1:{server.port}") as store,
        pytest.raises(CorruptObject, match="1125899906842624 bytes where at most"),
    ):
        store.get("log/0")
    assert server.requests == 1


def test_a_hung_read_is_asked_for_again(minio_server: MinioServer, minio_url: str) -> None:
    bucket = minio_url.split("/")[2].partition("?")[0]

    def first_read(request: Request) -> Trouble | None:
        return Trouble.HUNG if request.kind == "get" and request.number == 0 else None

    with (
        TroubledS3(minio_server.port, first_read, hung_for=None) as proxy,
        S3Store(bucket=bucket, endpoint=f"http://127.0.0.1:{proxy.port}", silence_timeout_s=3600) as plain,
    ):
        store = RetryingStore(plain, policy=RetryPolicy(deadline_s=3600, silence_s=0.2))
        data = bytes(range(256)) * 10_000
        store.put("pack", data)
        out = bytearray(1_000_000)
        store.get_into("pack", 777, memoryview(out))
        assert out == data[777 : 777 + 1_000_000]
        assert proxy.met == {("get", Trouble.HUNG): 1}


def test_killed_in_mid_put(own_minio: MinioServer) -> None:
    """SIGKILL of the server while a pack is on its way, and back: the object is whole or not there, and the put ends well."""
    data = bytes(range(256)) * 4 * 1024 * 24  # 24 MiB
    half = threading.Event()
    with (
        FaultyProxy(own_minio.port) as proxy,
        open_store(own_minio.url(own_minio.new_bucket(), port=proxy.port), policy=QUICK) as store,
    ):
        seen = 0

        def count(chunk: bytes) -> bytes:
            nonlocal seen
            seen += len(chunk)
            if seen > len(data) // 2 and not half.is_set():
                own_minio.kill()
                half.set()
            return chunk

        proxy.rewrite = count
        with ThreadPoolExecutor(1) as pool:
            putting = pool.submit(store.put, "pack", data)
            assert half.wait(120)
            with pytest.raises(StoreUnavailable, match="failed|connection"):
                open_store(
                    own_minio.url("any-bucket"),
                    policy=RetryPolicy(deadline_s=0.3, backoff=Backoff(first_s=0.05, longest_s=5.0)),
                ).get("pack")
            own_minio.start()
            putting.result(200)
        assert store.get("pack") == data


def test_a_silent_server(minio_server: MinioServer, minio_url: str) -> None:
    with FaultyProxy(minio_server.port) as proxy:
        proxy.hang = True
        through = minio_url.replace(str(minio_server.port), str(proxy.port))
        with open_store(through, policy=RetryPolicy(deadline_s=1.0)) as store:
            for call in (
                lambda: store.get("a"),
                lambda: store.put("a", b"x" * 100),
                lambda: store.put_if_absent("a", b"x"),
                lambda: list(store.list("")),
                store.now_s,
            ):
                begun = time.monotonic()
                with pytest.raises(StoreUnavailable):
                    call()
                assert time.monotonic() - begun < 15.0  # one silence alone may last twenty
        proxy.release()


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (501, b"<Error><Code>NotImplemented</Code></Error>", ConditionalPutUnsupported, "NotImplemented"),
        (405, b"<html><body>Welcome to nginx</body></html>", RequestRefused, "405"),
        (507, b"<Error><Code>XMinioStorageFull</Code></Error>", StoreFull, "XMinioStorageFull"),
    ],
)
def test_answers_are_named(minio_url, status, body, error, said):
    """An older gateway's, another web server's, and a full store's."""
    with FixedAnswers(status, body, {"Content-Type": "text/html"} if b"html" in body else {}) as server:
        url = f"s3://some-bucket?endpoint=http://127.0.0.1:{server.port}"
        with open_store(url) as store, pytest.raises(error, match=said):
            store.put_if_absent("a", b"x")
        assert server.requests == 1


def test_a_missing_bucket_is_told_from_a_missing_object(minio_server, minio_url):
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


def test_a_server_that_trickles_is_no_silence_but_the_deadline_ends_it(minio_url):
    with Trickle(0.05) as server:
        store = S3Store(bucket="some-bucket", endpoint=f"http://127.0.0.1:{server.port}")
        with store, deadline(3.0), pytest.raises(StoreUnavailable, match="deadline"):
            store.get("a")


def test_plain_http_is_warned_of_once_and_not_for_this_machine(caplog):
    transport._warned.clear()
    for host in (
        "http://127.0.0.1:1",
        "http://localhost:1",
        "https://minio.example",
        *["http://minio.example:9"] * 3,
    ):
        S3Store(bucket="some-bucket", endpoint=host)
    assert len(caplog.records) == caplog.text.count("http://minio.example:9") == 1
