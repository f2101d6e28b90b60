"""Bytes that several readers want at once are read once, and a failed reader does not fail the others."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from deltashard_checkpoint.restore import checkpoint_reader
from deltashard_checkpoint.restore.fetcher import Fetcher
from deltashard_checkpoint.restore.shared_read import SharedReads
from deltashard_checkpoint.stores.abc import StoreUnavailable
from deltashard_checkpoint.stores.deadline import deadline
from deltashard_checkpoint.stores.memory import MemoryStore
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint.faulty_store import Fault, FaultyStore
from tests.support.checkpoint.sample import RUN, SampleModel, SampleRun, schema, whole


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40), st.integers(0, 400))
def test_reads_return_stored_bytes_within_the_budget(asked, budget):
    shared = SharedReads(budget_bytes=budget)
    for key, wrong in asked:
        stored = bytes([key]) * 50 * key
        assert shared.read(key, lambda stored=stored: stored) == stored
        assert shared._cached_bytes == sum(map(len, shared._cached.values())) <= budget
        if 50 * key <= budget:
            shared.read(key, lambda: pytest.fail("the bytes are cached"))
        if wrong:
            shared.forget(key)
            assert key not in shared._cached
    shared.release_idle(idle_s=3600.0)
    shared.release_idle(idle_s=0.0)
    assert (shared._cached, shared._cached_bytes) == ({}, 0)


def test_concurrent_reader_waits_for_the_first() -> None:
    shared, started, go, reads = SharedReads(budget_bytes=0), threading.Event(), threading.Event(), []

    def fetch() -> bytes:
        reads.append(1)
        started.set()
        assert go.wait(60)
        return b"bytes"

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(shared.read, "key", fetch)
        assert started.wait(60)
        arrived = [threading.Event() for _ in range(7)]
        others = [pool.submit(_waiting, shared, each) for each in arrived]
        for event in arrived:
            assert event.wait(60)
        assert not any(each.done() for each in others)
        go.set()
        assert first.result(60) == b"bytes"
        # A reader that came after the first read ended reads again, because nothing is kept.
        assert {each.result(60) for each in others} <= {b"bytes", b"itself"}
    assert reads == [1]


def _waiting(shared: SharedReads, arrived: threading.Event) -> bytes:
    arrived.set()
    return bytes(shared.read("key", lambda: b"itself"))


def test_failed_read_is_not_shared() -> None:
    shared, started, go = SharedReads(), threading.Event(), threading.Event()

    def fails() -> bytes:
        started.set()
        assert go.wait(60)
        raise StoreUnavailable("mine", where="key")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared.read, "key", fails)
        assert started.wait(60)
        arrived = threading.Event()
        second = pool.submit(_waiting, shared, arrived)
        with pytest.raises(StoreUnavailable, match="timed out"), deadline(0.0):
            shared.read("key", lambda: b"never")
        assert arrived.wait(60)
        go.set()
        with pytest.raises(StoreUnavailable, match="mine"):
            first.result(60)
        assert second.result(60) == b"itself"


@pytest.fixture
def run(tmp_path):
    made = SampleRun(tmp_path, store=FaultyStore(MemoryStore()))
    model = made.model = SampleModel(schema(rows=400))
    blobs = {"dense/w": bytes(range(256)) * 40, "meta": b"m"}
    made.save([model.table], [([whole(model.table)], model.frames(range(400)))], step=1, blobs=blobs)
    made.store.calls.clear()
    return made


def _restored(run: SampleRun, shared: SharedReads) -> list[bytes]:
    state = run.log.refresh()
    wants = checkpoint_reader.whole_tables([run.model.table])
    plan = checkpoint_reader.plan_restore(run.store, state, state.newest().seq, wants, shared=shared)
    fetcher = Fetcher(run.store, RUN, shared=shared)
    found = [bytes(fetched.data) for fetched in fetcher.fetch(plan)]
    assert fetcher.stats.cache_bytes + fetcher.stats.store_bytes >= sum(
        request.length for request in plan.requests
    )
    return found


def _reads(run: SampleRun) -> dict[str, int]:
    read = [call.key for call in run.store.calls if call.operation in {"get", "get_into"}]
    run.store.calls.clear()
    return {kind: sum(key.endswith(kind) for key in read) for kind in ("index", "pack")}


def test_the_second_rank_reads_rows_only(run: SampleRun) -> None:
    shared = SharedReads()
    alone = _restored(run, SharedReads())
    once = _reads(run)
    assert _restored(run, shared) == _restored(run, shared) == alone
    twice = _reads(run)
    assert once["index"] == twice["index"] == 1
    assert once["pack"] < twice["pack"] < 2 * once["pack"]


@pytest.mark.parametrize(("kind", "operation"), [("index", "get"), ("pack", "get_into")])
def test_corrupt_shared_bytes_are_read_again(run, kind, operation):
    """The corrupt bytes are in the shared memory. The reader that finds them reads again, and the next rank gets the correct bytes."""
    shared = SharedReads()
    alone = _restored(run, SharedReads())
    run.store.fail_next(Fault.FLIPPED, operation=operation, key_contains=f".{kind}")
    assert _restored(run, shared) == alone
    assert Fault.FLIPPED in [call.fault for call in run.store.calls]
    assert _restored(run, shared) == alone
