"""Random programs with any optimizer and table, and with precopies before snapshots.

The store of each program receives the rows of each snapshot as delivered.
After every snapshot the store equals weights and state bit for bit.
If a program's snapshots are baselines, they also report which rows changed.
"""

from __future__ import annotations

import collections
import os
from types import SimpleNamespace

import pytest
import torch
from deltashard.snapshot import precopy
from deltashard.snapshot.block_writer import section_tensors
from deltashard.snapshot.precopy import Precopy, TablePrecopy, can_precopy
from deltashard.tracking.tracking import TrackingSettings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.gpu import DEVICES
from tests.support.trainer.arena import FakeArena, table_snapshot
from tests.support.trainer.tracking_case import CASES, EVENTS, EXACT, PLAIN, ROWS, begin, quiet

AUDIT_ALL = TrackingSettings(hash_below_bytes=0, audit_rows=ROWS)
TRACELESS = {"write_data"}
SEEN: collections.Counter[str] = collections.Counter()


class TrackedProgram:
    """A program under tracking, with its store and its running precopy."""

    def __init__(self, case, seed, how, *, split_batches=False):
        """`split_batches`: snapshots take all rows; rows changed since the newest commit are in separate batches."""
        self.split_batches, self.mode = split_batches, "all" if split_batches else "since_commit"
        self.training, self.checker = begin(*case, seed, how)
        self.table, self.tracking = self.checker.table, self.checker.tracking
        self.store = [part.clone() for part in section_tensors(self.take_snapshot())]
        self.ahead = None
        self.written = []

    def take_snapshot(self, **selection):
        fields = self.table.state_tensors().values()
        return table_snapshot(self.table.param, fields, box=self.table.box, **selection)

    def watch(self):
        """Start a precopy, as before a snapshot."""
        if self.ahead is None and can_precopy(self.table, self.take_snapshot()):
            self.arena, self.written = FakeArena(2 << 10), []
            self.writer = self.arena.writer(threads=1)
            self.ahead = TablePrecopy(self.table, self.take_snapshot())
            self.table.marks.watch()
            self.batches = self.ahead.copy(self.writer, self.mode, fresh_first=self.split_batches)
            self.copy()

    def copy(self):
        if self.ahead is not None and (batch := next(self.batches, None)) is not None:
            self.written.append((self.ahead, batch))

    def train_and_copy(self):
        self.training.train()
        self.watch()
        self.copy()
        self.copy()
        self.training.train()

    def take(self):
        checker = self.checker
        checker.snapshot_id += 1
        self.tracking.audit_before_commit()
        self.tracking.refresh()
        refreshed = None if self.ahead is None else self.ahead.refresh_copy(self.take_snapshot(), self.mode)
        SEEN["renewed" if refreshed else "discarded" if self.ahead else "plain"] += 1
        if self.ahead is None:
            self.arena = FakeArena(2 << 10)
            self.writer = self.arena.writer()
        else:
            self.writer.redirect(block=self.arena.take, send=self.arena.send)
            copies = SimpleNamespace(writer=self.writer, stream=self.arena, _written=self.written)
            Precopy.hand_over(copies, [self.ahead] if refreshed else [])
        if refreshed:
            SEEN["ahead"] += self.ahead.rows
            SEEN["again"] += refreshed.recopied
            SEEN["repeated"] += sum(
                len(each.snapshot.selection.ids) for each in refreshed.rest if each.duplicated
            )
            refreshed.write(self.writer, fresh_first=self.split_batches)
        elif self.split_batches:
            self.writer.table(
                self.take_snapshot(selection=self.table.marks.select("since_commit")), fresh=True
            )
            self.writer.table(self.take_snapshot(selection=self.table.marks.select_older("all")))
        else:
            self.writer.table(self.take_snapshot(selection=self.table.select_rows("since_commit")))
        self.writer.flush()
        self.ahead = None
        self.apply()
        self.tracking.snapshot_taken(checker.snapshot_id, self.mode)
        self.tracking.committed(checker.snapshot_id, baseline=self.split_batches)
        self.tracking.audit_sample()

    def apply(self):
        """Write the delivered rows into the store."""
        parts = section_tensors(self.take_snapshot())
        if len(parts) != len(self.store):  # a field was added or removed: all rows are sent
            self.store = [torch.full_like(part, 77) for part in parts]
        before = [part.clone() for part in self.store]
        fresh, sent = (torch.zeros(ROWS, dtype=torch.int64, device="cpu") for _ in range(2))
        for batch in self.arena.sent:
            rows, values = self.arena.rows(batch, parts)
            assert bool((sent[rows] > 0).all() if batch.duplicated else (sent[rows] == 0).all()), (
                "a row in two batches"
            )
            sent[rows] += 1
            fresh[rows] += int(batch.fresh)
            for stored, found in zip(self.store, values, strict=True):
                stored[rows] = found.to(stored.device)
        for part, stored in zip(parts, self.store, strict=True):
            same = (part == stored) | (part.isnan() & stored.isnan())
            wrong = (~same.view(ROWS, -1).all(1)).nonzero().view(-1).tolist()
            assert not wrong, f"rows {wrong[:8]} are of another step ({self.table.tracker})"
        if self.split_batches:
            changed = [
                ((was != now) & ~(was.isnan() & now.isnan())).view(ROWS, -1).any(1).cpu()
                for was, now in zip(before, self.store, strict=True)
            ]
            assert bool((sent > 0).all())
            assert bool((fresh <= 1).all())
            missed = (torch.stack(changed).any(0) & (fresh == 0)).nonzero().view(-1).tolist()
            assert not missed, f"rows {missed[:8]} changed, but no fresh batch has them"


