"""The life of a session is a table; these tests walk it."""

from pathlib import Path

import pytest
from deltashard_checkpoint.transition import IllegalEvent
from deltashard_sidecar.session.lifecycle import (
    MEANING,
    TABLE,
    SessionEvent,
    SessionLifecycle,
    SessionState,
    reference,
)

DOCS = Path(__file__).parents[4] / "docs/reference/session-lifecycle.md"
ENDS = {SessionEvent.DETACH, SessionEvent.LOSE, SessionEvent.REPLACE, SessionEvent.STOP}


@pytest.mark.parametrize("state", list(SessionState))
@pytest.mark.parametrize("event", list(SessionEvent))
def test_every_pair_is_either_an_arrow_or_a_named_error(state: SessionState, event: SessionEvent) -> None:
    """Nothing is ignored silently."""
    life = SessionLifecycle(state=state)
    if event in TABLE[state]:
        assert life.on(event).state is TABLE[state][event]
    else:
        with pytest.raises(IllegalEvent, match=state.value):
            life.on(event)


def test_every_state_is_reachable_and_can_end() -> None:
    """Every end leads to CLOSED, from everywhere; nothing leads out of it."""
    reached = {SessionLifecycle().state}
    for _ in SessionState:
        reached |= {to for state in reached for to in TABLE[state].values()}
    assert reached == set(SessionState)
    for state in SessionState:
        assert {TABLE[state][event] for event in ENDS} == {SessionState.CLOSED}
    assert set(TABLE[SessionState.CLOSED].values()) == {SessionState.CLOSED}


def test_a_fence_is_lifted_by_a_new_attempt_alone() -> None:
    """No save, and nothing a trainer says, makes a fenced session commit again."""
    arrows = {event for event, to in TABLE[SessionState.FENCED].items() if to is SessionState.OPEN}
    assert arrows == {SessionEvent.OPEN}


def test_what_goes_on_after_the_end_is_no_bug() -> None:
    """An Open that waited for the store, and a save that uploads, outlive their session."""
    assert {SessionEvent.OPEN, SessionEvent.FENCE} <= set(TABLE[SessionState.CLOSED])


def test_the_page_in_docs_is_fresh() -> None:
    """Regenerate with `python -m deltashard_sidecar.main reference docs/reference`."""
    assert set(MEANING) == set(SessionEvent)
    assert DOCS.read_text() == reference()
