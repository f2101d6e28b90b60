"""Measures what a save costs a running training: the stall, the slowdown of other steps, and processor time.

The measure includes a stall that only moves into the steps before or after it. All checkpointers train the same state
by the same steps on a real MinIO. A round:

    training changes the share of rows, ordinary steps follow; their mean is the round's measure of a step
    a save is due; steps continue until it is durable

`lost` is the extra time of the stall and of all steps from there on over as many ordinary steps: seconds of training
that one save costs. Ours is due by the sidecar's timer, as in a run, so that rows may be copied ahead. Its steps count
from so long before the snapshot (`_lead_s`) that no copy can start earlier, and those before are the ordinary ones.
Processor time is that of this process, of the sidecar and of MinIO together, less what as many ordinary steps take.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

import states
import torch
from deltashard.save.precopy_scheduler import MAX_PRECOPY_S as LONGEST_COPY_S
from measuring import Row, compare_with, limit, log_progress, process_cpu_s, record_errors
from ours import Deltashard, SidecarServer
from peers import DcpAsyncSave, DcpAsyncSaveReusing, StoreLocation, TorchSnapshotAsyncTake, minio_place

SHARES = (0.26, 1.0)
LOOKUPS = 512
"""Rows of each table that an ordinary step touches."""
ORDINARY = 100
"""Minimum number of steps per round without a concurrent save."""
LONGEST_S = 180.0
BARS = {DcpAsyncSave.name: 1 / 0.1, DcpAsyncSaveReusing.name: 1 / 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """The cost of one save."""

    stall_s: float
    lost_s: float
    cpu_s: float
    durable_s: float
    steps: int
    step_s: float


Found = dict[str, dict[float, list[SaveCost]]]


class TimedLoop:
    """Times ordinary steps; a measure needs at least `ordinary` of them."""

    def __init__(self, state: states.TrainingState, ordinary: int) -> None:
        self.state, self.ordinary = state, ordinary
        self.tables = [*state.rowwise, *state.pointwise]
        self.generator = torch.Generator().manual_seed(4)
        self.work = torch.randn(512, 512)

    def step(self, end: Callable[[], object] = lambda: None) -> float:
        """Run one step and return its seconds; `end` is called last and included."""
        begun = time.perf_counter()
        self.state.touch_rows(
            [torch.randint(len(t), (LOOKUPS,), generator=self.generator) for t in self.tables]
        )
        for _ in range(4):
            torch.mm(self.work, self.work)
        end()
        return time.perf_counter() - begun


def run(*, quick: bool) -> dict[str, object]:
    sizes = {40: 1} if quick else {42: 5, 402: 5, 4000: 1}
    out: dict[str, object] = {"errors": {}, "sizes": {}}
    rows: list[Row] = []
    for megabytes, rounds in sizes.items():
        log_progress(f"{megabytes} MB")
        try:
            # A smoke test does not measure speed, and must not fail where a step takes a second.
            found = _size(megabytes, rounds, 1 if quick else ORDINARY, out)
        except Exception as error:
            if quick:
                raise
            # Keep the results of the other sizes, which took minutes.
            out["errors"][f"{megabytes} MB"] = f"{type(error).__name__}: {error}"[:500]  # type: ignore[index]
            traceback.print_exc()
            continue
        out["sizes"][megabytes] = {  # type: ignore[index]
            who: {share: [asdict(cost) for cost in costs] for share, costs in by.items()}
            for who, by in found.items()
        }
        rows += _rows(megabytes, found)
    out["rows"] = rows
    return out


def _size(megabytes: int, rounds: int, ordinary: int, out: dict[str, object]) -> Found:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltashard-bench-")))
        place, pid = stack.enter_context(minio_place("bench"))
        loop = TimedLoop(states.build(megabytes=megabytes), ordinary)
        minio = partial(process_cpu_s, pid)
        found = _peers(place, loop, rounds, minio, out, megabytes)
        found["ours"] = _ours(place, loop, rounds, minio, folder, megabytes)
        return found


def _peers(
    place: StoreLocation,
    loop: TimedLoop,
    rounds: int,
    others: Callable[[], float],
    out: dict[str, object],
    megabytes: int,
) -> Found:
    found: Found = {}
    for kind in (DcpAsyncSave, DcpAsyncSaveReusing, TorchSnapshotAsyncTake):
        with record_errors(out["errors"], f"{kind.name}, {megabytes} MB"), closing(kind(place)) as peer:  # type: ignore[arg-type]
            costs = [_peer_round(peer, loop, turn, others) for turn in range(rounds + 1)]
            found[kind.name] = {1.0: costs[1:]}
    return found


class RoundSteps:
    """Steps of a round, each with its seconds and the processor time of all processes after it."""

    def __init__(
        self, loop: TimedLoop, cpu: Callable[[], float], end: Callable[[], object] = lambda: None
    ) -> None:
        self._loop, self._cpu, self._end = loop, cpu, end
        self.seconds: list[float] = []
        self.cpu = [cpu()]

    def step(self) -> None:
        self.seconds.append(self._loop.step(self._end))
        self.cpu.append(self._cpu())

    def cost(self, ordinary: int, *, stall_s: float, durable_s: float, within: bool) -> SaveCost:
        """Return the cost from step `ordinary` on; `within`: the stall is already part of a step."""
        assert ordinary >= self._loop.ordinary, f"{ordinary} steps are too few to measure an ordinary one"
        rest = self.seconds[ordinary:]
        step_s = fmean(self.seconds[:ordinary])
        cpu_step_s = (self.cpu[ordinary] - self.cpu[0]) / ordinary
        return SaveCost(
            stall_s=stall_s,
            lost_s=sum(rest) - len(rest) * step_s + (0.0 if within else stall_s),
            cpu_s=self.cpu[-1] - self.cpu[ordinary] - len(rest) * cpu_step_s,
            durable_s=durable_s,
            steps=len(rest),
            step_s=step_s,
        )


def _peer_round(peer: DcpAsyncSave, loop: TimedLoop, turn: int, others: Callable[[], float]) -> SaveCost:
    loop.state.touch(1.0, seed=turn)
    loop.step()
    steps = RoundSteps(loop, lambda: time.process_time() + others())
    for _ in range(loop.ordinary):
        steps.step()
    tag = f"slow-{type(peer).__name__}-{turn}"
    begun = time.perf_counter()
    done = peer.start(loop.state, tag)
    stall_s = time.perf_counter() - begun
    while not done():
        steps.step()
        if time.perf_counter() - begun > LONGEST_S:
            raise TimeoutError(f"not durable within {LONGEST_S} s")
    durable_s = time.perf_counter() - begun
    peer.place.remove(tag)
    return steps.cost(loop.ordinary, stall_s=stall_s, durable_s=durable_s, within=False)


def _ours(
    place: StoreLocation,
    loop: TimedLoop,
    rounds: int,
    minio: Callable[[], float],
    folder: Path,
    megabytes: int,
) -> dict[float, list[SaveCost]]:
    found: dict[float, list[SaveCost]] = {}
    for share in SHARES:
        # The timer runs out after the rows have changed (4 GB of them take a minute) and the ordinary steps have run.
        every_s = 5.0 + _lead_s(megabytes) + megabytes / (100 if megabytes < 1000 else 40)
        flags = {
            "encoding": "q8",
            "differential": "consecutive",
            "compact_after": 0,
            "arena_bytes": max(64 << 20, int(loop.state.bytes * 1.25)),
            "every_s": every_s,
        }
        run = f"slowdown-{megabytes}-{share}"
        with SidecarServer(place, run, folder / run, **flags) as sidecar:
            ours = Deltashard(sidecar, loop.state)
            ours.restore()
            others = lambda sidecar=sidecar: sidecar.cpu_s + minio()  # noqa: E731
            first = 1 + (rounds > 1)
            found[share] = [
                _our_round(ours, loop, share, turn, others, _lead_s(megabytes))
                for turn in range(rounds + first)
            ][first:]
            ours.ckpt.close()
    return found


def _lead_s(megabytes: int) -> float:
    """Return the minimum seconds before a snapshot in which a copy ahead may run."""
    return min(LONGEST_COPY_S, 1.5 + megabytes / 250)


def _our_round(
    ours: Deltashard, loop: TimedLoop, share: float, turn: int, others: Callable[[], float], lead_s: float
) -> SaveCost:
    """Run one interval of the timer, which started with the last snapshot."""
    ckpt = ours.ckpt
    _until_durable(ours, loop)
    ours.touch_and_step(share, seed=turn)
    snapshots, commits = ckpt.stats.snapshots, ckpt.stats.commits
    loop.step(ckpt.step)
    steps = RoundSteps(loop, lambda: time.process_time() + others(), ckpt.step)
    begun, snapshot_at = time.perf_counter(), 0
    while ckpt.stats.commits == commits:
        steps.step()
        if not snapshot_at and ckpt.stats.snapshots > snapshots:
            snapshot_at = len(steps.seconds)
        if time.perf_counter() - begun > LONGEST_S:
            raise TimeoutError(f"not durable within {LONGEST_S} s")
    ordinary, ahead_s = snapshot_at - 1, 0.0
    while ordinary > 1 and ahead_s < lead_s:
        ordinary -= 1
        ahead_s += steps.seconds[ordinary]
    assert ckpt.stats.last_commit is not None
    return steps.cost(
        max(ordinary, 1),
        stall_s=ckpt.stats.stalls_s[-1],
        durable_s=ckpt.stats.last_commit.durable_s,
        within=True,
    )


def _until_durable(ours: Deltashard, loop: TimedLoop) -> None:
    ckpt = ours.ckpt
    while ckpt.stats.commits < ckpt.stats.snapshots:
        loop.step(ckpt.step)


def _rows(megabytes: int, found: Found) -> list[Row]:
    rows: list[Row] = []
    ours = found["ours"]
    peers = {who: costs[1.0] for who, costs in found.items() if who != "ours"}
    best = min((median(cost.lost_s for cost in costs) for costs in peers.values()), default=None)
    for share, costs in ours.items():
        what = f"{megabytes} MB, {'all rows' if share == 1.0 else f'{share:.0%}'}"
        stall = median(cost.stall_s for cost in costs)
        lost = median(cost.lost_s for cost in costs)
        for who, theirs in peers.items():
            bar = 1.0 if megabytes < 100 and who == DcpAsyncSave.name else BARS.get(who)
            their_stall = median(c.stall_s for c in theirs)
            rows.append(compare_with(f"stall by the timer, {what}", stall, who, their_stall, "s", bar))
        for who, theirs in peers.items():
            rows.append(compare_with(f"durable, {what}", median(c.durable_s for c in costs), who,
                                median(c.durable_s for c in theirs), "s"))  # fmt: skip
        for who, theirs in peers.items():
            their_lost = median(c.lost_s for c in theirs)
            bar = 3.0 if their_lost == best else None
            title = f"training lost to a save, {what}"
            rows.append(compare_with(title, max(lost, 1e-4), who, their_lost, "s", bar))
        rows.append(limit(f"... of a minute, {what}", 100 * lost / 60, "%", 1.0))
        for who, theirs in peers.items():
            rows.append(compare_with(f"processor time of a save, {what}", median(c.cpu_s for c in costs), who,
                                median(c.cpu_s for c in theirs), "s"))  # fmt: skip
    return rows
