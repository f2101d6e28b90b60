"""Tests of the pack cache: budget, pins, restarts, ownership, full disks and open file descriptors."""

import os
import threading
from pathlib import Path

import pytest
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.cache.pack_spool import CacheFull


def _put(cache: PackCache, key: str, data: bytes, *, unpin: bool = True) -> None:
    spool = cache.create(key, capacity_bytes=len(data))
    assert spool.reserve(len(data)) == 0
    spool.write(0, memoryview(data))
    cache.seal(spool)
    if unpin:
        cache.unpin(key)


def _get(cache: PackCache, key: str, n: int, offset: int = 0) -> bytes | None:
    out = bytearray(n)
    return bytes(out) if cache.read_into(key, offset, memoryview(out)) else None


def test_evicts_least_recently_used_pack_first(tmp_path: Path) -> None:
    with PackCache(tmp_path, budget_bytes=3 * 640) as cache:
        for name in "abc":
            _put(cache, name, name.encode() * 640)
        assert _get(cache, "a", 3, 5) == b"aaa"
        _put(cache, "d", b"d" * 640)
        assert [name for name in "abcd" if name in cache] == ["a", "c", "d"]
        assert cache.used_bytes == 3 * 640
        assert _get(cache, "b", 1) is None
        assert _get(cache, "a", 10, 635) is None, "a read beyond the end must fail"


def test_pinned_packs_are_kept_and_create_waits_for_an_unpin(tmp_path: Path) -> None:
    with PackCache(tmp_path, budget_bytes=1280) as cache:
        _put(cache, "a", b"a" * 640, unpin=False)
        _put(cache, "b", b"b" * 640, unpin=False)
        with pytest.raises(CacheFull, match="not uploaded yet"):
            cache.create("c", capacity_bytes=640)
        got = threading.Event()
        threading.Thread(
            target=lambda: (cache.create_all(["c"], capacity_bytes=640, wait_s=30), got.set())
        ).start()
        assert not got.is_set()
        cache.unpin("a")
        assert got.wait(30)
        assert "a" not in cache
        assert sum(entry.bytes for entry in cache._entries.values() if entry.pins) == 1280
        with pytest.raises(CacheFull):
            cache.create_all(["huge"], capacity_bytes=1281, wait_s=30)
        with pytest.raises(CacheFull):
            cache.create_all(["d"], capacity_bytes=640, wait_s=30, stopped=lambda: True)


def test_restart_keeps_packs_and_removes_partial_files(tmp_path: Path) -> None:
    """A restart keeps the order of use. It removes partial files of an ended owner and evicts down to a smaller budget."""
    with PackCache(tmp_path, budget_bytes=1 << 20) as cache:
        for i, name in enumerate("abc"):
            _put(cache, name, name.encode() * 640)
            os.utime(cache._path(name), (i, i))
        assert _get(cache, "a", 1) == b"a"
        cache.create("half", capacity_bytes=100)
    with PackCache(tmp_path, budget_bytes=1280) as cache:
        assert [name for name in ("a", "b", "c", "half") if name in cache] == ["a", "c"]
        assert _get(cache, "c", 640) == b"c" * 640
    assert not list(tmp_path.glob("*.spool"))
