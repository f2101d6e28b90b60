"""URLs of missing or foreign data are explained within a bounded number of listings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.stores.abc import BucketMissing, ObjectInfo
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.stores.url import open_store
from deltashard_cli import target
from deltashard_cli.target import NoSuchRun, TooManyOtherObjects, find_run, runs_of


class ListingCounter(MemoryStore):
    """Counts the listings and the entries read from them."""

    def __init__(self) -> None:
        super().__init__()
        self.listings = self.entries = self.heads = 0

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self.listings += 1
        for each in super().list(prefix, start_after=start_after):
            self.entries += 1
            yield each

    def head(self, key: str) -> ObjectInfo:
        self.heads += 1
        return super().head(key)


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")


def test_runs_among_other_objects_are_found_with_few_requests():
    store = ListingCounter()
    for at in range(500):
        store.put(f"a/data/{at}", b"")
        store.put(f"z/{at}", b"")
    for run in ("m/one", "m/two", "y"):
        for key in (entry_key(0), entry_key(1), "data/x"):
            store.put(f"{run}/{key}", b"")
    assert list(runs_of(store)) == ["m/one", "m/two", "y"]
    assert store.listings == 4 + 1, "from the start, after each run, and the log that a/ might have"
    assert store.heads == 4
    assert store.entries == 1000 + 3


def test_search_of_a_foreign_tree_is_bounded(monkeypatch):
    monkeypatch.setattr(target, "MAX_OTHER_OBJECTS", 100)
    store = ListingCounter()
    for at in range(500):
        store.put(f"a/{at}", b"")
    with pytest.raises(TooManyOtherObjects, match="100 objects belong to no run"):
        list(runs_of(store, max_others=100))
    assert store.entries == 100


def test_run_in_a_large_foreign_tree_is_found_only_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(target, "MAX_OTHER_OBJECTS", 100)
    write(tmp_path, *(f"a/{at}" for at in range(120)), f"run/{entry_key(0)}")
    with pytest.raises(TooManyOtherObjects, match="the search ended there"):
        find_run(str(tmp_path), None)
    assert find_run(str(tmp_path), "run").run == "run"
    with pytest.raises(NoSuchRun, match="no run 'x'") as refused:
        find_run(str(tmp_path), "x")
    assert "no run was found" in refused.value.remedy


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_missing_target_is_reported(tmp_path, scheme):
    write(tmp_path, f"there/{entry_key(0)}")
    for run in ("x", None):
        with pytest.raises(BucketMissing, match="directory does not exist") as missing:
            find_run(f"{scheme}{tmp_path}/nonexist", run)
        assert missing.value.where == f"file://{tmp_path}/nonexist"


def test_listed_runs_are_bounded(tmp_path):
    write(tmp_path, *(f"r{at:02}/{entry_key(0)}" for at in range(25)))
    with pytest.raises(NoSuchRun, match="several") as refused:
        find_run(str(tmp_path), None)
    assert refused.value.remedy.endswith("r18, r19, ...")
    assert len(list(runs_of(open_store(str(tmp_path))))) == 25
