"""A training loop with a real child sidecar on file://: saves, restores, and no effect of faults on training."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import deltashard
import numpy as np
import pytest
import torch
from deltashard.errors import CheckpointMismatch, SaveFailed, UserError, WaitError
from deltashard_checkpoint.format import frame_encoder
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance.compaction import compactable
from deltashard_checkpoint.restore.frame_applier import FrameApplier, TableTarget
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.vocabulary import ENCODINGS

from tests.support.checkpointers import MakeCheckpointer, checkpointers, simulate_crash
from tests.support.eventually import eventually
from tests.support.trainer.toy_loop import ToyLoop

# torch's own optimizers build sparse tensors without an explicit invariant check setting.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
ROWS, DIM = 300, 16


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCheckpointer]:
    with checkpointers(tmp_path, monkeypatch, encoding="fp32", keep_last=100) as build:
        yield build


def resumed(
    make: MakeCheckpointer, loop: ToyLoop, *, step: int, **options: object
) -> deltashard.Checkpointer:
    """Yield a Checkpointer that has restored this step into `loop`."""
    ckpt = make(loop, **options)
    restored = ckpt.restore()
    assert restored.step == step
    return ckpt


@pytest.mark.parametrize("encoding", ["q8", "q4", "q3", "q2"])
def test_restored_state_is_decode_encode_of_snapshot(make: MakeCheckpointer, encoding: str) -> None:
    """Each row's weights pass through the codec, and its row-wise state is exact."""
    loop = ToyLoop()
    ckpt = make(loop, encoding=encoding, content_hash=True)
    assert ckpt.restore() is None
    loop.train(5, ckpt)
    weights, sums = loop.table()
    commit = ckpt.save("user", metadata={"loss": 0.5}).wait(120)
    assert (commit.step, commit.baseline, commit.rows) == (5, True, ROWS)
    ckpt.close()
    assert ckpt.stats.snapshots == 1, "the last step was durable already"

    schema = TableSchema(fqn="items.weight", rows=ROWS, columns=DIM, dtype="float32")
    block = RowBlock.of_whole_rows(schema, range(ROWS), weights.numpy(), {})
    frame = frame_encoder.encode_rows(block, EncodeOptions(encoding=ENCODINGS[encoding]), step=5)
    wanted = np.zeros((ROWS, DIM), np.float32)
    box = Box(table="items.weight", row_start=0, row_stop=ROWS, col_start=0, col_stop=DIM)
    FrameApplier([TableTarget(schema=schema, box=box, weights=wanted)]).apply(frame.data)

    again = ToyLoop(seed=1)
    restored = make(again, encoding=encoding, content_hash=True).restore()
    assert (restored.step, restored.seq, restored.verified, restored.source) == (5, commit.seq, True, "cache")
    found, found_sums = again.table()
    assert np.array_equal(found.numpy(), wanted)
    assert torch.equal(found_sums, sums)
    assert all(map(torch.equal, again.net.top.parameters(), loop.net.top.parameters()))


def test_trainer_on_synthetic_baselines_resumes_exactly(make: MakeCheckpointer, tmp_path: Path) -> None:
    """The trainer's marks count from compacted checkpoints. Each resume and the training after it are exact."""
    store = open_store(f"file://{tmp_path / 'store'}")

    def log() -> RunLog:
        read = RunLog(store, "r")
        read.refresh()
        return read

    for process in range(3):
        loop = ToyLoop(seed=process)
        ckpt = make(loop, content_hash=True, sidecar={"maintenance_interval_s": 0})
        restored = ckpt.restore()
        assert (restored is None) == (process == 0)
        assert restored is None or restored.verified
        made = len(log().state.compactions)
        for _ in range(40):
            loop.train(1, ckpt)
            commit = ckpt.save().wait(120)
            # More saves, while a slow machine compacts this save's base, would end with a full one.
            for seq in log().state.checkpoints[commit.seq].covered:
                eventually(lambda seq=seq: not compactable(log().state, seq), what="the pending compaction")
            if len(log().state.compactions) > made + 1:
                break
        else:
            pytest.fail("no baseline was made by compaction")
        ckpt.close()
        again = ToyLoop(seed=9)
        resumed(make, again, step=ckpt.steps, content_hash=True).close()
        assert all(map(torch.equal, again.table(), loop.table()))


def test_forked_children_do_not_affect_run(make: MakeCheckpointer) -> None:
    """Loader workers run during saves. A child may leave the block and close, and gets an error when it saves."""
    loop = ToyLoop()
    ckpt = make(loop, every_steps=1)
    ckpt.restore()
    data = torch.utils.data.TensorDataset(torch.randint(ROWS, (24, 4)))
    loader = ckpt.wrap(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=2))
    for _ in range(4):
        for (x,) in loader:
            loop.net(x).sum().backward()
            for optimizer in loop.optimizer:
                optimizer.step()
            ckpt.step()
    handle = ckpt.save()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with ckpt:
                ckpt.step()
                with pytest.raises(UserError, match="forked child"):
                    ckpt.save()
            ckpt.close()
            simulate_crash(ckpt)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert handle.wait(120).step == 12
    loop.train(2, ckpt)
    ckpt.close()
    assert ckpt.stats.failures == {}
    assert ckpt.stats.last_commit.step == 14


