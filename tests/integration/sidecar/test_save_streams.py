"""Save and restore streams of a real sidecar process: descriptors, blocks, seals, aborts, and the timer."""

from __future__ import annotations

import queue
import re
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from deltashard_checkpoint.format.layout import Layout
from deltashard_proto.arena_layout import NEVER, SAVE_AT_STEP, URGENT
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel
from tests.support.fake_trainer import SaveStreamFailed, Trainer
from tests.support.sidecar.training import training
from tests.support.sidecar_process import SidecarProcess, sidecar

# Streams and messages of a save.


@pytest.mark.parametrize("inner", ["abort", "batch"])
def test_invalid_message_mix_fails_its_save_only(trainer: Trainer, inner: str) -> None:
    """A message that is neither descriptor nor seal invalidates its save. The next save commits."""
    snapshot = trainer.begin(defer_descriptors=True)
    request = pb.SaveRequest()
    getattr(request, inner).SetInParent()
    snapshot.send(request)
    snapshot.write_all()
    with pytest.raises(SaveStreamFailed) as refused:
        snapshot.seal()
    assert refused.value.cause == "invalid"
    trainer.save_and_commit()


def test_unused_stream_does_not_block_saves(process: SidecarProcess, trainer: Trainer) -> None:
    """The stream is open for a save that never starts. Other streams save, and detaching closes it."""
    outbox: queue.SimpleQueue[pb.SaveRequest | None] = queue.SimpleQueue()
    outbox.put(pb.SaveRequest(ready=pb.SaveRequest.Ready(session=trainer.reply.session)))
    idle = trainer.stub.Save(iter(outbox.get, None))
    trainer.save_and_commit()
    assert process.blocks("quarantined") == 0
    trainer.detach()
    with pytest.raises(grpc.RpcError) as ended:
        next(idle)
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    outbox.put(None)


def test_saves_restore_exactly(trainer: Trainer) -> None:
    """The saves are a baseline, deltas, and a new baseline when the predictor requires it."""
    kinds = []
    for _ in range(6):
        trainer.model.train(0.3)
        state = trainer.model.state()
        commit = trainer.save_and_commit()
        kinds.append(commit.baseline)
        trainer.assert_restores(commit.seq, state)
        assert max(len(batch) for batch in trainer.batches_read) > 1, (
            "frames of one range come in one message"
        )
        frames = [each for batch in trainer.batches_read for each in batch]
        assert len(set(frames)) == len(frames)
    assert kinds[0]
    assert not kinds[1]
    assert any(kinds[2:])


def test_snapshot_larger_than_arena(tmp_path: Path, url: str) -> None:
    """The encoder sets the pace: blocks are released as their batches are encoded."""
    with sidecar(tmp_path, url, encoding="q8", arena_bytes="32MiB", metrics_port=0) as process:
        trainer = Trainer(process.socket, FakeModel(rows=300_000, columns=32))
        trainer.open()
        snapshot = trainer.begin()
        assert snapshot.begun.stall_budget_s == 0, "a snapshot larger than the arena has no stall budget"
        snapshot.write_all()
        snapshot.seal()
        assert snapshot.blocks_used * 8 > 64
        commit = trainer.committed(snapshot.number)
        assert commit.raw_bytes > 64 << 20
        assert process.blocks("free") == 4
        weights = trainer.model.tables[0].weights.copy()
        sums = trainer.model.tables[0].sums.copy()
        trainer.model.wipe()
        done = trainer.restore(commit.seq)
        assert done.store_bytes == 0
        assert np.abs(trainer.model.tables[0].weights - weights).max() < 0.05
        assert np.array_equal(trainer.model.tables[0].sums, sums)
        trainer.close()


def test_aborted_save_frees_blocks_at_once(process: SidecarProcess, trainer: Trainer) -> None:
    """The trainer's abort confirms that it no longer writes. Two aborts count as a stall, and the next save waits."""
    for _ in range(2):
        snapshot = trainer.begin()
        assert snapshot.begun.stall_budget_s > 0
        snapshot.rows_of(0, None)
        snapshot.abort("stall_budget")
        assert snapshot.end.failed.cause == "stall_budget"
    eventually(lambda: process.blocks("free") == 8)
    snapshot = trainer.begin()
    assert snapshot.begun.stall_budget_s == 0
    snapshot.write_all()
    snapshot.seal()
    trainer.committed(snapshot.number)
    assert process.metric('deltashard_save_failures_total{cause="stall_budget"}') == 2
    again = trainer.begin()
    assert again.begun.stall_budget_s > 0
    again.abort()


