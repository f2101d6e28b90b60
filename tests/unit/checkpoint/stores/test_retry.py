"""Retries: how often, how long, what never; on a fake clock."""

from __future__ import annotations

import pytest
from deltashard_checkpoint.backoff import Backoff, Clocks
from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.stores.abc import (
    Buffer,
    ObjectExists,
    ObjectNotFound,
    RequestRefused,
    StoreUnavailable,
)
from deltashard_checkpoint.stores.deadline import deadline, remaining_s, silence_s, until
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.stores.retry import RetryingStore, RetryPolicy

from tests.support.checkpoint.faulty_store import Fault, FaultyStore
from tests.support.checkpoint.store_conformance import get_range


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self.clocks = Clocks(monotonic_s=self, sleep=self.sleep, uniform=lambda: 1.0)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class Log:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.tries: list[tuple[str, bool]] = []
        self.calls: list[tuple[str, int, bool]] = []

    def attempted(self, operation: str, seconds: float, error: Exception | None) -> None:
        self.tries.append((operation, error is None))

    def finished(self, operation: str, seconds: float, size_bytes: int, error: Exception | None) -> None:
        self.calls.append((operation, size_bytes, error is None))


def retrying(inner: FaultyStore, clock: Clock, log: Log | None = None, **policy: object) -> RetryingStore:
    return RetryingStore(
        inner,
        policy=RetryPolicy(**policy),  # type: ignore[arg-type]
        observer=log,
        clocks=clock.clocks,
    )


def test_it_tries_again_with_growing_pauses() -> None:
    """Two failures, two pauses, the second twice the first; the observer sees tries and the call."""
    faulty, clock, log = FaultyStore(MemoryStore()), Clock(), Log()
    faulty.fail_next(Fault.UNAVAILABLE, times=3)
    retrying(faulty, clock, log, backoff=Backoff(first_s=0.1, longest_s=5.0)).put("a", b"xyz")
    assert clock.slept == pytest.approx([0.1, 0.2, 0.4])
    assert log.tries == [("put", False)] * 3 + [("put", True)]
    assert log.calls == [("put", 3, True)]


class Slow(MemoryStore):
    """Its reads begin after so many seconds."""

    def __init__(self, clock: Clock, *first_byte_s: float) -> None:
        super().__init__()
        self.clock = clock
        self.first_byte_s = list(first_byte_s)
        self.silences: list[float] = []

    def get(self, key: str) -> bytes:
        allowed_s, needed_s = silence_s(20.0), self.first_byte_s.pop(0)
        self.silences.append(allowed_s)
        self.clock.now_s += min(allowed_s, needed_s)
        if allowed_s < needed_s:
            raise StoreUnavailable("silent")
        return super().get(key)

    def put(self, key: str, data: Buffer) -> None:
        self.silences.append(silence_s(20.0))
        super().put(key, data)