def test_exception_and_torn_step_are_never_saved(make: MakeCheckpointer) -> None:
    """The interrupted step must not become the newest checkpoint: parameters changed after the last step()."""
    loop = ToyLoop()
    with pytest.raises(ZeroDivisionError), make(loop) as ckpt:  # noqa: PT012 - the block is what is tested
        ckpt.restore()
        loop.train(4, ckpt)
        ckpt.save().wait(120)
        loop.train(2, ckpt)
        loop.train(1)
        raise ZeroDivisionError
    ckpt = make(loop)
    restored = ckpt.restore()
    assert (restored.step, restored.lost_steps) == (4, 2)
    loop.train(1, ckpt)
    with pytest.raises(UserError, match="before the loop"):
        ckpt.restore()
    loop.train(1)
    handle = ckpt.save()
    with pytest.raises(WaitError):  # this thread would have to save at its next step()
        handle.wait(5)
    with pytest.raises(SaveFailed, match="boundary is gone"):
        ckpt.close(deadline_s=60)


def test_gradient_accumulation_waits_for_the_next_optimizer_step(make: MakeCheckpointer) -> None:
    """A due save between two optimizer steps would lose the gradients accumulated so far."""
    loop = ToyLoop()
    snapshots: list[int] = []
    ckpt = make(
        loop, on_event=lambda name, facts: snapshots.append(facts["step"]) if name == "snapshot" else None
    )
    ckpt.restore()
    loop.train(1, ckpt)
    for micro in range(1, 9):
        if micro == 1:
            handle = ckpt.save("asked where step() left the program")
            assert snapshots == [1]
            handle.wait(120)
        loop.net(torch.randint(ROWS, (8, 4))).sum().backward()
        if micro == 1:
            assert ckpt.save("asked in the middle of an iteration").snapshot_id is None
        if micro % 4 == 0:
            for optimizer in loop.optimizer:
                optimizer.step()
                optimizer.zero_grad()
        ckpt.step()
        if micro == 2:
            asked = ckpt.save("in the middle of accumulation")
            assert asked.snapshot_id is None
        assert snapshots == ([1] if micro < 4 else [1, 5])
    assert asked.wait(120).step == 5


def test_sigterm_saves_then_calls_the_previous_handler(make: MakeCheckpointer) -> None:
    """The save happens at the next step. The previous handler runs only after its commit."""
    called: list[int | None] = []
    loop = ToyLoop()
    previous = signal.signal(signal.SIGTERM, lambda *_: called.append(committed()))

    def committed() -> int | None:
        return ckpt.stats.last_commit.step if ckpt.stats.last_commit else None

    try:
        ckpt = make(loop, grace_s=120.0)
        ckpt.restore()
        loop.train(2, ckpt)
        signal.raise_signal(signal.SIGTERM)
        assert called == []
        loop.train(1, ckpt)
        assert called == [3]
        ckpt.close()
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_pins_seqs_and_steps_can_be_restored(make: MakeCheckpointer) -> None:
    """Two pins of one snapshot from independent parts of a program are included. fresh=True starts a new run."""
    loop = ToyLoop()
    ckpt = make(loop)
    ckpt.restore()
    tables = {}
    seqs = {}
    for step in range(1, 5):
        loop.train(1)
        pins = ["best", "epoch-1"] if step == 2 else [None]
        handles = [ckpt.save(pin=pin, metadata={str(pin): step}) for pin in pins]
        ckpt.step()
        tables[step] = loop.table()
        (seqs[step],) = {handle.wait(120).seq for handle in handles}
    ckpt.close()
    for which, step in (("pin:best", 2), ("pin:epoch-1", 2), (seqs[3], 3), ("step:1", 1)):
        again = ToyLoop(seed=9)
        ckpt = make(again)
        restored = ckpt.restore(which=which)
        assert (restored.step, restored.seq) == (step, seqs[step])
        assert all(map(torch.equal, again.table(), tables[step]))
        simulate_crash(ckpt)
    other = ToyLoop(seed=2)
    with make(other, fresh=True) as ckpt:
        other.train(3, ckpt)
    assert ckpt.stats.last_commit.baseline
    resumed(make, again, step=3)
    assert torch.equal(again.weights, other.weights)


def test_warm_start_from_another_run(make: MakeCheckpointer) -> None:
    """The warm start reads that run, commits to the new run, and begins with a baseline."""
    loop = ToyLoop()
    with make(loop, run="first") as ckpt:
        loop.train(3, ckpt)
    again = ToyLoop(seed=1)
    with make(again, run="second") as ckpt:
        restored = ckpt.restore(from_run="first", weights_only=True)
        assert restored.step == 3
        assert [*map(torch.equal, again.table(), loop.table())] == [True, False]
        again.train(1, ckpt)
    assert (ckpt.stats.last_commit.baseline, ckpt.stats.last_commit.step) == (True, 1)


def test_grown_table_is_refused_or_reported(make: MakeCheckpointer) -> None:
    """With strict=False the prefix is restored, the rest keeps its values, and the next snapshot is full."""
    loop = ToyLoop()
    with make(loop) as ckpt:
        loop.train(3, ckpt)
    bigger = ToyLoop(seed=1, rows=ROWS + 50)
    tail = bigger.weights[ROWS:].clone()
    ckpt = make(bigger)
    with pytest.raises(CheckpointMismatch, match="grew"):
        ckpt.restore()
    restored = ckpt.restore(strict=False)
    assert any("grew" in note for note in restored.notes)
    assert torch.equal(bigger.weights[:ROWS], loop.weights)
    assert torch.equal(bigger.weights[ROWS:], tail)
    bigger.train(1, ckpt)
    assert ckpt.save().wait(120).baseline


def test_setting_unsupported_by_sidecar(make: MakeCheckpointer) -> None:
    """The setting came from an argument, and the message names it."""
    with pytest.raises(UserError, match=r"no setting 'nope' \[Checkpointer\(sidecar=\)\]"):
        make(ToyLoop(), sidecar={"nope": 1})
    with pytest.raises(UserError, match="keep_last is a separate argument"):
        make(ToyLoop(), keep_last=5, sidecar={"keep_last": 1})