def test_blocks_of_a_broken_stream_are_quarantined(process: SidecarProcess, trainer: Trainer) -> None:
    """A live trainer may still write to the blocks, so they are not granted until it begins another save."""
    snapshot = trainer.begin()
    snapshot.rows_of(0, None)
    snapshot.disconnect()
    eventually(lambda: process.blocks("quarantined") > 0)
    held = process.blocks("quarantined")
    with pytest.raises(AssertionError, match="not within"):
        eventually(lambda: process.blocks("quarantined") < held, within_s=0.5)
    state = trainer.model.state()
    commit = trainer.save_and_commit()
    assert process.blocks("quarantined") == 0
    trainer.assert_restores(commit.seq, state)


class Prepared:
    """A Save stream that holds blocks before its save begins."""

    def __init__(self, trainer: Trainer) -> None:
        self.outbox: queue.SimpleQueue[pb.SaveRequest | None] = queue.SimpleQueue()
        self.call = trainer.stub.Save(iter(self.outbox.get, None), timeout=60)
        self.begin = pb.SaveRequest.Begin(
            session=trainer.reply.session, snapshot_id=trainer.snapshot_id + 1, reason="ahead"
        )
        self.outbox.put(pb.SaveRequest(ready=pb.SaveRequest.Ready(session=trainer.reply.session)))
        self.outbox.put(pb.SaveRequest(prepare=pb.SaveRequest.Prepare(begin=self.begin)))
        self.answer = next(self.call).prepared
        self.granted = [] if self.answer.refused else list(next(self.call).blocks.granted)

    def abort(self) -> None:
        self.outbox.put(pb.SaveRequest(abort=pb.SaveRequest.Abort(cause="no snapshot")))
        self.outbox.put(None)


def test_precopy_blocks_are_freed_on_abort_or_quarantined(process: SidecarProcess, trainer: Trainer) -> None:
    """The trainer may still copy into them until it begins another save or another copy."""
    for _ in range(2):
        prepared = Prepared(trainer)
        prepared.call.cancel()
        eventually(lambda: process.blocks("quarantined") > 0 == process.blocks("granted"))
    again = Prepared(trainer)
    assert len(again.granted) == len(prepared.granted) == process.blocks("granted")
    assert process.blocks("quarantined") == 0
    again.abort()
    assert list(again.call) == []
    eventually(lambda: process.blocks("granted") == 0)
    trainer.save_and_commit()


def test_blocks_of_older_epoch_wait_for_writer(tmp_path: Path, url: str) -> None:
    """A restarted sidecar grants no blocks while an earlier writer holds its lock and has not attached again."""
    first = SidecarProcess(tmp_path, url, encoding="fp32", metrics_port=0)
    trainer = Trainer(first.socket, FakeModel(), world_size=2)
    boxes = [table.box for table in trainer.model.tables]
    layout = Layout.of(2, {b.table: (b.row_stop, b.col_stop) for b in boxes}, {0: boxes})
    trainer.layout = trainer.open(layout=layout.data).layout
    trainer.begin().rows_of(0, None)
    first.kill()
    with sidecar(tmp_path, url, encoding="fp32", metrics_port=0) as second:
        other = Trainer(
            second.socket, FakeModel(), rank=1, world_size=2, attempt=trainer.attempt, layout=layout.digest
        )
        snapshot = other.begin()
        assert snapshot.granted.empty(), "rank 0 still holds its lock from the older epoch"
        trainer.attach()
        eventually(lambda: not snapshot.granted.empty(), what="blocks after rank 0 attached again")
        snapshot.abort()
        other.close()
        trainer.close()


