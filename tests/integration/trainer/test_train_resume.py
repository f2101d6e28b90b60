"""A training loop with a real child sidecar on file://: what is saved, what comes back, what never harms training."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltashard
import numpy as np
import pytest
import torch
from deltashard.errors import (
    CheckpointMismatch,
    FencedError,
    NotRestored,
    SaveFailed,
    StateError,
    UserError,
    WaitError,
)
from deltashard_checkpoint.format import frame_encoder
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance.compaction import compactable
from deltashard_checkpoint.restore.frame_applier import FrameApplier, TableTarget
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_checkpoint.write.attempt import open_attempt
from torch import nn

from tests.support.eventually import eventually

sys.path.insert(0, str(Path(__file__).parent))
from resuming import CASES

# torch's own optimizers build sparse tensors without saying whether to check them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

Make = Callable[..., deltashard.Checkpointer]
ROWS, DIM = 300, 16


class Net(nn.Module):
    """A table and a dense layer."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.items = nn.Embedding(rows, DIM, sparse=True)
        self.top = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.items(x).mean(1))


class Loop:
    """A model, its optimizers, and steps on fixed random data."""

    def __init__(self, seed: int = 0, rows: int = ROWS) -> None:
        torch.manual_seed(seed)
        self.net = Net(rows)
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adagrad([self.net.items.weight], lr=0.1),
            torch.optim.Adam(self.net.top.parameters(), lr=0.01),
        ]
        self.generator = torch.Generator().manual_seed(5)

    def train(self, steps: int = 1, ckpt: deltashard.Checkpointer | None = None) -> None:
        for _ in range(steps):
            x = torch.randint(ROWS, (8, 4), generator=self.generator)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.net(x).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
            if ckpt is not None:
                ckpt.step()

    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Clones of the table's weights and Adagrad sums."""
        weight = self.net.items.weight
        return weight.detach().clone(), self.optimizers[0].state[weight]["sum"].clone()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Builds Checkpointers of one store; whatever is still open is let go of at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    made: list[deltashard.Checkpointer] = []

    def build(loop: Loop, **options: Any) -> deltashard.Checkpointer:
        options = {"run": "r", "encoding": "fp32", "arena_bytes": 64 << 20, "grace_s": None} | options
        ckpt = deltashard.Checkpointer(loop.net, loop.optimizers, url=tmp_path / "store", **options)
        made.append(ckpt)
        return ckpt

    yield build
    for ckpt in made:
        with ckpt:
            ckpt.__exit__(KeyboardInterrupt, None, None)


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from flat(value, f"{path}/{i}")
    elif isinstance(tree, torch.Tensor) and tree.is_sparse:
        yield f"{path}/indices", tree._indices()
        yield f"{path}/values", tree._values()
    else:
        yield path, tree


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture(scope="module")
def resumed_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Every case of resuming.py: uninterrupted, killed, resumed."""
    work = tmp_path_factory.mktemp("resuming")
    environment = {**os.environ, "XDG_CACHE_HOME": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parent / "resuming.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(work), *CASES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    return work, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first one waits for all of the processes
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_equals_uninterrupted(case: str, resumed_runs: tuple[Path, str]) -> None:
    """Bit for bit: parameters, optimizer state and generators, with dropout and loader workers."""
    work, said = resumed_runs
    assert (work / f"{case}.resumed.pt").exists(), said
    plain = dict(flat(torch.load(work / f"{case}.plain.pt", weights_only=True)))
    resumed = dict(flat(torch.load(work / f"{case}.resumed.pt", weights_only=True)))
    assert plain.keys() == resumed.keys()
    assert [name for name in plain if not same(plain[name], resumed[name])] == []


@pytest.mark.parametrize("encoding", ["q8", "q4", "q3", "q2"])
def test_restored_state_is_decode_encode_of_the_cut(make: Make, encoding: str) -> None:
    """Row for row, weights through the codec and row-wise state exactly."""
    loop = Loop()
    ckpt = make(loop, encoding=encoding, content_hash=True)
    assert ckpt.restore() is None
    loop.train(5, ckpt)
    weights, sums = loop.table()
    commit = ckpt.save("user", metadata={"loss": 0.5}).wait(120)
    assert (commit.step, commit.baseline, commit.rows) == (5, True, ROWS)
    ckpt.close()

    schema = TableSchema(fqn="items.weight", rows=ROWS, columns=DIM, dtype="float32")
    frame = frame_encoder.encode_rows(
        RowBlock.of_whole_rows(schema, range(ROWS), weights.numpy(), {}),
        EncodeOptions(encoding=ENCODINGS[encoding]),
        step=5,
    )
    wanted = np.zeros((ROWS, DIM), np.float32)
    box = Box(table="items.weight", row_start=0, row_stop=ROWS, col_start=0, col_stop=DIM)
    FrameApplier([TableTarget(schema=schema, box=box, weights=wanted)]).apply(frame.data)

    again = Loop(seed=1)
    restored = make(again, encoding=encoding, content_hash=True).restore()
    assert restored is not None
    assert (restored.step, restored.seq, restored.verified, restored.source) == (5, commit.seq, True, "cache")
    found, found_sums = again.table()
    assert np.array_equal(found.numpy(), wanted)
    assert torch.equal(found_sums, sums)
    assert all(
        torch.equal(a, b) for a, b in zip(again.net.top.parameters(), loop.net.top.parameters(), strict=True)
    )


def test_tensors_mutated_right_after_the_cut_are_saved_as_they_were(make: Make) -> None:
    """Pytorch #144657: nothing of the saved state refers to living tensors."""
    loop = Loop()
    mine = {"table": torch.arange(1000.0), "note": [1]}
    ckpt = make(loop, state={"mine": mine})
    ckpt.restore()
    loop.train(3, ckpt)
    before = {k: v.clone() for k, v in loop.net.state_dict().items()}
    weights, sums = loop.table()
    handle = ckpt.save()
    with torch.no_grad():
        for parameter in loop.net.parameters():
            parameter.fill_(7)
        for optimizer in loop.optimizers:
            for entry in optimizer.state.values():
                for value in entry.values():
                    value.fill_(9)
        mine["table"].fill_(5)
        mine["note"].append(2)
    handle.wait(120)
    ckpt.__exit__(KeyboardInterrupt, None, None)
    again = Loop(seed=1)
    theirs = {"table": torch.zeros(1000), "note": []}
    assert make(again, state={"mine": theirs}).restore() is not None
    assert all(torch.equal(again.net.state_dict()[k], v) for k, v in before.items())
    assert torch.equal(again.table()[0], weights)
    assert torch.equal(again.table()[1], sums)
    assert torch.equal(theirs["table"], torch.arange(1000.0))
    assert theirs["note"] == [1]


