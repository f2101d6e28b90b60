"""kill -9 of the sidecar at every named instant, and of its trainer at every stage of a snapshot or restore.

After each: the newest committed checkpoint restores and equals its snapshot by content; every live checkpoint reads
back whole and equals its snapshot; the next save succeeds. The interrupted snapshot is committed exactly if its log entry
was written before the kill.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.whole_run import removal

from tests.support.checkpoint.snapshot import read_checkpoint
from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel, assert_stored, same
from tests.support.fake_trainer import SaveStreamFailed, Trainer, lock_is_free
from tests.support.sidecar_process import SidecarProcess, sidecar

States = dict[tuple[int, int], list[np.ndarray]]

# Crash points of a save, and whether the interrupted snapshot is committed afterwards.
BEFORE_ENTRY = [
    "stage.granted", "stage.batch_received", "stage.batch_received:3", "encode.first", "encode.first:2",
    "stage.sealed", "pack.before_put", "pack.during_put", "pack.after_put", "index.before_put", "index.after_put",
    "commit.after_list", "commit.before_log_put",
]  # fmt: skip
AFTER_ENTRY = ["commit.after_log_put", "ack.before_send", "ack.after_send"]
SAVE_POINTS = {**dict.fromkeys(BEFORE_ENTRY, False), **dict.fromkeys(AFTER_ENTRY, True)}


class KillScenario:
    """A run with one committed baseline and one committed delta, and the record of every snapshot's content."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"file://{root}/store"
        self.states: States = {}
        self.model = FakeModel()

    def sidecar(self, **flags: object) -> SidecarProcess:
        return SidecarProcess(self.root, self.url, encoding="fp32", **flags)  # type: ignore[arg-type]

    def take_snapshot(self, trainer: Trainer) -> int:
        self.model.train()
        self.states[trainer.attempt, trainer.snapshot_id + 1] = self.model.state()
        return trainer.save()

    def newest(self) -> tuple[int, int] | None:
        state = RunLog(open_store(self.url), "run").refresh()
        newest = state.newest()
        return None if newest is None else (newest.attempt, newest.snapshot_id)

    def check(self) -> None:
        """Check that every live checkpoint, read directly from the store, equals its snapshot."""
        store = open_store(self.url)
        state = RunLog(store, "run").refresh()
        assert state.stopped is None
        for seq, entry in state.checkpoints.items():
            try:
                snapshot = read_checkpoint(store, "run", f"seq:{seq}", state=state)
            except InvalidCheckpoint:
                # A sidecar that does housekeeping without grace retires and deletes during this read.
                assert seq not in RunLog(store, "run").refresh().checkpoints
                continue
            assert_stored(snapshot, self.states[entry.attempt, entry.snapshot_id])

    def assert_recovers(self, process: SidecarProcess) -> None:
        expected = self.newest()
        self.check()
        trainer = Trainer(process.socket, self.model)
        opened = trainer.open()
        if expected is None:
            assert not opened.HasField("resume_seq")
        else:
            assert (opened.resume_attempt, opened.snapshot_id) == expected
            trainer.assert_restores(opened.resume_seq, self.states[expected])
        commit = trainer.committed(self.take_snapshot(trainer))
        self.model.wipe()
        trainer.restore(commit.seq)
        assert same(self.model.state(), self.states[trainer.attempt, commit.snapshot_id])
        self.check()
        trainer.close()

    def assert_recovers_after_kill(self, process: SidecarProcess, trainer: Trainer, **flags: object) -> None:
        assert_killed(process)
        trainer.close()
        with sidecar(self.root, self.url, encoding="fp32", **flags) as again:
            self.assert_recovers(again)

    def save_until_killed(self, process: SidecarProcess, trainer: Trainer, count: int = 6) -> None:
        """Save until the kill: a slow machine may do its housekeeping only after the last save."""
        with pytest.raises((SaveStreamFailed, grpc.RpcError)):  # noqa: PT012 - whichever notices first
            for _ in range(count):
                trainer.committed(self.take_snapshot(trainer))
                if any(event["event"] == "save.content_overridden" for event in process.events()):
                    break  # more snapshots, while a slow machine compacts, would end with a full one
            eventually(lambda: process.poll() is not None)
            raise SaveStreamFailed("gone", "killed between saves")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> KillScenario:
    """A run with a baseline and a delta; tests use copies."""
    scenario = KillScenario(tmp_path_factory.mktemp("prepared"))
    with sidecar(scenario.root, scenario.url, encoding="fp32") as process:
        trainer = Trainer(process.socket, scenario.model)
        trainer.open()
        for _ in range(2):
            trainer.committed(scenario.take_snapshot(trainer))
        trainer.close()
        assert process.terminate() == 0
    return scenario


