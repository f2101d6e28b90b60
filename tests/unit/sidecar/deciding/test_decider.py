"""The decider with a fake clock, simulated trainers and saves of given cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from deltashard_checkpoint.deciding.cost import KEY
from deltashard_checkpoint.deciding.interval import MIN_SAVES
from deltashard_checkpoint.deciding.record import parse_metadata
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.run_state import Attempt, RunState
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar import settings
from deltashard_sidecar.deciding.choice import CHOICE_CAUSES
from deltashard_sidecar.deciding.decider import Decider
from deltashard_sidecar.deciding.measurements import Cost, MeasuredSave, Opening
from deltashard_sidecar.deciding.step_meter import Reading
from deltashard_sidecar.policy import changed
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import configure
from hypothesis import given
from hypothesis import settings as bounded
from hypothesis import strategies as st

EMPTY = RunState(run="r")
ONCE, LOSSY = "0 lossy failures and 1 restores", "1 lossy failures and 1 restores"


def log_of(
    metadata: Mapping[str, str], *, attempt: int = 1, step: int = 100, reason: str = "timer"
) -> RunState:
    newest = Checkpoint(
        seq=attempt + 1, previous="", writer="", at_s=0.0, attempt=attempt, snapshot_id=1, step=step, tables=(), encodings={},
        rows=0, raw_bytes=0, stored_bytes=0, stall_s=0.0, snapshot_at_s=0.0, directive=f"{reason}; x", metadata=metadata,
    )  # fmt: skip
    return RunState(run="r", checkpoints={newest.seq: newest})


class DeciderBench:
    """A trainer and its sidecar's decider: steps take a fixed time, saves stall and slow training."""

    def __init__(self, *, step_s: float = 0.5, seed: int = 0, **fields: object) -> None:
        self.rng = random.Random(seed)
        self.now_s, self.step, self.step_s, self.snapshot_id = 1e9, 0, step_s, 0
        self.metrics, self.policy = Metrics(), changed(pb.Policy(goal="auto"), **fields)
        needed = ["--url", "memory://x", "--run", "r", "--dir", "/d", "--cache-dir", "/c", "--goal", "auto"]
        log = configure("error", run="r")
        self.decider = Decider(
            settings.load(needed, {}), metrics=self.metrics, log=log, clock=lambda: self.now_s
        )
        self.decider.set_policy(self.policy)

    def open(
        self,
        state: RunState = EMPTY,
        *,
        attempt: int = 1,
        resumed: bool = False,
        seen: int = 0,
        ranks: int = 1,
    ) -> str:
        """Open an attempt, and return the failure evidence of the decision."""
        opening = Opening(
            attempt=attempt, world_size=ranks, ranks_here=ranks, reading=Reading(self.step, self.now_s),
            resumed=resumed, step_seen=seen,
        )  # fmt: skip
        self.decider.opened(opening, state)
        return self.decision.evidence.partition("; ")[2]

    def observe(self, step: int | None = None, at_s: float | None = None) -> None:
        self.decider.observe(
            Reading(self.step if step is None else step, self.now_s if at_s is None else at_s)
        )

    def train(self, seconds: float, *, observations: int = 4) -> None:
        until_s, pause_s = self.now_s + seconds, seconds / observations
        observe_s = self.now_s + pause_s
        while self.now_s < until_s:
            count = max(1, int((min(observe_s, until_s) - self.now_s) / self.step_s))
            self.step, self.now_s = self.step + count, self.now_s + count * self.step_s
            observe_s += pause_s
            self.observe()

    def save(
        self, *, stall_s: float, slowdown_s: float = 0.0, durable_s: float = 1.0, timed: bool = True
    ) -> None:
        self.snapshot_id += 1
        save = MeasuredSave(snapshot_id=self.snapshot_id, started=Reading(self.step, self.now_s), timed=timed)
        self.decider.save_started(save, planned_steps=0, partial=False)
        ended_s = self.now_s + durable_s
        inside = int((durable_s - stall_s - slowdown_s) / self.step_s)
        self.now_s += stall_s + slowdown_s + inside * self.step_s
        self.step += inside
        self.observe()
        at_s, self.now_s = self.now_s, max(ended_s, self.now_s)
        self.decider.save_ended(self.snapshot_id, Cost(stall_s=stall_s, slowdown_s=0.0, durable_s=durable_s))
        self.observe(at_s=at_s)
        self.now_s = at_s + self.step_s
        self.step += 1
        self.observe()

    def saves(self, count: int, cost_s: Callable[[], float] = lambda: 0.1, durable_s: float = 1.0) -> None:
        for _ in range(count):
            self.train(self.every_s, observations=2)
            drawn = cost_s()
            self.save(stall_s=drawn / 2, slowdown_s=drawn / 2, durable_s=max(durable_s, drawn))

    def text(self, *, closing: bool = False) -> str:
        return self.decider.text(closing=closing) or ""

    def set_policy_fields(self, **fields: object) -> None:
        self.policy = changed(self.policy, **fields)
        self.decider.set_policy(self.policy)

    @property
    def every_s(self) -> float:
        return self.decider.apply_to(self.policy).every_s

    @property
    def decision(self) -> fleet.Decision:
        (one,) = self.decider.decisions()
        return one

    @property
    def measured(self) -> fleet.Measured:
        found = self.decider.measured()
        assert found is not None
        return found

    @property
    def changes(self) -> int:
        return sum(int(self.changed(cause)) for cause in CHOICE_CAUSES)

    def changed(self, cause: str) -> float:
        return self.metrics.decided.labels(cause)._value.get()