def test_bad_descriptors_fail_their_save_only(process: SidecarProcess, trainer: Trainer) -> None:
    """Every number of a descriptor is validated before it becomes an address."""
    good = {"table": 0, "rows": 10, "contiguous": True, "col_start": 0, "col_stop": 8}
    for bad in (
        {"block": 99}, {"rows": 1 << 62}, {"contiguous": False},
    ):  # fmt: skip
        snapshot = trainer.begin()
        block = snapshot.granted.get(timeout=60)
        message = {**good, "block": block, **bad}
        snapshot.outbox.put(pb.SaveRequest(rows=pb.RowBatch(**message)))
        if bad == {"contiguous": False}:  # ids [0, 0, ...] are not ascending: the encoder detects it
            trainer.arena.block(block)[:80] = bytes(80)
            snapshot.outbox.put(pb.SaveRequest(seal=pb.SaveRequest.Seal(rows=10)))
        eventually(lambda c=snapshot: c.end is not None)
        snapshot.outbox.put(None)
        if bad != {"contiguous": False}:
            assert snapshot.end.failed.cause == "invalid"
        else:
            eventually(
                lambda c=snapshot: c.number in trainer.failures or c.end.WhichOneof("kind") == "failed"
            )
        assert snapshot.over.wait(60)
    trainer.save_and_commit()
    assert process.poll() is None


def test_missing_rows_fail_save(trainer: Trainer) -> None:
    """The seal has the number of sent rows. A save with another number is never committed."""
    snapshot = trainer.begin()
    snapshot.write_all()
    snapshot.rows += 1
    snapshot.seal()
    with pytest.raises(SaveStreamFailed, match="341 rows were sealed, 340 arrived"):
        trainer.committed(snapshot.number)


def test_unresponsive_trainer_save_is_aborted(tmp_path: Path, url: str) -> None:
    """A hung trainer must not hold the arena without limit."""
    with training(tmp_path, url, encoding="fp32", stream_idle_s=4) as (_, trainer):
        snapshot = trainer.begin()
        assert snapshot.over.wait(60)
        assert snapshot.end.failed.cause == "deadline"
        trainer.save_and_commit()


def test_urgent_save_replaces_save_in_flight(trainer: Trainer, process: SidecarProcess) -> None:
    """A normal second save is refused as busy. An urgent one replaces a save that stages."""
    first = trainer.begin(reason="timer")
    with pytest.raises(SaveStreamFailed, match="busy"):
        trainer.begin()
    assert process.metric("deltashard_saves_skipped_total") == 1
    line = trainer.arena.line(0)  # the state is urgent from the preStop hook's call until a save begins
    assert trainer.stub.Notify(pb.NotifyRequest(reason="eviction", deadline_s=9)).trainers == 1
    eventually(lambda: line[URGENT] == 1 and line[SAVE_AT_STEP] <= trainer.model.step)
    eventually(lambda: trainer.urgent)
    assert (trainer.urgent[0].reason, trainer.urgent[0].urgent) == ("eviction", True)
    urgent = trainer.begin(reason="eviction", urgent=True)
    assert first.over.wait(60)
    assert first.end.failed.cause == "superseded"
    urgent.write_all()
    urgent.seal()
    assert trainer.committed(urgent.number).baseline
    eventually(lambda: line[URGENT] == 0 and line[SAVE_AT_STEP] == NEVER)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fd_and_memory_do_not_grow(tmp_path: Path, url: str) -> None:
    """Over 200 saves the number of descriptors is constant, and memory grows by less than 256 MiB beyond the arena."""
    with sidecar(tmp_path, url, encoding="q8", metrics_port=0) as process:
        trainer = Trainer(process.socket, FakeModel(rows=50))
        trainer.open()
        me = psutil.Process(process.pid)
        counts = 0, 0
        for i in range(200):
            trainer.model.train()
            try:
                trainer.save_and_commit()
            except (
                SaveStreamFailed
            ) as refused:  # the previous stream is still closing: on a busy machine a save is skipped
                assert refused.cause == "busy"  # noqa: PT017
            if i == 99:
                counts = me.num_fds(), me.num_threads()
        # The threads of the last streams may still run.
        eventually(lambda: me.num_fds() <= counts[0] + 2, what=f"no more descriptors than {counts}")
        eventually(lambda: me.num_threads() <= counts[1] + 4, what=f"no more threads than {counts}")
        status = Path(f"/proc/{process.pid}/status").read_text()
        anonymous = int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])  # type: ignore[index]
        assert anonymous < 256 << 10, status
        trainer.close()
