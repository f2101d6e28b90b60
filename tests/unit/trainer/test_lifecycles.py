"""The tables of an attachment, a snapshot and a restore: their pages in docs, and what they promise."""

from __future__ import annotations

from types import ModuleType

import pytest
from deltashard.attach import lifecycle as attach
from deltashard.attach.lifecycle import ENDED, AttachEvent, AttachState, TrainingAttempt
from deltashard.errors import UserError
from deltashard.restore import lifecycle as restore
from deltashard.restore.lifecycle import RestoreEvent, RestorePhase, RestoreState
from deltashard.save import lifecycle as save
from deltashard.save.lifecycle import SnapshotEvent, SnapshotPhase, SnapshotState
from deltashard_checkpoint.transition import IllegalEvent

from tests.support.tool import ROOT

IN_PRODUCTION = attach.unknown


@pytest.mark.parametrize(("table", "page"), [(attach, "trainer"), (save, "snapshot"), (restore, "restore")])
def test_the_page_in_docs_is_fresh(table: ModuleType, page: str) -> None:
    """Regenerate: write there what the module's `reference()` returns."""
    assert (ROOT / f"docs/reference/{page}-lifecycle.md").read_text() == table.reference()


def test_a_run_goes_from_new_to_closed_and_comes_back_from_a_lost_sidecar() -> None:
    """The attempt has its number from the open on."""
    attempt = TrainingAttempt()
    attempt.happen(AttachEvent.ATTACH)
    assert (attempt.state, attempt.opened, attempt.number) == (AttachState.ATTACHED, False, None)
    attempt.begin(3, resumed_step=7)
    assert (attempt.state, attempt.opened) == (AttachState.TRAINING, True)
    assert (attempt.number, attempt.resumed_step) == (3, 7)
    assert attempt.happen(AttachEvent.LOSE) is AttachState.DEGRADED
    assert attempt.happen(AttachEvent.ATTACH) is AttachState.TRAINING
    attempt.refuse_closed("step()")
    attempt.happen(AttachEvent.CLOSE)
    with pytest.raises(UserError, match="closed"):
        attempt.refuse_closed("step()")


def test_an_event_that_a_state_does_not_know_is_logged_and_harms_no_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state stays; under these tests it is raised."""
    attempt = TrainingAttempt()
    with pytest.raises(IllegalEvent, match="NEW"):
        attempt.happen(AttachEvent.LOSE)
    monkeypatch.setattr(attach, "unknown", IN_PRODUCTION)
    assert attempt.happen(AttachEvent.LOSE) is AttachState.NEW
    assert "'lose' in state NEW" in caplog.text


def test_only_close_leaves_a_fenced_trainer_and_only_an_open_leads_into_training() -> None:
    """A newer attempt is final, whatever the sidecar says afterwards; every state can end."""
    table = attach.TABLE
    assert set(table[AttachState.FENCED].values()) == {AttachState.FENCED, AttachState.CLOSED}
    assert set(table[AttachState.CLOSED].values()) == {AttachState.CLOSED}
    into = {(s, e) for s, row in table.items() for e, to in row.items() if to is AttachState.TRAINING}
    inside = {AttachState.TRAINING, AttachState.DEGRADED}
    assert {(s, e) for s, e in into if s not in inside} == {(AttachState.ATTACHED, AttachEvent.OPEN)}
    for start in AttachState:
        seen = {start}
        for _ in AttachState:
            seen |= {to for state in seen for to in table[state].values()}
        assert seen & ENDED


def test_one_snapshot_at_a_time() -> None:
    """While one is in flight none is begun; only what is with the sidecar becomes durable."""
    state = SnapshotState()
    for event in (SnapshotEvent.AHEAD, SnapshotEvent.TAKE, SnapshotEvent.SEAL):
        state.happen(event)
    for event in (SnapshotEvent.AHEAD, SnapshotEvent.TAKE):
        with pytest.raises(IllegalEvent, match=f"'{event.value}' in state STAGED"):
            state.happen(event)
    assert state.now is SnapshotPhase.STAGED

    def left_by(event: SnapshotEvent) -> set[SnapshotPhase]:
        return {phase for phase, row in save.TABLE.items() if event in row}

    ends = {SnapshotPhase.IDLE, SnapshotPhase.COMMITTED, SnapshotPhase.FAILED}
    assert left_by(SnapshotEvent.AHEAD) == ends
    assert left_by(SnapshotEvent.TAKE) == {*ends, SnapshotPhase.PRECOPY}
    assert left_by(SnapshotEvent.FAIL) == {SnapshotPhase.COPYING, SnapshotPhase.STAGED}
    assert left_by(SnapshotEvent.COMMIT) == {SnapshotPhase.STAGED}


def test_a_restore_in_its_midst_may_fail_and_every_end_may_be_called_again() -> None:
    """No generators before the rows, whatever the code does."""
    state = RestoreState()
    state.happen(RestoreEvent.CALL)
    with pytest.raises(IllegalEvent, match="'applied' in state OPENING"):
        state.happen(RestoreEvent.APPLIED)
    assert state.now is RestorePhase.OPENING
    midst = {RestorePhase.OPENING, RestorePhase.RECEIVING, RestorePhase.APPLYING, RestorePhase.ARMING}
    for phase, row in restore.TABLE.items():
        assert (RestoreEvent.FAIL in row) == (phase in midst)
        assert (RestoreEvent.CALL in row) == (phase not in midst)
        assert (RestorePhase.DONE in row.values()) == (phase is RestorePhase.ARMING)
