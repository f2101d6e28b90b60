"""The real log code over a faulty store, under random schedules of all events of a run.

`DELTASHARD_TEST_SCHEDULES=100000` runs as many; a failing seed repeats with `run_schedule(SEED)`.
"""

import functools
import os
from collections import Counter

import pytest

from tests.crash import log_model
from tests.crash.log_model import run_schedule
from tests.support.checkpoint.faulty_store import Fault

CHUNK = 150
CHUNKS = max(1, int(os.environ.get("DELTASHARD_TEST_SCHEDULES", "750")) // CHUNK)
COUNTED = """
schedules steps entries checkpoints deltas multi_rank laid_out mixed torn attempts late overtaken fenced
abandoned fallbacks compactions retired deleted reclaimed pinned rewound kills failures
"""
"""Events that schedules must contain: a model without them detects nothing."""


@functools.cache
def counts_of(chunk: int) -> Counter[str]:
    """Run the schedules of a chunk; return how often each event occurred."""
    found: Counter[str] = Counter()
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            found += run_schedule(seed)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    return found


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_newest_commit_restores_and_zombies_never_commit(chunk):
    assert counts_of(chunk)["schedules"] == CHUNK


def test_schedules_cover_all_events():
    """The chunks are combined, because one chunk may lack a rare event."""
    counts = sum(map(counts_of, range(CHUNKS)), Counter())
    assert counts.keys() >= set(COUNTED.split())
    assert counts["deltas"] > counts["checkpoints"] / 5
    assert counts["multi_rank"] > counts["checkpoints"] / 5


def test_unfenced_operations_succeed_without_faults():
    """The same moves on a store that never fails: no data is lost, and no call needs a retry."""
    for seed in range(30):
        run_schedule(seed, faults=False)


def test_schedule_is_deterministic():
    assert run_schedule(5) == run_schedule(5) != run_schedule(6)


def test_moves_include_every_store_fault():
    assert set(log_model.FAULTS) == set(Fault)
