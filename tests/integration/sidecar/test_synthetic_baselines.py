"""Baselines by compaction instead of a snapshot, and baselines after an increase of bits, with a real sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltashard_checkpoint.log.chain import chain
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.vocabulary import PRECISION_KEY
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.checkpoint.snapshot import read_checkpoint
from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel, same
from tests.support.fake_trainer import Trainer
from tests.support.server.fleet_server import FleetServer
from tests.support.sidecar.training import pod
from tests.support.sidecar_process import SidecarProcess, sidecar

FLAGS: dict[str, Any] = {
    "encoding": "fp32", "differential": "intermittent", "maintenance-interval-s": 0, "keep-last": 20, "metrics-port": 0,
}  # fmt: skip


class TrackedTrainer:
    """A trainer that saves through a sidecar and records the expected state of every checkpoint."""

    def __init__(self, process: SidecarProcess, url: str, *, run: str = "run") -> None:
        self.process = process
        self.url, self.run = url, run
        self.trainer = Trainer(process.socket, FakeModel(), rebases=True)
        self.trainer.open()
        self.states: dict[int, list[np.ndarray]] = {}

    def state(self) -> RunState:
        return RunLog(open_store(self.url), self.run).refresh()

    def save(self, fraction: float = 0.3) -> pb.Commit:
        """Train, save, and wait until the maintenance round has compacted the checkpoints that the save builds on."""
        model = self.trainer.model
        model.train(fraction)
        commit = self.trainer.save_and_commit()
        self.states[commit.seq] = model.state()

        def compacted() -> bool:
            state = self.state()
            newest = state.newest()
            needed = [seq for seq in newest.covered if not state.checkpoints[seq].baseline]
            return all(seq in state.compactions for seq in needed)

        eventually(compacted, what="the compaction of the covered checkpoints")
        return commit

    def check(self) -> None:
        """Assert that all live checkpoints restore bit for bit, and the newest also through the sidecar."""
        state = self.state()
        for seq in state.checkpoints:
            snapshot = read_checkpoint(open_store(self.url), self.run, f"seq:{seq}", state=state)
            for i, name in enumerate(("big.weight", "small.weight")):
                table = snapshot.tables[name]
                got = [table.weights, table.fields["sum"], table.fields["exp_avg"]]
                assert same(got, self.states[seq][2 + 3 * i : 5 + 3 * i])
        newest = max(state.checkpoints)
        self.trainer.model.wipe()
        self.trainer.restore(newest)
        assert same(self.trainer.model.state(), self.states[newest])

    def decided(self) -> list[str]:
        return [
            str(event["why"])
            for event in self.process.events()
            if event["event"] == "save.content_overridden"
        ]


def test_compaction_makes_baselines_after_first_snapshot(tmp_path: Path, url: str) -> None:
    with sidecar(tmp_path, url, **FLAGS) as process:
        tracked = TrackedTrainer(process, url)
        commits = [tracked.save() for _ in range(14)]
        assert [commit.baseline for commit in commits] == [True] + [False] * 13
        state = tracked.state()
        assert len(state.compactions) >= 2
        assert len({link.seq for link in chain(state, commits[-1].seq)}) == 2
        assert all(why.startswith("synthetic baseline: ") for why in tracked.decided())
        covered = [state.checkpoints[commit.seq].covered for commit in commits[1:]]
        assert len(set(covered)) == 1 + len(tracked.decided())
        line = f'deltashard_compactions_total{{why="deferred"}} {len(state.compactions)}.0'
        eventually(lambda: line in process.metrics_page(), what=line)
        tracked.check()
        # It reads them through the compaction and continues from there.
        rows = tracked.save(0.02).rows
        assert rows < 340 * 0.8
        tracked.check()
        tracked.trainer.close()


def test_snapshots_are_full_without_synthetic_baselines(tmp_path: Path, url: str) -> None:
    with sidecar(tmp_path, url, **{**FLAGS, "synthetic-baselines": "no"}) as process:
        tracked = TrackedTrainer(process, url)
        assert sum(tracked.save().baseline for _ in range(7)) == 2
        assert not tracked.state().compactions
        assert not tracked.decided()
        tracked.check()
        tracked.trainer.close()


def test_raised_bits_make_next_snapshot_a_baseline(tmp_path: Path, url: str, server: FleetServer) -> None:
    """A directive raises the bits from 2 to 8. The restored state equals that of a run with 8 bits."""
    flags = {**FLAGS, **server.flags(tmp_path), **pod(), "encoding": "q2"}
    with sidecar(tmp_path, url, **flags) as process:
        tracked = TrackedTrainer(process, url, run="ns/job")
        tracked.save()
        coarse = tracked.save(0.1)
        precision = tracked.state().checkpoints[coarse.seq].metadata[PRECISION_KEY]
        assert precision == '{"state":"fp32","weights":{"*":"q2"}}'
        server.set_reply(directive=fleet.Directive(id=1, policy=pb.Policy(encoding="q8")))
        eventually(lambda: server.last.pod.directive == 1, what="the directive is in force")
        raised = tracked.save(0.1)
        assert raised.baseline
        entry = tracked.state().checkpoints[raised.seq]
        assert "baseline (bits raised: q2 to q8)" in entry.directive
        assert tracked.decided() == ["bits raised: q2 to q8"]
        delta = tracked.save(0.1)
        assert not delta.baseline
        assert entry.metadata[PRECISION_KEY] == '{"state":"fp32","weights":{"*":"q8"}}'
        tracked.trainer.close()


@pytest.mark.parametrize(("differential", "baseline"), [("one-shot", False), ("consecutive", True)])
def test_bits_lowered_and_raised_again(tmp_path: Path, url: str, differential: str, baseline: bool) -> None:
    """A delta over the fine baseline contains all coarse rows. A delta over the coarse delta would omit them."""
    stored = []
    for encoding in ("q8", "q2", "q8"):
        with sidecar(
            tmp_path, url, **{**FLAGS, "encoding": encoding, "differential": differential}
        ) as process:
            trainer = Trainer(process.socket, FakeModel(), rebases=True)
            if (opened := trainer.open()).HasField("resume_seq"):
                trainer.restore(opened.resume_seq)
            trainer.model.train(0.1)
            commit = trainer.save_and_commit()
            entry = RunLog(open_store(url), "run").refresh().checkpoints[commit.seq]
            stored.append((commit.baseline, entry.metadata[PRECISION_KEY].split('"')[-2]))
            trainer.close()
    assert stored == [(True, "q8"), (False, "q2"), (baseline, "q8")]
