"""Coordinator threads over a real store: closed ranks, late attempts, and a lost store.

The group model tests that all ranks save at the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from deltashard.group.coordinator_thread import CoordinatorThread
from deltashard.group.snapshot_round import Proposal
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking
from deltashard_proto.arena_layout import NEVER, SAVE_AT_STEP
from torch import nn


@pytest.fixture(autouse=True)
def _store(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def coordinators(step: int = 0) -> list[CoordinatorThread]:
    found = []
    for number in range(2):
        clock = StepClock(Tracking(nn.Linear(1, 1)))
        clock.adopt(memoryview(bytearray(64)).cast("Q"))
        clock._line[SAVE_AT_STEP] = NEVER
        clock.set(step)
        found.append(CoordinatorThread(number, 2, clock=clock, not_ready_reason=lambda _urgent: ""))
        found[-1].begin("attempt/")
    return found


def test_late_attempt_is_saved_at_next_step() -> None:
    """The earlier steps took no time in the attempt. Counting them for its pace would delay its first snapshot."""
    ranks = coordinators(1_000_000)
    ranks[1].request(Proposal(reason="user"))
    for rank in ranks:
        while rank._rounds.due is None:
            rank._clock.clear_wake()
            rank._clock.pause(0.05)
    assert [rank._rounds.due for rank in ranks] == [(1, 1_000_001)] * 2
    for rank in ranks:
        rank.close()
