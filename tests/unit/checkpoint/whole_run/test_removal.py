"""A removal during writes of an unaware writer removes the new objects too, or reports them."""

from collections.abc import Iterable
from pathlib import Path

from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.whole_run import removal

from tests.support.checkpoint.run_builder import MemoryRun

PACK = f"data/{1:020d}/{{:08d}}/00000-{'0' * 16}-00000.pack"


class ConcurrentWriterStore(FileStore):
    """After each delete of a removal, another process puts an object, until `keys` is empty."""

    def __init__(self, directory: Path, keys: Iterable[str]) -> None:
        super().__init__(directory)
        self.keys = list(keys)

    def delete(self, keys: Iterable[str]) -> None:
        super().delete(keys)
        if self.keys:
            self.put(self.keys.pop(0), b"late")


def run_in(directory: Path) -> None:
    run = MemoryRun(FileStore(directory))
    run.memory = run.store
    attempt = run.open().attempt
    for snapshot_id in range(1, 4):
        run.commit(attempt, snapshot_id)


def test_objects_written_during_removal_are_removed_too(tmp_path: Path) -> None:
    run_in(tmp_path)
    late = ["log/HINT", entry_key(5), PACK.format(5), "closing/00000000000000000001/x", "log/HINT"]
    late += map(PACK.format, range(6, 10))
    store = ConcurrentWriterStore(tmp_path, [f"job/{key}" for key in late])
    assert removal.remove(RunLog(store, "job")).left == 0
    assert store.keys == []
    assert list(FileStore(tmp_path).list("")) == []