def test_deltas_over_many_saves_restore_the_last_state(make: Make) -> None:
    """NeMo-RL #3312 and xtuner #1859: every save differs where it must, and none leaks a descriptor."""
    loop = Loop()
    ckpt = make(loop, content_hash=True, sidecar={"compact_after": 4, "housekeeping_s": 0})
    ckpt.restore()
    loop.train(1, ckpt)
    ckpt.save().wait(120)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    threads = threading.active_count()
    for _ in range(40):
        loop.train(1, ckpt)
        ckpt.save().wait(120)
    # The threads of the last stream may still be ending.
    eventually(
        lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 2, what="no more descriptors"
    )
    eventually(lambda: threading.active_count() <= threads + 2, what="no more threads")
    ckpt.close()
    again = Loop(seed=1)
    restored = make(again, content_hash=True).restore()
    assert restored is not None
    assert (restored.step, restored.verified) == (41, True)
    assert torch.equal(again.table()[0], loop.table()[0])


def test_a_trainer_that_builds_on_synthetic_baselines_resumes_exactly(make: Make, tmp_path: Path) -> None:
    """Its marks count from what the sidecar compacts; each resume, and what is trained after it, is exact."""
    store = open_store(f"file://{tmp_path / 'store'}")

    def log() -> RunLog:
        read = RunLog(store, "r")
        read.refresh()
        return read

    loop = Loop()
    ckpt = make(loop, content_hash=True, keep_last=100, sidecar={"housekeeping_s": 0})
    for life in range(3):
        if life:
            loop = Loop(seed=life)
            ckpt = make(loop, content_hash=True, keep_last=100, sidecar={"housekeeping_s": 0})
        restored = ckpt.restore()
        assert (restored is None) == (life == 0)
        assert restored is None or restored.verified
        made = len(log().state.compactions)
        for _ in range(40):
            loop.train(1, ckpt)
            commit = ckpt.save().wait(120)
            # More cuts, while a slow machine compacts what this one was built on, would end with a full one.
            for seq in log().state.checkpoints[commit.seq].covered:
                eventually(lambda seq=seq: not compactable(log().state, seq), what="what was owed is made")
            if len(log().state.compactions) > made + 1:
                break
        else:
            pytest.fail("no baseline was made by compaction")
        weights, sums = loop.table()
        ckpt.close()
        again = Loop(seed=9)
        reader = make(again, content_hash=True)
        found = reader.restore()
        assert found is not None
        assert found.verified
        assert torch.equal(again.table()[0], weights)
        assert torch.equal(again.table()[1], sums)
        reader.close()


