"""The table of a restore's states."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltashard.restore.lifecycle import MEANING, TABLE, RestoreEvent, RestorePhase, RestoreState, reference
from deltashard_checkpoint.transition import IllegalEvent

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "restore-lifecycle.md"
IN_MIDST = {RestorePhase.OPENING, RestorePhase.RECEIVING, RestorePhase.APPLYING, RestorePhase.ARMING}


def test_what_cannot_happen_raises_and_changes_nothing() -> None:
    """No generators before the rows, whatever the code does."""
    state = RestoreState()
    state.happen(RestoreEvent.CALL)
    with pytest.raises(IllegalEvent, match="'applied' in state OPENING"):
        state.happen(RestoreEvent.APPLIED)
    assert state.now is RestorePhase.OPENING


def test_every_state_in_midst_may_fail_and_every_end_may_be_called_again() -> None:
    """Whatever is raised finds an arrow; a torn model is left by a new attempt, an error, or the rest of the restore."""
    for state in RestorePhase:
        assert (RestoreEvent.FAIL in TABLE[state]) == (state in IN_MIDST)
        assert (RestoreEvent.CALL in TABLE[state]) == (state not in IN_MIDST)
    assert {s for s, row in TABLE.items() if RestoreEvent.AGAIN in row} == {
        RestorePhase.RECEIVING,
        RestorePhase.APPLYING,
    }
    assert [s for s, row in TABLE.items() if RestorePhase.DONE in row.values()] == [RestorePhase.ARMING]


def test_the_page_in_docs_is_fresh() -> None:
    """Regenerate: `from deltashard.restore.lifecycle import reference`, and write what it returns."""
    assert set(MEANING) == set(RestoreEvent)
    assert DOCS.read_text() == reference()
