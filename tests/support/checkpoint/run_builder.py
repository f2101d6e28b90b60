"""Runs for tests of the log: a memory store, clocks that do not wait, and one-line helpers that append entries."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deltashard_checkpoint.backoff import Clocks
from deltashard_checkpoint.format.canonical_json import canonical
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.object_key import index_key
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, Compacted, Part, Retired
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.write import attempt as attempts
from deltashard_checkpoint.write.commit import commit_parts
from deltashard_checkpoint.write.report import PartReport

TABLE = TableSchema(fqn="t", rows=8, columns=2, dtype="float32")
TOKEN = "00000000aaaaaaaa"


def rows(start: int, stop: int, table: str = "t") -> Box:
    return Box(table=table, row_start=start, row_stop=stop, col_start=0, col_stop=2)


WHOLE = rows(0, 8)
HALVES = (rows(0, 4), rows(4, 8))


def layout_of(halves: Sequence[Box] = HALVES) -> Layout:
    return Layout.of(2, {"t": (8, 2)}, {rank: [half] for rank, half in enumerate(halves)})


@dataclass
class FakeClock:
    """Advances only when a caller sleeps."""

    now_s: float = 1e9
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    @property
    def clocks(self) -> Clocks:
        now = lambda: self.now_s  # noqa: E731
        return Clocks(wall_s=now, monotonic_s=now, sleep=self.sleep, uniform=lambda: 0.5)


class MemoryRun:
    """A run on a memory store (or a given one), written through the real log."""

    def __init__(self, store: Store | None = None) -> None:
        self.time = FakeClock()
        self.memory = MemoryStore(clock=lambda: self.time.now_s)
        self.store = store or self.memory
        self.log = self.reader()
        self.step = 0

    def reader(self, **options: Any) -> RunLog:
        return RunLog(self.store, "job", clocks=self.time.clocks, **options)

    def open(self, **options: Any) -> attempts.OpenedAttempt:
        return attempts.open_attempt(self.log, **{"owner": "me", "closing_wait_s": 0.0, **options})

    def report(
        self, attempt: int, snapshot_id: int, covers: int | None = None, *, rank: int = 0, boxes: Sequence[Box] = (WHOLE,),
        stored_bytes: int = 100, token: str = TOKEN, **more: Any,
    ) -> PartReport:  # fmt: skip
        key = index_key(
            attempt=attempt, snapshot_id=snapshot_id, rank=rank, token=token, xxh3=f"{snapshot_id:032x}"
        )
        self.memory.put(f"job/{key}", b"index")
        part = Part(rank=rank, index_key=key, boxes=tuple(boxes), stored_bytes=stored_bytes, covers=covers)
        fields = {"tables": (TABLE,), "encodings": {"t": ("q8",)}, "rows": 8, "raw_bytes": 64, "stall_s": 0.5}
        return PartReport(part=part, **{**fields, **more})

    def commit(
        self,
        attempt: int,
        snapshot_id: int,
        covers: int | None = None,
        *,
        step: int | None = None,
        **more: Any,
    ) -> int:
        self.step += 1
        done = commit_parts(
            self.log, attempt=attempt, snapshot_id=snapshot_id, step=self.step if step is None else step, world_size=1,
            reports=[self.report(attempt, snapshot_id, covers, **more)],
        )  # fmt: skip
        return done.seq

    def commit_halves(
        self,
        attempt: int,
        snapshot_id: int,
        covers: Sequence[int | None] = (None, None),
        halves: Sequence[Box] = HALVES,
    ) -> Checkpoint:
        """Commit one checkpoint of two ranks with a layout."""
        self.step += 1
        each = enumerate(zip(covers, halves, strict=True))
        reports = [
            self.report(attempt, snapshot_id, covered, rank=rank, boxes=[half])
            for rank, (covered, half) in each
        ]
        return commit_parts(
            self.log, attempt=attempt, snapshot_id=snapshot_id, step=self.step, world_size=2, layout=layout_of(halves).digest, reports=reports
        ).entry  # fmt: skip

    def append(self, kind: type[Any], **members: Any) -> int:
        self.log.refresh()
        common = {"previous": "", "at_s": 0.0}
        appended = self.log.append(
            lambda _state, seq, writer: kind(seq=seq, writer=writer, **common, **members), before="", after=""
        )
        assert appended is not None
        return appended.entry.seq

    def append_checkpoint(
        self, parts: Sequence[Part], *, attempt: int, snapshot_id: int, step: int = 0
    ) -> int:
        return self.append(
            Checkpoint, attempt=attempt, snapshot_id=snapshot_id, step=step, parts=tuple(parts), tables=(TABLE,), encodings={}, rows=0,
            raw_bytes=0, stored_bytes=1, stall_s=0.0, snapshot_at_s=0.0,
        )  # fmt: skip

    def compacted(self, seq: int, boxes: Sequence[Box] = (WHOLE,)) -> None:
        key = f"data/compact-{self.log.refresh().tip:015d}x{TOKEN}/{'0' * 32}.index"
        moved = Part(rank=0, index_key=key, boxes=tuple(boxes), stored_bytes=9, covers=None)
        self.append(Compacted, replaces=seq, parts=(moved,), rows=8, stored_bytes=9, encodings={"t": ("q8",)})

    def retire(self, checkpoints: Sequence[int] = (), prefixes: Sequence[str] = ()) -> int:
        return self.append(Retired, checkpoints=tuple(checkpoints), prefixes=tuple(prefixes))


def started_run(**options: Any) -> tuple[MemoryRun, int]:
    run = MemoryRun()
    return run, run.open(**options).attempt


def part(attempt: int, snapshot_id: int, rank: int, boxes: Sequence[Box], covers: int | None) -> Part:
    key = index_key(attempt=attempt, snapshot_id=snapshot_id, rank=rank, token=TOKEN, xxh3=f"{rank:032x}")
    return Part(rank=rank, index_key=key, boxes=tuple(boxes), stored_bytes=1, covers=covers)


def rehashed(document: dict) -> bytes:
    """Return the document with its own hash recomputed, as a hostile or broken writer could store it."""
    body = {key: value for key, value in document.items() if key != "hash"}
    return canonical({**body, "hash": hashlib.sha256(canonical(body)).hexdigest()})
