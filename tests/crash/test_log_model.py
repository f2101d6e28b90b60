"""The real log code, over a faulty store, under random schedules of everything that may happen to a run.

The bulk of the schedules are seeds (`log_schedules` runs as many as one likes); a Hypothesis state machine drives the
same moves, so that a failure shrinks to a short story.
"""

import functools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.crash import log_model
from tests.crash.log_model import MOVES, Counts, World, act, run_schedule, total
from tests.support.checkpoint.faulty_store import Fault

CHUNKS, CHUNK = 5, 150


@functools.cache
def counts_of(chunk: int) -> Counts:
    """What happened in a chunk's schedules, none of which broke a rule."""
    found = []
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            found.append(run_schedule(seed))
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    return total(found)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_newest_commit_always_restores_and_zombies_never_commit(chunk):
    """750 schedules; a failing seed repeats with `python -m tests.crash.log_schedules --first SEED --schedules 1`."""
    assert counts_of(chunk).schedules == CHUNK


def test_everything_happens_in_these_schedules():
    """A model in which nothing happens would prove nothing. Of all chunks together: in one, what is rare may be absent."""
    counts = total(map(counts_of, range(CHUNKS)))
    for name in vars(counts):
        assert getattr(counts, name) > 0, f"no {name} in {CHUNKS * CHUNK} schedules"
    assert counts.deltas > counts.checkpoints / 5
    assert counts.multi_rank > counts.checkpoints / 5


def test_without_faults_everything_that_is_not_fenced_succeeds():
    """The same moves on a store that never fails: nothing is lost either, and nothing needs a retry."""
    for seed in range(30):
        run_schedule(seed, faults=False)


def test_a_schedule_is_its_seed():
    assert run_schedule(5) == run_schedule(5) != run_schedule(6)


def test_every_fault_of_the_store_is_among_the_moves():
    assert set(log_model.FAULTS) == set(Fault) - {Fault.STALLED}


class LogMachine(RuleBasedStateMachine):
    """Hypothesis chooses the moves; what a move draws comes from a seed that Hypothesis chooses too."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed):
        self.world = World(seed)

    @rule(move=st.sampled_from([move for move in MOVES if move != "step"]), seed=st.integers(0, 2**16))
    def move(self, move, seed):
        self.world.random = random.Random(seed)
        act(self.world, move)

    @rule(which=st.integers(0, 8), steps=st.sampled_from([1, 2, 4, 8, 16, 40]))
    def step(self, which, steps):
        if self.world.tasks:
            self.world.advance(self.world.tasks[which % len(self.world.tasks)], steps)
            self.world.look()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