def test_forked_workers_every_epoch_during_saves(make: Make) -> None:
    """DataLoader workers are forked while blocks are written and gRPC threads live."""
    loop = Loop()
    ckpt = make(loop, every_steps=1)
    ckpt.restore()
    data = torch.utils.data.TensorDataset(torch.randint(ROWS, (24, 4)))
    loader = ckpt.wrap(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=2))
    for _ in range(4):
        for (x,) in loader:
            loop.net(x).sum().backward()
            for optimizer in loop.optimizers:
                optimizer.step()
            ckpt.step()
    ckpt.close()
    assert ckpt.stats.failures == {}
    assert ckpt.stats.last_commit is not None
    assert ckpt.stats.last_commit.step == 12


def test_a_forked_child_leaves_the_run_alone(make: Make) -> None:
    """It may leave the block, close, and is told that it cannot save; at once, and with a save of the parent in flight."""
    loop = Loop()
    ckpt = make(loop)
    ckpt.restore()
    loop.train(3, ckpt)
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
            ckpt.__exit__(KeyboardInterrupt, None, None)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert handle.wait(120).step == 3
    loop.train(2, ckpt)
    ckpt.close()
    assert ckpt.stats.last_commit is not None
    assert ckpt.stats.last_commit.step == 5


def test_an_exception_never_cuts(make: Make) -> None:
    """The step it tore must not become the newest checkpoint."""
    loop = Loop()
    with pytest.raises(ZeroDivisionError), make(loop) as ckpt:  # noqa: PT012 - the block is what is tested
        ckpt.restore()
        loop.train(4, ckpt)
        ckpt.save().wait(120)
        loop.train(2, ckpt)
        loop.train(1)  # the optimizers stepped, step() was not reached
        raise ZeroDivisionError
    restored = make(Loop(seed=1)).restore()
    assert restored is not None
    assert restored.step == 4
    assert restored.lost_steps == 2


def test_close_makes_the_last_step_durable(make: Make) -> None:
    """And does nothing more when it is already."""
    loop = Loop()
    with make(loop) as ckpt:
        ckpt.restore()
        loop.train(7, ckpt)
    assert ckpt.stats.last_commit is not None
    assert ckpt.stats.last_commit.step == 7
    again = Loop(seed=1)
    ckpt = make(again)
    restored = ckpt.restore()
    assert restored is not None
    assert restored.step == 7
    assert torch.equal(again.table()[0], loop.table()[0])
    ckpt.close()
    assert ckpt.stats.cuts == 0


def test_close_raises_when_the_store_is_gone(make: Make, tmp_path: Path) -> None:
    """What is not durable is not called so."""
    loop = Loop()
    ckpt = make(loop)
    ckpt.restore()
    loop.train(2, ckpt)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").write_text("no directory")
    with pytest.raises(SaveFailed, match="not durable"):
        ckpt.close(deadline_s=2)


def test_close_refuses_a_torn_boundary(make: Make) -> None:
    """Parameters that moved after the last step() are not that step's."""
    loop = Loop()
    ckpt = make(loop)
    ckpt.restore()
    loop.train(2, ckpt)
    loop.train(1)
    with pytest.raises(SaveFailed, match="boundary is gone"):
        ckpt.close(deadline_s=60)


