"""Marks compared with a model that remembers every change, snapshot and notification."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from deltashard.tracking.marks import Marks
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gpu import DEVICES

ROWS = 10
rows_of = st.lists(st.integers(0, ROWS - 1), max_size=4)
moves = st.one_of(
    st.tuples(st.just("change"), rows_of),
    st.tuples(st.just("snapshot"), st.sampled_from(["all", "since_baseline", "since_commit"])),
    # A notification about any earlier snapshot, also repeated, late, out of order, or after an assumed failure.
    st.tuples(st.just("committed"), st.integers(0, 30)),
    st.tuples(st.just("failed"), st.integers(0, 30)),
    # The newest commit that the trainer knows becomes the sidecar's baseline.
    st.tuples(st.just("rebase"), st.none()),
)


@dataclass
class MarksModel:
    """The actual changes since the newest commit that the trainer knows."""

    changed: list[set[int]] = field(default_factory=lambda: [set()])
    """The rows that changed before snapshot 1, between snapshots 1 and 2, and so on."""
    commit: int = 0
    baseline: int = 0
    full: dict[int, bool] = field(default_factory=dict)

    def since(self, snapshot_id: int) -> set[int]:
        if snapshot_id == 0:
            return set(range(ROWS))
        return set().union(*self.changed[snapshot_id:])


def selected(marks: Marks, mode: str) -> set[int]:
    selection = marks.select(mode)
    return set(range(ROWS)) if selection.all else set(selection.ids.tolist())


def check_script(script: list[tuple[str, object]], device: str = "cpu") -> tuple[Marks, MarksModel]:
    marks, model = Marks(ROWS, device), MarksModel()
    for kind, what in script:
        if kind == "change":
            marks.mark(torch.tensor(what, dtype=torch.int64, device=device))
            model.changed[-1].update(what)
        elif kind == "snapshot":
            snapshot_id = len(model.changed)
            marks.snapshot_taken(snapshot_id, full=what == "all")
            model.full[snapshot_id] = what == "all"
            model.changed.append(set())
        elif kind == "rebase":
            if model.commit:
                marks.rebase()
                model.baseline = model.commit
        elif what in model.full:
            if kind == "failed":
                marks.failed(what)
            else:
                marks.committed(what, baseline=model.full[what])
                model.commit = max(model.commit, what)
                if model.full[what]:
                    model.baseline = max(model.baseline, what)
        assert selected(marks, "since_commit") >= model.since(model.commit), (kind, what)
        assert selected(marks, "since_baseline") >= model.since(model.baseline), (kind, what)
        fresh = selected(marks, "since_commit")
        for mode in ("since_baseline", "all"):
            older = set(marks.select_older(mode).ids.tolist())
            assert not older & fresh, (kind, what)
            assert older | fresh >= selected(marks, mode), (kind, what)
    return marks, model


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=600, deadline=None)
@given(script=st.lists(moves, max_size=30))
def test_selection_contains_every_changed_row_for_any_notifications(device, script):
    check_script(script, device)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(rows_of, st.sampled_from(["all", "since_baseline", "since_commit", "rebased"])), max_size=12
    )
)
def test_selection_is_exact_with_prompt_notifications(script):
    """Each snapshot is acknowledged before the next one. No unchanged row is marked."""
    marks, model = Marks(ROWS), MarksModel()
    marks.snapshot_taken(1, full=True)
    marks.committed(1, baseline=True)
    model.changed.append(set())
    model.commit = model.baseline = 1
    for rows, mode in script:
        marks.mark(torch.tensor(rows, dtype=torch.int64))
        model.changed[-1].update(rows)
        assert selected(marks, "since_commit") == model.since(model.commit)
        assert selected(marks, "since_baseline") == model.since(model.baseline)
        if mode == "rebased":
            marks.rebase()
            model.baseline = model.commit
            assert selected(marks, "since_baseline") == model.since(model.commit)
        snapshot_id = len(model.changed)
        marks.snapshot_taken(snapshot_id, full=mode == "all")
        model.changed.append(set())
        marks.committed(snapshot_id, baseline=mode == "all")
        model.commit = snapshot_id
        model.baseline = snapshot_id if mode == "all" else model.baseline


def test_checker_detects_marks_dropped_too_early(monkeypatch):
    """The property is not vacuous: clearing pending flags at any commit misses rows of a newer failed snapshot."""

    def clear_all_pending(self, snapshot_id, *, baseline):
        if self._in_flight.pop(snapshot_id, None) is not None:
            self.flags.bitwise_and_(0xFF ^ 2)

    monkeypatch.setattr(Marks, "committed", clear_all_pending)
    script = [
        ("change", [1]),
        ("snapshot", "all"),
        ("change", [2]),
        ("snapshot", "since_commit"),
        ("committed", 1),
        ("failed", 2),
    ]
    with pytest.raises(AssertionError):
        check_script(script)


def test_full_snapshot_committed_as_a_delta_keeps_the_old_baseline():
    """The trainer sends all rows, but the commit is recorded as a delta: the rows still count as changed."""
    marks = Marks(ROWS)
    marks.snapshot_taken(1, full=True)
    marks.committed(1, baseline=True)
    marks.mark(torch.tensor([3]))
    marks.snapshot_taken(2, full=True)
    marks.committed(2, baseline=False)
    assert selected(marks, "since_baseline") == {3}
    assert selected(marks, "since_commit") == set()
