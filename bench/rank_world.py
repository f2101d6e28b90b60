"""Simulates all pods of `bench/ranks.py` over one store in memory, and the reports of their ranks."""

from __future__ import annotations

import functools
import heapq
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from deltashard_checkpoint.backoff import Clocks
from deltashard_checkpoint.format.blob_name import blob_name
from deltashard_checkpoint.format.frame import FrameInfo, FrameKind, TailInfo
from deltashard_checkpoint.format.frame_encoder import BLOB_CHUNK_BYTES, rows_per_frame
from deltashard_checkpoint.format.frame_layout import aligned
from deltashard_checkpoint.format.index import Index, Pack, Place, digest_hex, encode_index
from deltashard_checkpoint.format.layout import Layout, TableShape
from deltashard_checkpoint.format.object_key import index_key, pack_key
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.stores.abc import Buffer, ObjectInfo
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.commit import Committed, commit_parts
from deltashard_checkpoint.write.commit_wait import CommitLatency
from deltashard_checkpoint.write.report import PartReport, ReportBodyCache
from deltashard_checkpoint.write.snapshot_reports import LIST_PAGE

RUN = "ranks"
COLUMNS = 64
ROW_BYTES = COLUMNS + 8  # codes, scale and bias
STATE_BYTES = 4  # per row: one row-wise float32
RAW_BYTES = 4 * COLUMNS + 4
CHANGED_SHARE = 0.26
PACK_BYTES = 64 << 20
DENSE_BYTES = 40 << 20
DENSE_OWNERS = 8
SPREAD_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScale:
    """The size of the simulation."""

    ranks: int
    tables: int
    rows: int
    per_pod: int = 8
    snapshots: int = 4
    """A baseline, then deltas, each since the checkpoint before."""
    other_ranks: int
    """Ranks of the world that restores."""

    @property
    def pods(self) -> int:
        return -(-self.ranks // self.per_pod)

    @property
    def schemas(self) -> tuple[TableSchema, ...]:
        return _schemas(self.tables, self.rows)

    def rows_of(self, rank: int, world: int) -> tuple[int, int]:
        return self.rows * rank // world, self.rows * (rank + 1) // world

    def boxes_of(self, rank: int, world: int) -> tuple[Box, ...]:
        a, b = self.rows_of(rank, world)
        return tuple(
            Box(table=_fqn(n), row_start=a, row_stop=b, col_start=0, col_stop=COLUMNS)
            for n in range(self.tables)
        )

    def layout(self) -> Layout:
        """Return all boxes as columns, since objects would take gigabytes."""
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


FULL = RankScale(ranks=4096, tables=800, rows=10**8, other_ranks=3072)
SMALL = RankScale(ranks=64, tables=20, rows=10**6, other_ranks=48)


@functools.cache
def _schemas(tables: int, rows: int) -> tuple[TableSchema, ...]:
    state = (FieldSpec(name="sum", kind="rowwise", dtype="float32"),)
    return tuple(
        TableSchema(fqn=_fqn(n), rows=rows, columns=COLUMNS, dtype="float32", fields=state)
        for n in range(tables)
    )


def _fqn(n: int) -> str:
    return f"sparse.ebc.embedding_bags.table_{n:03d}.weight"


# Store and time


class RequestCountingStore(MemoryStore):
    """A store in memory that counts bytes and, per client, requests as S3 does."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock=clock)
        self.requests: Counter[tuple[str, str]] = Counter()
        """By (client, PUT | GET | LIST | HEAD | DELETE); a LIST is one for each 1,000 names."""
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
        for n, info in enumerate(found):
            if n and n % LIST_PAGE == 0:
                self._count("LIST")
            yield info

    def delete(self, keys: Iterable[str]) -> None:
        self._count("DELETE")
        super().delete(keys)


class SimulatedPods:
    """Pods as greenlets over one clock; a pod that sleeps yields to the next one."""

    def __init__(self) -> None:
        from greenlet import getcurrent

        self.now_s = 1e9
        self.store = RequestCountingStore(lambda: self.now_s)
        self._tasks: list[tuple[float, int, str, Any]] = []
        self._main = getcurrent()
        self._count = 0
        self.rng = random.Random(7)
        self.clocks = Clocks(
            wall_s=lambda: self.now_s,
            monotonic_s=lambda: self.now_s,
            sleep=self._sleep,
            uniform=self.rng.random,
        )

    def schedule(self, delay_s: float, who: str, run: Any) -> None:
        from greenlet import greenlet

        self._push(delay_s, who, greenlet(run, parent=self._main))

    def run_all(self) -> None:
        while self._tasks:
            at_s, _, who, task = heapq.heappop(self._tasks)
            self.now_s, self.store.who = at_s, who
            task.switch()

    def _push(self, delay_s: float, who: str, task: Any) -> None:
        self._count += 1
        heapq.heappush(self._tasks, (self.now_s + delay_s, self._count, who, task))

    def _sleep(self, seconds: float) -> None:
        from greenlet import getcurrent

        if getcurrent() is self._main:
            self.now_s += seconds
            return
        self._push(seconds, self.store.who, getcurrent())
        self._main.switch()


# Reports of ranks


def make_index(
    scale: RankScale, rank: int, *, attempt: int, snapshot_id: int, token: str, covers: int | None
) -> Index:
    """Return a rank's index of a snapshot, with packs that do not exist."""
    a, b = scale.rows_of(rank, scale.ranks)
    frames: list[FrameInfo] = []

    def digest(*, tail: bool = False) -> bytes:
        return (tail << 127 | rank << 64 | snapshot_id << 32 | len(frames)).to_bytes(16, "big")

    held = b - a if covers is None else max(2, round(CHANGED_SHARE * (b - a)))
    count = -(-held // rows_per_frame(scale.schemas[0], COLUMNS, ENCODINGS["q8"]))
    for n in range(scale.tables):
        for i in range(count):
            first, end = a + (b - a) * i // count, a + (b - a) * (i + 1) // count
            rows = held * (i + 1) // count - held * i // count
            frames.append(
                FrameInfo(
                    kind=FrameKind.ROWS,
                    length=aligned(rows * ROW_BYTES + (end - first) // 8 + 512),
                    digest=digest(),
                    step=snapshot_id,
                    table=_fqn(n),
                    row_min=first,
                    row_max=end - 1,
                    rows=rows,
                    col_start=0,
                    col_stop=COLUMNS,
                    encoding="q8",
                    tail=TailInfo(length=aligned(rows * STATE_BYTES + 256), digest=digest(tail=True)),
                )
            )
    for name, size in _blobs(scale, rank).items():
        for at in range(0, size, BLOB_CHUNK_BYTES):
            frames.append(
                FrameInfo(
                    kind=FrameKind.BLOB,
                    length=aligned(min(size - at, BLOB_CHUNK_BYTES) + 256),
                    digest=digest(),
                    step=snapshot_id,
                    name=name,
                    blob_offset=at,
                    blob_bytes=size,
                )
            )
    places, packs = _place_frames(frames)
    return Index(
        run=RUN,
        attempt=attempt,
        snapshot_id=snapshot_id,
        step=snapshot_id,
        rank=rank,
        token=token,
        tables=scale.schemas,
        packs=tuple(
            Pack(
                key=pack_key(
                    attempt=attempt, snapshot_id=snapshot_id, rank=rank, token=token, n=n, state=pack.state
                ),
                bytes=pack.bytes,
            )
            for n, pack in enumerate(packs)
        ),
        places=tuple(places),
        boxes=scale.boxes_of(rank, scale.ranks),
        covers=covers,
        raw_bytes=sum(place.info.rows for place in places) * RAW_BYTES,
    )


@dataclass(slots=True)
class _PackFill:
    """A pack and its fill level."""

    number: int
    state: bool
    """Whether the pack has tails."""
    bytes: int = 0


def _place_frames(frames: Iterable[FrameInfo]) -> tuple[list[Place], list[_PackFill]]:
    """Return where frames and tails are stored when each kind fills one pack after another, and these packs."""
    packs: list[_PackFill] = []
    filling: dict[bool, _PackFill] = {}

    def reserved(length: int, *, state: bool) -> tuple[int, int]:
        pack = filling.get(state)
        if pack is None or pack.bytes + length > PACK_BYTES:
            pack = filling[state] = _PackFill(number=len(packs), state=state)
            packs.append(pack)
        offset, pack.bytes = pack.bytes, pack.bytes + length
        return pack.number, offset

    places = []
    for info in frames:
        pack, offset = reserved(info.length, state=False)
        place = Place(pack=pack, offset=offset, info=info)
        if info.tail is not None:
            pack, offset = reserved(info.tail.length, state=True)
            place = replace(place, tail_pack=pack, tail_offset=offset)
        places.append(place)
    return places, packs


def owners(scale: RankScale) -> list[int]:
    return list(range(0, scale.ranks, scale.ranks // DENSE_OWNERS))


def _blobs(scale: RankScale, rank: int) -> dict[str, int]:
    found = {blob_name(rank, "rng"): 6000, blob_name(rank, "loader"): 3000, blob_name(rank, "meta"): 20_000}
    if rank == 0:
        found |= {"optim/0": 100_000}
    if rank in (dense := owners(scale)):
        found |= {f"dense/over.{dense.index(rank)}.weight": DENSE_BYTES // DENSE_OWNERS}
    return found


# Commits


@dataclass(slots=True, kw_only=True)
class CommittedSnapshot:
    """One snapshot with the requests of its commit."""

    number: int
    seq: int = 0
    covers: int | None = None
    requests: dict[str, dict[str, int]] = field(default_factory=dict)
    """PUT, GET, LIST, ... of `first` (the pod of rank 0), of the sum of `others`, and of `worst` (one of them)."""
    indexes: int = 0
    """The PUTs of indexes among them."""
    committed_by: str = ""
    waited_s: float = 0.0
    """From the last part until every pod has received the commit."""
    first_s: float = 0.0
    """Real seconds of work of rank 0's pod, when it finishes last."""
    packs: int = 0
    bytes: int = 0


class PodGroup:
    """All pods, over one run."""

    def __init__(self, scale: RankScale, read: Iterable[int]) -> None:
        self.scale = scale
        self.world = SimulatedPods()
        self.read = frozenset(read)
        """Ranks with complete indexes; those of other ranks are empty objects of the same names."""
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
        self.bodies = [ReportBodyCache() for _ in range(scale.pods)]
        self.latencies = [CommitLatency() for _ in range(scale.pods)]
        self._shapes: dict[tuple[bool, bool, bool], tuple[int, int, int]] = {}
        self.index_bytes: dict[int, int] = {}
        """By snapshot, of the first rank whose index is read."""

    def reports(self, pod: int, snapshot: CommittedSnapshot) -> list[PartReport]:
        scale, found = self.scale, []
        for rank in range(pod * scale.per_pod, min((pod + 1) * scale.per_pod, scale.ranks)):
            token = f"{snapshot.number:08x}{rank:08x}"
            index = self._shape(rank, snapshot)
            data = b""
            if rank in self.read:
                data = encode_index(
                    make_index(
                        scale,
                        rank,
                        attempt=self.attempt,
                        snapshot_id=snapshot.number,
                        token=token,
                        covers=snapshot.covers,
                    )
                )
                self.index_bytes.setdefault(snapshot.number, len(data))
            key = index_key(
                attempt=self.attempt,
                snapshot_id=snapshot.number,
                rank=rank,
                token=token,
                xxh3=digest_hex(data) if data else f"{rank:032x}",
            )
            self.world.store.put(f"{RUN}/{key}", data)
            snapshot.indexes += 1
            packs, rows, stored = index
            snapshot.packs += packs
            snapshot.bytes += stored
            part = Part(rank=rank, index_key=key, boxes=(), stored_bytes=stored, covers=snapshot.covers)
            found.append(
                PartReport(
                    part=part,
                    tables=scale.schemas,
                    encodings=dict.fromkeys((table.fqn for table in scale.schemas), ("q8",)),
                    rows=rows,
                    raw_bytes=rows * RAW_BYTES,
                    stall_s=0.125,
                    directive="timer",
                    fingerprint={"torch": "2.7"},
                    common_blobs=rank in owners(scale),
                )
            )
        return found

    def _shape(self, rank: int, snapshot: CommittedSnapshot) -> tuple[int, int, int]:
        """Return (packs, rows, bytes) of a rank's part; ranks without blobs differ by at most a row per table."""
        kind = (rank in owners(self.scale), rank == 0, snapshot.covers is None)
        if kind not in self._shapes:
            index = make_index(
                self.scale,
                rank,
                attempt=1,
                snapshot_id=snapshot.number,
                token="0" * 16,
                covers=snapshot.covers,
            )
            self._shapes[kind] = (len(index.packs), index.rows, sum(pack.bytes for pack in index.packs))
        return self._shapes[kind]

    def save(self, number: int, covers: int | None, *, first_last: bool) -> CommittedSnapshot:
        """Save one snapshot of all pods; rank 0's pod finishes its upload before or after all others."""
        snapshot = CommittedSnapshot(number=number, covers=covers)
        store, world = self.world.store, self.world
        store.requests.clear()
        ends = [world.rng.uniform(0.0, SPREAD_S) for _ in range(self.scale.pods)]
        ends[0] = SPREAD_S + 1.0 if first_last else 0.0
        begun_s = world.now_s

        def pod(number_: int) -> None:
            real_s = time.monotonic()
            done: Committed = commit_parts(
                self.logs[number_],
                attempt=self.attempt,
                snapshot_id=snapshot.number,
                step=snapshot.number,
                world_size=self.scale.ranks,
                reports=self.reports(number_, snapshot),
                layout=self.digest,
                bodies=self.bodies[number_],
                latency=self.latencies[number_],
                since_s=ends[number_],
            )
            snapshot.seq = done.seq
            snapshot.waited_s = world.now_s - begun_s - max(ends)
            if done.by_us:
                snapshot.committed_by = store.who
            if number_ == 0 and first_last:
                snapshot.first_s = time.monotonic() - real_s

        for n, end_s in enumerate(ends):
            world.schedule(end_s, "first" if n == 0 else f"pod {n}", lambda n=n: pod(n))
        world.run_all()
        others: Counter[str] = Counter()
        by_pod: dict[str, Counter[str]] = {}
        for (who, kind), times in store.requests.items():
            by_pod.setdefault(who, Counter())[kind] += times
            if who != "first":
                others[kind] += times
        worst = max((c for who, c in by_pod.items() if who != "first"), key=lambda c: c.total())
        snapshot.requests = {"first": dict(by_pod["first"]), "others": dict(others), "worst": dict(worst)}
        return snapshot
