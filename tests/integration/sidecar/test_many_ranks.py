"""Ranks of one run with one or more sidecars: one commit for each snapshot, and separate results for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from deltashard_checkpoint.deciding import error_ledger
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.vocabulary import PRECISION_KEY
from deltashard_checkpoint.write import precision

from tests.support.checkpoint.snapshot import read_checkpoint
from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel, same
from tests.support.fake_trainer import SaveStreamFailed, Trainer
from tests.support.sidecar_process import SidecarProcess, sidecar

LONG_WAIT = {"deltashard_sidecar.save_service.BRIEF_WAIT_S": 30.0}
"""A rank does not retry a refused save, unlike a lone trainer that learns late of the end of its last save."""


class RankGroup:
    """W ranks with their own tables, distributed over sidecars. It coordinates them as the trainer library would."""

    def __init__(self, sidecars: list[SidecarProcess], world_size: int, *, seed: int = 0) -> None:
        self.models = [FakeModel(seed=seed + rank, of_rank=rank, rows=120) for rank in range(world_size)]
        per_pod = -(-world_size // len(sidecars))
        self.trainers = [
            Trainer(
                sidecars[rank // per_pod].socket, model, rank=rank, local_rank=rank % per_pod,
                world_size=world_size,
            )
            for rank, model in enumerate(self.models)
        ]  # fmt: skip

    @property
    def layout(self) -> Layout:
        shapes = {t.fqn: t.weights.shape for model in self.models for t in model.tables}
        return Layout.of(
            len(self.models), shapes, {r: [t.box for t in m.tables] for r, m in enumerate(self.models)}
        )

    def open(self, which: str = "latest") -> int | None:
        """Open an attempt by rank 0, attach the other ranks to it, and return the seq to resume from."""
        first, *others = self.trainers
        reply = first.open(which, layout=self.layout.data)
        assert reply.layout == self.layout.digest
        for trainer in others:
            trainer.attempt, trainer.layout, trainer.snapshot_id = reply.attempt, reply.layout, 0
            trainer.attach()
        first.layout = reply.layout
        return reply.resume_seq if reply.HasField("resume_seq") else None

    def restore(self, seq: int) -> None:
        for trainer in self.trainers:
            trainer.model.wipe()
            trainer.restore(seq)

    def train(self) -> None:
        for model in self.models:
            model.train()

    def save(self) -> list[int]:
        return [trainer.save() for trainer in self.trainers]

    def save_and_commit(self) -> int:
        commits = [
            t.committed(snapshot_id) for t, snapshot_id in zip(self.trainers, self.save(), strict=True)
        ]
        assert len({commit.seq for commit in commits}) == 1
        return int(commits[0].seq)

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()


@contextmanager
def pods(root: Path, url: str, count: int, **flags: object) -> Iterator[list[SidecarProcess]]:
    with ExitStack() as stack:
        found = []
        for pod in range(count):
            (root / f"pod{pod}").mkdir(exist_ok=True)
            options = {"encoding": "fp32", "constants": LONG_WAIT, "arena_bytes": "256MiB", **flags}
            process = SidecarProcess(root / f"pod{pod}", url, **options)
            stack.callback(process.kill)
            found.append(process)
        yield found


@contextmanager
def start_group(
    root: Path, count: int = 2, ranks: int = 4, **flags: object
) -> Iterator[tuple[str, RankGroup, int]]:
    """Yield a store's URL, a group of ranks on `count` pods, and the seq of its first checkpoint."""
    url = (root / "store").as_uri()
    with pods(root, url, count, **flags) as sidecars:
        group = RankGroup(sidecars, ranks)
        group.open()
        group.train()
        yield url, group, group.save_and_commit()
        group.close()


def state_of(url: str) -> RunState:
    with open_store(url) as store:
        return RunLog(store, "run").refresh()


def _assert_holds(url: str, seq: int, models: list[FakeModel]) -> None:
    with open_store(url) as store:
        found = read_checkpoint(store, "run", f"seq:{seq}")
    for model in models:
        for table in model.tables:
            np.testing.assert_array_equal(found.tables[table.fqn].weights, table.weights)
            np.testing.assert_array_equal(found.tables[table.fqn].fields["sum"], table.sums)


@pytest.mark.parametrize("count", [1, 2])
def test_four_ranks_save_and_resume(tmp_path: Path, count: int) -> None:
    """Each snapshot has one entry, with deltas after a baseline.

    A new group resumes from it, each rank with its own rows.
    """
    url = (tmp_path / "store").as_uri()
    with pods(tmp_path, url, count) as sidecars:
        group = RankGroup(sidecars, 4)
        assert group.open() is None
        seqs = []
        for _ in range(3):
            group.train()
            seqs.append(group.save_and_commit())
        _assert_holds(url, seqs[-1], group.models)
        state = state_of(url)
        assert [entry.covers for entry in state.checkpoints.values()] == [(None,), (seqs[0],), (seqs[0],)]
        wanted = [model.state() for model in group.models]
        group.close()
        again = RankGroup(sidecars, 4, seed=50)
        assert again.open() == seqs[-1]
        again.restore(seqs[-1])
        assert all(same(model.state(), held) for model, held in zip(again.models, wanted, strict=True))
        again.train()
        seq = again.save_and_commit()
        _assert_holds(url, seq, again.models)
        assert state_of(url).checkpoints[seq].covers == (seqs[0],)
        again.close()


