"""Part writers: concurrency, order, failures of store and disk, and budgets, with real files and a faulty store."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.cache.pack_spool import CacheFull
from deltashard_checkpoint.format import object_key
from deltashard_checkpoint.format.frame import parse_frame
from deltashard_checkpoint.format.index import decode_index
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.stores.retry import RetryingStore
from deltashard_checkpoint.write.part_writer import PartAborted, PartTarget, PartWriter, UploadFailed

from tests.support.checkpoint.faulty_store import Fault, FaultyStore
from tests.support.checkpoint.sample import RUN, SampleModel, open_descriptors, schema, whole
from tests.support.eventually import eventually

TABLE = schema(rows=4000)
TOKEN = "0123456789abcdef"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PackCache]:
    with PackCache(tmp_path / "cache", budget_bytes=64 << 20) as made:
        yield made


def _target(**changes: object) -> PartTarget:
    made = {
        "run": RUN, "attempt": 1, "snapshot_id": 2, "step": 3, "rank": 0, "token": TOKEN, "tables": (TABLE,),
        "boxes": (whole(TABLE),), "covers": None, **changes,
    }  # fmt: skip
    return PartTarget(**made)


def _uploads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("upload")]


def _write(writer: PartWriter) -> None:
    for frame in SampleModel(TABLE).frames(range(4000), per_frame=50):
        writer.add(frame)
    writer.finish()


def test_writers_of_a_small_cache_do_not_deadlock(tmp_path: Path) -> None:
    """Each of four ranks writes two kinds of packs, and the cache has room for four packs."""
    store, frames = MemoryStore(), SampleModel(TABLE).frames(range(4000), per_frame=50, encoding="q8")
    assert all(frame.tail is not None for frame in frames)
    largest = max(len(each) for frame in frames for each in (frame.data, frame.tail) if each is not None)

    def write(rank: int) -> Part:
        target = _target(rank=rank, token=f"{TOKEN}{rank}")
        with PartWriter(store, target, cache, deadline_s=120.0) as writer:
            for frame in frames:
                writer.add(frame)
            return writer.finish()

    with PackCache(tmp_path / "cache", budget_bytes=8 * largest) as cache, ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(write, range(4)))) == 4


def test_concurrent_frames_are_packed_and_indexed(cache: PackCache) -> None:
    store, model = MemoryStore(), SampleModel(TABLE)
    frames = model.frames(range(4000), per_frame=50, encoding="q8")
    with PartWriter(store, _target(), cache, pack_bytes=20_000) as writer, ThreadPoolExecutor(8) as pool:
        list(pool.map(writer.add, frames))
        part = writer.finish()
    index = decode_index(store.get(object_key.run_key(RUN, part.index_key)), key=part.index_key, run=RUN)
    packs = {pack.key: store.get(object_key.run_key(RUN, pack.key)) for pack in index.packs}
    assert len(packs) > 10
    assert all(len(data) <= 20_000 for data in packs.values())
    assert [len(packs[pack.key]) for pack in index.packs] == [pack.bytes for pack in index.packs]
    seen = []
    for place in index.places:
        data = packs[index.packs[place.pack].key]
        frame = parse_frame(data[place.offset : place.offset + place.info.length])
        assert frame.info == place.info
        seen.append(frame.row_ids())
    assert sorted(np.concatenate(seen)) == list(range(4000))
    assert writer.index is not None
    assert (writer.index.rows, writer.index.encodings, len(writer.index.places)) == (
        4000,
        {TABLE.fqn: ("q8",)},
        80,
    )
    assert part.stored_bytes == sum(map(len, packs.values())) + len(
        store.get(object_key.run_key(RUN, part.index_key))
    )
    assert not any(entry.pins for entry in cache._entries.values())
    assert all(object_key.run_key(RUN, key) in cache for key in packs), "the cache keeps what was uploaded"


def test_failed_upload_fails_the_part_and_cleans_up(cache: PackCache) -> None:
    store = FaultyStore(MemoryStore())
    store.fail_next(Fault.UNAVAILABLE)
    writer = PartWriter(store, _target(), cache, pack_bytes=20_000)
    with pytest.raises(UploadFailed, match="snapshot 2, rank 0") as caught:
        _write(writer)
    assert caught.value.__cause__ is not None
    assert not [info for info in store.list("") if info.key.endswith(".index")]
    with pytest.raises((PartAborted, UploadFailed)):
        writer.add(SampleModel(TABLE).frames(range(5))[0])
    writer.abort()
    assert cache.used_bytes == 0
    assert not list(cache.directory.glob("*.spool"))


def test_unavailable_store_fills_the_cache_then_fails_the_part(
    tmp_path: Path,
) -> None:
    store = FaultyStore(MemoryStore())
    store.down = True
    with PackCache(tmp_path, budget_bytes=60_000) as cache:
        options = {"pack_bytes": 20_000, "uploads": 1, "deadline_s": 0.5}
        with PartWriter(RetryingStore(store), _target(), cache, **options) as writer:
            with pytest.raises((CacheFull, UploadFailed)):
                _write(writer)
            assert cache.used_bytes <= 60_000


def test_abort_from_another_thread_stops_writers_and_leaves_no_files(cache: PackCache) -> None:
    before = open_descriptors()
    for round_ in range(10):
        writer = PartWriter(MemoryStore(), _target(snapshot_id=round_), cache, pack_bytes=20_000)
        frames = SampleModel(TABLE).frames(range(4000), per_frame=20)
        started = threading.Barrier(5)

        def work(part: list, writer: PartWriter = writer, started: threading.Barrier = started) -> None:
            started.wait()
            while True:  # until the abort
                for frame in part:
                    writer.add(frame)

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(work, frames[i::4]) for i in range(4)]
            started.wait()
            writer.abort()
            for future in futures:
                assert isinstance(future.exception(60), PartAborted)
    for thread in _uploads():
        thread.join(60)
    assert cache.used_bytes == 0
    assert not list(cache.directory.glob("*.spool"))
    assert not list(cache.directory.glob("*.pack"))
    eventually(lambda: open_descriptors() <= before)


def test_abort_ends_uploads_that_are_being_retried(cache: PackCache) -> None:
    """The store is down. Upload threads of an abandoned part end within a back-off, not at the part's deadline."""
    faulty = FaultyStore(MemoryStore())
    faulty.down = True
    writer = PartWriter(RetryingStore(faulty), _target(), cache, pack_bytes=20_000, deadline_s=1800.0)
    for frame in SampleModel(TABLE).frames(range(1000), per_frame=50):
        writer.add(frame)
    eventually(lambda: len(faulty.calls) >= 4)
    uploads = _uploads()
    assert uploads
    writer.abort()
    for thread in uploads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in uploads)
    assert not any(entry.pins for entry in cache._entries.values())
