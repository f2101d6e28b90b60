"""On a GPU: the cost of tracking per step and the training stall of a save, compared with torch.save and DCP.

Tables, their state and the dense parameters are on the device; stores and caches are in memory (/dev/shm), so that
no disk is measured. All checkpointers save the same live state, in one run and in turns. A stall is the time the
training thread waits with no work of this process queued on the device. For a save that is due by time, the queue is
drained first, and the stall includes that drain.

    by hand      `save()` right after a step, when the device has finished it
    by time      a save is due during training; the stall includes the work on the device's queue
    lost         the stall plus the extra time of the steps until the save was durable, against untracked steps

Without a GPU only `--quick` runs, on the CPU, as a smoke test.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import Row, compare_with, limit, log_progress, record_errors
from ours import Deltashard, SidecarServer
from peers import DcpAsyncSave, DcpAsyncSaveReusing, Peer, StoreLocation, TorchSave
from states import _tensors
from torch import nn

COLUMNS = 128
TABLES = 4
BATCH, POOLING = 4096, 8
BATCHES = 32
SHARE = 0.26
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class GpuState:
    """Four bags with row-wise Adagrad and an MLP with Adam on the device, and steps of skewed lookups."""

    def __init__(self, gigabytes: float) -> None:
        """Allocate this many GiB of tables and state; every row's state is non-zero."""
        from deltashard.optim import RowWiseAdagrad

        torch.manual_seed(0)
        self.rows_each = int(gigabytes * 2**30 / TABLES / (COLUMNS * 4 + 4))
        with torch.device(DEVICE):
            tables = nn.ModuleList(
                nn.EmbeddingBag(self.rows_each, COLUMNS, mode="sum", sparse=True) for _ in range(TABLES)
            )
            mlp = nn.Sequential(
                nn.Linear(TABLES * COLUMNS, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
            )
        self.model = nn.ModuleDict({"tables": tables, "mlp": mlp})
        self.optimizers: list[torch.optim.Optimizer] = [
            RowWiseAdagrad([table.weight for table in tables], lr=0.05),
            torch.optim.Adam(mlp.parameters(), lr=1e-3),
        ]
        for table in tables:
            self.optimizers[0].state[table.weight]["sum"].uniform_()
        # Log-uniform: Zipf's law with exponent 1, the hot rows are spread over the table.
        self.batches = [
            [
                (self.rows_each ** torch.rand((BATCH, POOLING), device=DEVICE)).long() * 7919 % self.rows_each
                for _ in range(TABLES)
            ]
            for _ in range(BATCHES)
        ]
        self.at = 0

    def step(self) -> None:
        self.at += 1
        self._train(self.batches[self.at % BATCHES])

    def touch(self, share: float, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        rows = torch.randperm(self.rows_each, generator=generator, device=DEVICE)
        rows = rows[: int(self.rows_each * share)]
        for piece in torch.split(rows, 1 << 20):
            self._train([piece[:, None]] * TABLES)

    def _train(self, ids: list[torch.Tensor]) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        found = [table(each) for table, each in zip(self.model["tables"], ids, strict=True)]
        self.model["mlp"](torch.cat(found, 1)).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def as_dict(self) -> dict[str, object]:
        """Return what a script passes to torch.save: state_dicts, by reference."""
        return {
            "model": dict(self.model.state_dict()),  # torch 2.11's stager accepts no other mapping
            "optimizers": {str(i): optimizer.state_dict() for i, optimizer in enumerate(self.optimizers)},
        }

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self.as_dict()))


class DcpPinned(DcpAsyncSaveReusing):
    """DCP's asynchronous save with a stager that keeps pinned memory for the whole state."""

    name = "dcp.async_save (cached, pinned)"
    pinned = DEVICE == "cuda"


