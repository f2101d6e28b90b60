"""User entries of a run: moved pins, rewinds in both directions, and who may still hold the run."""

import pytest
from deltashard_checkpoint.log import folded_state
from deltashard_checkpoint.log.replay import EntryRefused
from deltashard_checkpoint.log.selection import NothingRestorable, select
from deltashard_checkpoint.maintenance import user_entry
from deltashard_checkpoint.maintenance.holder import holder
from deltashard_checkpoint.maintenance.retention import (
    KEEP_ALL,
    Retention,
    append_retirement,
    keep_reasons,
    kept,
    retire_blockers,
)
from deltashard_checkpoint.write.closing import mark_closing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.run_builder import MemoryRun, started_run


def three_baselines(run: MemoryRun, **options: object) -> tuple[int, list[int]]:
    attempt = run.open(**options).attempt
    return attempt, [run.commit(attempt, snapshot_id, directive="steps") for snapshot_id in (1, 2, 3)]


def test_annotation_is_dropped_with_its_checkpoint():
    """Without the removal, the state would grow with every name that was used before."""
    run, attempt = started_run()
    first = run.commit(attempt, 1, pins=("best",))
    run.commit(attempt, 2)
    user_entry.pin(run.reader(), "best", None)
    user_entry.pin(run.reader(), "paper", f"{first}")
    assert run.log.refresh().user_entries.keys() == {"best", "paper"}
    user_entry.pin(run.reader(), "paper", None)
    assert run.log.refresh().user_entries.keys() == {"best"}
    run.retire([first])
    assert run.log.state.user_entries == {}
    assert b'"pins":[]' in folded_state.dump(run.log.state)


def test_run_holder_is_named_by_the_last_commit():
    run = MemoryRun()
    assert holder(run.log, run.log.refresh()) is None, "no attempt is open"
    attempt = run.open(workload="uid").attempt
    found = holder(run.log, run.log.refresh())
    assert (found.attempt, found.workload, found.closing) == (attempt, "uid", False)
    for directive, held in (
        ("timer; x", True),
        ("close; x", False),
        ("", True),
        ("user", True),
        ("drain", True),  # a cordon; the trainer continues
        ("eval", True),
        ("user close", True),
        ("sigterm", False),
    ):
        run.commit(attempt, run.step + 1, directive=directive)
        assert (holder(run.log, run.log.refresh()) is not None) is held, directive
    mark_closing(run.log, attempt, "0-abc")
    assert holder(run.log, run.log.state).closing
    run.time.now_s += 61
    assert holder(run.log, run.log.state) is None
    run.open()
    assert holder(run.log, run.log.refresh()) is not None, "a new attempt holds the run again"


def test_excluded_checkpoint_is_no_fallback_and_is_retired_first():
    run = MemoryRun()
    attempt, (first, second, third) = three_baselines(run)
    user_entry.rewind(run.reader(), f"{second}", ended=True)
    state = run.log.refresh()
    assert select(state, exclude=[second]).seq == first
    with pytest.raises(NothingRestorable, match=r"2 live ones is valid") as failed:
        select(state, exclude=[first, second])
    assert f"{third} is valid, but detached" in failed.value.remedy
    assert select(state, f"seq:{third}").seq == third
    assert kept(state, Retention(keep_last=KEEP_ALL)) == {first, second, third}
    assert kept(state, Retention(keep_last=2)) == {first, second}
    with pytest.raises(EntryRefused, match="every checkpoint"):
        run.retire([first, second])
    user_entry.pin(run.reader(), "keep", f"{third}")
    assert append_retirement(run.log, Retention(keep_last=1)) is None, (
        "one is pinned, and one is the second chain"
    )
    assert attempt < run.log.state.attempt


@st.composite
def runs(draw: st.DrawFn) -> MemoryRun:
    """Draw a run with deltas on any checkpoint, pins, compactions and rewinds."""
    run, attempt = started_run()
    for snapshot_id in range(1, draw(st.integers(2, 15))):
        live = sorted(run.log.refresh().checkpoints)
        what = draw(
            st.sampled_from(["full", "delta", "delta", "pinned", "pin", "unpin", "rewind", "open", "compact"])
        )
        one = draw(st.sampled_from(live)) if live else None
        if what in {"full", "pinned"} or one is None:
            run.commit(attempt, snapshot_id, pins=(draw(st.sampled_from("ab")),) if what == "pinned" else ())
        elif what == "delta":
            base = run.log.state.attempts[attempt].last_seq or run.log.state.attempts[attempt].resumes_from
            run.commit(attempt, snapshot_id, base if base in run.log.state.checkpoints else None)
        elif what == "pin":
            user_entry.pin(run.log, draw(st.sampled_from("ab")), f"{one}")
        elif what == "unpin":
            name = draw(st.sampled_from("ab"))
            if name in run.log.state.pinned:
                user_entry.pin(run.log, name, None)
        elif what == "rewind":
            user_entry.rewind(run.log, f"{one}", ended=True)
            attempt = run.open().attempt
        elif what == "open":
            attempt = run.open(which=f"seq:{one}").attempt
        elif one not in run.log.state.compactions:
            run.compacted(one)
    return run


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(runs(), st.sampled_from([1, 2, 5, KEEP_ALL]), st.sampled_from([None, 3]))
def test_every_kept_checkpoint_has_a_reason_and_no_other(run, keep_last, every_steps):
    state, retention = run.log.refresh(), Retention(keep_last=keep_last, every_steps=every_steps)
    why = keep_reasons(state, retention)
    assert why.keys() == kept(state, retention)
    assert all(why.values())
    assert any("the newest" in reason for reason in why[state.newest().seq])
    for name, seq in state.pinned.items():
        assert f"pinned {name}" in why[seq]
    # No kept checkpoint needs what retention releases, and the folded state equals the state.
    retired = state.checkpoints.keys() - why.keys()
    assert retire_blockers(state, retired) == {}
    data = folded_state.dump(state)
    assert folded_state.load(data, "job", folded_state.name_of(state, data)) == state