@pytest.fixture
def scenario(prepared: KillScenario, tmp_path: Path) -> KillScenario:
    """A copy of the prepared run, at the same model."""
    shutil.copytree(prepared.root / "store", tmp_path / "store")
    shutil.copytree(prepared.root / "cache", tmp_path / "cache")
    copy = KillScenario(tmp_path)
    copy.states = dict(prepared.states)
    return copy


def assert_killed(process: SidecarProcess) -> None:
    assert process.wait_exit() == -signal.SIGKILL, process.log()[-2000:]


@pytest.mark.parametrize(("point", "committed"), SAVE_POINTS.items(), ids=list(SAVE_POINTS))
def test_sidecar_killed_during_a_save(scenario: KillScenario, point: str, committed: bool) -> None:
    """The kill happens at every instant from the first grant to the acknowledgement."""
    before = scenario.newest()
    process = scenario.sidecar(crash_at=point)
    trainer = Trainer(process.socket, scenario.model)
    opened = trainer.open()
    trainer.restore(opened.resume_seq)
    with pytest.raises((SaveStreamFailed, grpc.RpcError)):  # noqa: PT012 - whichever notices first
        trainer.committed(scenario.take_snapshot(trainer))
        # The acknowledgement itself arrived, so only the end of the sidecar is visible.
        assert point == "ack.after_send"
        raise SaveStreamFailed("gone", "acknowledged, then killed")
    assert_killed(process)
    assert scenario.newest() == ((trainer.attempt, 1) if committed else before)
    scenario.assert_recovers_after_kill(process, trainer)


def test_sidecar_killed_while_snapshot_waits_for_blocks(tmp_path: Path) -> None:
    """The sidecar encodes while the trainer copies, so the trainer waits for a block of a killed process."""
    scenario = KillScenario(tmp_path)
    scenario.model = FakeModel(rows=100_000, columns=32)
    process = scenario.sidecar(crash_at="encode.first:2", arena_bytes="32MiB")
    trainer = Trainer(process.socket, scenario.model)
    trainer.open()
    with pytest.raises((SaveStreamFailed, grpc.RpcError)):
        scenario.take_snapshot(trainer)
    assert_killed(process)
    assert scenario.newest() is None
    scenario.assert_recovers_after_kill(process, trainer, arena_bytes="32MiB")


@pytest.mark.parametrize("point", ["stage.batch_received", "index.after_put", "commit.after_log_put"])
def test_trainer_survives_killed_sidecar(scenario: KillScenario, point: str) -> None:
    process = scenario.sidecar(crash_at=point)
    trainer = Trainer(process.socket, scenario.model)
    opened = trainer.open()
    trainer.restore(opened.resume_seq)
    epoch = trainer.reply.epoch
    with pytest.raises((SaveStreamFailed, grpc.RpcError)):
        trainer.committed(scenario.take_snapshot(trainer))
    assert_killed(process)
    with sidecar(scenario.root, scenario.url, encoding="fp32"):
        reply = trainer.attach()
        assert reply.epoch != epoch
        known = reply.last_commit.snapshot_id if reply.HasField("last_commit") else 0
        assert known == (1 if point == "commit.after_log_put" else 0)
        commit = trainer.committed(scenario.take_snapshot(trainer))
        scenario.check()
        assert commit.attempt == trainer.attempt
        trainer.assert_restores(commit.seq, scenario.states[commit.attempt, commit.snapshot_id])
    trainer.close()


COPY_POINTS = [
    "pack.during_put", "index.after_put", "cp.after_data", "cp.after_hint", "cp.after_first_entry",
    "cp.before_last_entry", "cp.after_last_entry", "attempt.before_open", "attempt.after_open",
]  # fmt: skip


