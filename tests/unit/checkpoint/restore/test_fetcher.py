"""Fetching plans: cache first, all hashes checked, invalid and unavailable kept apart, bounded memory, no deadlock."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format import frame_encoder, object_key
from deltashard_checkpoint.format.frame import frame_length
from deltashard_checkpoint.restore import checkpoint_reader
from deltashard_checkpoint.restore.fetcher import Fetcher
from deltashard_checkpoint.restore.plan import Plan, RangeRequest
from deltashard_checkpoint.stores.abc import StoreUnavailable
from deltashard_checkpoint.stores.memory import MemoryStore

from tests.support.checkpoint.faulty_store import FaultyStore
from tests.support.checkpoint.sample import RUN, SampleModel, SampleRun, schema, whole


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    """Return a run with a baseline of 40 frames in several packs, and a blob."""
    made = SampleRun(tmp_path, store=FaultyStore(MemoryStore()))
    model = SampleModel(schema(rows=4000))
    made.model = model
    made.save(
        [model.table], [([whole(model.table)], model.frames(range(4000), per_frame=100))], step=1,
        blobs={"rng": bytes(9000)}, pack_bytes=50_000,
    )  # fmt: skip
    return made


def _plan(run: SampleRun, *, weights_only: bool = False) -> Plan:
    wants = checkpoint_reader.whole_tables([run.model.table])
    return checkpoint_reader.plan_restore(
        run.store, run.log.refresh(), run.log.state.newest().seq, wants, weights_only=weights_only
    )


def _frames(fetcher: Fetcher, plan: Plan) -> list[bytes]:
    return [bytes(fetched.data) + bytes(fetched.tail or b"") for fetched in fetcher.fetch(plan)]


def test_cache_is_read_before_the_store(run: SampleRun) -> None:
    plan = _plan(run)
    read = sum(request.length for request in plan.requests)
    cached, direct = Fetcher(run.store, RUN, cache=run.cache), Fetcher(run.store, RUN, prefetch_bytes=1)
    assert _frames(cached, plan) == _frames(direct, plan)
    assert (cached.stats.cache_bytes, cached.stats.store_bytes) == (read, 0)
    assert (direct.stats.cache_bytes, direct.stats.store_bytes) == (0, read)
    assert plan.bytes <= read
    assert len(plan.requests) < plan.frames


def _flip(data: bytearray) -> bytes:
    data[5000] ^= 4
    return bytes(data)


def _swapped(data: bytearray) -> bytes:
    """Exchange the first two frames: each is intact but has other rows."""
    first = frame_length(memoryview(data))
    second = frame_length(memoryview(data)[first:])
    return bytes(data[first : first + second] + data[:first] + data[first + second :])


@pytest.mark.parametrize("state", [False, True], ids=["weights", "state"])
@pytest.mark.parametrize("damage", [_flip, lambda data: bytes(data[:1000]), _swapped, None])
def test_damaged_checkpoint_is_invalid(run: SampleRun, damage, *, state: bool) -> None:
    """`InvalidCheckpoint` names the object. With damaged state, the weights are still readable without it."""
    plan = _plan(run)
    packs = [info.key for info in run.store.list(RUN) if info.key.endswith(".pack")]
    key = next(key for key in packs if ("-s" in key) is state)
    if damage is None:
        run.store.delete([key])
    else:
        run.store.put(key, damage(bytearray(run.store.get(key))))
    with pytest.raises(InvalidCheckpoint, match=r"-s00000\.pack" if state else r"\.pack"):
        _frames(Fetcher(run.store, RUN), plan)
    assert _frames(Fetcher(run.store, RUN, cache=run.cache), plan), "the copy in the cache is undamaged"
    if state:
        assert _frames(Fetcher(run.store, RUN), _plan(run, weights_only=True))


def test_tail_of_another_table_is_invalid_despite_its_hash(tmp_path, monkeypatch):
    """No hash shows this fault of a writer. The reader refuses it before a trainer gets it."""
    encode = frame_encoder._encode_tail

    def of_more_rows(block, *rest):
        return encode(replace(block, schema=replace(block.schema, rows=5000)), *rest)

    monkeypatch.setattr(frame_encoder, "_encode_tail", of_more_rows)
    run = SampleRun(tmp_path, store=FaultyStore(MemoryStore()))
    model = run.model = SampleModel(schema(rows=400))
    run.save([model.table], [([whole(model.table)], model.frames(range(400), per_frame=100))], step=1)
    with pytest.raises(InvalidCheckpoint, match="differ in the shape of table"):
        _frames(Fetcher(run.store, RUN), _plan(run))
    assert _frames(Fetcher(run.store, RUN), _plan(run, weights_only=True))


def test_damaged_cache_costs_one_extra_read(run: SampleRun) -> None:
    for path in run.cache.directory.glob("*.pack"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    plan = _plan(run)
    fetcher = Fetcher(run.store, RUN, cache=run.cache)
    assert _frames(fetcher, plan) == _frames(Fetcher(run.store, RUN), plan)
    assert fetcher.stats.reread_bytes > 0
    assert not any(object_key.run_key(RUN, request.key) in run.cache for request in plan.requests)


def test_unreachable_store_is_unavailable_not_invalid(run: SampleRun) -> None:
    plan = _plan(run)
    run.store.down = True
    with pytest.raises(StoreUnavailable):
        _frames(Fetcher(run.store, RUN), plan)
    assert _frames(Fetcher(run.store, RUN, cache=run.cache), plan)


class TwoBlockArena:
    """Two blocks for a consumer that frees a block when its last frame is applied."""

    def __init__(self, block_bytes: int, blocks: int = 2) -> None:
        self.free = [bytearray(block_bytes) for _ in range(blocks)]
        self.lent: dict[int, bytearray] = {}
        self.least = blocks

    def __call__(self, request: RangeRequest, *, wait: bool) -> memoryview | None:
        if not self.free:
            assert not wait, "must not wait for a block: no read is in flight and the consumer holds none"
            return None
        block = self.free.pop()
        self.least = min(self.least, len(self.free))
        self.lent[id(request)] = block
        return memoryview(block)[: request.length]

    def back(self, request: RangeRequest) -> None:
        self.free.append(self.lent.pop(id(request)))


def test_fetch_works_with_two_destination_blocks(run: SampleRun) -> None:
    """Two blocks are the minimum. The frames are views of the blocks."""
    plan = _plan(run)
    expected = _frames(Fetcher(run.store, RUN), plan)
    arena = TwoBlockArena(max(request.length for request in plan.requests))
    found = []
    left = [len(request.frames) + len(request.tails) for request in plan.requests]
    for fetched in Fetcher(run.store, RUN, cache=run.cache).fetch(plan, arena):
        pieces = [(fetched.request, fetched.data)]
        if fetched.tail is not None:
            pieces.append((fetched.tail_request, fetched.tail))
        for number, data in pieces:
            block = arena.lent[id(plan.requests[number])]
            assert np.shares_memory(np.frombuffer(block, np.uint8), np.frombuffer(data, np.uint8))
        found.append(b"".join(bytes(data) for _, data in pieces))
        for number, _ in pieces:
            left[number] -= 1
            if not left[number]:
                arena.back(plan.requests[number])
    assert found == expected
    assert arena.least == 0


def test_stalled_store_hits_the_deadline_and_close_stops_threads(run: SampleRun) -> None:
    plan = _plan(run)
    fetching = Fetcher(run.store, RUN, workers=3, deadline_s=30).fetch(plan)
    next(fetching)
    fetching.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="not read within"):
        list(Fetcher(run.store, RUN, deadline_s=0.0).fetch(plan))
    assert time.monotonic() - started < 20
