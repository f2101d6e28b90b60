"""Training on a GPU with a real sidecar: snapshots are exact under any use of streams, graphs or memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from deltashard.attach import pinned
from deltashard.errors import SaveFailed, UserError
from deltashard.snapshot.block_writer import section_tensors
from deltashard.tracking.marks import RowSelection
from torch import nn

from tests.support.checkpointers import precopied_programs
from tests.support.eventually import eventually
from tests.support.gpu import needs_gpu
from tests.support.trainer.arena import FakeArena, table_snapshot
from tests.support.trainer.precopied_program import PrecopiedProgram

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
COLUMNS = 16
OPTIMIZER_OF = {
    "rowwise": lambda params: deltashard.optim.RowWiseAdagrad(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sparse_adam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
}
TABLES = {
    "a": (nn.Embedding, True, "rowwise"),
    "b": (nn.EmbeddingBag, True, "adagrad"),
    "c": (nn.EmbeddingBag, True, "sparse_adam"),
    "d": (nn.Embedding, False, "sgd"),
    "e": (nn.EmbeddingBag, False, "adagrad"),
    "f": (nn.EmbeddingBag, False, "adam"),
}
"""Name -> (module, sparse gradients, optimizer)."""


class CudaProgram(PrecopiedProgram):
    """Six tables on `device` and a dense layer on `dense`."""

    def __init__(self, folder: Path, *, device: str, dense: str, rows: int = 8_000, **options: Any) -> None:
        torch.manual_seed(2)
        self.rows, self.device, self.dense = rows, device, dense
        self.stream: torch.cuda.Stream | None = None
        """The stream of the training. None means the caller's stream."""
        tables = {
            name: kind(rows, COLUMNS, sparse=sparse).to(device) for name, (kind, sparse, _) in TABLES.items()
        }
        top = nn.Linear(COLUMNS, 1).to(dense)
        optimizers = [OPTIMIZER_OF[rule]([tables[name].weight]) for name, (*_, rule) in TABLES.items()]
        optimizers.append(torch.optim.Adam(top.parameters(), lr=0.01))
        self.now: dict[str, torch.Tensor] = {}
        """The state at the end of the last step."""
        super().__init__(folder, tables, optimizers, top, **{"arena_bytes": 128 << 20} | options)

    def on_snapshot(self) -> dict[str, torch.Tensor]:
        return self.now

    def step(self) -> None:
        ids = (torch.rand((64, 4), device=self.device) ** 2 * self.rows).long()
        found = [table(ids) for table in self.tables.values()]
        pooled = sum(each.sum(1) if each.dim() == 3 else each for each in found)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.top(pooled.to(self.dense)).square().mean().backward()
        if self.stream is not None:
            torch.cuda._sleep(2_000_000)  # the saved values are not computed yet when the save is requested
        for optimizer in self.optimizers:
            optimizer.step()
        self.now = self.state()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
                self.step()
            self.ckpt.step()
            self.wait_for_copy()

    def check(self) -> None:
        if "cuda" in (self.device, self.dense):
            torch.cuda.synchronize()
        super().check()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with precopied_programs(tmp_path, monkeypatch, CudaProgram) as build:
        yield build


PLACES = [
    ("cpu", "cpu"),
    *(pytest.param(*each, marks=needs_gpu) for each in (("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda"))),
]


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "at the snapshot"])
@pytest.mark.parametrize(("device", "dense"), PLACES)
def test_every_checkpoint_matches_its_step(make: Any, device: str, dense: str, ahead: bool) -> None:
    """The cases cover every kind of gradient and state, and every device, with rows that are copied during training."""
    program = make(device=device, dense=dense, every_steps=7, precopy=ahead)
    for _ in range(6):
        program.train(7)
        program.wait_idle()
    program.check()
    assert [*program.snapshots] == [7, 14, 21, 28, 35, 42]
    counts = program.ckpt.stats.precopy
    ahead = ahead and device == "cpu"  # from a GPU all rows are copied at the snapshot
    assert (counts.snapshots >= 3) == ahead, counts
    if ahead:
        assert counts.precopied_rows > counts.recopied_rows > 0
    trackers = [table.tracker for table in program.ckpt._program.tracking.tables]
    assert trackers == ["gradients"] * 3 + ["hashes"] * 3
    assert not program.ckpt._program.tracking.faults
    assert not program.ckpt.stats.failures


