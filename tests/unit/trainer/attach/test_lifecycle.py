"""The life of a trainer is a table; these tests walk it."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltashard.attach import lifecycle
from deltashard.attach.lifecycle import (
    ENDED,
    MEANING,
    TABLE,
    AttachEvent,
    AttachState,
    TrainingAttempt,
    reference,
)
from deltashard.errors import UserError
from deltashard_checkpoint.transition import IllegalEvent, after

IN_PRODUCTION = lifecycle.unknown
DOCS = Path(__file__).parents[4] / "docs/reference/trainer-lifecycle.md"


def test_a_run_goes_from_new_to_closed_and_comes_back_from_a_lost_sidecar() -> None:
    """attach, open, lose, attach, close; the attempt has its number from the open on."""
    attempt = TrainingAttempt()
    attempt.happen(AttachEvent.ATTACH)
    assert (attempt.state, attempt.opened, attempt.number) == (AttachState.ATTACHED, False, None)
    attempt.begin(3, resumed_step=7)
    assert (attempt.state, attempt.opened, attempt.number, attempt.resumed_step) == (
        AttachState.TRAINING,
        True,
        3,
        7,
    )
    assert [attempt.happen(event) for event in (AttachEvent.LOSE, AttachEvent.ATTACH)] == [
        AttachState.DEGRADED,
        AttachState.TRAINING,
    ]
    attempt.refuse_closed("step()")
    attempt.happen(AttachEvent.CLOSE)
    assert attempt.closed
    with pytest.raises(UserError, match="closed"):
        attempt.refuse_closed("step()")


@pytest.mark.parametrize("state", list(AttachState))
@pytest.mark.parametrize("event", list(AttachEvent))
def test_every_pair_is_either_an_arrow_or_a_named_error(state: AttachState, event: AttachEvent) -> None:
    """Nothing is ignored silently."""
    if event in TABLE[state]:
        assert after(TABLE, state, event, where="trainer lifecycle") is TABLE[state][event]
    else:
        with pytest.raises(IllegalEvent, match=state.value):
            after(TABLE, state, event, where="trainer lifecycle")


def test_an_event_that_a_state_does_not_know_is_logged_and_harms_no_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state stays; under these tests it is raised."""
    attempt = TrainingAttempt()
    with pytest.raises(IllegalEvent, match="NEW"):
        attempt.happen(AttachEvent.LOSE)
    monkeypatch.setattr(lifecycle, "unknown", IN_PRODUCTION)
    assert attempt.happen(AttachEvent.LOSE) is AttachState.NEW
    assert "'lose' in state NEW" in caplog.text


def test_every_state_is_reachable_and_can_end() -> None:
    """From NEW every state is reached, and from every state CLOSED."""
    for start in AttachState:
        seen = {start}
        for _ in AttachState:
            seen |= {to for state in seen for to in TABLE[state].values()}
        assert seen & ENDED
        assert start is not AttachState.NEW or seen == set(AttachState)


def test_nothing_leaves_fenced_but_close_and_nothing_leaves_closed() -> None:
    """A newer attempt is final, whatever the sidecar says afterwards."""
    assert set(TABLE[AttachState.FENCED].values()) == {AttachState.FENCED, AttachState.CLOSED}
    assert set(TABLE[AttachState.CLOSED].values()) == {AttachState.CLOSED}


def test_only_an_open_leads_into_training_from_outside() -> None:
    """A sidecar that is there is no attempt."""
    arrows = {(s, e) for s, row in TABLE.items() for e, to in row.items() if to is AttachState.TRAINING}
    inside = {AttachState.TRAINING, AttachState.DEGRADED}
    assert {(s, e) for s, e in arrows if s not in inside} == {(AttachState.ATTACHED, AttachEvent.OPEN)}


def test_the_page_in_docs_is_fresh() -> None:
    """Regenerate: `from deltashard.attach.lifecycle import reference`, and write what it returns."""
    assert set(MEANING) == set(AttachEvent)
    assert DOCS.read_text() == reference()
