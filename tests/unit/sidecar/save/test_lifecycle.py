"""The life of a save is a table; these tests walk it."""

from pathlib import Path

import pytest
from deltashard_checkpoint.transition import IllegalEvent, after
from deltashard_sidecar.save.lifecycle import (
    ENDED,
    MEANING,
    TABLE,
    SaveEvent,
    SaveState,
    reference,
)

DOCS = Path(__file__).parents[4] / "docs/reference/save-lifecycle.md"


def test_the_good_road_leads_to_committed() -> None:
    """seal, encoded, commit."""
    state = SaveState.STAGING
    for event in (SaveEvent.SEAL, SaveEvent.ENCODED, SaveEvent.COMMIT):
        assert state not in ENDED
        state = after(TABLE, state, event, where="")
    assert state is SaveState.COMMITTED
    assert state in ENDED


@pytest.mark.parametrize("state", list(SaveState))
@pytest.mark.parametrize("event", list(SaveEvent))
def test_every_pair_is_either_an_arrow_or_a_named_error(state: SaveState, event: SaveEvent) -> None:
    """Nothing is ignored silently."""
    if event in TABLE[state]:
        assert after(TABLE, state, event, where="") is TABLE[state][event]
    else:
        with pytest.raises(IllegalEvent, match=state.value):
            after(TABLE, state, event, where="")


def test_every_state_can_end_and_is_reachable() -> None:
    """From every state an ended one can be reached, and every state from STAGING."""
    reached = {SaveState.STAGING}
    while True:
        more = reached | {to for state in reached for to in TABLE[state].values()}
        if more == reached:
            break
        reached = more
    assert reached == set(SaveState)
    for start in SaveState:
        seen = {start}
        for _ in SaveState:
            seen |= {to for state in seen for to in TABLE[state].values()}
        assert seen & ENDED


def test_a_staged_save_does_not_end_by_the_trainer() -> None:
    """Once staged, neither a broken stream nor an abort of the trainer can stop it."""
    for state in (SaveState.STAGED, SaveState.UPLOADING):
        assert SaveEvent.BREAK not in TABLE[state]
        assert SaveEvent.ABORT not in TABLE[state]


def test_only_a_commit_leads_to_committed() -> None:
    """There is one arrow into COMMITTED and it starts when every block is free."""
    arrows = [(s, e) for s, row in TABLE.items() for e, to in row.items() if to is SaveState.COMMITTED]
    assert arrows == [(SaveState.UPLOADING, SaveEvent.COMMIT)]


def test_the_page_in_docs_is_fresh() -> None:
    """Regenerate: `from deltashard_sidecar.save.lifecycle import reference`, and write what it returns."""
    assert set(MEANING) == set(SaveEvent)
    assert DOCS.read_text() == reference()