@needs_gpu
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "staged"])
def test_training_on_separate_stream(make: Any, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """`step()` runs under another current stream right after unfinished work, and training continues immediately."""
    if not direct:
        monkeypatch.setattr(pinned, "_register", lambda _arena: 0)
    program = make(device="cuda", dense="cuda", every_steps=5)
    program.stream = torch.cuda.Stream()
    program.stream.wait_stream(torch.cuda.current_stream())
    for _ in range(6):
        program.train(5)
        program.train(1)  # without a synchronization since the snapshot
        program.wait_idle()
    program.check()
    assert not program.ckpt._program.tracking.faults
    assert [address != 0 for _, address in pinned._pinned.values()] == [direct]


@needs_gpu
def test_arena_not_registrable_with_cuda(make: Any) -> None:
    """Another component may have registered it. Rows then use pinned buffers, and no CUDA error remains pending."""
    program = make(device="cuda", dense="cuda", every_steps=5)
    (arena,) = [arena for arena, address in pinned._pinned.values() if address]
    held = pinned._pinned.pop(id(arena))
    assert not pinned.pin(arena), "registered twice"
    torch.ones(3, device="cuda").add_(1)
    torch.cuda.synchronize()
    program.train(6)
    program.wait_idle()
    program.check()
    assert not program.ckpt.stats.failures
    pinned._pinned[id(arena)] = held


@needs_gpu
@pytest.mark.parametrize("chosen", [False, True])
def test_copies_in_flight_do_not_change(chosen: bool) -> None:
    """Later writes on the same stream run after the requested copy, even if the device is busy."""
    rows = 300_000
    weights = torch.randn(rows, COLUMNS, device="cuda")
    state = torch.randn(rows, device="cuda")
    ids = torch.arange(0, rows, 3, device="cuda") if chosen else None
    kept = [each.cpu() if ids is None else each[ids].cpu() for each in (weights, state)]

    arena = FakeArena(16 << 20)
    writer = arena.writer()
    snapshot_id = table_snapshot(weights, [state], selection=RowSelection(all=ids is None, ids=ids))
    torch.cuda._sleep(20_000_000)
    writer.table(snapshot_id)
    weights.fill_(7.0)
    state.fill_(7.0)
    writer.flush()
    got = [arena.rows(batch, [weights, state])[1] for batch in arena.sent]
    for mine, before in zip(zip(*got, strict=True), kept, strict=True):
        assert torch.equal(torch.cat(mine), before)
    assert [part.device.type for part in section_tensors(snapshot_id)] == ["cuda", "cuda"]


@needs_gpu
def test_model_moved_to_device(make: Any) -> None:
    """The model is built and saved on the CPU and then moved. Tables tracked by hashes and by gradients are saved."""
    program = make(device="cpu", dense="cpu", every_steps=5)
    program.train(10)
    program.wait_idle()
    program.model.to("cuda")
    program.device = program.dense = "cuda"
    for optimizer in program.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())  # moves its state to its parameters
    program.train(10)
    program.wait_idle()
    program.check()
    assert not program.ckpt.stats.failures


class Captured(PrecopiedProgram):
    """A table and a layer whose whole step, or whose gradients alone, are a CUDA graph."""

    def __init__(self, folder: Path, *, whole: bool) -> None:
        self.whole = whole
        torch.manual_seed(1)
        table, top = nn.Embedding(20_000, COLUMNS, device="cuda"), nn.Linear(COLUMNS, 1, device="cuda")
        self.ids = torch.zeros((32, 4), dtype=torch.int64, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer = torch.optim.SGD([table.weight, *top.parameters()], lr=0.1)
        super().__init__(folder, {"table": table}, [self.optimizer], top, every_steps=5)

    def backward(self) -> None:
        self.top(self.tables["table"](self.ids).sum(1)).square().mean().backward()

    def draw(self) -> None:
        self.ids.copy_(torch.randint(20_000, self.ids.shape, device="cuda"))

    def warm_up(self) -> None:
        for _ in range(3):
            self.draw()
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.ckpt.step()

    def capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.backward()
            self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            self.backward()
            if self.whole:
                self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.draw()
            if not self.whole:
                for param in self.model.parameters():
                    param.grad.zero_()
            self.graph.replay()
            if not self.whole:
                self.optimizer.step()
            self.ckpt.step()


@needs_gpu
@pytest.mark.parametrize("whole", [True, False], ids=["whole step", "gradients"])
def test_replayed_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    """No hook reports a replay's writes. The table falls back to hashes with a log entry, and saves remain correct."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, logger="deltashard.tracking")
    program = Captured(tmp_path, whole=whole)
    with program.ckpt as ckpt:
        program.warm_up()
        program.capture()
        for _ in range(4):
            program.train(5)
            program.wait_idle()
        program.check()
        assert max(program.snapshots) > 10
        table = ckpt._program.tracking.by_key["table.weight"]
        assert table.tracker == "hashes"
        assert "gradients are dense" in table.reason
        assert any("is tracked by row hashes" in each.message for each in caplog.records)
        flags = table.marks.flags
        flags.zero_()
        program.draw()
        program.graph.replay()
        torch.cuda.synchronize()
        assert not flags.any(), "a replay writes marks that may be freed by then"
        ckpt.__exit__(KeyboardInterrupt, None, None)


@needs_gpu
def test_step_inside_graph_is_refused(make: Any) -> None:
    """A replay would not call it. The capture fails with an error, and the program continues without the call."""
    program = make(device="cuda", dense="cuda", every_steps=5)
    program.train(5)
    program.wait_idle()
    steps, graph = program.ckpt.steps, torch.cuda.CUDAGraph()
    room = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        room += 1
        with pytest.raises(UserError, match="CUDA graph"):
            program.ckpt.step()
    graph.replay()
    torch.cuda.synchronize()
    assert room.tolist() == [1.0] * 4
    assert program.ckpt.steps == steps
    program.train(5)
    program.wait_idle()
    program.check()


def _use_up() -> list[torch.Tensor]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held = []
    for size in (64 << 20, 1 << 20, 1 << 16, 512):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return held


@needs_gpu
def test_out_of_memory_fails_one_save(make: Any) -> None:
    """The save fails and names the cause. Training continues, and the next save has the rows."""
    program = make(device="cuda", dense="cuda")
    program.train(3)
    program.ckpt.save().wait()
    program.train(2)
    held = _use_up()
    try:
        handle = program.ckpt.save()
        with pytest.raises(Exception, match="out of memory"):
            handle.wait()
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert program.ckpt.stats.failures == {"error": 1}
    program.train(3)

    def saved() -> bool:
        handle = program.ckpt.save()
        try:
            handle.wait()
        except SaveFailed:  # the trainer backs off for a while
            return False
        return True

    eventually(saved, what="a save")
    program.check()
    assert not program.ckpt._program.tracking.faults
