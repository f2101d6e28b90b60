"""The decider under a clock of the test's: trainers that are simulated, saves that cost what the test says."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from deltashard_checkpoint.deciding.cost import KEY
from deltashard_checkpoint.deciding.interval import ENOUGH
from deltashard_checkpoint.deciding.record import recorded
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.run_state import Attempt, RunState
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar import settings
from deltashard_sidecar.deciding.choice import CAUSES
from deltashard_sidecar.deciding.decider import Decider, place
from deltashard_sidecar.deciding.measurements import Cost, MeasuredSave, Opening
from deltashard_sidecar.deciding.step_meter import Reading
from deltashard_sidecar.policy import changed
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import configure
from hypothesis import given
from hypothesis import settings as bounded
from hypothesis import strategies as st

EMPTY = RunState(run="r")


def log_of(
    metadata: Mapping[str, str], *, attempt: int = 1, step: int = 100, reason: str = "timer"
) -> RunState:
    """A log whose newest commit has this metadata."""
    newest = Checkpoint(
        seq=attempt + 1, previous="", writer="", at_s=0.0, attempt=attempt, cut=1, step=step, tables=(), encodings={},
        rows=0, raw_bytes=0, stored_bytes=0, stall_s=0.0, cut_at_s=0.0, directive=f"{reason}; x", metadata=metadata,
    )  # fmt: skip
    return RunState(run="r", checkpoints={newest.seq: newest})


class Life:
    """A trainer and its sidecar's decider: steps of a fixed time, saves that stall and slow."""

    def __init__(self, *, step_s: float = 0.5, seed: int = 0, **said: object) -> None:
        self.rng = random.Random(seed)
        self.now_s, self.step, self.step_s, self.cut, self.partial = 1e9, 0, step_s, 0, False
        self.metrics = Metrics()
        self.policy = changed(pb.Policy(goal="auto"), **said)
        needed = ["--url", "memory://x", "--run", "r", "--dir", "/d", "--cache-dir", "/c"]
        config = settings.load(needed, {"DELTASHARD_GOAL": "auto"})
        self.decider = Decider(
            config, metrics=self.metrics, log=configure("error", run="r"), clock=lambda: self.now_s
        )
        self.decider.governed(self.policy)

    def open(
        self,
        state: RunState = EMPTY,
        *,
        attempt: int = 1,
        resumed: bool = False,
        seen: int = 0,
        world_size: int = 1,
    ) -> None:
        self.decider.opened(
            Opening(
                attempt=attempt, world_size=world_size, ranks_here=1, reading=Reading(self.step, self.now_s),
                resumed=resumed, step_seen=seen,
            ),
            state,
        )  # fmt: skip

    def train(self, seconds: float, *, looks: int = 4) -> None:
        """Quiet steps."""
        until_s, pause_s = self.now_s + seconds, seconds / looks
        look_s = self.now_s + pause_s
        while self.now_s < until_s:
            count = max(1, int((min(look_s, until_s) - self.now_s) / self.step_s))
            self.step, self.now_s = self.step + count, self.now_s + count * self.step_s
            look_s += pause_s
            self.decider.look(Reading(self.step, self.now_s))

    def save(
        self, *, stall_s: float, slower_s: float = 0.0, durable_s: float = 1.0, reason_timed: bool = True
    ) -> None:
        """A save of the step that was last ended, and the first step after its commit."""
        self.cut += 1
        begun = Reading(self.step, self.now_s)
        save = MeasuredSave(cut=self.cut, begun=begun, timed=reason_timed)
        self.decider.save_begins(save, planned_steps=0, partial=self.partial)
        ended_s = self.now_s + durable_s
        inside = int((durable_s - stall_s - slower_s) / self.step_s)
        self.now_s += stall_s + slower_s + inside * self.step_s
        self.step += inside
        self.decider.look(Reading(self.step, self.now_s))
        at_s, self.now_s = self.now_s, max(ended_s, self.now_s)
        self.decider.save_ended(self.cut, Cost(stall_s=stall_s, slower_s=0.0, durable_s=durable_s))
        self.decider.look(Reading(self.step, at_s))
        self.now_s = at_s + self.step_s
        self.step += 1
        self.decider.look(Reading(self.step, self.now_s))

    @property
    def every_s(self) -> float:
        return self.decider.over(self.policy).every_s

    def saves(self, count: int, cost_s: Callable[[], float], durable_s: float = 1.0) -> None:
        """So many saves at the interval in force, each costing this."""
        for _ in range(count):
            self.train(self.every_s, looks=2)
            drawn = cost_s()
            self.save(stall_s=drawn / 2, slower_s=drawn / 2, durable_s=max(durable_s, drawn))

    @property
    def changes(self) -> int:
        return sum(int(self.changed(cause)) for cause in CAUSES)

    def changed(self, cause: str) -> float:
        return self.metrics.decided.labels(cause)._value.get()


