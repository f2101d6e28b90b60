"""Save loops and snapshot rounds of four ranks under random schedules: one step or none, and no endless wait.

`DELTASHARD_TEST_GROUP_SCHEDULES=2000` runs as many schedules; a failing seed repeats by itself.
"""

import functools
import os
from collections import Counter

import pytest

from tests.crash.group_model import run_schedule

pytestmark = pytest.mark.slow

FIRST, CHUNK = 40, 10
"""Schedules 42 and 67: a held step ends between two reads of the training thread."""
CHUNKS = max(1, int(os.environ.get("DELTASHARD_TEST_GROUP_SCHEDULES", "20")) // CHUNK)
COUNTED = """
schedules attempts steps switches snapshots commits cancelled declined failed_parts vetoes disconnects kills zombies slow pins pins_failed
waits waits_failed held
"""


@functools.cache
def counts_of(chunk: int) -> Counter[str]:
    """Run the schedules of a chunk; return how often each event occurred."""
    seeds = range(FIRST + chunk * CHUNK, FIRST + (chunk + 1) * CHUNK)
    return sum(map(run_schedule, seeds), Counter())


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ranks_take_snapshots_at_same_step_without_deadlock(chunk: int) -> None:
    assert counts_of(chunk)["schedules"] == CHUNK


def test_schedules_cover_all_events() -> None:
    counts = sum(map(counts_of, range(CHUNKS)), Counter())
    assert counts.keys() >= set(COUNTED.split())
    assert counts["commits"] > counts["attempts"]


def test_every_save_commits_without_faults() -> None:
    """Without faults only pins can fail, while the previous save is not durable yet."""
    counts = sum((run_schedule(seed, faults=False) for seed in range(15)), Counter())
    assert counts["waits_failed"] == counts["pins_failed"]
    assert counts["commits"] == counts["snapshots"]


def test_schedule_is_deterministic() -> None:
    assert run_schedule(5) == run_schedule(5) != run_schedule(6)
