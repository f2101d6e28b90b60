"""A removal beside a writer that does not know of it: what he writes meanwhile goes too, or is said."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.log_error import LogGap
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.whole_run import removal

from tests.support.checkpoint.run_builder import Run

PACK = f"job/data/{1:020d}/{{:08d}}/00000-{'0' * 16}-00000.pack"


class Busy(FileStore):
    """Beside every delete of a removal somebody else puts an object, so many times."""

    def __init__(self, directory: Path, keys: Iterable[str]) -> None:
        super().__init__(directory)
        self.keys = list(keys)

    def delete(self, keys: Iterable[str]) -> None:
        super().delete(keys)
        if self.keys:
            self.put(self.keys.pop(0), b"late")


def run_in(directory: Path) -> None:
    run = Run(FileStore(directory))
    run.memory = run.store
    attempt = run.open().attempt
    for cut in range(1, 4):
        run.commit(attempt, cut)


def left(directory: Path) -> list[str]:
    return [info.key for info in FileStore(directory).list("")]


@pytest.mark.parametrize(
    "late",
    [
        [PACK.format(cut) for cut in range(7, 12)],
        [f"job/{entry_key(seq)}" for seq in range(5, 9)],
        [
            "job/log/HINT", f"job/{entry_key(5)}", PACK.format(5), "job/closing/00000000000000000001/x",
            "job/log/HINT",
        ],
    ],
)  # fmt: skip
def test_what_comes_while_a_run_is_removed_is_listed_again_and_goes(tmp_path: Path, late: list[str]) -> None:
    run_in(tmp_path)
    store = Busy(tmp_path, late)
    done = removal.remove(RunLog(store, "job"))
    assert store.keys == []
    assert left(tmp_path) == []
    assert done.left == 0


def test_who_never_ends_is_said_and_nothing_of_it_is_a_run(tmp_path: Path) -> None:
    run_in(tmp_path)
    done = removal.remove(RunLog(Busy(tmp_path, map(PACK.format, range(5, 1000))), "job"))
    assert done.left > 0
    assert "job/log/HINT" in left(tmp_path), "the barrier stands"
    with pytest.raises(LogGap):
        RunLog(FileStore(tmp_path), "job").refresh(deadline_s=0.0)
    again = removal.remove(RunLog(FileStore(tmp_path), "job"))
    assert (again.left, left(tmp_path)) == (0, [])


def test_what_comes_when_the_barrier_is_gone_is_said(tmp_path: Path) -> None:
    """One request before the end nobody can know of it; it is seen by a last look."""
    run_in(tmp_path)

    class AtTheEnd(FileStore):
        def delete(self, keys: Iterable[str]) -> None:
            keys = list(keys)
            super().delete(keys)
            if keys == ["job/log/HINT"]:
                self.put(PACK.format(9), b"late")

    assert removal.remove(RunLog(AtTheEnd(tmp_path), "job")).left == 1
    assert left(tmp_path) == [PACK.format(9)]
