"""Manifests are read once, strictly, and must match the entry that names them; the fold does not depend on them."""

import json
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event

import pytest
from deltashard_checkpoint.errors import CorruptObject, InternalBug, InvalidCheckpoint, UnsupportedVersion
from deltashard_checkpoint.format.canonical_json import canonical, content_digest
from deltashard_checkpoint.log import folded_state
from deltashard_checkpoint.log.chain import chain, parts_of
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.manifest import Manifest, Manifests, manifest_key
from deltashard_checkpoint.log.part_list import ListedPart

from tests.support.checkpoint.faulty_store import Fault, FaultyStore
from tests.support.checkpoint.run_builder import MemoryRun, layout_of, started_run

EXAMPLE = Manifest(
    run="job", attempt=1, snapshot_id=2, step=3, layout="0f" * 16,
    parts=(
        ListedPart(token="a" * 16, xxh3="1" * 32, covers=None, rows=4, stored_bytes=9, common_blobs=False),
        ListedPart(token="b" * 16, xxh3="2" * 32, covers=7, rows=0, stored_bytes=8, common_blobs=True),
    ),
)  # fmt: skip


def saved() -> tuple[MemoryRun, int, Checkpoint]:
    run, attempt = started_run(world_size=2, layout=layout_of().data)
    return run, attempt, run.commit_halves(attempt, 1)


def key_of(entry: Checkpoint) -> str:
    assert entry.listed is not None
    return f"job/{manifest_key(entry.attempt, entry.snapshot_id, entry.listed.manifest)}"


def test_manifest_has_the_documented_bytes() -> None:
    assert EXAMPLE.data == (
        b'{"attempt":1,"blobs":[1],"format":1,"kind":"rows","layout":"' + b"0f" * 16 + b'","parts":[["aaaaaaaaaaaaaaaa","'
        + b"1" * 32 + b'",null,4,9],["bbbbbbbbbbbbbbbb","' + b"2" * 32 + b'",7,0,8]],"run":"job","snapshot_id":2,"step":3}'
    )  # fmt: skip
    assert EXAMPLE.listed.covers == (None, 7)


def test_wrong_values_with_a_valid_hash_are_refused() -> None:
    document = json.loads(EXAMPLE.data)
    part = document["parts"][0]
    bad_parts = [
        [*part[:at], bad, *part[at + 1 :]]
        for at in range(5)
        for bad in (-1, 1.5, True, "x" * 70_000, "A" * 32, [], {}, 1 << 63)
    ]
    changes = [
        *({"parts": [each]} for each in (*bad_parts, part[:4], [*part, 1], None, {}, "x")),
        *(
            {key: bad}
            for key in document
            for bad in (None, -1, True, 1 << 63, [], {}, "x" * 70_000)
            if bad != []
        ),
        *({key: []} for key in document if key not in {"parts", "blobs"}),
        *({"blobs": bad} for bad in ([1, 0], [0, 0], [2], [-1], [True], [1.0], ["1"], [None])),
        {"surprise": 1},
        {"layout": "0F" * 16},
        {"format": 2},
        {"kind": "keys"},
    ]
    for change in changes:
        data = canonical({**document, **change})
        with pytest.raises((CorruptObject, UnsupportedVersion)):
            Manifest.decode(data, digest=content_digest(data))
    for key in document:
        data = canonical({name: value for name, value in document.items() if name != key})
        with pytest.raises(CorruptObject):
            Manifest.decode(data, digest=content_digest(data))


def test_manifest_and_layout_are_cached_and_reread_if_corrupt():
    run, attempt, first = saved()
    run.commit_halves(attempt, 2, (first.seq, None))
    store = FaultyStore(run.memory)
    store.fail_next(Fault.FLIPPED, operation="get", key_contains=".manifest")
    manifests, state = Manifests(store, "job"), run.reader().refresh()
    for _ in range(3):
        listed = manifests.listing(state, state.checkpoints)
        assert manifests.listing(listed, state.checkpoints) is listed
    assert len(store.calls) == 4  # two manifests, one of them twice, and a layout
    assert [len(parts_of(listed, seq)) for seq in listed.checkpoints] == [2, 2]
    assert listed == state  # cached manifests are not part of the state
    assert folded_state.dump(listed) == folded_state.dump(state)


def test_concurrent_manifest_reads_are_shared(monkeypatch):
    """Eight readers of a pod share one layout of thousands of ranks in memory."""
    run, _, entry = saved()
    state, reading, go, reads = run.reader().refresh(), Event(), Event(), []
    get = run.memory.get

    def slow(key: str) -> bytes:
        reads.append(key)
        reading.set()
        assert go.wait(60)
        return get(key)

    monkeypatch.setattr(run.memory, "get", slow)
    manifests = Manifests(run.memory, "job")
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(manifests.listing, state, [entry.seq]) for _ in range(8)]
        assert reading.wait(60)
        wait(found, timeout=0.3)  # this also covers a reader that does not wait for the first
        go.set()
    parts = [each.result().listings[entry.seq] for each in found]
    assert len(reads) == 2, "a manifest and a layout"
    assert all(each is parts[0] for each in parts)


def test_access_to_unread_parts_raises() -> None:
    run, _, entry = saved()
    with pytest.raises(InternalBug, match="was not read"):
        chain(run.log.state, entry.seq)


@pytest.mark.parametrize(
    "change", ["run", "attempt", "snapshot_id", "step", "layout", "covers", "ranks", "newer"]
)
def test_mismatched_manifest_is_refused(change: str) -> None:
    """The manifest is intact, with the right hash and name, but differs from the entry."""
    run, _, entry = saved()
    assert entry.listed is not None
    good = Manifest.decode(run.memory.get(key_of(entry)), digest=entry.listed.manifest)
    part = good.parts[0]
    bad = {
        "run": replace(good, run="jobs"),
        "attempt": replace(good, attempt=good.attempt + 1),
        "snapshot_id": replace(good, snapshot_id=good.snapshot_id + 1),
        "step": replace(good, step=good.step + 1),
        "layout": replace(good, layout="0" * 32),
        "covers": replace(good, parts=(part, replace(part, covers=entry.seq - 1))),
        "ranks": replace(good, parts=(*good.parts, part)),
    }
    data = canonical({**json.loads(good.data), "format": 2}) if change == "newer" else bad[change].data
    listed = replace(entry.listed, manifest=content_digest(data))
    changed = replace(entry, listed=listed)
    run.memory.put(key_of(changed), data)
    with pytest.raises(UnsupportedVersion if change == "newer" else InvalidCheckpoint):
        Manifests(run.memory, "job").parts(changed)