def run(*, quick: bool) -> dict[str, object]:
    if DEVICE == "cpu" and not quick:
        raise RuntimeError("torch finds no CUDA device")
    gigabytes, rounds, steps = (0.03, 1, 5) if quick else (8.0, 3, 100)
    out: dict[str, Any] = {"errors": {}, "device": _device(), "gigabytes": gigabytes}
    state = GpuState(gigabytes)
    out["state_bytes"], out["rows_of_tables"] = state.bytes, TABLES * state.rows_each
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="deltashard-bench-", dir=base) as name:
        folder = Path(name)
        place = StoreLocation(name="file", root=str(folder / "store"))
        Path(place.root).mkdir()
        log_progress("steps")
        out["steps"] = _steps(place, state, folder, steps, rounds)
        for what, kind, times in (
            ("torch", TorchSave, 1),
            ("dcp", DcpAsyncSave, rounds),
            ("dcp pinned", DcpPinned, rounds),
        ):
            log_progress(what)
            with record_errors(out["errors"], kind.name):
                out[kind.name] = _peer(kind, place, state, times)
        for share in (SHARE, 1.0):
            log_progress(f"by hand, {share:.0%}")
            with record_errors(out["errors"], f"by hand, {share:.0%}"):
                out[f"by hand {share}"] = _manual_saves(
                    place, state, folder, share, rounds if share < 1 else 1
                )
        for share in (SHARE, 0.0):
            log_progress(f"by time, {share:.0%}")
            with record_errors(out["errors"], f"by time, {share:.0%}"):
                out[f"by time {share}"] = _timer_saves(
                    place, state, folder, share, rounds, step_s=out["steps"]["without"], quick=quick
                )
    out["rows"] = _rows(out)
    return out


def _device() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"


def _sync() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _flags(state: GpuState, **flags: object) -> dict[str, object]:
    # As much shared memory as the asynchronous peers use for their copy.
    room = max(64 << 20, int(state.bytes * 1.1))
    return {"encoding": "q8", "differential": "consecutive", "compact_after": 0, "arena_bytes": room} | flags


def _timed(state: GpuState, steps: int, end: Callable[[], object]) -> float:
    _sync()
    begun = time.perf_counter()
    for _ in range(steps):
        state.step()
        end()
    _sync()
    return (time.perf_counter() - begun) / steps


def _steps(place: StoreLocation, state: GpuState, folder: Path, steps: int, rounds: int) -> dict[str, object]:
    """Time steps without and with tracking and `step()`, in turns; no save is due."""
    found: dict[str, list[float]] = {"without": [], "with": []}
    _timed(state, steps, lambda: None)
    with SidecarServer(place, "steps", folder / "steps", **_flags(state)) as sidecar:
        for turn in range(rounds + 1):
            without = _timed(state, steps, lambda: None)
            ours = Deltashard(sidecar, state)  # type: ignore[arg-type]
            ours.restore()
            _timed(state, 3, ours.ckpt.step)
            tracked = _timed(state, steps, ours.ckpt.step)
            if turn or rounds == 1:
                found["without"].append(without)
                found["with"].append(tracked)
            with ours.ckpt as ckpt:  # leaves without a last save
                ckpt.__exit__(KeyboardInterrupt, None, None)
    return {name: median(each) for name, each in found.items()} | {"all": found}


def _peer(kind: type[Peer], place: StoreLocation, state: GpuState, rounds: int) -> dict[str, object]:
    peer = kind(place)
    saves = []
    try:
        for turn in range(rounds + (rounds > 1)):
            state.step()
            _sync()
            saves.append(peer.save(state, f"{kind.__name__}-{turn}"))  # type: ignore[arg-type]
            place.remove(f"{kind.__name__}-{turn}")
    finally:
        peer.close()
    saves = saves[-rounds:]
    return {
        "stall_s": median(saved.stall_s for saved in saves),
        "durable_s": median(saved.durable_s for saved in saves),
        "stored_bytes": saves[-1].stored_bytes,
        "stalls_s": [saved.stall_s for saved in saves],
    }


