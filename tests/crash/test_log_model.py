"""The real log code, over a faulty store, under random schedules of everything that may happen to a run.

Schedules are seeds: `log_schedules` runs as many as one likes.
"""

import functools

import pytest

from tests.crash import log_model
from tests.crash.log_model import Counts, run_schedule, total
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
