"""The faulty store does what it says: each fault, by script and by seed."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from deltashard_checkpoint.stores.abc import ObjectNotFound, StoreUnavailable
from deltashard_checkpoint.stores.memory import MemoryStore

from tests.support.checkpoint.faulty_store import Fault, FaultyStore


def test_each_fault_by_script() -> None:
    """What happened and what did not, per fault."""
    inner = MemoryStore()
    store = FaultyStore(inner)
    store.fail_next(Fault.UNAVAILABLE)
    with pytest.raises(StoreUnavailable):
        store.put("a", b"1")
    with pytest.raises(ObjectNotFound):
        inner.get("a")

    store.fail_next(Fault.LOST_ACK, operation="put_if_absent", key_contains="log/")
    store.put_if_absent("data/a", b"1")
    with pytest.raises(StoreUnavailable):
        store.put_if_absent("log/a", b"1")
    assert inner.get("log/a") == b"1"

    store.fail_next(Fault.FLIPPED)
    assert store.get("log/a") != b"1"
    assert store.get("log/a") == b"1"

    store.fail_next(Fault.TRUNCATED)
    out = bytearray(8)
    inner.put("eight", b"12345678")
    with pytest.raises(StoreUnavailable):
        store.get_into("eight", 0, memoryview(out))
    assert out == b"1234\0\0\0\0"

    store.fail_next(Fault.STALE_LIST)
    with pytest.raises(StoreUnavailable, match="listing"):
        store.list("")

    store.down = True
    with pytest.raises(StoreUnavailable):
        store.now_s()
    store.down = False
    assert store.now_s() > 0


def test_a_late_put_lands_after_a_404() -> None:
    """The client saw a time-out and then an absence; yet the put takes effect, unless its sender is gone."""
    inner = MemoryStore()
    store = FaultyStore(inner)
    for land in (True, False):
        store.fail_next(Fault.LANDS_LATE)
        with pytest.raises(StoreUnavailable):
            store.put_if_absent(f"log/{land}", b"x")
        with pytest.raises(ObjectNotFound):
            inner.get(f"log/{land}")
        assert store.settle(land=land) == 1
        assert [found.key for found in inner.list(f"log/{land}")] == ([f"log/{land}"] if land else [])


def test_a_late_create_that_comes_second_changes_nothing() -> None:
    """Create-only holds for late puts too."""
    store = FaultyStore(MemoryStore())
    store.fail_next(Fault.LANDS_LATE, operation="put_if_absent")
    with pytest.raises(StoreUnavailable):
        store.put_if_absent("log/0", b"late")
    store.inner.put_if_absent("log/0", b"first")
    store.settle()
    assert store.inner.get("log/0") == b"first"


def test_a_stall_lasts_until_released() -> None:
    """The call hangs, then does what it was asked."""
    store = FaultyStore(MemoryStore())
    store.fail_next(Fault.STALLED)
    thread = threading.Thread(target=store.put, args=("a", b"x"))
    thread.start()
    assert store.wait_stalled()
    assert list(store.inner.list("")) == []
    store.release()
    thread.join(30)
    assert store.get("a") == b"x"


def test_a_seed_repeats_its_faults() -> None:
    """Same seed, same calls, same faults; another seed, others; and about as many as asked for."""

    def run(seed: int) -> list[Fault | None]:
        store = FaultyStore(MemoryStore(), seed=seed, rates={Fault.UNAVAILABLE: 0.2, Fault.LOST_ACK: 0.1})
        for number in range(500):
            with suppress(StoreUnavailable):
                store.put(f"k/{number}", b"x")
        return [call.fault for call in store.calls]

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert 60 < run(1).count(Fault.UNAVAILABLE) < 140
    assert 25 < run(1).count(Fault.LOST_ACK) < 80


def test_a_fault_that_cannot_apply_is_refused() -> None:
    """A script that would never fire is a test's mistake."""
    with pytest.raises(ValueError, match="does not apply"):
        FaultyStore(MemoryStore()).fail_next(Fault.FLIPPED, operation="put")