TRACKED = [case for case in CASES if case[0] in EXACT and case[1:] == ("embedding", True)]
"""Cases that are tracked by gradients. Tables of other cases are never precopied."""
COMMON = [
    "train", "train_and_copy", "train_and_copy", "watch", "copy", "copy", "snapshot", "snapshot", "step_again", "accumulate_and_step",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(precopy, "MIN_PRECOPY_TABLE_BYTES", 0)
    monkeypatch.setattr(precopy, "LIST_ROWS", 32)
    monkeypatch.setattr(precopy, "MAX_RECOPY_FRACTION", 100)


@settings(
    max_examples=int(os.environ.get("DELTASHARD_TRACKING_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    case=st.one_of(st.sampled_from(TRACKED), st.sampled_from(TRACKED), st.sampled_from(CASES)),
    events=st.lists(
        st.one_of(st.sampled_from(COMMON), st.sampled_from(COMMON), st.sampled_from(EVENTS)),
        min_size=4,
        max_size=18,
    ),
    seed=st.integers(0, 1000),
    split_batches=st.booleans(),
)
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_stored_rows_equal_the_live_rows(device, case, events, seed, split_batches):
    if "replace_module" in events:
        # torch cannot return the state of a parameter that is in no group any more
        events = [event for event in events if event != "reload_optimizer"]
    with quiet(), torch.device(device):
        program = TrackedProgram(
            case, seed, AUDIT_ALL if TRACELESS & set(events) else PLAIN, split_batches=split_batches
        )
        for event in [*events, "snapshot"]:
            if event in ("watch", "copy", "train_and_copy"):
                getattr(program, event)()
            elif event == "snapshot":
                program.take()
            else:
                getattr(program.training, event)()


@pytest.mark.slow
def test_programs_used_precopy():
    """The property is not vacuous: programs use copies, copy or send rows again, and discard copies."""
    if not SEEN:
        pytest.skip("the property did not run in this process")
    kinds = ("renewed", "discarded", "ahead", "again", "repeated")
    assert min(SEEN[kind] for kind in kinds) > 0, SEEN
