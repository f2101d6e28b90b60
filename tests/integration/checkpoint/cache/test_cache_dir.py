"""Caches of several runs on one machine share a budget. Eviction skips caches in use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deltashard_checkpoint.cache import cache_dir
from deltashard_checkpoint.cache.cache_dir import acquire, sweep
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.cache.pack_spool import CacheUnusable

from tests.support.checkpoint.sample import open_descriptors

PACK = 640


def make_cache(directory: Path, packs: int, used_s: float) -> None:
    with PackCache(directory, budget_bytes=1 << 20) as cache:
        for n in range(packs):
            spool = cache.create(str(n), capacity_bytes=PACK)
            spool.reserve(PACK)
            spool.write(0, memoryview(b"x" * PACK))
            cache.seal(spool)
            cache.unpin(str(n))
    for path in directory.iterdir():
        os.utime(path, (used_s, used_s))


def remaining(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_least_recently_used_runs_are_evicted_to_budget(tmp_path: Path) -> None:
    for name, packs, used_s in (("b", 2, 200.0), ("a", 2, 300.0), ("c", 2, 100.0), ("mine", 1, 50.0)):
        make_cache(tmp_path / name, packs, used_s)
    assert sweep(tmp_path / "mine", budget_bytes=7 * PACK).runs == 0
    swept = sweep(tmp_path / "mine", budget_bytes=7 * PACK - 1)
    assert (swept.runs, swept.bytes) == (1, 2 * PACK)
    assert remaining(tmp_path) == ["a", "b", "mine"]
    assert sweep(tmp_path / "mine", budget_bytes=0).runs == 2
    assert remaining(tmp_path) == ["mine"], "a sweep never removes the caller's cache"


def test_live_sidecar_cache_is_counted_and_kept(tmp_path: Path) -> None:
    """The owner is another process or another cache of this process. Scanning does not release its lock."""
    for name, used_s in (("other", 1.0), ("here", 2.0), ("over", 3.0)):
        make_cache(tmp_path / name, 1, used_s)
    code = (
        "import sys; from pathlib import Path; from deltashard_checkpoint.cache.cache_dir import acquire;"
        "acquire(Path(sys.argv[1])); print('owned', flush=True); sys.stdin.read()"
    )
    with (
        PackCache(tmp_path / "here", budget_bytes=1 << 20) as here,
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "other")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder,
    ):
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"owned\n"
        assert sweep(tmp_path / "mine", budget_bytes=2 * PACK).runs == 1
        assert sweep(tmp_path / "mine", budget_bytes=0).runs == 0
        assert remaining(tmp_path) == ["here", "other"]
        assert "0" in here
        with pytest.raises(CacheUnusable, match="another running process"):
            acquire(tmp_path / "other", wait_s=0.0)
        holder.communicate(timeout=60)
    assert sweep(tmp_path / "mine", budget_bytes=0).runs == 2


def test_foreign_directory_is_not_touched(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", 1, 1.0)
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "big.pack").write_bytes(b"x" * 4096)
    make_cache(tmp_path / "elsewhere" / "run", 1, 1.0)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "run")
    assert sweep(tmp_path / "mine", budget_bytes=0).runs == 0
    assert remaining(tmp_path) == ["cache", "elsewhere", "link", "plain"]


def test_interrupted_sweep_is_finished_by_next_one(tmp_path, monkeypatch):
    make_cache(tmp_path / "old", 3, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", lambda path: (_ for _ in ()).throw(OSError("killed here")))
        patch.setattr(Path, "unlink", lambda path, **options: (_ for _ in ()).throw(OSError("killed here")))
        assert sweep(tmp_path / "mine", budget_bytes=0).runs == 0
    assert len(remaining(tmp_path)) == 1
    assert sweep(tmp_path / "mine", budget_bytes=0).runs == 1
    assert remaining(tmp_path) == []


def test_concurrent_owners_and_sweepers_never_share_a_directory(tmp_path: Path) -> None:
    """A second process evicts continuously while owners start and end. Files written under the lock remain."""
    code = (
        "import sys; from pathlib import Path; from deltashard_checkpoint.cache.cache_dir import sweep\n"
        "print('begun', flush=True)\n"
        "while True: sweep(Path(sys.argv[1]) / 'mine', budget_bytes=0)"
    )
    before = open_descriptors()
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as sweeper:
        try:
            assert sweeper.stdout is not None
            assert sweeper.stdout.readline() == b"begun\n"
            for n in range(200):
                fd = acquire(tmp_path / "run", wait_s=60.0)
                pack = tmp_path / "run" / f"{n}.pack"
                pack.write_bytes(b"x")
                assert pack.read_bytes() == b"x"
                cache_dir.release_lock(tmp_path / "run", fd)
        finally:
            sweeper.kill()
    assert open_descriptors() <= before


def test_non_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(CacheUnusable, match="cannot be written"):
        acquire(tmp_path / "file", wait_s=60.0)
