"""Four ranks: one, or a sidecar, is killed at a named point of a save or a restore, and then all restart.

After each kill all ranks restore the same committed step, bit for bit (each rank records hashes of each step outside
of the store). It is no older than the newest commit that any rank was notified of. Training repeats the same steps to
the same bits and reaches a next commit. Every commit that a rank was notified of is in the log with its step.

By default some points are tested. `DELTASHARD_TEST_KILL_POINTS=full` tests a kill at every one, of rank 0 and another
rank, and of each of two sidecars.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store

from tests.support.eventually import eventually
from tests.support.trainer.rank_zygote import RankZygote

RunRanks = Callable[..., list[Any]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RANKS = 4
FULL = os.environ.get("DELTASHARD_TEST_KILL_POINTS") == "full"

# Points that a rank reaches while it trains and restores, and those that only rank 0 reaches.
SAVE = (
    "order.answered",
    "order.read",
    "snapshot.begun",
    "snapshot.first_batch",
    "snapshot.before_seal",
    "snapshot.after_seal",
)
RESTORE = (
    "rendezvous.hello",
    "agree.answered",
    "restore.first_applied",
    "restore.before_dense",
)
LEADERS_SAVE = ("order.proposed", "order.settled")
LEADERS_RESTORE = ("rendezvous.welcomed", "open.before_publish", "open.after_publish", "agree.published")
# Points that each pod's sidecar reaches, and those that only the committing sidecar reaches.
SIDECAR_SAVE = (
    "stage.granted",
    "stage.batch_received",
    "encode.first",
    "stage.sealed",
    "pack.before_put",
    "pack.after_put",
    "index.before_put",
    "index.after_put",
    "report.before_put",
    "report.after_put",
    "ack.before_send",
    "ack.after_send",
)
COMMITTERS = (
    "commit.after_list",
    "manifest.before_put",
    "manifest.after_put",
    "commit.before_log_put",
    "commit.after_log_put",
)
SIDECAR_RESTORE = ("restore.planned", "restore.first_filled")
LEADERS_SIDECAR_RESTORE = ("attempt.before_open", "attempt.after_open")
FIRST = ("attempt.before_genesis", "attempt.after_genesis", "layout.before_put", "layout.after_put")


@pytest.fixture(scope="module")
def run(rank_zygote: RankZygote) -> RunRanks:
    """Return the results of all ranks of a scenario of `killed_ranks`."""
    return partial(rank_zygote.run, "tests.integration.trainer.ranks.killed_ranks")


def records(workdir: Path, rank: int) -> list[list[Any]]:
    path = workdir / f"record-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(workdir: Path, url: str = "") -> list[list[dict[str, Any]]]:
    """Check the invariants of all cases, and return what each rank restored in each process."""
    commits: dict[int, int] = {}
    restored: list[list[dict[str, Any]]] = []
    for rank in range(RANKS):
        contents: dict[int, str] = {}
        mine: list[dict[str, Any]] = []
        for what, facts in records(workdir, rank):
            if what == "step":
                # Also where a later process repeats it.
                assert contents.setdefault(facts["step"], facts["content"]) == facts["content"], (rank, facts)
            elif what == "notified":
                assert commits.setdefault(facts["seq"], facts["step"]) == facts["step"]
            elif what == "restored":
                mine.append(facts)
                if facts["seq"]:
                    assert facts["content"] == contents[facts["step"]], (rank, facts)
                    assert (facts["exact"], facts["notes"]) == (True, [])
        restored.append(mine)
    for processes in zip(*restored, strict=True) if len({len(each) for each in restored}) == 1 else ():
        assert len({(facts["seq"], facts["step"]) for facts in processes}) == 1
    with open_store(url or (workdir / "store").as_uri()) as store:
        state = RunLog(store, "group").refresh()
    assert state.stopped is None
    assert commits.items() <= {seq: entry.step for seq, entry in state.checkpoints.items()}.items()
    return restored


def newest_reported(workdir: Path) -> int:
    every = [facts for rank in range(RANKS) for what, facts in records(workdir, rank) if what == "notified"]
    return max((facts["seq"] for facts in every), default=0)


def codes(workdir: Path) -> list[int]:
    return json.loads((workdir / "codes").read_text())


def assert_recovers(run: RunRanks, workdir: Path, nodes: int) -> None:
    """Start the group again: it resumes from at least the newest commit, repeats the same steps, and commits."""
    before = newest_reported(workdir)
    run(workdir, RANKS, "trained", agent=True, nodes=nodes, commits=1, end="close")
    assert codes(workdir) == [0] * RANKS
    assert newest_reported(workdir) > before
    for processes in check(workdir):
        assert processes[-1]["seq"] >= before


def run_with_kill(
    run: RunRanks, workdir: Path, nodes: int, commits: int, victim: str, point: str, nth: int
) -> None:
    """Kill `victim` at `point` while the group runs. A killed sidecar's ranks restore, train, and are killed later."""
    results = run(
        workdir, RANKS, "trained", agent=True,
        nodes=nodes, commits=commits, end="kill", victim=victim, point=point, nth=nth,
    )  # fmt: skip
    kind, _, number = victim.partition(" ")
    if kind == "rank":
        assert codes(workdir)[int(number)] == -9
        assert records(workdir, int(number))[-1][0] != "ended", f"{victim} did not reach {point}"
        return
    firsts = range(0, RANKS, RANKS // nodes)
    if victim != "sidecar of any":
        firsts = firsts[int(number) : int(number) + 1]
    assert all(results[first] is None for first in firsts), results
    ends = [records(workdir, first)[-1] for first in firsts]
    assert ["ended", {"lost": True}] in ends or not commits, f"{victim} did not reach {point}"


def kill_cases() -> Iterator[Any]:
    """Return (nodes, victim, point, where) for each case. `where` is "save", "restore" or "first"."""
    for point in SAVE:
        yield from ((1, "rank 0", point, "save"), (1, "rank 2", point, "save"))
    for point in LEADERS_SAVE:
        yield 1, "rank 0", point, "save"
    for point in RESTORE:
        yield from ((1, "rank 0", point, "restore"), (1, "rank 2", point, "restore"))
    yield 1, "rank 2", "rendezvous.here", "restore"
    for point in LEADERS_RESTORE:
        yield 1, "rank 0", point, "restore"
    for point in SIDECAR_SAVE:
        yield from ((2, "sidecar 0", point, "save"), (2, "sidecar 1", point, "save"))
    for point in COMMITTERS:
        yield 2, "sidecar of any", point, "save"
    for point in SIDECAR_RESTORE:
        yield from ((2, "sidecar 0", point, "restore"), (2, "sidecar 1", point, "restore"))
    for point in LEADERS_SIDECAR_RESTORE:
        yield 2, "sidecar 0", point, "restore"
    for point in FIRST:
        yield 2, "sidecar 0", point, "first"


FAST_CASES = {
    ("rank 2", "snapshot.before_seal"),
    ("rank 2", "restore.before_dense"),
    ("rank 0", "order.read"),
    ("sidecar 0", "stage.batch_received"),
    ("sidecar of any", "commit.after_log_put"),
    ("sidecar 0", "restore.planned"),
}
KILL_CASES = [each for each in kill_cases() if FULL or each[1:3] in FAST_CASES]


@pytest.mark.parametrize(("nodes", "victim", "point", "where"), KILL_CASES)
def test_group_recovers_from_kill_at_any_point(
    run: RunRanks, tmp_path: Path, nodes: int, victim: str, point: str, where: str
) -> None:
    if where == "restore":
        run(tmp_path, RANKS, "trained", agent=True, nodes=nodes, commits=1, end="kill")
    first = where != "save" or point == "order.proposed" or point in COMMITTERS
    run_with_kill(run, tmp_path, nodes, 2, victim, point, 1 if first else 2)
    assert_recovers(run, tmp_path, nodes)


def test_stale_rank_commits_nothing_and_gets_reason(run: RunRanks, tmp_path: Path) -> None:
    """The rank was stopped while its group was killed and a new group started elsewhere.

    It then continues at the same time.
    """
    run(tmp_path, RANKS, "stale", agent=True, spare=2)
    pid = (tmp_path / "stopped").read_text()
    before = newest_reported(tmp_path)
    run(tmp_path, RANKS, "trained", agent=True, nodes=2, commits=3, end="close", wakes=pid)
    assert codes(tmp_path) == [0] * RANKS
    eventually((tmp_path / "stale-result").exists, "the stopped rank has ended")
    collective, _, save, close = json.loads((tmp_path / "stale-result").read_text())
    assert collective
    assert "the store of the process group does not answer" in save + close
    assert close.startswith(("SaveFailed", "FencedError"))
    with open_store((tmp_path / "store").as_uri()) as store:
        state = RunLog(store, "group").refresh()
    assert {entry.attempt for seq, entry in state.checkpoints.items() if seq > before} == {
        max(state.attempts)
    }
    assert newest_reported(tmp_path) == max(state.checkpoints)
    check(tmp_path)


def test_slow_or_stopped_rank_costs_at_most_one_save(run: RunRanks, tmp_path: Path) -> None:
    results = run(tmp_path, RANKS, "uneven")
    assert results[0]["cancelled"] >= 1
    seen = [[facts for what, facts in records(tmp_path, rank) if what == "notified"] for rank in range(RANKS)]
    assert len(seen[0]) >= 3
    assert all(each == seen[0] for each in seen)
    check(tmp_path)
