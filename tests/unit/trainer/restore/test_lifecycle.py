"""The table of a restore's states."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltashard.restore.lifecycle import MEANING, TABLE, Event, RestoreState, State, reference
from deltashard_checkpoint.transition import IllegalEvent

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "restore-lifecycle.md"
IN_MIDST = {State.OPENING, State.RECEIVING, State.APPLYING, State.ARMING}


def test_what_cannot_happen_raises_and_changes_nothing() -> None:
    """No generators before the rows, whatever the code does."""
    state = RestoreState()
    state.happen(Event.CALL)
    with pytest.raises(IllegalEvent, match="'applied' in state OPENING"):
        state.happen(Event.APPLIED)
    assert state.now is State.OPENING


def test_every_state_in_midst_may_fail_and_every_end_may_be_called_again() -> None:
    """Whatever is raised finds an arrow; a torn model is left by a new attempt, an error, or the rest of the restore."""
    for state in State:
        assert (Event.FAIL in TABLE[state]) == (state in IN_MIDST)
        assert (Event.CALL in TABLE[state]) == (state not in IN_MIDST)
    assert {s for s, row in TABLE.items() if Event.AGAIN in row} == {State.RECEIVING, State.APPLYING}
    assert [s for s, row in TABLE.items() if State.DONE in row.values()] == [State.ARMING]


def test_the_page_in_docs_is_fresh() -> None:
    """Regenerate: `from deltashard.restore.lifecycle import reference`, and write what it returns."""
    assert set(MEANING) == set(Event)
    assert DOCS.read_text() == reference()