def _manual_saves(
    place: StoreLocation, state: GpuState, folder: Path, share: float, rounds: int
) -> dict[str, object]:
    name = f"hand-{share:.2f}"
    with SidecarServer(place, name, folder / name, **_flags(state)) as sidecar:
        ours = Deltashard(sidecar, state)  # type: ignore[arg-type]
        ours.restore()
        saves = []
        for turn in range(rounds + 1):  # the first is the baseline
            state.touch(share if turn else 0.01, seed=turn)
            ours.ckpt.step()
            _sync()
            saves.append(ours.save())
        ours.ckpt.close()
    saves = saves[-rounds:]
    return {
        "stall_s": median(each.saved.stall_s for each in saves),
        "durable_s": median(each.saved.durable_s for each in saves),
        "stored_bytes": saves[-1].saved.stored_bytes,
        "rows": saves[-1].rows,
        "raw_bytes": saves[-1].raw_bytes,
        "stalls_s": [each.saved.stall_s for each in saves],
    }


def _timer_saves(
    place: StoreLocation,
    state: GpuState,
    folder: Path,
    share: float,
    rounds: int,
    *,
    step_s: float,
    quick: bool,
) -> dict[str, object]:
    """Measure saves by the timer; each interval changes `share` of the rows in addition to its steps' rows."""
    name = f"time-{share:.2f}"
    found = []
    with SidecarServer(place, name, folder / name, **_flags(state, every_s=1 if quick else 4)) as sidecar:
        ours = Deltashard(sidecar, state)  # type: ignore[arg-type]
        ours.restore()
        ckpt = ours.ckpt
        for turn in range(rounds + 1):  # the first is the baseline
            if share:
                state.touch(share, seed=turn)
                ckpt.step()
            snapshots, began = ckpt.stats.snapshots, time.perf_counter()
            while ckpt.stats.snapshots == snapshots:
                state.step()
                ckpt.step()
                if time.perf_counter() - began > 60:
                    raise TimeoutError(f"no snapshot within 60 s: {ckpt.stats}")
            stall_s, steps, began = ckpt.stats.stalls_s[-1], 0, time.perf_counter()
            while ckpt.stats.commits < ckpt.stats.snapshots:
                state.step()
                ckpt.step()
                steps += 1
            _sync()
            slower_s = time.perf_counter() - began - steps * step_s
            commit = ckpt.stats.last_commit
            assert commit is not None
            found.append(
                {
                    "stall_s": stall_s,
                    "lost_s": stall_s + slower_s,
                    "durable_s": commit.durable_s,
                    "rows": commit.rows,
                    "raw_bytes": commit.raw_bytes,
                }
            )
        with ckpt:
            ckpt.__exit__(KeyboardInterrupt, None, None)
    last = found[-rounds:]
    whats = ("stall_s", "lost_s", "durable_s")
    return {what: median(each[what] for each in last) for what in whats} | {"rounds": found}


def _rows(out: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    steps = out["steps"]
    rows.append(
        compare_with("a step, tracked and with step()", steps["with"], "without us", steps["without"], "s")
    )
    peers = [kind.name for kind in (TorchSave, DcpAsyncSave, DcpPinned) if kind.name in out]
    for mine, what in (
        (f"by time {SHARE}", f"by time, {SHARE:.0%} of the rows dirty"),
        ("by time 0.0", "by time, the rows of 4 s of steps"),
        (f"by hand {SHARE}", f"by hand, {SHARE:.0%}"),
        ("by hand 1.0", "by hand, all rows"),
    ):
        if mine in out:
            rows += [
                compare_with(f"stall, {what}", out[mine]["stall_s"], who, out[who]["stall_s"], "s")
                for who in peers
            ]
            if "lost_s" in out[mine]:
                rows.append(limit(f"training lost, {what}", out[mine]["lost_s"], "s"))
            rows += [
                compare_with(f"durable, {what}", out[mine]["durable_s"], who, out[who]["durable_s"], "s")
                for who in peers
            ]
    return rows
