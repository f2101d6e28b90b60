"""The sampled audit finds silent writes at the rate that its documentation states."""

from __future__ import annotations

import pytest
import torch
from deltashard.tracking.audit import SYNC_CHECK_INTERVAL, Audit
from deltashard.tracking.marks import Marks
from deltashard.tracking.tracking import Tracking, TrackingSettings
from torch import nn

ROWS = 20_000


def clean_marks() -> Marks:
    marks = Marks(ROWS)
    marks.reseed(torch.tensor([], dtype=torch.int64))
    return marks


@pytest.mark.parametrize(("fraction", "sampled"), [(0.001, 2048), (0.002, 512), (0.0005, 1000)])
def test_silent_write_detection_rate_matches_the_docs(fraction, sampled):
    """200 seeded audits of a random silent write: the miss rate is (1 - f) ** k within four standard errors."""
    weights = torch.randn(ROWS, 4)
    marks = clean_marks()
    touched = int(fraction * ROWS)
    random = torch.Generator().manual_seed(7)
    trials, missed = 200, 0
    for seed in range(trials):
        audit = Audit("t", seed)
        audit.draw([weights], sampled)()
        rows = torch.randperm(ROWS, generator=random)[:touched]
        weights.data[rows] += 1
        missed += audit.check([weights], marks) is None
    expected = (1 - fraction) ** sampled
    error = (expected * (1 - expected) / trials) ** 0.5
    assert abs(missed / trials - expected) < 4 * error + 1e-9


def audited(rows: int = 512) -> tuple[nn.Embedding, Tracking]:
    """Return a table after a full snapshot, and the sample for its next snapshot."""
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, 8, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    tracking = Tracking(table, optimizer, settings=TrackingSettings(audit_rows=rows, audit_rows_in_all=ROWS))
    commit_snapshot(tracking, 1)
    return table, tracking


def commit_snapshot(tracking: Tracking, snapshot_id: int) -> None:
    tracking.refresh()
    tracking.snapshot_taken(snapshot_id, "all")
    tracking.committed(snapshot_id, baseline=True)
    tracking.audit_sample()


def test_fault_makes_the_next_snapshot_full_and_is_counted():
    """A stand-in for a fused kernel writes a tenth of the table through .data.

    The next snapshot detects it, and tracking is exact afterwards.
    """
    table, tracking = audited()
    assert tracking.tables[0].tracker == "gradients"
    table.weight.data[::10] *= 0.5
    faults = tracking.audit_before_commit()
    assert [f.table for f in faults] == ["weight"]
    assert "changed untracked" in str(faults[0])
    assert tracking.faults == 1
    assert tracking.refresh().commit == ROWS
    tracking.snapshot_taken(2, "since_commit")
    tracking.committed(2, baseline=False)
    table.weight.data[17] = 0
    tracking.refresh()
    assert tracking.tables[0].select_rows("since_commit").ids.tolist() == [17]


def compare_ahead(tracking: Tracking) -> None:
    """Compare the sample as the copying thread does right before a snapshot."""
    for each in tracking.audit_ahead():
        each()


def test_comparison_before_a_snapshot_counts_for_the_snapshot():
    """The early comparison finds the fault; the snapshot does not repeat it. A row marked meanwhile is no fault."""
    table, tracking = audited()
    compare_ahead(tracking)
    assert tracking.audit_before_commit(ahead=True) == []
    commit_snapshot(tracking, 2)
    sampled = tracking.tables[0]._audit._ids
    table.weight.data[sampled[:2]] += 1
    compare_ahead(tracking)
    tracking.tables[0].marks.mark(sampled[:1])
    [fault] = tracking.audit_before_commit(ahead=True)
    assert fault.found == len({int(i) for i in sampled[1:2]} - {int(sampled[0])})


def test_write_between_check_and_snapshot_is_found_by_rotation():
    """Every table is compared at the snapshot itself once in SYNC_CHECK_INTERVAL snapshots."""
    table, tracking = audited()
    found = []
    for snapshot_id in range(2, 2 + SYNC_CHECK_INTERVAL):
        compare_ahead(tracking)
        table.weight.data += 1
        found.append(bool(tracking.audit_before_commit(ahead=True)))
        if found[-1]:
            break
        commit_snapshot(tracking, snapshot_id)
    assert found[-1]
    assert tracking.tables[0].tracker == "hashes"


def test_full_sample_is_compared_only_at_snapshots():
    """The copying thread would miss writes before its first comparison or after its last."""
    table, tracking = audited(ROWS)
    commit_snapshot(tracking, 2)
    tracking.audit_sample(lambda _: pytest.fail("compared on another thread"))
    assert tracking.audit_ahead() == []
    table.weight.data[17] += 1
    [fault] = tracking.audit_before_commit(ahead=True)
    assert (fault.rows, fault.checked) == ((17,), ROWS)


def test_state_is_audited_and_a_new_field_is_no_fault():
    """Lazy state changes the layout. Another mechanism marks the whole table then."""
    weights, total = torch.randn(ROWS, 4), torch.zeros(ROWS)
    audit = Audit("t", 1)
    audit.draw([weights, total], ROWS)()
    total[9] = 3
    fault = audit.check([weights, total], clean_marks())
    assert (fault.rows, fault.found) == ((9,), 1)
    audit.draw([weights], 64)()
    assert audit.check([weights, torch.zeros(ROWS)], clean_marks()) is None
    audit.forget()
    assert audit.check([weights + 1], clean_marks()) is None
