"""What a log tells of a run's failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.run_state import Attempt, RunState
from deltashard_sidecar.deciding.history import follows_rewind, past


def attempt(last_seq: int | None, last_step: int | None, resumes: int | None = None) -> Attempt:
    return Attempt(
        world_size=1, resumes_from=None, resumes_attempt=resumes, last_seq=last_seq, last_step=last_step
    )


def checkpoint(seq: int, directive: str, **fields: Any) -> Checkpoint:
    return Checkpoint(
        seq=seq, previous="", writer="", at_s=0.0, attempt=1, cut=1, step=1, tables=(), encodings={}, rows=0,
        raw_bytes=0, stored_bytes=0, stall_s=0.0, cut_at_s=0.0, directive=directive, **fields,
    )  # fmt: skip


def test_steps_and_ends_of_attempts() -> None:
    """Crash loops count once, an eviction lost nothing, a retired end counts as lost, and the open one not at all."""
    state = RunState(
        run="r",
        attempt=30,
        attempts={
            1: attempt(5, 100),
            6: attempt(None, 100, 1),
            7: attempt(None, 100, 1),
            8: attempt(12, 250, 1),
            20: attempt(25, 300, 8),
            30: attempt(None, 300, 20),
        },
        checkpoints={12: checkpoint(12, "eviction; x"), 25: checkpoint(25, "timer; x")},
    )
    seen = past(state, open_attempt=20)
    assert (seen.steps, seen.lossy, seen.restores) == (300, 1, 2)
    assert past(state, open_attempt=None).lossy == 2
    evidence = seen.evidence(0.5)
    assert (evidence.exposure_s, evidence.lossy, evidence.restores) == (150.0, 1, 2)
    assert seen.evidence(0.0).lossy == 0, "failures without their time would be a rate of nothing"


def test_a_rewind_is_a_restore_and_no_failure() -> None:
    """Nothing broke; and who goes on from there has trained what it trained, though its step is a lower one."""
    rewind = Attempt(world_size=0, resumes_from=5, resumes_attempt=1, last_step=100)
    attempts = {
        1: attempt(12, 400),
        13: rewind,
        14: Attempt(world_size=1, resumes_from=5, resumes_attempt=1, last_seq=20, last_step=600),
        21: attempt(None, 600, 14),
    }
    timer = {12: checkpoint(12, "timer; x"), 20: checkpoint(20, "timer; x")}
    seen = past(RunState(run="r", attempt=21, attempts=attempts, checkpoints=timer), open_attempt=None)
    assert (seen.steps, seen.lossy, seen.restores) == (400 + 500, 1, 2)
    assert follows_rewind(RunState(run="r", attempts=attempts), 14)
    assert not follows_rewind(RunState(run="r", attempts=attempts), 21)
    assert not follows_rewind(RunState(run="r", attempts=attempts), 1)
    # Where the checkpoint is live it says itself where the attempt began: of a line that fell back, too.
    fell_back = {1: attempt(12, 400), 13: replace(attempts[14], last_step=450)}
    live = {5: replace(checkpoint(5, "timer; x"), step=300)}
    assert past(RunState(run="r", attempts=fell_back, checkpoints=live), open_attempt=13).steps == 400 + 150
