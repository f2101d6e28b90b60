"""Retries on a fake clock: how often, how long, and which errors never."""

import pytest
from deltashard_checkpoint.backoff import Backoff
from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.stores.abc import ObjectExists, ObjectNotFound, RequestRefused, StoreUnavailable
from deltashard_checkpoint.stores.deadline import abandon_when, deadline, idle_timeout_s, remaining_s
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.stores.retry import RetryingStore, RetryPolicy

from tests.support.checkpoint.faulty_store import Fault, FaultyStore
from tests.support.checkpoint.run_builder import FakeClock
from tests.support.checkpoint.store_conformance import get_range

START_S = FakeClock().now_s


class TryRecorder:
    """An observer that records tries."""

    def __init__(self) -> None:
        self.tries, self.calls = [], []

    def attempted(self, operation, seconds, error) -> None:
        self.tries.append((operation, error is None))

    def finished(self, operation, seconds, size_bytes, error) -> None:
        self.calls.append((operation, size_bytes, error is None))


def retrying(**policy) -> tuple[FaultyStore, RetryingStore, FakeClock, TryRecorder]:
    faulty, time, log = FaultyStore(MemoryStore()), FakeClock(), TryRecorder()
    store = RetryingStore(faulty, policy=RetryPolicy(**policy), observer=log, clocks=time.clocks)
    return faulty, store, time, log


def test_retries_with_growing_delays():
    faulty, store, time, log = retrying(backoff=Backoff(first_s=0.1, longest_s=5.0, jitter=0.0))
    faulty.fail_next(Fault.UNAVAILABLE, times=3)
    store.put("a", b"xyz")
    assert time.slept == pytest.approx([0.1, 0.2, 0.4])
    assert log.tries == [("put", False)] * 3 + [("put", True)]
    assert log.calls == [("put", 3, True)]


class SlowStore(MemoryStore):
    """A store that delays each read by the given seconds."""

    def __init__(self, time: FakeClock, *first_byte_s: float) -> None:
        super().__init__()
        self.time, self.first_byte_s, self.silences = time, list(first_byte_s), []

    def get(self, key):
        allowed_s, needed_s = idle_timeout_s(20.0), self.first_byte_s.pop(0)
        self.silences.append(allowed_s)
        self.time.now_s += min(allowed_s, needed_s)
        if allowed_s < needed_s:
            raise StoreUnavailable("silent")
        return super().get(key)

    def put(self, key, data):
        self.silences.append(idle_timeout_s(20.0))
        super().put(key, data)


def test_first_byte_timeout_doubles_and_is_remembered():
    """The timeout doubles up to the store's own. Writes use it from the start. Other failures do not double the timeout."""
    time = FakeClock()
    slow = SlowStore(time, *[100.0] * 5, 0.0)
    store = RetryingStore(slow, policy=RetryPolicy(deadline_s=600.0), clocks=time.clocks)
    store.put("a", b"x")
    assert store.get("a") == b"x"
    assert slow.silences == [20.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    faulty = FaultyStore(SlowStore(time, 0.0, 0.0))
    store = RetryingStore(faulty, clocks=time.clocks)
    store.put("a", b"x")
    faulty.fail_next(Fault.UNAVAILABLE)
    assert store.get("a") == store.get("a") == b"x"
    assert faulty.inner.silences == [20.0, 2.0, 2.0]
    # A slow store costs three requests at its first read and one at each later read. The timeout may shrink again.
    slow = SlowStore(time, *[5.0] * 4, *[0.0] * 100)
    store = RetryingStore(slow, clocks=time.clocks)
    store.put("a", b"x")
    for _ in range(102):
        store.get("a")
    assert slow.silences[1:6] == pytest.approx([2.0, 4.0, 8.0, 8.0, 8.0 * 0.98])
    assert slow.silences[-1] == 2.0


def test_create_only_and_definite_errors_are_not_retried():
    """The caller resolves an ambiguous create: a second try would find its own object."""
    faulty, store, time, _ = retrying()
    faulty.fail_next(Fault.LOST_ACK)
    with pytest.raises(StoreUnavailable, match="acknowledgement lost"):
        store.put_if_absent("log/0", b"mine")
    assert [call.operation for call in faulty.calls] == ["put_if_absent"]
    for error, call in (
        (ObjectNotFound, lambda: store.get("missing")),
        (ObjectExists, lambda: store.put_if_absent("log/0", b"y")),
        (CorruptObject, lambda: get_range(store, "log/0", 0, 5)),
    ):
        with pytest.raises(error):
            call()
    assert time.slept == []


def test_deadline_ends_retries_and_grows_with_object_size():
    """The deadline assumes the slowest rate that is still progress. The error has the last reason and the count of tries."""
    for size_bytes, expected_s in ((0, 10.0), (50_000_000, 35.0)):
        faulty, store, time, log = retrying(deadline_s=10.0, slowest_bytes_per_s=2e6, attempts=1000)
        faulty.down = True
        with pytest.raises(StoreUnavailable, match=r"put failed \d+ times in .*503"):
            store.put("a", bytes(size_bytes))
        assert expected_s - 5.1 <= time.now_s - START_S <= expected_s
        assert log.calls == [("put", size_bytes, False)]
    faulty, store, _, _ = retrying(attempts=7, backoff=Backoff(first_s=0.0, longest_s=5.0))
    faulty.down = True
    with pytest.raises(StoreUnavailable, match="7 times"):
        store.get("a")
    assert len(faulty.calls) == 7


def test_broken_listing_resumes_and_deletes_are_batched():
    """Each key is listed once, in order, though every answer breaks off. A lost answer repeats one batch of a thousand."""
    faulty, store, time, _ = retrying()
    keys = [f"k/{number:04d}" for number in range(2500)]
    for key in keys:
        faulty.put(key, b"")
    faulty.fail_next(Fault.TRUNCATED, operation="list", times=3)
    faulty.fail_next(Fault.STALE_LIST, operation="list", times=1)
    assert [found.key for found in store.list("k/")] == keys
    assert len(time.slept) == 4
    faulty.calls.clear()
    faulty.fail_next(Fault.LOST_ACK, operation="delete", key_contains="k/1000")
    store.delete(iter(keys))
    assert [call.key for call in faulty.calls] == ["k/0000", "k/1000", "k/1000", "k/2000"]
    assert list(faulty.inner.list("")) == []


def test_cancelled_call_is_not_retried_and_earlier_deadline_wins():
    """A call that is abandoned in a pause raises the store's reason. No deadline remains afterwards."""
    faulty, store, time, _ = retrying()
    faulty.down = True
    with abandon_when(lambda: len(time.slept) == 2), pytest.raises(StoreUnavailable):
        store.put("a", b"xyz")
    assert len(faulty.calls) == 2
    with abandon_when(lambda: True), deadline(60.0):
        assert remaining_s() == 0.0
    with deadline(500.0), deadline(10_000.0):
        assert remaining_s() <= 500.0
    assert remaining_s() == float("inf")
    assert remaining_s(7.0) == 7.0


@pytest.mark.parametrize("error", [ValueError("null byte"), OSError("no errno"), UnicodeError("x")])
def test_library_errors_get_a_location_and_a_remedy(error):
    class Foreign(MemoryStore):
        def get(self, key):
            raise error

    with pytest.raises(RequestRefused, match=str(error)) as caught:
        RetryingStore(Foreign(url="memory://x")).get("a/key")
    assert caught.value.where == "memory://x/a/key"
    assert caught.value.remedy
    assert caught.value.__cause__ is error
