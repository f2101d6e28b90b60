"""A pod's ranks commit together: whoever comes last makes the call, and all hear what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
from deltashard_checkpoint.format.object_key import index_key
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.stores.abc import StoreUnavailable
from deltashard_checkpoint.write.commit import Committed, PartsMissing
from deltashard_checkpoint.write.cut_reports import GivenUp
from deltashard_checkpoint.write.report import PartReport
from deltashard_sidecar.save.joint_commit import JointCommits


def _report(rank: int, cut: int = 1) -> PartReport:
    key = index_key(attempt=1, cut=cut, rank=rank, token="a" * 16, xxh3=f"{rank:032x}")
    part = Part(rank=rank, index_key=key, boxes=(), stored_bytes=1, covers=None)
    return PartReport(part=part, tables=(), encodings={}, rows=0, raw_bytes=0, stall_s=0.0)


class Pod:
    """So many ranks, each on a thread of its own."""

    def __init__(self, ranks: int, *, outcome: object = None) -> None:
        self.joint = JointCommits()
        self.expected = set(range(ranks))
        self.calls: list[list[int]] = []
        self.outcome = outcome or Committed(seq=9, entry=cast("Any", None), by_us=True)
        self.pool = ThreadPoolExecutor(ranks)

    def commit(self, reports: Sequence[PartReport]) -> Committed:
        self.calls.append([report.part.rank for report in reports])
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return cast("Committed", self.outcome)

    def bring(self, rank: int, *, cut: int = 1, deadline_s: float = 60.0) -> Future[Committed]:
        return self.pool.submit(
            self.joint.commit, 1, cut, _report(rank, cut),
            expected=lambda: self.expected, commit=self.commit, deadline_s=deadline_s,
        )  # fmt: skip


def test_the_last_one_commits_for_all() -> None:
    pod = Pod(4)
    found = [pod.bring(rank) for rank in (2, 0, 3)]
    assert pod.calls == []
    found.append(pod.bring(1))
    assert {each.result(60).seq for each in found} == {9}
    assert pod.calls == [[0, 1, 2, 3]]


def test_what_the_commit_raises_every_rank_hears() -> None:
    pod = Pod(3, outcome=StoreUnavailable("away", where="store"))
    for each in [pod.bring(rank) for rank in range(3)]:
        with pytest.raises(StoreUnavailable):
            each.result(60)
    assert len(pod.calls) == 1


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_withdraws_takes_the_cut_from_the_others(*, before: bool) -> None:
    """Those who wait, and those who come later; the next cut is another one."""
    pod = Pod(3)
    waiting = [] if before else [pod.bring(rank) for rank in range(2)]
    assert pod.joint.withdraw(1, 1, 2)
    for each in waiting or [pod.bring(rank) for rank in range(2)]:
        with pytest.raises(GivenUp, match="rank 2"):
            each.result(60)
    assert pod.calls == []
    assert {each.result(60).seq for each in [pod.bring(rank, cut=2) for rank in range(3)]} == {9}


def test_who_withdraws_after_the_commit_changes_nothing() -> None:
    pod = Pod(1)
    assert pod.bring(0).result(60).seq == 9
    assert not pod.joint.withdraw(1, 1, 0)


def test_a_rank_that_is_gone_is_not_waited_for_and_one_that_stays_away_has_a_deadline() -> None:
    pod = Pod(3)
    with pytest.raises(PartsMissing, match="ranks 1, 2"):
        pod.bring(0, deadline_s=0.0).result(60)
    waiting = [pod.bring(rank, cut=2) for rank in range(2)]
    pod.expected.discard(2)  # its trainer's session is over
    assert {each.result(60).seq for each in waiting} == {9}
    assert pod.calls == [[0, 1]]