@pytest.mark.parametrize("count", [1, 2])
def test_bits_are_chosen_for_all_ranks_sharing_a_sidecar(tmp_path: Path, count: int) -> None:
    """Tables that rank 0 does not have are included. In two pods `encoding` applies, and the reason is logged."""
    with start_group(tmp_path, count, bits_goal="budget", differential="full") as (
        url,
        group,
        _,
    ):  # adds the sample
        group.train()
        seq = group.save_and_commit()
        entry = state_of(url).checkpoints[seq]
        stored = precision.parse_metadata(entry.metadata[PRECISION_KEY])
        chosen = {rank: stored.of_table(f"rank{rank}.big.weight") for rank in range(4)}
        if count == 2:
            assert set(chosen.values()) == {"fp32"}
            _assert_holds(url, seq, group.models)
            return
        assert set(chosen.values()) <= {"q2", "q3", "q4"}
        assert "q8" in {stored.of_table(f"rank{rank}.small.weight") for rank in range(4)}
        ledger = error_ledger.parse_metadata(entry.metadata[error_ledger.KEY])
        assert ledger.error.keys() >= {f"rank{rank}.big.weight" for rank in range(4)}
        wanted = [model.tables[0].weights.copy() for model in group.models]
        group.restore(seq)
        for rank, (model, held) in enumerate(zip(group.models, wanted, strict=True)):
            off = np.linalg.norm(model.tables[0].weights - held) / np.linalg.norm(held)
            assert off == pytest.approx(ledger.error[f"rank{rank}.big.weight"], rel=0.2)


def test_ranks_read_common_and_own_blobs(
    tmp_path: Path,
) -> None:
    """The readers are four ranks on two pods, a single rank, and a trainer without a rank."""
    common = {"meta", *(f"dense/rank{rank}.w" for rank in range(4))}
    with start_group(tmp_path) as (url, group, seq):
        group.restore(seq)
        assert [trainer.blobs_read for trainer in group.trainers] == [
            common,
            *(common | {f"rank/{rank}/meta"} for rank in (1, 2, 3)),
        ]
    (tmp_path / "node").mkdir()
    with pods(tmp_path / "node", url, 1) as sidecars:  # without a local copy: one rank reads for the others
        again = RankGroup(sidecars, 4, seed=50)
        assert again.open() == seq
        first, *others = [trainer.restore(seq) for trainer in again.trainers]
        assert first.cache_bytes == 0
        assert all(0 < each.cache_bytes < first.store_bytes for each in others)
        again.close()
    with open_store(url) as store:
        assert read_checkpoint(store, "run").blobs.keys() == common
        assert read_checkpoint(store, "run", blobs=["rank/3/meta"]).tree("rank/3/meta")["rank"] == 3
    (tmp_path / "alone").mkdir()
    with sidecar(tmp_path / "alone", url, encoding="fp32", arena_bytes="256MiB") as process:
        alone = Trainer(process.socket, FakeModel(of_rank=0, rows=120))
        assert alone.open().resume_seq == seq
        alone.model.wipe()
        alone.restore(seq)
        assert alone.blobs_read == common
        assert same(alone.model.state(), group.models[0].state())
        alone.close()


def test_rank_abort_drops_snapshot_and_next_one_has_rows(
    tmp_path: Path,
) -> None:
    """Its own pod drops the snapshot at once, and the other pod when it learns of the abort, before the deadline."""
    with start_group(tmp_path) as (url, group, base):
        group.train()
        snapshots = []
        for trainer in group.trainers:
            if trainer.rank == 1:
                snapshot = trainer.begin()
                snapshot.abort("stall")
                snapshots.append(snapshot.number)
            else:
                snapshots.append(trainer.save())
        for trainer, number in zip(group.trainers, snapshots, strict=True):
            with pytest.raises(SaveStreamFailed, match="aborted" if trainer.rank == 1 else "abandoned"):
                trainer.committed(number)
        group.train()
        seq = group.save_and_commit()
        _assert_holds(url, seq, group.models)
        assert state_of(url).checkpoints.keys() == {base, seq}


def test_ranks_at_different_steps_make_no_checkpoint(tmp_path: Path) -> None:
    with start_group(tmp_path, ranks=2) as (url, group, base):
        group.train()
        group.models[1].train()
        snapshots = group.save()
        with pytest.raises(SaveStreamFailed, match="abandoned"):
            group.trainers[0].committed(snapshots[0])
        group.models[0].train()
        for trainer in group.trainers:
            trainer.snapshot_id += 1
        eventually(lambda: snapshots[1] in group.trainers[1].failures, what="the other rank's failure")
        seq = group.save_and_commit()
        _assert_holds(url, seq, group.models)
        assert state_of(url).checkpoints.keys() == {base, seq}


def test_inconsistent_group_is_refused_with_remedy(tmp_path: Path) -> None:
    """The faults are another world size, a duplicate rank, a second opener, and a layout with gaps or overlaps."""
    url = (tmp_path / "store").as_uri()
    with pods(tmp_path, url, 1) as sidecars:
        group = RankGroup(sidecars, 2)
        for options, why in (
            ({"rank": 2, "local_rank": 2, "world_size": 3}, "not of one group"),
            ({"rank": 1, "local_rank": 2, "world_size": 2}, "is local rank 1"),
        ):
            with pytest.raises(grpc.RpcError, match=why):
                Trainer(sidecars[0].socket, FakeModel(of_rank=9), lock=False, **options)  # type: ignore[arg-type]
        with pytest.raises(grpc.RpcError, match="rank 0 opens it for all"):
            group.trainers[1].open(layout=group.layout.data)
        with pytest.raises(grpc.RpcError, match="with the layout of all ranks"):
            group.trainers[0].open()
        shapes = {t.fqn: t.weights.shape for t in group.models[0].tables}
        gap = Layout.of(2, shapes, {0: [group.models[0].tables[0].box]})
        with pytest.raises(grpc.RpcError, match="no rank holds"):
            group.trainers[0].open(layout=gap.data)
        group.open()
        group.train()
        group.save_and_commit()
        group.close()