def test_reads_hear_nothing_for_two_seconds_and_then_for_longer() -> None:
    """Doubled from try to try up to the store's own; writes have that at once. Other failures double nothing."""
    clock = Clock()
    slow = Slow(clock, *[100.0] * 5, 0.0)
    store = RetryingStore(slow, policy=RetryPolicy(deadline_s=600.0), clocks=clock.clocks)
    store.put("a", b"x")
    assert store.get("a") == b"x"
    assert slow.silences == [20.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    faulty = FaultyStore(Slow(clock, 0.0, 0.0))
    store = RetryingStore(faulty, clocks=clock.clocks)
    store.put("a", b"x")
    faulty.fail_next(Fault.UNAVAILABLE)
    assert store.get("a") == store.get("a") == b"x"
    assert faulty.inner.silences == [20.0, 2.0, 2.0]


def test_the_silence_that_a_store_needs_is_remembered() -> None:
    """One that is slow as a whole costs its first read three requests, each later one a single one; it may get faster."""
    clock = Clock()
    slow = Slow(clock, *[5.0] * 4, *[0.0] * 100)
    store = RetryingStore(slow, clocks=clock.clocks)
    store.put("a", b"x")
    del slow.silences[:]
    for _ in range(102):
        store.get("a")
    assert slow.silences[:5] == pytest.approx([2.0, 4.0, 8.0, 8.0, 8.0 * 0.98])
    assert slow.silences[-1] == 2.0


def test_a_read_that_failed_leaves_its_silence_to_the_next() -> None:
    """Else one whose first byte comes later than the last try of a call listens would never be read."""
    clock = Clock()
    slow = Slow(clock, *[9.0] * 4)
    store = RetryingStore(slow, policy=RetryPolicy(attempts=3), clocks=clock.clocks)
    store.put("a", b"x")
    del slow.silences[:]
    with pytest.raises(StoreUnavailable, match="get failed 3 times"):
        store.get("a")
    assert slow.silences == [2.0, 4.0, 8.0]
    assert store.get("a") == b"x"
    assert slow.silences == [2.0, 4.0, 8.0, 16.0]


def test_create_only_is_tried_once() -> None:
    """An ambiguous create is the caller's to resolve: a second try would find its own object."""
    faulty, clock = FaultyStore(MemoryStore()), Clock()
    store = retrying(faulty, clock)
    faulty.fail_next(Fault.LOST_ACK)
    with pytest.raises(StoreUnavailable, match="acknowledgement lost"):
        store.put_if_absent("log/0", b"mine")
    assert clock.slept == []
    assert [call.operation for call in faulty.calls] == ["put_if_absent"]
    assert store.get("log/0") == b"mine"


def test_answers_are_not_retried() -> None:
    """Not found, exists, corrupt: the store has spoken."""
    faulty, clock = FaultyStore(MemoryStore()), Clock()
    store = retrying(faulty, clock)
    store.put("a", b"x")
    for error, call in (
        (ObjectNotFound, lambda: store.get("missing")),
        (ObjectExists, lambda: store.put_if_absent("a", b"y")),
        (CorruptObject, lambda: get_range(store, "a", 0, 5)),
    ):
        with pytest.raises(error):
            call()
    assert clock.slept == []


def test_the_deadline_ends_it() -> None:
    """A store that stays down: the call ends before its deadline, with the last reason and the count."""
    faulty, clock, log = FaultyStore(MemoryStore()), Clock(), Log()
    faulty.down = True
    store = retrying(faulty, clock, log, deadline_s=10.0, attempts=1000)
    with pytest.raises(StoreUnavailable, match=r"get failed \d+ times in .*503"):
        store.get("a")
    assert 5.0 < clock.now_s <= 10.0
    assert log.calls == [("get", 0, False)]


def test_a_try_that_the_deadline_cut_off_hides_nothing_that_the_store_said() -> None:
    """A pause may end just before the deadline: the last try knows only that time was up."""
    clock = Clock()

    class Throttling(MemoryStore):
        def get(self, key: str) -> bytes:
            if not clock.slept:
                raise StoreUnavailable("SlowDown")
            clock.now_s = 10.0
            raise StoreUnavailable("the call's deadline passed")

    policy = RetryPolicy(deadline_s=10.0)
    store = RetryingStore(Throttling(), policy=policy, clocks=clock.clocks)
    with pytest.raises(StoreUnavailable, match=r"get failed 2 times in 10.0 s, last: SlowDown"):
        store.get("a")


def test_bigger_objects_get_more_time() -> None:
    """By the slowest rate that is still progress."""
    for size_bytes, expected_s in ((0, 10.0), (50_000_000, 35.0)):
        faulty, clock = FaultyStore(MemoryStore()), Clock()
        faulty.down = True
        store = retrying(faulty, clock, deadline_s=10.0, slowest_bytes_per_s=2e6, attempts=1000)
        with pytest.raises(StoreUnavailable):
            store.put("a", bytes(size_bytes))
        assert expected_s - 5.1 <= clock.now_s <= expected_s


def test_attempts_are_bounded() -> None:
    """Also when the clock stands still."""
    faulty, clock = FaultyStore(MemoryStore()), Clock()
    faulty.down = True
    with pytest.raises(StoreUnavailable, match="7 times"):
        retrying(faulty, clock, attempts=7, backoff=Backoff(first_s=0.0, longest_s=5.0)).get("a")
    assert len(faulty.calls) == 7


def test_a_broken_listing_goes_on_where_it_stopped() -> None:
    """Every key once, in order, though each answer breaks off half-way; and no gap when what was listed is deleted."""
    faulty, clock = FaultyStore(MemoryStore()), Clock()
    for number in range(20):
        faulty.put(f"k/{number:02d}", b"")
    faulty.fail_next(Fault.TRUNCATED, operation="list", times=3)
    faulty.fail_next(Fault.STALE_LIST, operation="list", times=1)
    listed = [found.key for found in retrying(faulty, clock).list("k/")]
    assert listed == [f"k/{number:02d}" for number in range(20)]
    assert len(clock.slept) == 4


def test_deletes_go_in_batches() -> None:
    """A thousand keys a request, from any iterable; a lost answer repeats one batch."""
    faulty, clock = FaultyStore(MemoryStore()), Clock()
    for number in range(2500):
        faulty.put(f"k/{number:04d}", b"")
    faulty.calls.clear()
    faulty.fail_next(Fault.LOST_ACK, operation="delete", key_contains="k/1000")
    retrying(faulty, clock).delete(f"k/{number:04d}" for number in range(2500))
    assert [call.key for call in faulty.calls] == ["k/0000", "k/1000", "k/1000", "k/2000"]
    assert list(faulty.inner.list("")) == []


def test_deadlines_nest() -> None:
    """An outer deadline that ends sooner wins; outside there is none."""
    assert remaining_s() == float("inf")
    with deadline(500.0):
        with deadline(10_000.0):
            assert remaining_s() <= 500.0
        with deadline(100.0):
            assert remaining_s() <= 100.0
        assert 400.0 < remaining_s() <= 500.0
    assert remaining_s(7.0) == 7.0


def test_a_caller_that_gave_up_is_not_retried_for() -> None:
    """Given up during a pause: no further try, the store's reason; and nothing remains for whoever waits below."""
    faulty, clock = FaultyStore(MemoryStore()), Clock()
    faulty.down = True
    with until(lambda: len(clock.slept) == 2), pytest.raises(StoreUnavailable):
        retrying(faulty, clock).put("a", b"xyz")
    assert len(faulty.calls) == 2
    with until(lambda: True), deadline(60.0):
        assert remaining_s() == 0.0
    assert remaining_s() == float("inf")


@pytest.mark.parametrize(
    "error", [ValueError("embedded null byte"), OSError("nothing to say"), UnicodeError("x")]
)
def test_what_a_library_raises_gets_a_place_and_a_remedy(error: Exception) -> None:
    class Foreign(MemoryStore):
        def get(self, key: str) -> bytes:
            raise error

    with pytest.raises(RequestRefused, match=str(error)) as caught:
        RetryingStore(Foreign(url="memory://x")).get("a/key")
    assert caught.value.where == "memory://x/a/key"
    assert caught.value.remedy
    assert caught.value.__cause__ is error