def chosen(life: Life) -> tuple[Life, str]:
    """The same, that has measured enough saves for a choice; and the record of that in a commit."""
    life.open()
    life.saves(ENOUGH, lambda: 0.1)
    text = life.decider.text(closing=False)
    assert text is not None
    return life, text


@pytest.mark.parametrize("said", ["", "fixed"])
def test_without_a_goal_the_timers_hold_and_what_auto_would_choose_is_shown(said: str) -> None:
    """Nothing is chosen or written; what saves cost is measured all the same."""
    life = Life()
    life.policy = changed(life.policy, every_s=7.0, every_steps=9, goal=said)
    life.decider.governed(life.policy)
    life.open()
    life.saves(ENOUGH - 1, lambda: 0.1)
    (decision,) = life.decider.decisions()
    assert (decision.goal, decision.value, decision.would) == ("fixed", "every 7 s or 9 steps", "")
    life.saves(ENOUGH + 1, lambda: 0.1)
    (decision,) = life.decider.decisions()
    assert (decision.goal, decision.value) == ("fixed", "every 7 s or 9 steps")
    assert decision.would == "every 1800 s"
    assert decision.why.startswith("as stated; under auto a save costs 96.9 ms")
    assert life.decider.over(life.policy) == life.policy
    assert (life.decider.text(closing=False), life.changes) == (None, 0)
    assert (life.decider.measured() or fleet.Measured()).saves == 2 * ENOUGH
    life.policy = changed(life.policy, goal="auto")
    life.decider.governed(life.policy)
    assert life.every_s == 1800.0, "it was measured already"


def test_saves_are_measured_before_anything_is_chosen() -> None:
    """As the timers are said, or every minute; then the choice holds, in place of both timers, and says why."""
    life = Life(every_steps=20)
    life.open()
    assert (life.every_s, life.decider.over(life.policy).every_steps) == (0.0, 20)
    life = Life()
    life.open()
    assert life.every_s == 60.0
    life.saves(ENOUGH - 1, lambda: 0.1)
    assert life.every_s == 60.0
    (decision,) = life.decider.decisions()
    assert (decision.value, decision.would) == ("every 60 s", "")
    assert f"{ENOUGH - 1} of {ENOUGH}" in decision.why
    life.saves(1, lambda: 0.1)
    (decision,) = life.decider.decisions()
    assert life.every_s == 1800.0
    assert (decision.value, decision.would) == ("every 1800 s", "every 1800 s")
    assert decision.bound == "not above 30 min (30 minutes)"
    assert "a save costs 100 ms" in decision.why
    assert life.changed("measured") == 1


@given(
    st.floats(0.01, 5.0),
    st.floats(0.0, 2.0),
    st.floats(0.0, 2.0),
    st.floats(0.0, 30.0),
    st.floats(5.0, 500.0),
)
@bounded(deadline=None, max_examples=60)
def test_a_cost_is_exact_wherever_looks_and_commits_fall(
    step_s: float, stall_s: float, slower_s: float, more_s: float, quiet_s: float
) -> None:
    """No step more or less is counted to it, however long a step is."""
    life = Life(step_s=step_s)
    life.open()
    life.train(max(quiet_s, 40 * step_s), looks=7)
    life.save(stall_s=stall_s, slower_s=slower_s, durable_s=stall_s + slower_s + more_s)
    life.train(3 * step_s)  # a step may end just when the commit does
    measured = life.decider.measured()
    assert measured is not None
    assert measured.cost_s == pytest.approx(
        stall_s + slower_s, abs=2e-3 * (stall_s + slower_s + more_s + step_s) + 1e-5
    )
    assert measured.step_s == pytest.approx(step_s, rel=1e-3)


