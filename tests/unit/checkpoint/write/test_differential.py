"""Differential policies: the predictor equals the paper's and counts at the current encoding."""

import pytest
from deltashard_checkpoint.format.row_block import raw_row_bytes, stored_row_bytes
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from deltashard_checkpoint.vocabulary import ENCODING_CHOICES, ENCODINGS, INCREMENTS_KEY
from deltashard_checkpoint.write.differential import History, decide, history, increments_text
from deltashard_checkpoint.write.precision import StoredPrecision

from tests.support.checkpoint.run_builder import MemoryRun, started_run

PAPER = (0.26, 0.31, 0.35, 0.385, 0.415, 0.44, 0.46, 0.48)
TABLE = TableSchema(
    fqn="t", rows=1000, columns=32, dtype="float32",
    fields=(FieldSpec(name="sum", kind="rowwise", dtype="float32"),),
)  # fmt: skip
ROW = raw_row_bytes(TABLE, 32)
BLOBS = 5000
Q8, Q2 = StoredPrecision.of("q8"), StoredPrecision.of("q2")


def known(*increments: float) -> History:
    return History(baseline=2, newest=9, increments=increments)


def saved(
    run: MemoryRun, attempt: int, snapshot_id: int, share: float, covers: int | None = None, **more: object
) -> int:
    rows = round(TABLE.rows * share)
    return run.commit(
        attempt, snapshot_id, covers, tables=(TABLE,), rows=rows, raw_bytes=rows * ROW + BLOBS, **more
    )


def at(share: float, precision: StoredPrecision) -> float:
    """Calculate S of an increment with the given share of all rows independently of the code under test."""
    row = stored_row_bytes(TABLE, 32, ENCODINGS[precision.of_table("t")], precision.state)
    return (BLOBS + share * 1000 * row) / (BLOBS + 1000 * row)


def test_paper_example_takes_a_baseline_after_seven_increments():
    decisions = [decide("intermittent", known(*PAPER[:i])) for i in range(len(PAPER))]
    assert decisions == ["since_baseline"] * 7 + ["full"]


def test_history_restarts_at_a_baseline():
    run, attempt = started_run()
    base = saved(run, attempt, 1, 1.0)
    for snapshot_id, size in enumerate(PAPER[:7], start=2):
        saved(run, attempt, snapshot_id, size, base)
    seen = history(run.log.state, attempt, Q8)
    assert seen.baseline == base
    assert seen.increments == pytest.approx([at(size, Q8) for size in PAPER[:7]])
    assert (seen.raw_bytes, seen.full_bytes) == (1000 * ROW + BLOBS, 1000 * (32 + 8 + 4) + BLOBS)
    assert decide("intermittent", seen) == "full"
    second = saved(run, attempt, 9, 1.0)
    assert history(run.log.state, attempt, Q8).increments == ()
    third = saved(run, attempt, 10, 0.1, second)
    seen = history(run.log.state, attempt, Q8)
    assert (seen.baseline, seen.newest) == (second, third)
    assert seen.increments == pytest.approx((at(0.1, Q8),))
    assert decide("intermittent", seen) == "since_baseline"


def test_history_follows_the_lineage_of_a_restore_not_log_order():
    run, first = started_run()
    base = saved(run, first, 1, 1.0)
    delta = saved(run, first, 2, 0.3, base)
    saved(run, first, 3, 1.0)
    second = run.open(which=f"seq:{delta}").attempt
    seen = history(run.log.state, second, Q8)
    assert (seen.baseline, seen.newest) == (base, delta)
    assert seen.increments == pytest.approx((at(0.3, Q8),))


@pytest.mark.parametrize("encoding", ENCODING_CHOICES)
@pytest.mark.parametrize("state_encoding", ["fp32", "bf16"])
def test_full_snapshot_counts_one_at_every_encoding(encoding, state_encoding):
    run, attempt = started_run()
    base = saved(run, attempt, 1, 1.0)
    saved(run, attempt, 2, 1.0, base)
    seen = history(run.log.state, attempt, StoredPrecision.of(encoding, state_encoding))
    assert seen.increments == pytest.approx((1.0,))


def test_history_restarts_at_a_compacted_base():
    run, attempt = started_run()
    base = saved(run, attempt, 1, 1.0)
    first = saved(run, attempt, 2, 0.3, base)
    run.compacted(first)
    seen = history(run.log.state, attempt, Q8)
    assert (seen.baseline, seen.newest, seen.increments) == (first, first, ())
    assert seen.full_bytes == pytest.approx(1000 * 44 + BLOBS, rel=0.01)
    second = saved(run, attempt, 3, 0.2, first)
    seen = history(run.log.state, attempt, Q8)
    assert (seen.baseline, seen.newest) == (first, second)
    assert seen.increments == pytest.approx((at(0.2, Q8),), rel=0.05)


def test_retired_increments_are_remembered():
    """Each increment records the increments before it, also when it covers a compacted checkpoint."""
    run, attempt = started_run()
    base = saved(run, attempt, 1, 1.0)
    found: list[int] = []
    for snapshot_id, size in enumerate(PAPER[:7], start=2):
        text = increments_text(history(run.log.state, attempt, Q8), base)
        found.append(saved(run, attempt, snapshot_id, size, base, metadata={INCREMENTS_KEY: text}))
        run.retire(found[:-2])
        del found[:-2]
    assert len(run.log.state.checkpoints) == 3
    seen = history(run.log.state, attempt, Q8)
    assert seen.increments == pytest.approx([at(size, Q8) for size in PAPER[:7]])
    assert decide("intermittent", seen) == "full"
    run.compacted(found[-1])
    assert increments_text(seen, found[-1]) == f"{found[-1]}:"


@pytest.mark.parametrize("text", ["", "x", "7:1,2", "2:1,-2", "2:" + "9" * 30, "2:1;2"])
def test_invalid_increment_history_is_ignored(text: str):
    run, attempt = started_run()
    base = saved(run, attempt, 1, 1.0)
    saved(run, attempt, 2, 0.3, base, metadata={INCREMENTS_KEY: text})
    assert history(run.log.state, attempt, Q8).increments == pytest.approx((at(0.3, Q8),))


def test_history_skips_an_unused_compaction():
    """The trainer's next snapshot covered the old baseline: the snapshot began before the compaction was in the log."""
    run, attempt = started_run()
    base = saved(run, attempt, 1, 1.0)
    first = saved(run, attempt, 2, 0.3, base)
    saved(run, attempt, 3, 0.4, base)
    run.compacted(first)
    seen = history(run.log.state, attempt, Q8)
    assert seen.baseline == base
    assert seen.increments == pytest.approx((at(0.3, Q8), at(0.4, Q8)))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("full", "full"), ("one-shot", "since_baseline"), ("consecutive", "since_commit")],
)
def test_fixed_policies_ignore_the_history(policy, expected):
    assert decide(policy, known(0.9, 0.9, 0.9)) == expected
    assert decide(policy, History()) == "full"
    assert decide(policy, known(), force_full=True) == "full"