@pytest.mark.parametrize(
    "point", ["stage.batch_received", "encode.first", "pack.before_put", "index.after_put"]
)
def test_sidecar_killed_mid_save_training_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The save fails, the marks stay, the library starts the sidecar again, and the next save covers all."""
    monkeypatch.setenv("DELTASHARD_CRASH_AT", point)
    loop = Loop()
    ckpt = make(loop, content_hash=True)
    ckpt.restore()
    loop.train(3, ckpt)
    first = ckpt.sidecar_pid
    lost = ckpt.save("lost")
    loop.train(3, ckpt)
    with pytest.raises(SaveFailed):
        lost.wait(120)
    deadline = time.monotonic() + 120
    while ckpt.stats.last_commit is None and time.monotonic() < deadline:
        loop.train(1, ckpt)
        handle = ckpt.save("again")
        if handle.cut is not None:
            try:
                handle.wait(120)
            except SaveFailed as error:
                logging.getLogger("test").info("tried again: %s", error)
    assert ckpt.stats.last_commit is not None
    assert ckpt.sidecar_pid != first
    loop.train(2, ckpt)
    ckpt.close()
    again = Loop(seed=1)
    restored = make(again, content_hash=True).restore()
    assert restored is not None
    assert restored.verified is True
    assert restored.step == ckpt.steps
    assert torch.equal(again.table()[0], loop.table()[0])


def test_lost_cache_and_shared_memory_come_back_from_the_store(make: Make, tmp_path: Path) -> None:
    """Both processes gone, nothing local left."""
    import shutil

    loop = Loop()
    ckpt = make(loop)
    ckpt.restore()
    loop.train(5, ckpt)
    ckpt.save().wait(120)
    pid, arena = ckpt.sidecar_pid, ckpt.arena_path
    assert pid is not None
    assert arena is not None
    ckpt.__exit__(KeyboardInterrupt, None, None)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    shutil.rmtree(Path(arena).parent)
    shutil.rmtree(tmp_path / "cache")
    again = Loop(seed=1)
    restored = make(again).restore()
    assert restored is not None
    assert (restored.step, restored.source, restored.lost_steps) == (5, "store", None)
    assert torch.equal(again.table()[0], loop.table()[0])


def test_falls_back_loudly_past_a_broken_checkpoint(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint whose bytes are wrong in the store is passed over, and nothing of it stays in the model."""
    import shutil

    loop = Loop()
    ckpt = make(loop, differential="full")
    ckpt.restore()
    loop.train(4, ckpt)
    ckpt.save().wait(120)
    wanted = loop.table()
    loop.train(4, ckpt)
    newest = ckpt.save().wait(120)
    ckpt.__exit__(KeyboardInterrupt, None, None)
    packs = sorted((tmp_path / "store").rglob(f"{newest.cut:08d}/*.pack"))
    assert packs
    for pack in packs:
        data = bytearray(pack.read_bytes())
        for at in range(100, len(data), 997):
            data[at] ^= 0xFF
        pack.chmod(0o600)
        pack.write_bytes(data)
    shutil.rmtree(tmp_path / "cache")
    again = Loop(seed=1)
    ckpt = make(again, differential="full")
    restored = ckpt.restore()
    assert restored is not None
    assert (restored.step, restored.fell_back) == (4, True)
    assert "falling back" in caplog.text
    assert torch.equal(again.table()[0], wanted[0])
    assert torch.equal(again.table()[1], wanted[1])
    again.train(1, ckpt)
    assert ckpt.save().wait(120).step == 5


def test_a_run_with_checkpoints_is_not_trained_on_by_accident(make: Make) -> None:
    """Without restore() the first step() raises; fresh=True begins anew, with a baseline."""
    loop = Loop()
    with make(loop) as ckpt:
        loop.train(2, ckpt)
    other = Loop(seed=1)
    forgot = make(other)
    with pytest.raises(NotRestored, match="restore"):
        other.train(1, forgot)
    forgot.__exit__(NotRestored, None, None)
    with make(other, fresh=True) as ckpt:
        other.train(3, ckpt)
    assert ckpt.stats.last_commit is not None
    assert ckpt.stats.last_commit.baseline
    again = Loop(seed=2)
    restored = make(again).restore()
    assert restored is not None
    assert restored.step == 3
    assert torch.equal(again.table()[0], other.table()[0])


def test_a_newer_attempt_fences_this_trainer(make: Make, tmp_path: Path) -> None:
    """The zombie's save never commits, it raises, and goes on raising."""
    loop = Loop()
    ckpt = make(loop)
    ckpt.restore()
    loop.train(2, ckpt)
    ckpt.save().wait(120)
    open_attempt(RunLog(open_store(f"file://{tmp_path / 'store'}"), "r"), owner="", world_size=1)
    with pytest.raises(FencedError):  # noqa: PT012 - at which step is not known
        for _ in range(10_000):
            loop.train(1, ckpt)
            ckpt.save()
            time.sleep(0.01)
    with pytest.raises(FencedError):
        loop.train(1, ckpt)
    with pytest.raises(FencedError):
        ckpt.close()