def test_only_what_a_timer_wanted_is_measured() -> None:
    """Who asks for a save waits for it; a save that failed has no cost; and the steps beside them are not quiet."""
    life = Life(step_s=0.5)
    life.open()
    life.train(50.0)
    life.save(stall_s=30.0, durable_s=30.0, reason_timed=False)
    begins = MeasuredSave(cut=99, begun=Reading(life.step, life.now_s), timed=True)
    life.decider.save_begins(begins, planned_steps=0, partial=False)
    life.now_s += 5.0
    life.decider.save_ended(99, None)
    life.step += 1
    life.decider.look(Reading(life.step, life.now_s + 0.1))
    life.now_s += 0.1
    life.train(50.0)
    measured = life.decider.measured()
    assert measured is not None
    assert (measured.saves, measured.cost_s, measured.step_s) == (0, 0.0, 0.5)


@pytest.mark.parametrize("goal", ["auto", "overhead=1%", "lost-work=5m"])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_a_day_of_noise_hardly_changes_anything(goal: str, spread: float) -> None:
    """Log-normal costs with a spread of 30 % and of 130 %: a handful of changes in a day, always within bounds."""
    life = Life(seed=int(10 * spread), least_s=20.0, most_s=900.0)
    life.policy = changed(life.policy, goal=goal)
    life.decider.governed(life.policy)
    life.open()
    begun_s, found = life.now_s, []
    while life.now_s < begun_s + 86400.0:
        life.saves(1, lambda: 0.5 * life.rng.lognormvariate(0, spread), durable_s=3.0)
        found.append(life.every_s)
    assert all(20.0 <= each <= 900.0 for each in found[ENOUGH:])
    assert life.changes <= 6


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_cost_that_changes_fourfold_is_followed_within_40_saves(factor: float) -> None:
    """In both directions, after a day at the old cost, and then the interval fits the new one."""
    life = Life(seed=3, most_s=3600.0)
    life.policy = changed(life.policy, goal="overhead=1%")
    life.decider.governed(life.policy)
    life.open()
    noise = life.rng
    life.saves(300, lambda: 1.0 * noise.lognormvariate(0, 0.3))
    assert life.every_s == pytest.approx(100.0, rel=0.3)
    life.saves(40, lambda: factor * noise.lognormvariate(0, 0.3), durable_s=2.0)
    assert life.changed("cost") >= 1
    life.saves(40, lambda: factor * noise.lognormvariate(0, 0.3), durable_s=2.0)
    assert life.every_s == pytest.approx(100.0 * factor, rel=0.4)


def test_failures_shorten_the_interval_and_ends_in_good_order_do_not() -> None:
    """From the log's side: which trainer came back to what."""
    life = Life()
    life.open()
    life.saves(2 * ENOUGH, lambda: 0.5)
    assert life.every_s == 1800.0
    for reason, lossy in (("close", 0.0), ("timer", 1.0), ("timer", 2.0), ("timer", 3.0)):
        text = life.decider.text(closing=reason == "close")
        assert text is not None
        life.open(log_of({KEY: text}, reason=reason, step=life.step), attempt=life.cut + 2, resumed=True)
        (decision,) = life.decider.decisions()
        assert round(float(decision.evidence.partition("; ")[2].split()[0])) == lossy, "they fade a little"
        life.saves(ENOUGH, lambda: 0.5)
        assert (life.changed("failures") > 0) == (lossy > 1)
    assert life.every_s < 1200.0


def test_a_crash_loop_is_one_failure_and_what_the_arena_saw_decides() -> None:
    """Trainers that come back to the same commit: one incident; a step that was seen beyond it, or none."""
    life = Life()
    life.open()
    life.saves(1, lambda: 0.1)
    state = log_of({}, step=life.step)
    for attempt in (5, 6, 7):
        life.open(state, attempt=attempt, resumed=True, seen=life.step)
    (decision,) = life.decider.decisions()
    assert "0 lossy failures and 1 restores" in decision.evidence
    life.saves(1, lambda: 0.1)
    life.open(log_of({}, step=life.step), attempt=8, resumed=True, seen=life.step + 3)
    (decision,) = life.decider.decisions()
    assert "1 lossy failures and 2 restores" in decision.evidence