def chosen(**fields: object) -> str:
    """Return the commit record of a decider that has measured enough saves for a choice."""
    bench = DeciderBench(**fields)
    bench.open()
    bench.saves(MIN_SAVES)
    return bench.text()


def test_without_a_goal_timers_apply_and_auto_choice_is_shown() -> None:
    """Nothing is chosen or written, but the cost of saves is measured. Before an attempt nothing is known."""
    bench = DeciderBench(every_s=7.0, every_steps=9, goal="fixed")
    assert (bench.decider.apply_to(bench.policy), bench.decider.measured(), bench.text()) == (
        bench.policy,
        None,
        "",
    )
    bench.open()
    bench.saves(MIN_SAVES - 1)
    decision = bench.decision
    assert (decision.goal, decision.value, decision.proposed) == ("fixed", "every 7 s or 9 steps", "")
    bench.saves(MIN_SAVES + 1)
    decision = bench.decision
    assert (decision.value, decision.proposed) == ("every 7 s or 9 steps", "every 1800 s")
    assert decision.why.startswith("as stated; under auto a save costs 96.9 ms")
    assert (bench.decider.apply_to(bench.policy), bench.text(), bench.changes) == (bench.policy, "", 0)
    assert bench.measured.saves == 2 * MIN_SAVES
    bench.set_policy_fields(goal="auto")
    assert bench.every_s == 1800.0, "the cost is already measured"


@given(
    st.floats(0.01, 5.0),
    st.floats(0.0, 2.0),
    st.floats(0.0, 2.0),
    st.floats(0.0, 30.0),
    st.floats(5.0, 500.0),
)
@bounded(deadline=None, max_examples=60)
def test_cost_is_independent_of_observation_times(
    step_s: float, stall_s: float, slowdown_s: float, more_s: float, quiet_s: float
) -> None:
    bench = DeciderBench(step_s=step_s)
    bench.open()
    bench.train(max(quiet_s, 40 * step_s), observations=7)
    bench.save(stall_s=stall_s, slowdown_s=slowdown_s, durable_s=stall_s + slowdown_s + more_s)
    bench.train(3 * step_s)  # a step may end together with the commit
    off_s = 2e-3 * (stall_s + slowdown_s + more_s + step_s) + 1e-5
    assert bench.measured.cost_s == pytest.approx(stall_s + slowdown_s, abs=off_s)
    assert bench.measured.step_s == pytest.approx(step_s, rel=1e-3)


def test_only_timer_saves_are_measured() -> None:
    """A requested save blocks its caller, a failed save has no cost, and the steps during either are not quiet."""
    bench = DeciderBench(step_s=0.5)
    bench.open()
    bench.train(50.0)
    bench.save(stall_s=30.0, durable_s=30.0, timed=False)
    begins = MeasuredSave(snapshot_id=99, started=Reading(bench.step, bench.now_s), timed=True)
    bench.decider.save_started(begins, planned_steps=0, partial=False)
    bench.now_s += 5.0
    bench.decider.save_ended(99, None)
    bench.step, bench.now_s = bench.step + 1, bench.now_s + 0.1
    bench.observe()
    bench.train(50.0)
    assert (bench.measured.saves, bench.measured.cost_s, bench.measured.step_s) == (0, 0.0, 0.5)