def test_state_that_breaks_at_a_save_never_harms_training(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, counted, and the save after it covers."""
    loop = Loop()
    broken = [False]

    def get() -> int:
        if broken[0]:
            raise RuntimeError("out of order")
        return 5

    got: list[int] = []
    ckpt = make(loop, state={"mine": (get, got.append)})
    ckpt.restore()
    loop.train(1, ckpt)
    broken[0] = True
    for _ in range(3):
        loop.train(1, ckpt)
        with pytest.raises(SaveFailed):
            ckpt.save().wait(120)
    assert ckpt.stats.failures["error"] == 3
    assert caplog.text.count("a save failed") == 1
    broken[0] = False
    loop.train(1, ckpt)
    assert ckpt.save().wait(120).step == 5
    ckpt.close()
    make(Loop(seed=1), state={"mine": (get, got.append)}).restore()
    assert got == [5]


def test_gradient_accumulation_waits_for_the_next_optimizer_step(make: Make) -> None:
    """A due cut between two optimizer steps would lose the gradients gathered so far."""
    loop = Loop()
    cuts: list[int] = []
    ckpt = make(loop, on_event=lambda name, facts: cuts.append(facts["step"]) if name == "cut" else None)
    ckpt.restore()
    loop.train(1, ckpt)
    for micro in range(1, 9):
        if micro == 1:
            handle = ckpt.save("asked where step() left the program")
            assert cuts == [1]
            handle.wait(120)
        loop.net(torch.randint(ROWS, (8, 4))).sum().backward()
        if micro == 1:
            assert ckpt.save("asked in the middle of an iteration").cut is None
        if micro % 4 == 0:
            for optimizer in loop.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ckpt.step()
        if micro == 2:
            asked = ckpt.save("in the middle of accumulation")
            assert asked.cut is None
        assert cuts == ([1] if micro < 4 else [1, 5])


def test_saving_right_after_a_step_of_accumulation_is_put_off(make: Make) -> None:
    """Also when no earlier save made step() look twice."""
    loop = Loop()
    ckpt = make(loop)
    ckpt.restore()
    loop.train(3, ckpt)
    loop.net(torch.randint(ROWS, (8, 4))).sum().backward()
    ckpt.step()
    handle = ckpt.save()
    assert handle.cut is None
    loop.train(1, ckpt)
    assert handle.wait(120).step == 5


def test_waiting_for_a_cut_that_this_thread_must_take_is_refused(make: Make) -> None:
    """No dead-lock: inside an iteration the cut only happens at the next step()."""
    loop = Loop()
    ckpt = make(loop)
    ckpt.restore()
    loop.train(1, ckpt)
    loop.train(1)
    handle = ckpt.save()
    with pytest.raises(WaitError):
        handle.wait(5)
    ckpt.step()
    assert handle.wait(120).step == 2


def test_sigterm_saves_then_calls_the_previous_handler(make: Make) -> None:
    """At the next step, durable, and only then."""
    called: list[int | None] = []
    loop = Loop()
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


def test_validate_vetoes_a_cut(make: Make) -> None:
    """A NaN guard keeps the last good checkpoint the newest one."""
    loop = Loop()
    ckpt = make(loop, every_steps=1, validate=lambda: not bool(loop.net.top.weight.isnan().any()))
    ckpt.restore()
    loop.train(2, ckpt)
    with torch.no_grad():
        loop.net.top.weight.fill_(float("nan"))
    deadline = time.monotonic() + 120
    while not ckpt.stats.skipped["vetoed"] and time.monotonic() < deadline:
        loop.train(1, ckpt)
    assert ckpt.stats.skipped["vetoed"] > 0
    with pytest.raises(SaveFailed, match="vetoed"):
        ckpt.close(deadline_s=60)


def test_pins_seqs_and_steps_can_be_restored(make: Make) -> None:
    """Time travel opens an attempt that resumes from there."""
    loop = Loop()
    ckpt = make(loop, keep_last=20)
    ckpt.restore()
    tables = {}
    seqs = {}
    for step in range(1, 5):
        loop.train(1, ckpt)
        tables[step] = loop.table()[0]
        seqs[step] = ckpt.save(pin="best" if step == 2 else None, metadata={"step": step}).wait(120).seq
    ckpt.close()
    for which, step in (("pin:best", 2), (seqs[3], 3), ("step:1", 1)):
        again = Loop(seed=9)
        ckpt = make(again, keep_last=20)
        restored = ckpt.restore(which=which)
        assert restored is not None
        assert restored.step == step
        assert torch.equal(again.table()[0], tables[step])
        ckpt.__exit__(KeyboardInterrupt, None, None)


def test_two_pins_of_one_cut_both_hold(make: Make) -> None:
    """Asked for in the same step, by two parts of a program that do not know of each other."""
    loop = Loop()
    ckpt = make(loop)
    ckpt.restore()
    loop.train(1)
    handles = [ckpt.save(pin=name, metadata={name: "yes"}) for name in ("best", "epoch-1")]
    ckpt.step()
    seqs = {handle.wait(120).seq for handle in handles}
    assert len(seqs) == 1
    ckpt.close()
    for name in ("best", "epoch-1"):
        ckpt = make(Loop(seed=1))
        restored = ckpt.restore(which=f"pin:{name}")
        assert restored is not None
        assert {restored.seq} == seqs
        ckpt.__exit__(KeyboardInterrupt, None, None)


def test_warm_start_from_another_run(make: Make) -> None:
    """Reads that run, commits to ours, and begins with a baseline."""
    loop = Loop()
    with make(loop, run="first") as ckpt:
        loop.train(3, ckpt)
    again = Loop(seed=1)
    with make(again, run="second") as ckpt:
        restored = ckpt.restore(from_run="first", weights_only=True)
        assert restored is not None
        assert restored.step == 3
        assert torch.equal(again.table()[0], loop.table()[0])
        assert not torch.equal(again.table()[1], loop.table()[1])
        again.train(1, ckpt)
    assert ckpt.stats.last_commit is not None
    assert ckpt.stats.last_commit.baseline
    assert ckpt.stats.last_commit.step == 1


def test_other_tables_are_refused_or_said(make: Make) -> None:
    """Grown: refused; with strict=False the prefix comes back, the rest keeps its values, and the next cut is whole."""
    loop = Loop()
    with make(loop) as ckpt:
        loop.train(3, ckpt)
    bigger = Loop(seed=1, rows=ROWS + 50)
    tail = bigger.net.items.weight.detach()[ROWS:].clone()
    ckpt = make(bigger)
    with pytest.raises(CheckpointMismatch, match="grew"):
        ckpt.restore()
    restored = ckpt.restore(strict=False)
    assert restored is not None
    assert any("grew" in note for note in restored.notes)
    weights = bigger.net.items.weight.detach()
    assert torch.equal(weights[:ROWS], loop.table()[0])
    assert torch.equal(weights[ROWS:], tail)
    bigger.train(1, ckpt)
    assert ckpt.save().wait(120).baseline


def test_other_optimizers_and_state_are_refused(make: Make) -> None:
    """Before anything of the model is changed."""
    loop = Loop()
    with make(loop, state={"mine": {"a": 1}}) as ckpt:
        loop.train(3, ckpt)
    other = Loop(seed=1)
    other.optimizers[1] = torch.optim.SGD(other.net.top.parameters(), lr=0.1)
    before = other.net.items.weight.detach().clone()
    ckpt = make(other)
    with pytest.raises(CheckpointMismatch, match=r"(?s)SGD.*mine"):
        ckpt.restore()
    assert torch.equal(other.net.items.weight, before)


def test_what_cannot_be_saved_is_refused_at_construction(make: Make) -> None:
    """With the path and the remedy, not at the first save."""
    loop = Loop()
    with pytest.raises(StateError, match="get, set"):
        make(loop, state={"epoch": 3})
    with pytest.raises(StateError, match="object"):
        make(loop, state={"mine": {"deep": [object()]}})
    with pytest.raises(StateError, match="optimizer="):
        make(loop, state={"optimizer": loop.optimizers[0]})
    with pytest.raises(UserError, match="url"):
        deltashard.Checkpointer(loop.net, loop.optimizers, run="r")


def test_a_setting_that_the_sidecar_does_not_have(make: Make) -> None:
    """It was said in an argument, of which the message speaks."""
    with pytest.raises(UserError, match=r"no setting 'nope' \[Checkpointer\(sidecar=\)\]"):
        make(Loop(), sidecar={"nope": 1})
    with pytest.raises(UserError, match="keep_last is an argument of its own"):
        make(Loop(), keep_last=5, sidecar={"keep_last": 1})


def test_restore_after_training_began_is_refused(make: Make) -> None:
    """The model would be half of one run and half of another."""
    loop = Loop()
    ckpt = make(loop)
    ckpt.restore()
    loop.train(1, ckpt)
    with pytest.raises(UserError, match="before the loop"):
        ckpt.restore()