@pytest.mark.parametrize("restarted", [False, True])
def test_who_comes_after_a_rewind_failed_in_nothing(*, restarted: bool) -> None:
    """Its restore counts, for bits; the steps beyond the checkpoint were left by a person."""
    life, text = chosen(Life())
    rewind = Attempt(world_size=0, resumes_from=2, resumes_attempt=1, last_step=100)
    after = Attempt(world_size=1, resumes_from=2, resumes_attempt=1, last_step=100)
    state = replace(log_of({KEY: text}), attempts={1: replace(after, last_seq=9), 10: rewind, 11: after})
    life = Life() if restarted else life
    life.open(state, attempt=11, resumed=True, seen=life.step)
    assert "0 lossy failures and 1 restores" in life.decider.decisions()[0].evidence


def test_who_starts_next_goes_on_from_the_commit() -> None:
    """Its profile, its choice and its evidence; of another world size only the evidence."""
    first = Life()
    first.open()
    first.saves(ENOUGH, lambda: 0.2)
    text = first.decider.text(closing=True)
    assert text is not None
    assert recorded(text).held is not None
    state = log_of({KEY: text}, attempt=3)
    again = Life()
    again.open(state, attempt=5, resumed=True)
    assert again.every_s == first.every_s == 1800.0
    assert again.changes == 0, "nothing was decided anew"
    assert "0 lossy failures and 1 restores" in again.decider.decisions()[0].evidence
    other = Life()
    other.decider.opened(
        Opening(attempt=5, world_size=2, ranks_here=2, reading=Reading(0, other.now_s), resumed=True),
        state,
    )
    assert other.every_s == 60.0
    assert "0 lossy failures and 1 restores" in other.decider.decisions()[0].evidence


def log_of_attempts(empty: int, metadata: Mapping[str, str]) -> RunState:
    """A log whose attempt 1 committed, and so many after it did not; the newest is open."""
    state, nothing = log_of(metadata), Attempt(world_size=1, resumes_from=2, resumes_attempt=1)
    first = Attempt(
        world_size=1, resumes_from=None, resumes_attempt=None, last_cut=1, last_seq=2, last_step=100
    )
    later = dict.fromkeys(range(2, 3 + empty), nothing)
    return replace(state, attempts={1: first, **later}, attempt=2 + empty)


def test_attempt_after_ones_without_a_checkpoint_saves_soon_and_then_twice_as_late() -> None:
    """A minute, half of it for each further one; doubled with each commit, also of a sidecar before; bounds hold."""
    _, text = chosen(Life(most_s=600.0))
    for empty, every_s in ((0, 600.0), (1, 60.0), (2, 30.0), (9, 1.0)):
        life = Life(most_s=600.0)
        life.open(log_of_attempts(empty, {KEY: text}), attempt=2 + empty, resumed=True)
        assert life.every_s == pytest.approx(every_s)
    life = Life(most_s=600.0)
    life.open(log_of_attempts(1, {KEY: text}), attempt=3, resumed=True)
    (decision,) = life.decider.decisions()
    assert (decision.value, decision.would) == ("every 60 s", "every 600 s")
    assert "ended without a checkpoint" in decision.bound
    found = []
    for _ in range(5):
        life.saves(1, lambda: 0.1)
        found.append(life.every_s)
    assert found == [120.0, 240.0, 480.0, 600.0, 600.0]
    state = log_of_attempts(1, {KEY: text})
    mine = {3: replace(state.checkpoints[2], attempt=3, seq=3)}
    again = Life(most_s=600.0)
    again.open(replace(state, checkpoints=state.checkpoints | mine), attempt=3, resumed=True)
    assert again.every_s == pytest.approx(120.0)