@pytest.mark.parametrize("goal", ["auto", "overhead=1%", "lost-work=5m"])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_noise_rarely_changes_the_interval(goal: str, spread: float) -> None:
    """Costs are log-normal with a spread of 30 % or 130 %. A day has few changes, all within bounds."""
    bench = DeciderBench(seed=int(10 * spread), min_interval_s=20.0, max_interval_s=900.0, goal=goal)
    bench.open()
    begun_s, found = bench.now_s, []
    while bench.now_s < begun_s + 86400.0:
        bench.saves(1, lambda: 0.5 * bench.rng.lognormvariate(0, spread), durable_s=3.0)
        found.append(bench.every_s)
    assert all(20.0 <= each <= 900.0 for each in found[MIN_SAVES:])
    assert bench.changes <= 6


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_fourfold_cost_change_is_followed_within_40_saves(factor: float) -> None:
    """After a day at the old cost, in both directions."""
    bench = DeciderBench(seed=3, max_interval_s=3600.0, goal="overhead=1%")
    bench.open()
    noise = bench.rng
    bench.saves(300, lambda: 1.0 * noise.lognormvariate(0, 0.3))
    assert bench.every_s == pytest.approx(100.0, rel=0.3)
    bench.saves(40, lambda: factor * noise.lognormvariate(0, 0.3), durable_s=2.0)
    assert bench.changed("cost") >= 1
    bench.saves(40, lambda: factor * noise.lognormvariate(0, 0.3), durable_s=2.0)
    assert bench.every_s == pytest.approx(100.0 * factor, rel=0.4)


def test_failures_shorten_the_interval_and_clean_exits_do_not() -> None:
    bench = DeciderBench()
    bench.open()
    bench.saves(2 * MIN_SAVES, lambda: 0.5)
    assert bench.every_s == 1800.0
    for reason, lossy in (("close", 0.0), ("timer", 1.0), ("timer", 2.0), ("timer", 3.0)):
        state = log_of({KEY: bench.text(closing=reason == "close")}, reason=reason, step=bench.step)
        failure_evidence = bench.open(state, attempt=bench.snapshot_id + 2, resumed=True)
        assert round(float(failure_evidence.split()[0])) == lossy, "evidence decays slightly"
        bench.saves(MIN_SAVES, lambda: 0.5)
        assert (bench.changed("failures") > 0) == (lossy > 1)
    assert bench.every_s < 1200.0


def test_crash_loop_is_one_failure_unless_the_arena_saw_progress() -> None:
    bench = DeciderBench()
    bench.open()
    bench.saves(1)
    for attempt in (5, 6, 7):
        failure_evidence = bench.open(
            log_of({}, step=bench.step), attempt=attempt, resumed=True, seen=bench.step
        )
    assert ONCE in failure_evidence
    bench.saves(1)
    failure_evidence = bench.open(log_of({}, step=bench.step), attempt=8, resumed=True, seen=bench.step + 3)
    assert "1 lossy failures and 2 restores" in failure_evidence


def test_next_trainer_resumes_decider_state_from_the_commit() -> None:
    """The state is profile, choice and evidence. Another world size keeps only the evidence. Malformed text keeps nothing."""
    first = DeciderBench()
    first.open()
    first.saves(MIN_SAVES, lambda: 0.2)
    state = log_of({KEY: first.text(closing=True)}, attempt=3)
    again, other, malformed = DeciderBench(), DeciderBench(), DeciderBench()
    assert ONCE in again.open(state, attempt=5, resumed=True)
    assert again.every_s == first.every_s == 1800.0
    assert again.changes == 0, "the resumed choice stays"
    assert ONCE in other.open(state, attempt=5, resumed=True, ranks=2)
    assert "0 lossy failures" in malformed.open(log_of({KEY: '{"key":'}), attempt=3, resumed=True)
    assert other.every_s == malformed.every_s == 60.0


def log_of_attempts(empty: int, metadata: Mapping[str, str]) -> RunState:
    """Return a log whose attempt 1 committed, followed by attempts without a commit; the newest is open."""
    nothing = Attempt(world_size=1, resumes_from=2, resumes_attempt=1)
    first = replace(
        nothing, resumes_from=None, resumes_attempt=None, last_snapshot=1, last_seq=2, last_step=100
    )
    attempts = {1: first, **dict.fromkeys(range(2, 3 + empty), nothing)}
    return replace(log_of(metadata), attempts=attempts, attempt=2 + empty)


