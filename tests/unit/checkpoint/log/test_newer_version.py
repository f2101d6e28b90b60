"""The fold stops at an entry of a newer version, and this version changes and deletes nothing."""

import json
from collections.abc import Callable

import pytest
from deltashard_checkpoint.errors import UnsupportedVersion
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.log_error import LogStopped
from deltashard_checkpoint.log.repair import repair, salvage
from deltashard_checkpoint.maintenance import garbage_collection, user_entry
from deltashard_checkpoint.maintenance.compaction import compact
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement, retire_selected

from tests.support.checkpoint.run_builder import WHOLE, MemoryRun, part, rehashed, started_run

NEWER = {
    "version": {"format": 2}, "kind": {"kind": "future"}, "member": {"surprise": 1},
    "type": {"stall_s": None}, "part": {"parts": {}},
}  # fmt: skip
ACTORS: dict[str, Callable[[MemoryRun], object]] = {
    "a new trainer": lambda run: run.open(),
    "a takeover": lambda run: run.open(takeover=True, owner="other"),
    "the running trainer": lambda run: run.append_checkpoint(
        [part(1, 9, 0, [WHOLE], None)], attempt=1, snapshot_id=9, step=9
    ),
    "gc": lambda run: garbage_collection.collect(run.log, grace_s=0.0, min_reclaim_prefixes=1),
    "gc of orphaned objects": lambda run: garbage_collection.collect(
        run.log, grace_s=0.0, unretired=[f"data/{1:020d}/{snapshot_id:08d}/" for snapshot_id in range(9)]
    ),
    "retention": lambda run: append_retirement(run.log, Retention(keep_last=1)),
    "retire": lambda run: retire_selected(run.log, lambda _state: [2]),
    "compaction": lambda run: compact(run.log, 3, lambda *_: pytest.fail("moved")),
    "pin": lambda run: user_entry.pin(run.log, "paper", "seq:2"),
    "rewind": lambda run: user_entry.rewind(run.log, "seq:2", ended=True),
    "repair": lambda run: repair(run.log, salvage(run.log)),
}


def newer_run(change: dict[str, object]) -> tuple[MemoryRun, dict[str, bytes]]:
    run, attempt = started_run()
    first = run.commit(attempt, 1)
    run.commit(attempt, 2, first)
    run.retire([], [f"data/{attempt:020d}/{0:08d}/"])
    newest = run.commit(attempt, 3)
    key = f"job/{entry_key(newest)}"
    run.memory.put(key, rehashed({**json.loads(run.memory.get(key)), **change}))
    run.time.now_s += 1e6
    run.log = run.reader()
    return run, objects(run)


def objects(run: MemoryRun) -> dict[str, bytes]:
    return {info.key: run.memory.get(info.key) for info in run.memory.list("job/")}


@pytest.mark.parametrize("change", NEWER.values(), ids=NEWER)
@pytest.mark.parametrize("actor", ACTORS.values(), ids=ACTORS)
def test_newer_version_stops_the_log_and_nothing_is_deleted(change, actor):
    run, before = newer_run(change)
    state = run.log.refresh()
    assert (state.stopped.seq, state.stopped.voidable) == (state.tip, False)
    assert isinstance(state.stopped.error, UnsupportedVersion)
    assert (state.newest().seq, state.committed) == (3, 2), "older checkpoints are still restored"
    for _ in range(2):
        run.log = run.reader()
        with pytest.raises(LogStopped) as raised:
            actor(run)
        assert "upgrade" in raised.value.remedy
        assert objects(run) == before
