"""Opening an attempt with a known state, as every sidecar does: HINT is read but never trusted."""

from collections import Counter
from collections.abc import Iterator

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.log_error import LogGap
from deltashard_checkpoint.stores.abc import ObjectInfo
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.write.attempt import open_attempt

from tests.support.checkpoint.run_builder import MemoryRun


class RequestCounter(MemoryStore):
    """Counts requests and the names that listings return."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return super().get(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self.requests["list"] += 1
        for info in super().list(prefix, start_after=start_after):
            self.requests["names"] += 1
            yield info


def reader_and_new_commits(commits: int) -> tuple[MemoryRun, RunLog, list[int]]:
    """Return a run, a reader that read its first two checkpoints, and the seqs of the later ones."""
    run = MemoryRun(RequestCounter())
    run.memory = run.store
    attempt = run.open().attempt
    for snapshot_id in (1, 2):
        run.commit(attempt, snapshot_id)
    known = run.reader(readers=1)
    known.refresh()
    return run, known, [run.commit(attempt, snapshot_id) for snapshot_id in range(3, 3 + commits)]


def opened(log: RunLog) -> int | None:
    found = open_attempt(log, owner="me", closing_wait_s=0.0, deadline_s=30.0)
    return None if found.resume is None else found.resume.seq


def requests(run: MemoryRun, log: RunLog) -> Counter[str]:
    run.store.requests.clear()
    opened(log)
    return run.store.requests


@pytest.mark.slow
@pytest.mark.parametrize("commits", [100, 400])
def test_a_long_log_costs_as_many_requests_as_a_short_one(commits: int) -> None:
    """The opener reads the newest folded state and the entries after it."""
    run, known, seqs = reader_and_new_commits(commits)
    found = requests(run, known)
    assert found["get"] < 2 * 128 + 10, "the longest fold interval, and a few more"
    assert found["names"] < 2 * 128 + 10
    assert known.state.newest().seq == seqs[-1]
    assert known.state == run.reader().refresh()


def test_up_to_date_reader_requests_only_hint() -> None:
    run, known, _ = reader_and_new_commits(0)
    known.refresh()
    run.store.requests.clear()
    known.refresh()
    before = run.store.requests.copy()
    run.store.requests.clear()
    known.refresh(use_hint=True)
    assert run.store.requests - before == Counter(get=1)


def test_lost_newest_entries_are_a_gap_for_an_older_reader() -> None:
    """An older reader must not continue from its known state as if it were the newest."""
    run, known, seqs = reader_and_new_commits(3)
    run.memory.delete(["job/" + entry_key(seq) for seq in seqs])
    with pytest.raises(LogGap, match="newest entries are gone"):
        opened(known)
    assert [info.key for info in run.memory.list(f"job/{entry_key(seqs[0])[:-5]}")] == []
