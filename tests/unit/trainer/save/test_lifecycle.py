"""The table of a snapshot's states."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltashard.save.lifecycle import MEANING, TABLE, SnapshotEvent, SnapshotPhase, SnapshotState, reference
from deltashard_checkpoint.transition import IllegalEvent

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "snapshot-lifecycle.md"


def test_one_snapshot_at_a_time() -> None:
    """While one is in flight none is begun; once its fate is known, the next is begun ahead or at once."""
    state = SnapshotState()
    for event in (SnapshotEvent.AHEAD, SnapshotEvent.TAKE, SnapshotEvent.SEAL):
        state.happen(event)
    for event in (SnapshotEvent.AHEAD, SnapshotEvent.TAKE):
        with pytest.raises(IllegalEvent, match=f"'{event.value}' in state STAGED"):
            state.happen(event)
    assert state.now is SnapshotPhase.STAGED
    begins = {phase for phase, row in TABLE.items() if SnapshotEvent.AHEAD in row}
    assert begins == {SnapshotPhase.IDLE, SnapshotPhase.COMMITTED, SnapshotPhase.FAILED}
    assert all(SnapshotEvent.TAKE in TABLE[phase] for phase in begins)


def test_what_was_taken_is_durable_or_failed() -> None:
    """Nothing else follows; only what is with the sidecar becomes durable, and only what was not taken is dropped."""
    assert {phase for phase, row in TABLE.items() if SnapshotEvent.FAIL in row} == {
        SnapshotPhase.COPYING,
        SnapshotPhase.STAGED,
    }
    assert [phase for phase, row in TABLE.items() if SnapshotEvent.COMMIT in row] == [SnapshotPhase.STAGED]
    assert [phase for phase, row in TABLE.items() if SnapshotEvent.DROP in row] == [SnapshotPhase.PRECOPY]


def test_the_page_in_docs_is_fresh() -> None:
    """Regenerate: `from deltashard.save.lifecycle import reference`, and write what it returns."""
    assert set(MEANING) == set(SnapshotEvent)
    assert DOCS.read_text() == reference()
