"""A full store: what reads and what frees does not begin with a write, and an entry finds the room of a copy."""

import pytest
from deltashard_checkpoint.format.object_key import cut_prefix
from deltashard_checkpoint.maintenance.garbage_collection import collect, debris
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement
from deltashard_checkpoint.stores.abc import StoreFull
from deltashard_checkpoint.whole_run.removal import remove

from tests.support.checkpoint.run_builder import Run
from tests.support.checkpoint.small_store import SmallStore

ONE = Retention(keep_last=1)


def filled(commits: int) -> tuple[Run, SmallStore, int]:
    """A run with so many checkpoints of its one attempt, on a store without room."""
    store = SmallStore(url="memory://small")
    run = Run(store)
    run.memory = store
    attempt = run.open().attempt
    for cut in range(1, commits + 1):
        run.commit(attempt, cut)
    store.room = 0
    return run, store, attempt


def keys(store: SmallStore, prefix: str) -> list[str]:
    return [info.key for info in store.list(prefix)]


@pytest.mark.parametrize(("older", "spared"), [(1, "job/log/fold-"), (0, "job/log/HINT")])
def test_an_entry_that_frees_takes_the_room_of_a_copy(older: int, spared: str) -> None:
    """Of a folded state that is `older` than the newest, else of HINT; every reader still finds the same run."""
    run, store, _ = filled(4)
    store.delete(keys(store, "job/log/fold-")[: -1 - older])
    store.room = 0
    before = keys(store, spared)
    assert append_retirement(run.log, ONE) is not None
    assert len(keys(store, spared)) < len(before)
    fresh = run.reader().refresh()
    assert fresh == run.log.state
    assert len(fresh.checkpoints) == 2  # the newest, and the second chain
    assert collect(run.log, grace_s=0).objects == 2
    assert (store.room or 0) > 0
    assert not keys(store, "job/probe/")


def test_what_can_never_be_committed_goes_without_an_entry_and_nothing_else_does() -> None:
    """Where there is not even a copy to give up: the parts of failed saves, once a newer attempt has ended them."""
    run, store, attempt = filled(3)
    store.room = None
    failed = cut_prefix(attempt, 4)
    store.put(f"job/{failed}00000-{'a' * 16}-00000.pack", b"of a save that found no room")
    store.delete([*keys(store, "job/log/fold-"), "job/log/HINT"])
    run.log = run.reader()
    store.room = 0
    state = run.log.refresh()
    assert debris(run.log, state) == ()  # the attempt may commit it yet
    assert collect(run.log, unnamed=[failed]).objects == 0
    store.room = 3
    run.open()
    store.delete([*keys(store, "job/log/fold-"), "job/log/HINT"])
    run.log = run.reader()
    state = run.log.refresh()
    store.room = 0
    assert debris(run.log, state) == (failed,)
    with pytest.raises(StoreFull):
        append_retirement(run.log, ONE, debris=[failed])
    every = {prefix for each in state.checkpoints.values() for prefix in each.prefixes}
    assert collect(run.log, unnamed=[failed, *every]).prefixes == (failed,)
    assert append_retirement(run.log, ONE, debris=[failed]) is not None


@pytest.mark.parametrize("commits", [3, 40])
def test_a_run_is_removed_from_a_full_store(commits: int) -> None:
    run, store, _ = filled(commits)
    assert remove(run.log, through=run.log.state.tip).left == 0
    assert not keys(store, "")