def test_a_sidecar_that_starts_in_an_attempt_counts_what_the_one_before_could_not_commit() -> None:
    """The restore that the attempt began with."""
    _, text = chosen(Life(most_s=600.0))
    state = log_of_attempts(2, {KEY: text})
    life = Life(most_s=600.0)
    life.open(state, attempt=4)
    (decision,) = life.decider.decisions()
    assert "1 lossy failures and 1 restores" in decision.evidence
    life.saves(2, lambda: 0.1)
    assert "1 lossy failures and 1 restores" in life.decider.decisions()[0].evidence, "once"
    text = life.decider.text(closing=False)
    assert text is not None
    later = log_of({KEY: text}, attempt=4)
    mine = replace(state.attempts[4], last_cut=1, last_seq=5, last_step=100)
    later = replace(later, attempts={**state.attempts, 4: mine}, attempt=4)
    life = Life(most_s=600.0)
    life.open(later, attempt=4)
    assert "1 lossy failures and 1 restores" in life.decider.decisions()[0].evidence, "its commit says it"


def test_what_an_attempt_knew_is_found_by_the_next_though_its_last_commit_did_not_say_it() -> None:
    """Its sidecar had committed before it saw the log, and died then."""
    _, text = chosen(Life(most_s=600.0))
    before = log_of({KEY: text}, attempt=1).checkpoints[2]
    unsaid = replace(before, seq=4, attempt=3, step=200, metadata={})
    first = Attempt(
        world_size=1, resumes_from=None, resumes_attempt=None, last_cut=1, last_seq=2, last_step=100
    )
    second = Attempt(world_size=1, resumes_from=2, resumes_attempt=1, last_cut=1, last_seq=4, last_step=200)
    third = Attempt(world_size=1, resumes_from=4, resumes_attempt=3)
    attempts = {1: first, 3: second, 5: third}
    life = Life(most_s=600.0)
    life.open(
        RunState(run="r", checkpoints={2: before, 4: unsaid}, attempts=attempts, attempt=5), attempt=5, resumed=True
    )  # fmt: skip
    assert life.every_s == 600.0
    assert "1 lossy failures and 1 restores" in life.decider.decisions()[0].evidence


def test_a_commit_that_says_nonsense_is_passed_over() -> None:
    """Measured anew, and no sidecar ends by it."""
    life = Life()
    life.open(log_of({KEY: '{"key":'}), attempt=3, resumed=True)
    assert life.every_s == 60.0
    assert "1 lossy failures" in life.decider.decisions()[0].evidence


def test_how_long_a_restore_and_a_restart_take() -> None:
    """From the end of a trainer to the next, and from open to the first step."""
    life = Life()
    life.open()
    life.saves(2, lambda: 0.1)
    life.decider.gone()
    life.now_s += 40.0
    life.decider.came()
    life.open(log_of({}, step=life.step), attempt=3, resumed=True, seen=life.step)
    life.decider.look(
        Reading(life.step, life.now_s - 50.0)
    )  # the line still says what the last trainer wrote
    life.now_s += 12.5 + life.step_s
    life.step += 2
    life.decider.look(Reading(life.step, life.now_s))
    measured = life.decider.measured()
    assert measured is not None
    assert (measured.reschedule_s, measured.restore_s) == (40.0, 12.5)


def test_whatever_goes_wrong_with_a_decision_leaves_the_timers_as_they_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody foresaw it: it costs the decision."""
    life = Life(every_s=9.0)
    life.open()

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("deltashard_sidecar.deciding.decider.decide", broken)
    life.saves(2, lambda: 0.1)
    assert life.every_s == 9.0
    assert life.decider.decisions() == []


def test_a_place_is_what_was_stated_and_the_processors(tmp_path: Path) -> None:
    """Nodes of another type are other places, where nothing is stated, too."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t: fpu\nmodel name\t: AMD EPYC 7B13\n"
    )
    count = os.cpu_count()
    assert place("trainer:v3, cpu 4", cpuinfo=cpuinfo) == f"trainer:v3, cpu 4, {count} x AMD EPYC 7B13"
    assert place("", cpuinfo=cpuinfo) == f"{count} x AMD EPYC 7B13"
    assert place("", cpuinfo=tmp_path / "none") == f"{count} x processors"
