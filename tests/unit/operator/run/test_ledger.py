"""Counts match events under lost, repeated and late reports and any number of controller restarts.

The model has three pods with one rank each. Their sidecars keep an incident until its count is durable. A controller
can be killed at any moment, before or after its newest status is written.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.fleet.report import Incident, IncidentKind, Rank, Report
from deltashard_operator.run import ledger, reconcile, report_change, run_record, watched_run
from deltashard_operator.run.failure import Crash, Loss
from deltashard_operator.run.ledger import Ledger, decoded, encoded
from deltashard_operator.run.observed_object import PodView
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.watched_run import RunEvent, WatchedRun
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.run.observed import NODES, NOW_S, TRAIN, ended, job, pod, report

PODS = 3


class SidecarModel:
    """A sidecar process in a pod."""

    def __init__(self, n: int, number: int) -> None:
        self.n, self.uid, self.process = n, f"p-{number}", f"s-{number}"
        self.sequence = self.ids = self.restarts = self.code = 0
        self.incidents: list[Incident] = []

    def add_incident(self, kind: IncidentKind, at_s: float, **more: Any) -> None:
        self.ids += 1
        self.incidents.append(Incident(id=self.ids, kind=kind, at_s=at_s, **more))

    def pod(self, at_s: float, **changes: Any) -> PodView:
        ending = replace(ended(self.code), at_s=at_s) if self.restarts else None
        return pod(
            **{"uid": self.uid, "name": self.uid, "restarts": self.restarts, "ending": ending} | changes
        )


class LedgerModel:
    """The events, and a controller that observes some of them."""

    def __init__(self) -> None:
        self.at_s, self.attempts_opened, self.seq, self.lost_steps, self.pods = NOW_S, 0, 0, 0, 0
        self.run = watched_run.with_job(WatchedRun(workload=TRAIN), job(), self.at_s)
        self.written: dict[str, Any] = {}
        self.durable = Ledger()
        self.recorded: set[str] = set()
        self.in_flight: list[Report] = []
        self.seen: dict[str, PodView] = {}
        self.sidecars = [self.add_sidecar(n) for n in range(PODS)]
        self.reopen()
        self.write()

    def add_sidecar(self, n: int) -> SidecarModel:
        self.pods += 1
        sidecar = SidecarModel(n, self.pods)
        self.observe_pod(sidecar.pod(self.at_s))
        return sidecar

    def observe_pod(self, seen: PodView) -> None:
        self.seen[seen.uid] = seen
        self.run = watched_run.with_pod(self.run, seen, node_ready=True, now_s=self.at_s)

    def reopen(self) -> None:
        """Open training again, with a restore after the first opening; the sidecar of rank 0 reports it."""
        self.attempts_opened += 1
        self.seq += 1
        if self.attempts_opened > 1:
            restored = {"attempt": 10 * self.attempts_opened, "lost_steps": self.attempts_opened}
            self.sidecars[0].add_incident(IncidentKind.RESTORED, self.at_s, **restored)
            self.lost_steps += self.attempts_opened
        self.report(0)
        self.reconcile_run()

    def report(self, n: int) -> Report:
        mine = self.sidecars[n]
        mine.sequence += 1
        sent = report(
            mine.uid,
            process=mine.process,
            sequence=mine.sequence,
            started_at_s=float(mine.uid[2:]),
            ranks=(Rank(rank=n, world_size=PODS, step=10),),
            attempt=10 * self.attempts_opened,
            attempts_opened=self.attempts_opened,
            seq=self.seq,
            report_run=n == 0,
            incidents=mine.incidents[:64],
        )
        self.deliver(sent)
        return sent

    def deliver(self, sent: Report, *, answered: bool = True) -> None:
        self.run, notices = report_change.with_report(self.run, sent, self.at_s)
        self.record(notices)
        acknowledged = ledger.acknowledged_id(self.durable, self.recorded, sent, "")
        for each in self.sidecars:
            if answered and each.process == sent.process:
                each.incidents = [incident for incident in each.incidents if incident.id > acknowledged]

    def record(self, notices: Iterable[RunEvent]) -> None:
        for each in notices:
            assert each.key
            self.recorded.add(each.key)

    def reconcile_run(self) -> None:
        self.run, _ = reconcile.reconcile(self.run, NODES, self.at_s)

    def write(self) -> None:
        self.reconcile_run()
        self.written, self.durable = run_record.status(self.run, self.at_s), self.run.ledger

    def restart(self) -> None:
        """Start another controller from the written status and the existing pods."""
        self.run = run_record.run_of(run_record.document(self.run) | {"status": self.written})
        before, self.durable = self.visible_state(), self.run.ledger
        self.run = watched_run.with_job(self.run, job(), self.at_s)
        for each in self.seen.values():
            self.run = watched_run.with_pod(self.run, each, node_ready=True, now_s=self.at_s)
        self.reconcile_run()
        assert self.visible_state() == before
        self.report(1 + len(self.seen) % 2)
        self.reconcile_run()
        assert self.visible_state() == before, "whichever sidecar reports first"
        self.report(0)
        self.reconcile_run()

    def visible_state(self) -> tuple[Phase, dict[str, str]]:
        return self.run.phase, {each.type: each.status for each in self.run.conditions}

    def step(self, what: str, n: int) -> None:
        self.at_s += 7.0
        mine = self.sidecars[n]
        match what:
            case "pod is lost":  # failed pods of a Job stay in the API
                for _ in range(2):
                    self.observe_pod(mine.pod(self.at_s, phase="Failed", disruption="EvictionByEvictionAPI"))
                self.sidecars[n] = self.add_sidecar(n)
                self.reopen()
            case "container restarts":
                # A different exit code each time is no crash loop.
                mine.restarts, mine.code = mine.restarts + 1, self.attempts_opened
                self.observe_pod(mine.pod(self.at_s))
                self.reopen()
            case "trainer exits":
                mine.add_incident(IncidentKind.TRAINER_LOST, self.at_s)
                self.report(n)
                self.reopen()
            case "save fails":
                mine.add_incident(IncidentKind.SAVE_FAILED, self.at_s)
            case "unseen":
                self.reopen()
            case "report":
                self.in_flight.append(self.report(n))
            case "late":
                for each in random.Random(n).sample(self.in_flight, k=len(self.in_flight)):
                    self.deliver(each, answered=False)
            case "write":
                self.write()
            case "controller is killed":
                self.restart()
            case "write is refused":  # another controller wrote
                found = run_record.run_of(run_record.document(self.run) | {"status": self.written})
                self.durable = found.ledger
                self.run = watched_run.with_persisted_counts(self.run, found, NODES, self.at_s)
            case "controller stops":
                self.write()
                self.restart()
        self.reconcile_run()


EVENTS = (
    "pod is lost",
    "container restarts",
    "trainer exits",
    "save fails",
    "unseen",
    "report",
    "late",
    "write",
    "write is refused",
    "controller is killed",
    "controller stops",
)


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, PODS - 1)), max_size=25))
def test_counts_match_events_and_restart_keeps_the_phase(events: list[tuple[str, int]]) -> None:
    model = LedgerModel()
    for what, n in events:
        model.step(what, n)
    lost_with_its_pod = {"pod is lost"} & {what for what, _ in events}
    for _ in range(2):  # unwritten counts are sent again, written counts are not
        for n in range(PODS):
            model.report(n)
        model.write()
    for n in range(PODS):
        model.report(n)
        assert not model.sidecars[n].incidents, "an acknowledged incident is not sent again"
    found = model.run.ledger
    interruptions = model.attempts_opened - 1
    assert found.failures == interruptions
    if not lost_with_its_pod:
        assert (found.restores, found.lost_steps) == (interruptions, model.lost_steps)
    assert found.restores <= interruptions
    assert found.lost_steps <= model.lost_steps
    assert model.run.phase is Phase.TRAINING


def test_report_older_than_all_keys_is_counted() -> None:
    found = Ledger()
    for attempt in range(1, 100):
        found = found.with_restored("", attempt, 1)
    assert all(found.has_restored("", attempt) for attempt in range(1, 100))
    assert not found.has_restored("", 100)
    assert not found.has_restored("1", 5)
    for n in range(ledger.MAX_KEYS + 50):
        found = found.with_loss("", Loss(at_s=1000.0 + n, cause="Deleted"), f"k-{n}", 0)
    assert found.has("k-299", 1299.0)
    assert found.has("k-3", 1003.0)
    assert not found.has("another", 1299.0)


TEXT, COUNT = st.text(max_size=40), st.integers(0, 1 << 40)
TIME = COUNT.map(float)
CRASHES = st.builds(Crash, ending=TEXT, seq=COUNT, at_s=TIME, times=COUNT)
LEDGERS = st.builds(
    Ledger,
    restores=COUNT,
    lost_steps=COUNT,
    restored=st.dictionaries(TEXT, st.lists(COUNT, max_size=3).map(tuple)),
    failures=COUNT,
    attempts_opened=st.dictionaries(TEXT, st.integers(2, 1 << 40)),
    crashes=st.dictionaries(TEXT, CRASHES, max_size=2),
    counted=st.dictionaries(TEXT, TIME, max_size=5),
    counted_until_s=TIME,
    clipped=st.booleans(),
)


@given(LEDGERS)
def test_ledger_round_trips(found: Ledger) -> None:
    assert decoded(encoded(found)) == found


def test_part_opened_once_needs_no_text() -> None:
    """The next controller has no record of the part, and would drop the text."""
    once, again = Ledger().with_attempts_opened("1", 1), Ledger().with_attempts_opened("2", 2)
    assert (once.text, decoded(once.text).with_attempts_opened("1", 2).failures) == ("", 1)
    assert again.with_attempts_opened("1", 1).text == again.text


def test_text_is_bounded_and_omitted_failures_stay_in_the_total() -> None:
    noise = random.Random(0)
    found = Ledger()
    for n in range(2000):
        loss = Loss(at_s=NOW_S + n, cause="Error", message=noise.randbytes(128).hex())
        found = found.with_loss(str(n), loss, noise.randbytes(8).hex(), 0)
        found = found.with_restored(str(n), n + 1, 1).with_attempts_opened(str(n), 3)
    text = encoded(found)
    assert len(text) <= ledger.MAX_BYTES
    back = decoded(text)
    assert (back.failures, back.restores, back.clipped) == (4000, 2000, True)
    assert "1999" in back.attempts_opened
    assert back.counted == found.counted
    assert len(encoded(back)) <= ledger.MAX_BYTES
    # An omitted part starts with the attempts_opened that it reports.
    run = watched_run.with_job(WatchedRun(workload=TRAIN, ledger=back), job(), NOW_S)
    run = watched_run.with_pod(run, pod(index="0"), node_ready=True, now_s=NOW_S)
    for attempts_opened, more in ((9, 0), (10, 1)):
        sent = report(run="team/train-u-1-0", attempts_opened=attempts_opened)
        run, _ = report_change.with_report(run, sent, NOW_S)
        assert run.ledger.failures == found.failures + more


@pytest.mark.parametrize("text", ["x", "eNqrVrJSMDLWUVBKVLKqBQAXzwN9", encoded(Ledger(restores=1))[:-8]])
def test_malformed_ledger_text_is_refused(text: str) -> None:
    with pytest.raises(Exception, match=r".+"):
        decoded(text)
    assert decoded("") == Ledger()
