"""All ranks of a group commit at once, on a real MinIO: one checkpoint a cut, of one step, or none."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.manifest import Manifests
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.write import commit_wait
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.commit import Committed, commit_parts
from deltashard_checkpoint.write.cut_reports import Abandoned, GivenUp, abandon_part
from deltashard_checkpoint.write.report import ReportBodyCache

from tests.support.checkpoint.run_builder import Run, rows

pytestmark = [pytest.mark.minio, pytest.mark.slow]
WORLD, ROUNDS = 4, 24
BOXES = [[rows(2 * rank, 2 * rank + 2)] for rank in range(WORLD)]


@pytest.fixture
def stores(minio_url: str) -> Iterator[list[Store]]:
    """A client of its own for each rank."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_store(minio_url)) for _ in range(WORLD)]


def test_ranks_that_commit_at_once_make_one_checkpoint_of_one_step_or_none(stores, monkeypatch):
    """Every pod lists at once, so each round is a race. In some a rank is a step ahead, or gives the cut up."""
    monkeypatch.setattr(commit_wait, "FOLLOWERS_WAIT_S", 0.0)
    chance = random.Random(4)
    layout = Layout.of(WORLD, {"t": (8, 2)}, dict(enumerate(BOXES)))
    logs = [RunLog(store, "job") for store in stores]
    attempt = open_attempt(
        logs[0], owner="me", world_size=WORLD, layout=layout.data, closing_wait_s=0.0
    ).attempt
    bodies = [ReportBodyCache() for _ in range(WORLD)]
    reports, committed, covers = Run(), {}, [None] * WORLD

    def one(rank: int, cut: int, what: str, barrier: threading.Barrier) -> Committed | Abandoned:
        odd = rank == cut % WORLD
        report = reports.report(
            attempt, cut, covers[rank], rank=rank, boxes=BOXES[rank], token=f"{rank:016x}"
        )
        barrier.wait(timeout=60)
        try:
            if what == "gives up" and odd:
                abandon_part(
                    logs[rank], attempt=attempt, cut=cut, rank=rank, token=f"{rank:016x}", deadline_s=30
                )
                return Abandoned("gave it up", where="")
            return commit_parts(
                logs[rank], attempt=attempt, cut=cut, step=10 * cut + (what == "is ahead" and odd), world_size=WORLD,
                reports=[report], layout=layout.digest, bodies=bodies[rank], deadline_s=60,
            )  # fmt: skip
        except Abandoned as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        for cut in range(1, ROUNDS + 1):
            what = chance.choice(["is well", "is well", "is ahead", "gives up"])
            barrier = threading.Barrier(WORLD)
            done = list(pool.map(one, range(WORLD), [cut] * WORLD, [what] * WORLD, [barrier] * WORLD))
            if what != "is well":
                assert all(isinstance(each, Abandoned) for each in done)
                assert any(isinstance(each, GivenUp) for each in done) == (what == "gives up")
                continue
            found = [each for each in done if isinstance(each, Committed)]
            assert len(found) == WORLD
            assert len({each.seq for each in found}) == 1
            assert sum(each.by_us for each in found) == 1
            committed[cut] = found[0].seq
            # Ranks hear of commits at different times, or never.
            covers = [chance.choice([covered, found[0].seq]) for covered in covers]
    assert len(committed) >= ROUNDS // 4
    state = RunLog(stores[0], "job").refresh()
    assert {entry.cut: seq for seq, entry in state.checkpoints.items()} == committed
    assert {entry.step for entry in state.checkpoints.values()} == {10 * cut for cut in committed}
    state = Manifests(stores[1], "job").listing(state, state.checkpoints)
    assert all(len(parts) == WORLD for parts in state.listings.values())
