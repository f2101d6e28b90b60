"""Many ranks without the machines: 4,096 of them in 512 pods, 800 tables of 10^8 rows, metadata only.

Layout, reports, manifests, entries, indexes and plans are those of the real code; only packs are not written, and what
an index says of them is made up: rows of 8 bits with one row-wise field, a baseline and deltas of 26 % of the rows.
Every table is cut by rows over all ranks, which is the most boxes that a sharding has.

    commits   every pod's `commit_parts` over one store in memory that counts requests. Pods are greenlets over a clock
              of their own, so that waiting costs nothing and who asks when is the same in every run. Uploads end within
              30 s of one another, rank 0's first; in the last cut it is the last, which shows a commit without waiting.
              The first baseline and the first delta find pods that do not know how long such a cut takes.
    opening   a trainer's library hands the layout to a real sidecar, which opens the attempt on a directory.
    reading   fresh processes plan a restore from a copy of that store on disk: one rank, the ranks of one pod, a rank
              of another world size. Seconds are from an empty log to the plan; memory is the peak above what imports
              take.
    a month   the requests of such a cut every 30 minutes, with its packs, at S3's list price.

    bench/run.py ranks --out out/ranks.json           4,096 ranks (`make bench-ranks`): some minutes, 6 GB of memory
    bench/run.py ranks --quick                        64 ranks, 20 tables of 10^6 rows
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from deltashard_checkpoint.backoff import Clocks
from deltashard_checkpoint.format.blob_name import blob_name
from deltashard_checkpoint.format.frame import ALIGN, FrameInfo, FrameKind
from deltashard_checkpoint.format.index import Index, Pack, Place, digest_hex, encode_index
from deltashard_checkpoint.format.layout import Layout, TableShape
from deltashard_checkpoint.format.object_key import index_key, pack_key
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Part, entry_key
from deltashard_checkpoint.log.manifest import Manifests, manifest_key
from deltashard_checkpoint.restore.checkpoint_reader import plan_restore
from deltashard_checkpoint.restore.plan import Want
from deltashard_checkpoint.restore.shared_read import SharedReads
from deltashard_checkpoint.stores.abc import Buffer, ObjectInfo, Store
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.commit import (
    LIST_PAGE,
    CommitPace,
    Committed,
    PartReport,
    Sayings,
    commit_parts,
)

RUN = "ranks"
COLUMNS = 64
ROW_BYTES = COLUMNS + 8 + 4  # codes, scale and bias, one row-wise float32
RAW_BYTES = 4 * COLUMNS + 4
CHANGED = 0.26
PACK_BYTES = 64 << 20
FRAME_BYTES = 8 << 20
DENSE_BYTES = 40 << 20
DENSE_OWNERS = 8
SPREAD_S = 30.0
EVERY_S = 1800.0
MONTH_S = 30 * 86400.0
USD_WRITE, USD_READ = 5e-6, 0.4e-6
"""Of one PUT or LIST, and of one GET: S3 Standard's list price, us-east-1."""
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of it."""

    ranks: int
    tables: int
    rows: int
    """Of each table."""
    per_pod: int = 8
    cuts: int = 4
    """A baseline, then deltas, each since the one before."""
    other_ranks: int
    """Of the world that reads what this one wrote."""

    @property
    def pods(self) -> int:
        return -(-self.ranks // self.per_pod)

    @property
    def schemas(self) -> tuple[TableSchema, ...]:
        return _schemas(self.tables, self.rows)

    def rows_of(self, rank: int, world: int) -> tuple[int, int]:
        """Rows [start, stop) that a rank has of every table."""
        return self.rows * rank // world, self.rows * (rank + 1) // world

    def boxes_of(self, rank: int, world: int) -> tuple[Box, ...]:
        a, b = self.rows_of(rank, world)
        return tuple(
            Box(table=_fqn(n), row_start=a, row_stop=b, col_start=0, col_stop=COLUMNS)
            for n in range(self.tables)
        )

    def layout(self) -> Layout:
        """All boxes, as columns: objects would be gigabytes."""
        edges = np.array([self.rows_of(rank, self.ranks)[0] for rank in range(self.ranks)] + [self.rows])
        rank = np.repeat(np.arange(self.ranks), self.tables)
        return Layout(
            world_size=self.ranks,
            tables=[TableShape(fqn=_fqn(n), rows=self.rows, columns=COLUMNS) for n in range(self.tables)],
            columns={
                "rank": rank,
                "table": np.tile(np.arange(self.tables), self.ranks),
                "row_start": edges[rank],
                "row_stop": edges[rank + 1],
                "col_start": np.zeros(len(rank), np.int64),
                "col_stop": np.full(len(rank), COLUMNS, np.int64),
            },
        )


FULL = Scale(ranks=4096, tables=800, rows=10**8, other_ranks=3072)
SMALL = Scale(ranks=64, tables=20, rows=10**6, other_ranks=48)


@functools.cache
def _schemas(tables: int, rows: int) -> tuple[TableSchema, ...]:
    state = (FieldSpec(name="sum", kind="rowwise", dtype="float32"),)
    return tuple(
        TableSchema(fqn=_fqn(n), rows=rows, columns=COLUMNS, dtype="float32", fields=state)
        for n in range(tables)
    )


def _fqn(n: int) -> str:
    return f"sparse.ebc.embedding_bags.table_{n:03d}.weight"


# The store, and time


class Counting(MemoryStore):
    """A store in memory that counts requests as S3 does, by whoever is at work, and bytes."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock=clock)
        self.requests: Counter[tuple[str, str]] = Counter()
        """By (who, PUT | GET | LIST | HEAD | DELETE); a LIST is one for each 1,000 names."""
        self.who = ""

    def _count(self, kind: str) -> None:
        self.requests[self.who, kind] += 1

    def put(self, key: str, data: Buffer) -> None:
        self._count("PUT")
        super().put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._count("PUT")
        super().put_if_absent(key, data)

    def get(self, key: str) -> bytes:
        self._count("GET")
        return super().get(key)

    def head(self, key: str) -> ObjectInfo:
        self._count("HEAD")
        return super().head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._count("LIST")
        return self._paged(super().list(prefix, start_after=start_after))

    def _paged(self, found: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        """The next page is asked for when the last is used up."""
        for n, info in enumerate(found):
            if n and n % LIST_PAGE == 0:
                self._count("LIST")
            yield info

    def delete(self, keys: Iterable[str]) -> None:
        self._count("DELETE")
        super().delete(keys)


class World:
    """Pods as greenlets over one clock: whoever sleeps lets the next one go on."""

    def __init__(self) -> None:
        from greenlet import getcurrent

        self.now_s = 1e9
        self.store = Counting(lambda: self.now_s)
        self._turns: list[tuple[float, int, str, Any]] = []
        self._main = getcurrent()
        self._count = 0
        self.chance = random.Random(7)
        self.clocks = Clocks(
            wall_s=lambda: self.now_s,
            monotonic_s=lambda: self.now_s,
            sleep=self._sleep,
            uniform=self.chance.random,
        )

    def later(self, delay_s: float, who: str, run: Any) -> None:
        """Have `run()` begin after some seconds."""
        from greenlet import greenlet

        self._push(delay_s, who, greenlet(run, parent=self._main))

    def play(self) -> None:
        while self._turns:
            at_s, _, who, turn = heapq.heappop(self._turns)
            self.now_s, self.store.who = at_s, who
            turn.switch()

    def _push(self, delay_s: float, who: str, turn: Any) -> None:
        self._count += 1
        heapq.heappush(self._turns, (self.now_s + delay_s, self._count, who, turn))

    def _sleep(self, seconds: float) -> None:
        from greenlet import getcurrent

        if getcurrent() is self._main:
            self.now_s += seconds
            return
        self._push(seconds, self.store.who, getcurrent())
        self._main.switch()


# What ranks say


def made_index(scale: Scale, rank: int, *, attempt: int, cut: int, token: str, covers: int | None) -> Index:
    """What rank's index of a cut would be, with packs that are not there."""
    a, b = scale.rows_of(rank, scale.ranks)
    frames: list[FrameInfo] = []
    most = FRAME_BYTES // ROW_BYTES
    for n in range(scale.tables):
        for at in range(a, b, most):
            span = min(most, b - at)
            rows = span if covers is None else max(2, round(CHANGED * span))
            frames.append(
                FrameInfo(
                    kind=FrameKind.ROWS,
                    length=_aligned(rows * ROW_BYTES + span // 8 + 512),
                    digest=(rank << 64 | cut << 32 | len(frames)).to_bytes(16, "big"),
                    step=cut,
                    table=_fqn(n),
                    row_min=at,
                    row_max=at + span - 1,
                    rows=rows,
                    col_start=0,
                    col_stop=COLUMNS,
                    encoding="q8",
                )
            )
    for name, size in _blobs(scale, rank).items():
        for at in range(0, size, FRAME_BYTES // 2):
            frames.append(
                FrameInfo(
                    kind=FrameKind.BLOB,
                    length=_aligned(min(size - at, FRAME_BYTES // 2) + 256),
                    digest=(rank << 64 | cut << 32 | len(frames)).to_bytes(16, "big"),
                    step=cut,
                    name=name,
                    blob_offset=at,
                    blob_bytes=size,
                )
            )
    places: list[Place] = []
    sizes = [0]
    for info in frames:
        if sizes[-1] + info.length > PACK_BYTES:
            sizes.append(0)
        places.append(Place(pack=len(sizes) - 1, offset=sizes[-1], info=info))
        sizes[-1] += info.length
    return Index(
        run=RUN,
        attempt=attempt,
        cut=cut,
        step=cut,
        rank=rank,
        token=token,
        tables=scale.schemas,
        packs=tuple(
            Pack(key=pack_key(attempt=attempt, cut=cut, rank=rank, token=token, n=n), bytes=size)
            for n, size in enumerate(sizes)
        ),
        places=tuple(places),
        boxes=scale.boxes_of(rank, scale.ranks),
        covers=covers,
        raw_bytes=sum(place.info.rows for place in places) * RAW_BYTES,
    )


def _aligned(length: int) -> int:
    return -(-length // ALIGN) * ALIGN


def _owners(scale: Scale) -> list[int]:
    return list(range(0, scale.ranks, scale.ranks // DENSE_OWNERS))


def _blobs(scale: Scale, rank: int) -> dict[str, int]:
    found = {blob_name(rank, "rng"): 6000, blob_name(rank, "loader"): 3000, blob_name(rank, "meta"): 20_000}
    if rank == 0:
        found |= {"optim/0": 100_000}
    if rank in (owners := _owners(scale)):
        found |= {f"dense/over.{owners.index(rank)}.weight": DENSE_BYTES // DENSE_OWNERS}
    return found


# Commits


@dataclass(slots=True, kw_only=True)
class Cut:
    """One cut, as it was seen."""

    number: int
    seq: int = 0
    covers: int | None = None
    requests: dict[str, dict[str, int]] = field(default_factory=dict)
    """PUT, GET, LIST, ... of `first` (the pod of rank 0), of `others` together, and of `worst` (one of them)."""
    indexes: int = 0
    """PUTs among these that are indexes."""
    committed_by: str = ""
    waited_s: float = 0.0
    """From the last part to the last pod that knows."""
    first_s: float = 0.0
    """Real seconds that the pod of rank 0 worked, when it came last."""
    packs: int = 0
    bytes: int = 0


class Group:
    """All pods, over one run."""

    def __init__(self, scale: Scale, read: Iterable[int]) -> None:
        self.scale = scale
        self.world = World()
        self.read = frozenset(read)
        """Ranks whose indexes are whole: others' are empty objects of their names."""
        begun_s = time.monotonic()
        self.layout = scale.layout()
        self.digest = self.layout.digest
        self.made_layout_s = time.monotonic() - begun_s
        begun_s = time.monotonic()
        first = RunLog(self.world.store, RUN, clocks=self.world.clocks)
        self.attempt = open_attempt(
            first, owner="bench", world_size=scale.ranks, layout=self.layout.data, closing_wait_s=0.0
        ).attempt
        self.opened_s = time.monotonic() - begun_s
        self.logs = [first.fork() for _ in range(scale.pods)]
        self.sayings = [Sayings() for _ in range(scale.pods)]
        self.paces = [CommitPace() for _ in range(scale.pods)]
        self._shapes: dict[tuple[bool, bool, bool], tuple[int, int, int]] = {}
        self.index_bytes: dict[int, int] = {}
        """Of the first rank that is read, by cut."""

    def reports(self, pod: int, cut: Cut) -> list[PartReport]:
        """Of a pod's ranks; their indexes are put."""
        scale, found = self.scale, []
        for rank in range(pod * scale.per_pod, min((pod + 1) * scale.per_pod, scale.ranks)):
            token = f"{cut.number:08x}{rank:08x}"
            index = self._shape(rank, cut)
            data = b""
            if rank in self.read:
                data = encode_index(
                    made_index(
                        scale, rank, attempt=self.attempt, cut=cut.number, token=token, covers=cut.covers
                    )
                )
                self.index_bytes.setdefault(cut.number, len(data))
            key = index_key(
                attempt=self.attempt,
                cut=cut.number,
                rank=rank,
                token=token,
                xxh3=digest_hex(data) if data else f"{rank:032x}",
            )
            self.world.store.put(f"{RUN}/{key}", data)
            cut.indexes += 1
            packs, rows, stored = index
            cut.packs += packs
            cut.bytes += stored
            part = Part(rank=rank, index_key=key, boxes=(), stored_bytes=stored, covers=cut.covers)
            found.append(
                PartReport(
                    part=part,
                    tables=scale.schemas,
                    encodings=("q8",),
                    rows=rows,
                    raw_bytes=rows * RAW_BYTES,
                    stall_s=0.125,
                    directive="timer",
                    fingerprint={"torch": "2.7"},
                    common_blobs=rank in _owners(scale),
                )
            )
        return found

    def _shape(self, rank: int, cut: Cut) -> tuple[int, int, int]:
        """(packs, rows, bytes) of a rank's part; ranks without blobs for all differ by a row a table at most."""
        kind = (rank in _owners(self.scale), rank == 0, cut.covers is None)
        if kind not in self._shapes:
            index = made_index(self.scale, rank, attempt=1, cut=cut.number, token="0" * 16, covers=cut.covers)
            self._shapes[kind] = (len(index.packs), index.rows, sum(pack.bytes for pack in index.packs))
        return self._shapes[kind]

    def save(self, number: int, covers: int | None, *, first_last: bool) -> Cut:
        """One cut of all pods, of which that of rank 0 ends its upload before all others, or after them."""
        cut = Cut(number=number, covers=covers)
        store, world = self.world.store, self.world
        store.requests.clear()
        ends = [world.chance.uniform(0.0, SPREAD_S) for _ in range(self.scale.pods)]
        ends[0] = SPREAD_S + 1.0 if first_last else 0.0
        begun_s = world.now_s

        def pod(number_: int) -> None:
            real_s = time.monotonic()
            done: Committed = commit_parts(
                self.logs[number_],
                attempt=self.attempt,
                cut=cut.number,
                step=cut.number,
                world_size=self.scale.ranks,
                reports=self.reports(number_, cut),
                layout=self.digest,
                sayings=self.sayings[number_],
                pace=self.paces[number_],
                since_s=ends[number_],
            )
            cut.seq = done.seq
            cut.waited_s = world.now_s - begun_s - max(ends)
            if done.by_us:
                cut.committed_by = store.who
            if number_ == 0 and first_last:
                cut.first_s = time.monotonic() - real_s

        for n, end_s in enumerate(ends):
            world.later(end_s, "first" if n == 0 else f"pod {n}", lambda n=n: pod(n))
        world.play()
        others: Counter[str] = Counter()
        by_pod: dict[str, Counter[str]] = {}
        for (who, kind), times in store.requests.items():
            by_pod.setdefault(who, Counter())[kind] += times
            if who != "first":
                others[kind] += times
        worst = max((c for who, c in by_pod.items() if who != "first"), key=lambda c: c.total())
        cut.requests = {"first": dict(by_pod["first"]), "others": dict(others), "worst": dict(worst)}
        return cut


# Opening


def open_through_a_sidecar(layout: Layout) -> dict[str, float]:
    """Rank 0's library hands the layout of all to its sidecar, over their socket, and gets an attempt."""
    import grpc
    from deltashard.attach.lock import lock_line, open_arena, release_arena
    from deltashard.attach.session import OPEN_DEADLINE_S
    from deltashard_proto.arena_layout import ArenaShape
    from deltashard_proto.message_limit import MESSAGE_OPTIONS
    from deltashard_proto.v1 import trainer_pb2 as pb
    from deltashard_proto.v1.trainer_pb2_grpc import TrainerStub
    from ours import Sidecar
    from peers import Place

    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        place = Place(name="disk", root=f"{folder}/store")
        with (
            Sidecar(place, RUN, Path(folder), arena_bytes="64MiB") as sidecar,
            grpc.insecure_channel(f"unix:{sidecar.memory}/sidecar.sock", options=MESSAGE_OPTIONS) as channel,
        ):
            stub = TrainerStub(channel)  # type: ignore[no-untyped-call]  # generated
            attached = stub.Attach(
                pb.AttachRequest(
                    protocol_min=1, protocol_max=1, world_size=layout.world_size, pid=os.getpid()
                )
            )
            shape = ArenaShape.within(attached.arena_bytes, block_bytes=attached.block_bytes)
            arena = open_arena(Path(attached.arena_path), shape)
            try:
                lock_line(arena, 0)
                before, begun_s = sidecar.anonymous_bytes(), time.monotonic()
                request = pb.OpenRequest(session=attached.session, which="latest", layout=layout.data)
                reply = stub.Open(request, timeout=OPEN_DEADLINE_S)
                seconds = time.monotonic() - begun_s
            finally:
                release_arena(arena)
            assert reply.layout == layout.digest
        return {"seconds": seconds, "peak_bytes": sidecar.peak_anonymous_bytes - before}


# Reading


def copy_for_readers(store: Store, to: Path) -> dict[str, int]:
    """What readers need on disk; bytes by kind."""
    sizes: Counter[str] = Counter()
    with FileStore(to) as disk:
        for info in store.list(RUN):
            if "/part/" in info.key or (info.key.endswith(".index") and not info.size_bytes):
                continue
            disk.put(info.key, store.get(info.key))
            sizes[info.key.rsplit(".", 1)[-1] if "/layout/" not in info.key else "layout"] += info.size_bytes
    return dict(sizes)


class _Gets(FileStore):
    """A store on disk that counts what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gets: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        data = super().get(key)
        kind = (
            "layout"
            if "/layout/" in key
            else "log"
            if "/log/" in key
            else key.rsplit(".", 1)[-1]
            if "/data/" in key
            else "other"
        )
        self.gets[kind] += 1
        self.bytes[kind] += len(data)
        return data


def plan_in_this_process(scale: Scale, root: Path, ranks: list[int], world: int) -> dict[str, Any]:
    """Plan the newest checkpoint for ranks of a world, one after the other, as the sidecar of their pod does."""
    schemas = scale.schemas
    wants = {
        rank: [
            Want(schema=schema, boxes=(box,))
            for schema, box in zip(schemas, scale.boxes_of(rank, world), strict=True)
        ]
        for rank in ranks
    }
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    found: dict[str, Any] = {"seconds": []}
    with _Gets(root) as store:
        begun_s = time.monotonic()
        log = RunLog(store, RUN)
        state = log.refresh()
        manifests, shared = Manifests(store, RUN), SharedReads()
        newest = state.newest()
        assert newest is not None
        for rank in ranks:
            plan = plan_restore(
                store, state, newest.seq, wants[rank], rank=rank, world_size=world, manifests=manifests, shared=shared
            )  # fmt: skip
            found["seconds"].append(time.monotonic() - begun_s)
            begun_s = time.monotonic()
            found.setdefault("frames", plan.frames)
            found.setdefault("requests", len(plan.requests))
            found.setdefault("chain", plan.chain)
            found.setdefault("blobs", len(plan.blobs))
            found.setdefault("gets_of_first", dict(store.gets))
            found.setdefault("bytes_of_first", dict(store.bytes))
        found["gets"], found["bytes"] = dict(store.gets), dict(store.bytes)
    found["peak_bytes"] = _memory("VmHWM") - before
    return found


def _memory(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{what}:"))


def plan_in_another_process(scale: Scale, root: Path, ranks: list[int], world: int) -> dict[str, Any]:
    """The same, in a process that has done nothing else."""
    asked = json.dumps({"scale": asdict(scale), "root": str(root), "ranks": ranks, "world": world})
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--plan", asked],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# All of it


def run(*, quick: bool = False, scale: Scale | None = None) -> dict[str, Any]:
    """Measure; see `bench/run.py`."""
    scale = scale or (SMALL if quick else FULL)
    middle = scale.ranks // 2 // scale.per_pod * scale.per_pod
    pod = list(range(middle, middle + scale.per_pod))
    other = scale.other_ranks // 3
    probe = scale.layout()
    met = probe.ranks_meeting(scale.boxes_of(other, scale.other_ranks))
    boxes = len(probe)
    del probe
    group = Group(scale, {*pod, *met, *_owners(scale)})
    cuts: list[Cut] = []
    for number in range(1, scale.cuts + 1):
        covers = cuts[-1].seq if cuts else None
        cuts.append(group.save(number, covers, first_last=number == scale.cuts))
    sizes = _sizes(group, cuts)
    opening = open_through_a_sidecar(group.layout)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        copied = copy_for_readers(group.world.store, Path(folder))
        opened_s, made_s = group.opened_s, group.made_layout_s
        del group  # what the pods held is not the readers'
        reading = {
            "one rank": plan_in_another_process(scale, Path(folder), pod[:1], scale.ranks),
            "a pod": plan_in_another_process(scale, Path(folder), pod, scale.ranks),
            "another world": plan_in_another_process(scale, Path(folder), [other], scale.other_ranks),
        }
    month = _month(cuts)
    found: dict[str, Any] = {
        "scale": {**asdict(scale), "pods": scale.pods, "boxes": boxes},
        "bytes": sizes,
        "copied_bytes": copied,
        "layout_made_s": made_s,
        "attempt_opened_s": opened_s,
        "opening": opening,
        "cuts": [asdict(cut) for cut in cuts],
        "reading": reading,
        "ranks_met_by_another_world": len(met),
        "month": month,
    }
    found["rows"] = _rows(scale, found, cuts)
    return found


def _sizes(group: Group, cuts: list[Cut]) -> dict[str, int]:
    store, newest = group.world.store, cuts[-1]
    entry = group.logs[0].state.checkpoints[newest.seq]
    assert entry.listed is not None
    reports = [i.size_bytes for i in store.list(f"{RUN}/data/{group.attempt:020d}/{newest.number:08d}/part/")]
    manifest = manifest_key(group.attempt, newest.number, entry.listed.manifest)
    return {
        "layout": len(group.layout.data),
        "entry": len(store.get(f"{RUN}/{entry_key(newest.seq)}")),
        "manifest": len(store.get(f"{RUN}/{manifest}")),
        "report": max(reports),
        "reports": sum(reports),
        "index_baseline": group.index_bytes[cuts[0].number],
        "index_delta": group.index_bytes[newest.number],
    }


def _total(cut: Cut, kind: str) -> int:
    return sum(cut.requests[who].get(kind, 0) for who in ("first", "others"))


def _month(cuts: list[Cut]) -> dict[str, float]:
    """A delta every half hour and a baseline a day: requests and dollars."""
    times = round(MONTH_S / EVERY_S)
    baselines = round(MONTH_S / 86400.0)
    deltas = times - baselines
    full, delta = cuts[0], cuts[2]
    packs = baselines * full.packs + deltas * delta.packs
    writes = times * (_total(delta, "PUT") + _total(delta, "LIST"))
    reads = times * (_total(delta, "GET") + _total(delta, "HEAD"))
    return {
        "cuts": times,
        "pack_puts": packs,
        "other_writes": writes,
        "reads": reads,
        "usd_packs": packs * USD_WRITE,
        "usd_others": writes * USD_WRITE + reads * USD_READ,
    }


def _rows(scale: Scale, found: dict[str, Any], cuts: list[Cut]) -> list[dict[str, Any]]:
    delta, last, sizes, reading = cuts[1], cuts[-1], found["bytes"], found["reading"]
    one, pod, other = reading["one rank"], reading["a pod"], reading["another world"]
    links = len(one["chain"])
    month = found["month"]
    meet = found["ranks_met_by_another_world"]

    def row(what: str, ours: float, unit: str, bar: float | None = None) -> dict[str, Any]:
        return {
            "what": what, "ours": ours, "unit": unit, "bar": bar, "met": None if bar is None else ours <= bar
        }  # fmt: skip

    return [
        row(f"layout, {found['scale']['boxes']:,} boxes", sizes["layout"], "B"),
        row("the same, from trainer to an attempt of its sidecar", found["opening"]["seconds"], "s"),
        row("memory of that in the sidecar", found["opening"]["peak_bytes"], "B"),
        row("entry of a checkpoint", sizes["entry"], "B"),
        row("manifest", sizes["manifest"], "B"),
        row("reports of a cut, all", sizes["reports"], "B"),
        row("index of one rank, baseline", sizes["index_baseline"], "B"),
        row("index of one rank, delta", sizes["index_delta"], "B"),
        row(
            "PUTs of a cut beside packs",
            _total(delta, "PUT"),
            "PUTs",
            2 * scale.ranks + 2 * scale.pods,
        ),
        row(
            "LIST pages of rank 0's pod, all others there",
            last.requests["first"]["LIST"],
            "LISTs",
            -(-scale.ranks // LIST_PAGE) + 1,
        ),
        row("the same, uploads within 30 s", cuts[2].requests["first"]["LIST"], "LISTs", 5.0 + 1),
        row("the same, the first delta of its process", delta.requests["first"]["LIST"], "LISTs"),
        row("LIST pages of all other pods", cuts[2].requests["others"]["LIST"], "LISTs"),
        row("GETs of rank 0's pod", last.requests["first"].get("GET", 0), "GETs", 0.0),
        row("GETs of all other pods (the entry, each)", cuts[2].requests["others"].get("GET", 0), "GETs"),
        row("commit, work of rank 0's pod", last.first_s, "s"),
        row("commit, last part to last pod that knows", cuts[2].waited_s, "s"),
        row("plan of one rank, from an empty log", one["seconds"][0], "s", 5.0),
        row("plan of the next rank of its pod", max(pod["seconds"][1:]), "s", 5.0),
        row("memory of that, one rank alone", one["peak_bytes"], "B", 200 * MB),
        row("memory of that, a rank of a pod", pod["peak_bytes"] / len(pod["seconds"]), "B", 200 * MB),
        row("indexes that a rank reads", one["gets"]["index"], "GETs", links + DENSE_OWNERS + 1),
        row(
            "the same, all ranks of a pod",
            pod["gets"]["index"],
            "GETs",
            links * len(pod["seconds"]) + DENSE_OWNERS + 1,
        ),
        row(f"plan of a rank of {scale.other_ranks:,}", other["seconds"][0], "s", 5.0),
        row("memory of that", other["peak_bytes"], "B", 200 * MB),
        row("indexes that it reads", other["gets"]["index"], "GETs", links * meet + DENSE_OWNERS + 1),
        row("a month's requests beside packs", month["other_writes"] + month["reads"], "requests"),
        row("what they cost", month["usd_others"], "USD"),
        row("what the PUTs of its packs cost", month["usd_packs"], "USD"),
    ]


def main() -> int:
    """One plan, for `plan_in_another_process`."""
    parser = argparse.ArgumentParser(description="see bench/run.py ranks")
    parser.add_argument("--plan", required=True, type=json.loads)
    asked = parser.parse_args().plan
    scale = Scale(**asked["scale"])
    print(json.dumps(plan_in_this_process(scale, Path(asked["root"]), asked["ranks"], asked["world"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