@pytest.mark.parametrize("point", COPY_POINTS)
def test_sidecar_killed_during_warm_start(scenario: KillScenario, point: str) -> None:
    """The run starts with the copied checkpoint, never at step 0, although the source run has continued meanwhile."""
    newest = scenario.newest()
    assert newest is not None
    names = {"run": "warm", "restore_from": "run", "owner": "warm"}
    process = scenario.sidecar(crash_at=point, **names)
    trainer = Trainer(process.socket, FakeModel())
    with pytest.raises(grpc.RpcError):
        trainer.open()
    assert_killed(process)
    trainer.close()
    copied = point not in {"pack.during_put", "index.after_put", "cp.after_data", "cp.after_hint"}
    with sidecar(scenario.root, scenario.url, encoding="fp32") as source:
        trainer = Trainer(source.socket, scenario.model)
        trainer.restore(trainer.open().resume_seq)
        trainer.committed(scenario.take_snapshot(trainer))
        scenario.check()
        trainer.close()
    if not copied:
        newest = scenario.newest()
        assert newest is not None
    process = scenario.sidecar(**names)
    for again in range(2):
        trainer = Trainer(process.socket, FakeModel())
        opened = trainer.open()
        assert opened.resume_seq == 2
        trainer.restore(opened.resume_seq)
        assert same(trainer.model.state(), scenario.states[newest])
        if again:
            trainer.committed(trainer.save())
        trainer.close()
    assert process.terminate() == 0
    assert process.log().count("restore_from.ignored") == (point in COPY_POINTS[-3:])


def test_missing_copy_source_is_reported_with_fix(scenario: KillScenario) -> None:
    """A run with a truncated log cannot continue with another checkpoint, and does not start at step 0."""
    names = {"run": "warm", "restore_from": "run", "owner": "warm"}
    process = scenario.sidecar(crash_at="cp.after_first_entry", **names)
    trainer = Trainer(process.socket, FakeModel())
    with pytest.raises(grpc.RpcError):
        trainer.open()
    assert_killed(process)
    trainer.close()
    shutil.rmtree(scenario.root / "store/run")
    other = KillScenario(scenario.root)
    with sidecar(scenario.root, scenario.url, encoding="fp32") as source:
        trainer = Trainer(source.socket, other.model)
        trainer.open()
        trainer.committed(other.take_snapshot(trainer))
        trainer.close()
    with sidecar(scenario.root, scenario.url, encoding="fp32", **names) as process:
        trainer = Trainer(process.socket, FakeModel())
        with pytest.raises(
            grpc.RpcError, match="an interrupted copy of the run's first checkpoint does not continue"
        ):
            trainer.open()
        removal.remove(RunLog(open_store(scenario.url), "warm"))
        trainer.restore(trainer.open().resume_seq)
        assert same(trainer.model.state(), other.model.state())
        trainer.close()


@pytest.mark.parametrize("point", ["attempt.before_genesis", "attempt.after_genesis"])
def test_sidecar_killed_during_run_creation(tmp_path: Path, point: str) -> None:
    """No commit exists: the next attempt starts from nothing, and saves."""
    scenario = KillScenario(tmp_path)
    process = scenario.sidecar(crash_at=point)
    trainer = Trainer(process.socket, scenario.model)
    with pytest.raises(grpc.RpcError):
        trainer.open()
    scenario.assert_recovers_after_kill(process, trainer)


@pytest.mark.parametrize(
    "point", ["attempt.before_open", "attempt.after_open", "restore.planned", "restore.first_filled"]
)
def test_sidecar_killed_during_trainer_restart(scenario: KillScenario, point: str) -> None:
    process = scenario.sidecar(crash_at=point)
    trainer = Trainer(process.socket, scenario.model)
    with pytest.raises((SaveStreamFailed, grpc.RpcError)):
        trainer.restore(trainer.open().resume_seq)
    scenario.assert_recovers_after_kill(process, trainer)


@pytest.mark.parametrize(
    "point", ["retire.before_put", "retire.after_put", "gc.during_delete", "gc.after_delete"]
)
def test_sidecar_killed_during_maintenance(scenario: KillScenario, point: str) -> None:
    """Retention and gc run after every commit without grace: after the kill every live object is whole."""
    flags = {"maintenance-interval-s": 0, "keep-last": 1, "gc-grace-s": 0, "differential": "full"}
    process = scenario.sidecar(crash_at=point, **flags)
    trainer = Trainer(process.socket, scenario.model)
    trainer.restore(trainer.open().resume_seq)
    scenario.save_until_killed(process, trainer)
    scenario.assert_recovers_after_kill(process, trainer, **flags)