def test_attempt_after_failed_ones_saves_early_then_backs_off() -> None:
    """The delay is a minute, halved by each further failure and doubled by each commit. A rewind is not a failure."""
    text = chosen(max_interval_s=600.0)
    for empty, every_s in ((0, 600.0), (1, 60.0), (2, 30.0), (9, 1.0)):
        bench = DeciderBench(max_interval_s=600.0)
        bench.open(log_of_attempts(empty, {KEY: text}), attempt=2 + empty, resumed=True)
        assert bench.every_s == pytest.approx(every_s)
    state, bench, found = log_of_attempts(1, {KEY: text}), DeciderBench(max_interval_s=600.0), []
    assert LOSSY in bench.open(state, attempt=3, resumed=True)
    assert (bench.decision.value, bench.decision.proposed) == ("every 60 s", "every 600 s")
    assert "ended without a checkpoint" in bench.decision.bound
    for _ in range(5):
        bench.saves(1)
        found.append(bench.every_s)
    assert found == [120.0, 240.0, 480.0, 600.0, 600.0]
    mine = {3: replace(state.checkpoints[2], attempt=3, seq=3)}
    again = DeciderBench(max_interval_s=600.0)
    again.open(replace(state, checkpoints=state.checkpoints | mine), attempt=3, resumed=True)
    assert again.every_s == pytest.approx(120.0)
    rewound = DeciderBench(max_interval_s=600.0)
    attempts = state.attempts | {2: replace(state.attempts[2], world_size=0)}
    assert ONCE in rewound.open(replace(state, attempts=attempts), attempt=3, resumed=True)
    assert rewound.every_s == pytest.approx(600.0)


def test_restarted_sidecar_counts_uncommitted_restores() -> None:
    """The restore of the open attempt counts once. An earlier attempt counts if its commits did not."""
    state = log_of_attempts(2, {KEY: chosen(max_interval_s=600.0)})
    bench = DeciderBench(max_interval_s=600.0)
    assert LOSSY in bench.open(state, attempt=4)
    bench.saves(2)
    assert LOSSY in bench.decision.evidence, "counted once"
    mine = replace(state.attempts[4], last_snapshot=1, last_seq=5, last_step=100)
    later = replace(log_of({KEY: bench.text()}, attempt=4), attempts={**state.attempts, 4: mine}, attempt=4)
    assert LOSSY in DeciderBench(max_interval_s=600.0).open(later, attempt=4), "its commit already counts it"
    state = log_of_attempts(0, {KEY: chosen(max_interval_s=600.0)})
    unrecorded = replace(state.checkpoints[2], seq=7, attempt=2, step=200, metadata={})
    mine = replace(state.attempts[2], last_snapshot=1, last_seq=7, last_step=200)
    without_record = replace(
        state, checkpoints={**state.checkpoints, 7: unrecorded}, attempts={**state.attempts, 2: mine}
    )
    bench = DeciderBench(max_interval_s=600.0)
    bench.open(without_record, attempt=2)
    assert bench.every_s == 600.0
    assert parse_metadata(bench.text()).profile.save.n == MIN_SAVES


def test_restore_and_restart_durations_are_measured() -> None:
    """Restart lasts from the end of a trainer to the next start, restore from open to the first step."""
    bench = DeciderBench()
    bench.open()
    bench.saves(2)
    bench.decider.trainer_lost()
    bench.now_s += 40.0
    bench.decider.trainer_attached()
    bench.open(log_of({}, step=bench.step), attempt=3, resumed=True, seen=bench.step)
    bench.observe(at_s=bench.now_s - 50.0)  # the line still has the last trainer's values
    bench.now_s += 12.5 + bench.step_s
    bench.step += 2
    bench.observe()
    assert (bench.measured.reschedule_s, bench.measured.restore_s) == (40.0, 12.5)


def test_failed_decision_keeps_the_configured_timers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = DeciderBench(every_s=9.0)
    bench.open()

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("deltashard_sidecar.deciding.decider.decide", broken)
    bench.saves(2)
    assert bench.every_s == 9.0
    assert bench.decider.decisions() == []
