"""The watchdog reports an overdue save within a minute or three intervals, whatever the reason."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from deltashard.attach.attachment import Listener
from deltashard.save.snapshot_gate import MESSAGE, REMEDY
from deltashard.save.watchdog import CHECK_INTERVAL_S, INTERVALS, MIN_BLOCKED_S, BlockedBy, Watchdog
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking
from deltashard_proto.arena_layout import BLOCKED_SINCE_NS, BLOCKED_WHY
from deltashard_proto.block_reason import BlockReason, format_block_reason
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn


class WatchedLoop:
    """A training loop of one step a second, with its own clock and a record of all reports."""

    def __init__(self, *, every_s: float = 0.0, every_steps: int = 0) -> None:
        self.now_s = 1000.0
        self.recorded: list[tuple[float, dict[str, Any]]] = []
        self.clock = StepClock(Tracking(nn.Linear(1, 1)))
        self.line = self.clock._line
        self.asked = False
        self.block = BlockedBy(reason=BlockReason.ACCUMULATING, message=MESSAGE[BlockReason.ACCUMULATING])
        self.dog = Watchdog(
            self.clock,
            Listener(lambda name, facts: self._record_event(name, dict(facts)), lambda: 0),
            timer=lambda: (every_s, every_steps),
            now_s=lambda: self.now_s,
        )
        self.dog.begin(restored=False)

    def _record_event(self, name: str, facts: dict[str, Any]) -> None:
        assert name == "save_blocked"
        self.recorded.append((self.now_s, facts))

    def step(self, times: int = 1, *, takes_s: float = 1.0) -> None:
        for _ in range(times):
            self.now_s += takes_s
            self.clock.begin_step()
            self.dog.check(lambda: self.block, asked=self.asked)

    def save(self, *, durable_after: int = 0) -> None:
        """Take the snapshot of the last step and make it durable some steps later."""
        at = self.clock.step
        self.dog.taken()
        self.step(durable_after)
        self.dog.committed(at)

    def block_reason(self) -> str:
        assert bool(self.line[BLOCKED_SINCE_NS]) == bool(self.line[BLOCKED_WHY])
        return format_block_reason(self.line[BLOCKED_WHY])


@pytest.mark.parametrize(
    ("reason", "rank"), [(each, None) for each in BlockReason] + [(BlockReason.RANKS, 3)]
)
def test_blocked_save_is_reported_with_doubling_intervals(
    reason: BlockReason, rank: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason, the checkpoint's age and the remedy are in the log, the event, doctor() and the control line."""
    loop = WatchedLoop(every_steps=10)
    loop.block = BlockedBy(reason=reason, message=MESSAGE[reason], rank=rank)
    loop.step(10)
    assert loop.dog.blocked is not None
    loop.save()
    with caplog.at_level(logging.WARNING):
        loop.step(500)
    assert [at_s - 1020 for at_s, _ in loop.recorded] == [
        MIN_BLOCKED_S,
        2 * MIN_BLOCKED_S,
        4 * MIN_BLOCKED_S,
        8 * MIN_BLOCKED_S,
    ]
    first = loop.recorded[0][1]
    assert (first["reason"], first["rank"], first["for_s"], first["age_s"]) == (str(reason), rank, 60, 70)
    assert first["message"].endswith(f"(the newest is 70 s old): {MESSAGE[reason]} -- {REMEDY[reason]}")
    assert first["message"] in caplog.text
    assert str(loop.dog.blocked).startswith("no save for 490 s")
    assert loop.block_reason() == str(reason) + (" (rank 3)" if rank else "")
    loop.save()
    assert loop.dog.blocked is None
    assert loop.block_reason() == ""


def test_requested_save_is_due_without_a_timer() -> None:
    """With save() on demand only, nothing else is due. A save that failed or was taken is not due any more."""
    loop = WatchedLoop()
    loop.step(500)
    assert loop.dog.blocked is None
    loop.asked = True
    loop.step(62)
    assert len(loop.recorded) == 1
    assert loop.block_reason()
    loop.asked = False
    loop.step()
    assert loop.block_reason() == ""
    assert loop.dog.blocked is None


def test_watchdog_is_called_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped sidecar asks for nothing: `step()` still calls the watchdog every few seconds."""
    now_ns = [1]
    monkeypatch.setattr("deltashard.tracking.step_clock._time_ns", lambda: now_ns[0])
    loop = WatchedLoop(every_s=10)
    loop.clock.ack()
    loop.line[3] = 1 << 60
    loop.step()
    assert not loop.clock.begin_step()
    now_ns[0] += int(CHECK_INTERVAL_S * 1e9)
    assert loop.clock.begin_step()


@settings(max_examples=60, deadline=None)
@given(
    every_s=st.sampled_from([0.0, 5.0, 40.0, 300.0]),
    every_steps=st.sampled_from([0, 1, 7, 100]),
    saves=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 20)), max_size=6),
)
def test_only_overdue_saves_are_reported(
    every_s: float, every_steps: int, saves: list[tuple[int, int]]
) -> None:
    """For any times of saves, the time between two commits is reported if and only if it is above the limit."""
    loop = WatchedLoop(every_s=every_s, every_steps=every_steps)
    interval_s = min((each for each in (every_s, every_steps) if each), default=None)
    for pause, durable_after in saves:
        recorded, began_s = len(loop.recorded), loop.now_s - loop.dog._anchor[0]
        loop.step(pause)
        loop.save(durable_after=durable_after)
        waited_s = began_s + pause + durable_after
        limit_s = max(MIN_BLOCKED_S, INTERVALS * (every_s or every_steps))
        if interval_s is None or waited_s < interval_s + limit_s:
            assert len(loop.recorded) == recorded
        elif waited_s > interval_s + limit_s + 2:
            assert len(loop.recorded) > recorded