@pytest.mark.parametrize("point", ["compact.after_packs", "compact.after_index", "compact.after_log_put"])
def test_sidecar_killed_during_compaction(scenario: KillScenario, point: str) -> None:
    """A long chain is compacted into one part: half a compaction has no effect, a complete one reads the same."""
    flags = {"maintenance-interval-s": 0, "compact-after": 2, "differential": "consecutive", "keep-last": 20}
    process = scenario.sidecar(crash_at=point, **flags)
    trainer = Trainer(process.socket, scenario.model, consecutive=True)
    trainer.restore(trainer.open().resume_seq)
    scenario.save_until_killed(process, trainer)
    assert_killed(process)
    compactions = RunLog(open_store(scenario.url), "run").refresh().compactions
    assert bool(compactions) == (point == "compact.after_log_put")
    scenario.assert_recovers_after_kill(process, trainer, **flags)


@pytest.mark.parametrize("point", ["after_packs", "after_index", "before_log_put", "after_log_put"])
def test_sidecar_killed_during_synthetic_baseline(scenario: KillScenario, point: str) -> None:
    """The interrupted snapshot covers a compaction that is pending or just done, and the trainer's next snapshot as well."""
    flags = {"maintenance-interval-s": 0, "keep-last": 20}
    process = scenario.sidecar(crash_at=f"compact.{point}", **flags)
    trainer = Trainer(process.socket, scenario.model, rebases=True)
    trainer.restore(trainer.open().resume_seq)
    scenario.save_until_killed(process, trainer, 12)
    assert_killed(process)
    state = RunLog(open_store(scenario.url), "run").refresh()
    (rebased,) = {
        event["covers"] for event in process.events() if event["event"] == "save.content_overridden"
    }
    assert (rebased in state.compactions) == (point == "after_log_put")
    assert any(rebased in entry.covered for entry in state.checkpoints.values())
    scenario.check()
    with sidecar(scenario.root, scenario.url, encoding="fp32", **flags):
        trainer.attach()
        commit = trainer.committed(scenario.take_snapshot(trainer))
        state = RunLog(open_store(scenario.url), "run").refresh()
        assert state.checkpoints[commit.seq].covered == (rebased,)
        made = lambda: rebased in RunLog(open_store(scenario.url), "run").refresh().compactions  # noqa: E731
        eventually(made, what="the pending compaction is done")
        scenario.check()
    scenario.assert_recovers_after_kill(process, trainer, **flags)


TRAINER = """
import os, signal, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, {tests!r})
from tests.support.fake_model import FakeModel
from tests.support.fake_trainer import Trainer

stage = sys.argv[2]
def kill_at(at):
    if stage == at:
        os.kill(os.getpid(), signal.SIGKILL)

model = FakeModel()
trainer = Trainer(Path(sys.argv[1]), model)
kill_at("attached")
opened = trainer.open()
kill_at("opened")
trainer.restore(opened.resume_seq, hold=lambda n: kill_at("restoring"))
kill_at("restored")
model.train()
snapshot = trainer.begin()
kill_at("begun")
snapshot.rows_of(0, None)
kill_at("first table")
snapshot.rows_of(1, None)
for name, data in model.blobs().items():
    snapshot.blob(name, data)
kill_at("before seal")
np.savez(sys.argv[3], *model.state())
snapshot.seal(full=True)
kill_at("staged")
trainer.committed(snapshot.number)
kill_at("committed")
"""
BEFORE_SEAL = ("attached", "opened", "restoring", "restored", "begun", "first table", "before seal")
STAGES = {**dict.fromkeys(BEFORE_SEAL, False), "staged": True, "committed": True}


@pytest.mark.parametrize(("stage", "commits"), STAGES.items(), ids=list(STAGES))
def test_trainer_killed(scenario: KillScenario, stage: str, commits: bool) -> None:
    """Before the seal no part of the snapshot is in the log; after it the sidecar finishes and commits alone."""
    before = scenario.newest()
    saved = scenario.root / "snapshot.npz"
    with sidecar(scenario.root, scenario.url, encoding="fp32") as process:
        code = TRAINER.format(tests=str(Path(__file__).parents[2]))
        child = subprocess.run(
            [sys.executable, "-c", code, str(process.socket), stage, str(saved)], capture_output=True, text=True,
            timeout=240, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert child.returncode == -signal.SIGKILL, child.stderr
        assert lock_is_free(process.dir / "arena", 0), "the lock of a killed process is free"
        if commits:
            eventually(lambda: scenario.newest() != before, what="the sidecar commits alone")
            newest = scenario.newest()
            assert newest is not None
            with np.load(saved) as arrays:
                scenario.states[newest] = [arrays[name] for name in arrays.files]
        scenario.assert_recovers(process)
        assert (scenario.newest() != before) or not commits
        events = [event["event"] for event in process.events()]
        assert "save.unexpected" not in events
        assert "restore.unexpected" not in events
