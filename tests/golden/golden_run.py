"""A small run, written by today's writers from fixed values, a fixed clock and fixed tokens: the same bytes each time.

    slot  what                                                      slot  what
       0  genesis                                                     10  attempt, resumes from 6
       1  attempt, one rank                                           11  checkpoint, q8
       2  checkpoint, all rows, pinned                                12  rot, where a checkpoint was
       3  checkpoint since 2 (retired)                                13  attempt of two ranks and another owner, voids 12
       4  checkpoint since 2, q4 with odd rows, tombstones            14  checkpoint: rank 0 since 11, rank 1 since 6
       5  checkpoint since 4, q2 with an exponent (compacted)         15  checkpoint of attempt 10, which counts for nothing
       6  checkpoint since 5, q3, bf16 state                          16  attempt, resumes from 14, voids 15
       7  compact of 5                                                17  checkpoint, all rows, tables cut by columns
       8  retire of 3                                                 18  retire of a cut that failed
       9  reclaim                                                     19  checkpoint since 17, other rows in each shard
                                                                      20  checkpoint: rank 0 since 19, rank 1 all its rows

What each checkpoint must restore is kept beside (`Held`): frames decoded and laid over one another as they are made,
without log, chain, index or plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from deltashard_checkpoint.backoff import Clocks
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.codecs import decoder, quantizer
from deltashard_checkpoint.format import element_type, frame_encoder, typed_tree
from deltashard_checkpoint.format.canonical_json import canonical
from deltashard_checkpoint.format.frame import FrameKind, parse_frame
from deltashard_checkpoint.format.frame_encoder import EncodedFrame
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.object_key import new_token, pack_key
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log import folded_state
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, Part, entry_key
from deltashard_checkpoint.log.entry_codec import seal
from deltashard_checkpoint.maintenance import compaction, garbage_collection
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement
from deltashard_checkpoint.maintenance.row_mover import mover
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.commit import PartsMissing, commit_parts
from deltashard_checkpoint.write.part_writer import PartTarget

from tests.golden.golden_case import golden_tree
from tests.support.checkpoint.sample import box, fixed, tombstone, whole, write_part

RUN = "run"
"""Its name, and that of its folder in `tests/golden/v1`: a copy of that folder's parent is the store."""
ITEMS = TableSchema(
    fqn="embeddings.items.weight", rows=48, columns=8, dtype="float32",
    fields=(FieldSpec(name="sum", kind="rowwise", dtype="float32"),),
)  # fmt: skip
USERS = TableSchema(
    fqn="embeddings.users.weight", rows=30, columns=6, dtype="float32",
    fields=tuple(FieldSpec(name=name, kind="pointwise", dtype="float32") for name in ("exp_avg", "exp_avg_sq")),
)  # fmt: skip
TAGS = TableSchema(
    fqn="tags", rows=150, columns=12, dtype="bfloat16",
    fields=(FieldSpec(name="count", kind="rowwise", dtype="int64"),),
)  # fmt: skip
TABLES = (ITEMS, USERS, TAGS)
PACK_BYTES = 8 << 10
CHUNK_BYTES = 768
WORKLOADS = ("0b9e6a52-3d1c-4f67-8a55-0c6f1f2d7e01", "0b9e6a52-3d1c-4f67-8a55-0c6f1f2d7e02")


@dataclass
class Arrays:
    """A table's values; a row-wise field as one value for each weight, so that shards of columns may differ."""

    weights: np.ndarray
    fields: dict[str, np.ndarray]

    def copy(self) -> Arrays:
        return Arrays(self.weights.copy(), {name: values.copy() for name, values in self.fields.items()})


Model = dict[str, Arrays]


@dataclass
class Held:
    """What a checkpoint must restore."""

    tables: Model
    blobs: dict[str, bytes]
    schemas: Sequence[TableSchema] = TABLES
    told: dict[str, np.ndarray] = field(default_factory=dict)
    """Row-wise values [rows] that whoever wrote them knows better than `_joined`, by `table.field`."""

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """(`table` or `table.field`, values [rows, columns] or [rows]) of all tables."""
        for table in self.schemas:
            held = self.tables[table.fqn]
            yield table.fqn, held.weights
            for spec in table.fields:
                name, values = f"{table.fqn}.{spec.name}", held.fields[spec.name]
                joined = self.told.get(name)
                if joined is None:
                    joined = values if spec.kind == "pointwise" else _joined(values)
                yield name, joined


def _joined(values: np.ndarray) -> np.ndarray:
    """One value a row [n] of one for each weight [n, D]: the mean, and the first of values that are no floats.

    Tables are cut at column 3, or where it does not matter.
    """
    if values.dtype.kind != "f":
        return values[:, 0].copy()
    columns = values.shape[1]
    halves = np.float64(3 / columns) * values[:, 0] + np.float64((columns - 3) / columns) * values[:, -1]
    return np.where(values[:, 0] == values[:, -1], values[:, 0], halves).astype(values.dtype)


@dataclass
class Share:
    """What one rank brings to a cut."""

    boxes: Sequence[Box]
    frames: Sequence[EncodedFrame]
    covers: int | None = None


@dataclass
class Chance:
    """Tokens that hang on what is being done, and on nothing else."""

    doing: str = ""

    def token_hex(self, size_bytes: int) -> str:
        return hashlib.sha256(self.doing.encode()).hexdigest()[: 2 * size_bytes]


@dataclass
class Writer:
    """Writes the run into a store in memory."""

    directory: Path
    chance: Chance
    run: str = RUN
    tables: Sequence[TableSchema] = TABLES
    now_s: float = 1_800_000_000.125
    checkpoints: dict[int, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clocks = Clocks(
            wall_s=lambda: self.now_s, monotonic_s=lambda: 0.0, sleep=lambda _: None, uniform=lambda: 0.5
        )
        self.store = MemoryStore(clock=lambda: self.now_s)
        self.cache = PackCache(self.directory / "cache", budget_bytes=64 << 20)
        self.live: Model = {}
        self.attempt = self.cut = self.world_size = 0

    def open(self, *, world_size: int = 1, layout: Layout | None = None, **options: object) -> None:
        """A new trainer, which begins with what it restores; `layout`: of several ranks."""
        if layout is not None:
            options["layout"] = layout.data
        self.layout = "" if layout is None else layout.digest
        self.now_s += 100.25
        self.chance.doing = f"attempt {self.now_s}"
        self.log = RunLog(self.store, self.run, clocks=self.clocks, readers=1)
        opened = open_attempt(
            self.log, **{"owner": "golden", "closing_wait_s": 0.0, "world_size": world_size, **options}
        )
        self.attempt, self.cut, self.world_size = opened.attempt, 0, world_size
        if opened.resume is not None:
            self.live = {
                name: arrays.copy() for name, arrays in self.checkpoints[opened.resume.seq].tables.items()
            }

    def train(self, table: TableSchema, rows: Sequence[int], salt: int, by: float = 1.0) -> np.ndarray:
        """New values for some rows; their ids, ascending."""
        ids, live = np.array(sorted(rows), np.int64), self.live[table.fqn]
        values = fixed((len(ids), table.columns), salt) * np.float32(by)
        live.weights[ids] = values if table.dtype == "float32" else values.view(np.uint32) >> 16
        for i, spec in enumerate(table.fields):
            shape = (len(ids), table.columns if spec.kind == "pointwise" else 1)
            fresh = fixed(shape, salt + i + 1) + np.float32(2)
            live.fields[spec.name][ids] = (fresh * 1000).astype(np.int64) if spec.dtype == "int64" else fresh
        return ids

    def frame(
        self, table: TableSchema, ids: np.ndarray | range, encoding: str, held: Box | None = None, *,
        state_encoding: str = "fp32", step: int | None = None,
    ) -> EncodedFrame:  # fmt: skip
        """One frame of living rows, in the rows and columns of a box."""
        held, live = held or whole(table), self.live[table.fqn]
        if isinstance(ids, range):
            ids = range(max(ids.start, held.row_start), min(ids.stop, held.row_stop))
        else:
            ids = ids[(ids >= held.row_start) & (ids < held.row_stop)]
        columns, at = slice(held.col_start, held.col_stop), np.asarray(ids, np.int64)
        fields = {}
        for spec in table.fields:
            values = live.fields[spec.name][at]
            fields[spec.name] = values[:, columns] if spec.kind == "pointwise" else values[:, held.col_start]
        return frame_encoder.encode_rows(
            RowBlock(
                schema=table, ids=ids, weights=np.ascontiguousarray(live.weights[at, columns]), fields=fields,
                columns=range(held.col_start, held.col_stop),
            ),
            EncodeOptions(encoding=ENCODINGS[encoding], state_encoding=state_encoding, search=quantizer.PLAIN),
            step=self.step if step is None else step,
        )  # fmt: skip

    def save(
        self, shares: Sequence[Share], *, pins: tuple[str, ...] = (), everything: bool = False,
        blobs: dict[str, bytes] | None = None,
    ) -> int:  # fmt: skip
        """Commit a cut, with the blobs of a trainer or these; its slot."""
        self.now_s += 60.5
        self.cut += 1
        blobs = self.blobs(everything=everything) if blobs is None else blobs
        base = [self.checkpoints[share.covers] if share.covers is not None else None for share in shares]
        done = None
        for rank, share in enumerate(shares):
            self.chance.doing = f"attempt {self.attempt} cut {self.cut} rank {rank}"
            token = new_token()
            stored = [table for table in self.tables if any(b.table == table.fqn for b in share.boxes)]
            target = PartTarget(
                run=self.run, attempt=self.attempt, cut=self.cut, step=self.step, rank=rank, token=token,
                tables=tuple(stored), boxes=tuple(share.boxes), covers=share.covers,
            )  # fmt: skip
            blob_frames = [f for n, f in enumerate(self._blob_frames(blobs)) if n % len(shares) == rank]
            said = {
                "stall_s": round(0.125 * (rank + 1), 3), "cut_at_s": self.now_s - 0.5 - rank,
                "directive": "full" if share.covers is None else "differential",
                "fingerprint": {"library": "0.1.0", "threads": "2"}, "pins": pins,
                "metadata": {"note": f"cut {self.cut} of attempt {self.attempt}", "gr\u00fcn": "\u2713 \U0001f600"},
            }  # fmt: skip
            report = write_part(
                self.store, self.cache, target, [*share.frames, *blob_frames], said=said, pack_bytes=PACK_BYTES, uploads=1
            )  # fmt: skip
            # All but the last find that a part is missing, and would wait for it.
            with suppress(PartsMissing):
                done = commit_parts(
                    self.log, attempt=self.attempt, cut=self.cut, step=self.step, world_size=self.world_size, reports=[report],
                    layout=self.layout, deadline_s=600.0 if rank == len(shares) - 1 else 0.0,
                )  # fmt: skip
        assert done is not None
        self.checkpoints[done.seq] = Held(_laid_over(self.tables, base, shares), blobs, self.tables)
        return done.seq

    def pass_to(self, doing: str) -> None:
        """What comes next, a little later."""
        self.now_s += 10.0
        self.chance.doing = doing

    @property
    def step(self) -> int:
        """Of the cut that comes next."""
        return int(self.now_s - 1_800_000_000) // 10

    def blobs(self, *, everything: bool) -> dict[str, bytes]:
        """Everything that is no row, under the names that a trainer gives."""
        step = self.step

        def tensor(shape: tuple[int, ...], salt: int) -> typed_tree.Tensor:
            return typed_tree.Tensor(dtype="float32", shape=shape, data=fixed(shape, salt + step).tobytes())

        found = {
            "dense/mlp.0.weight": tensor((24, 16), 5),
            "dense/mlp.0.bias": tensor((24,), 6),
            "optim/0": {
                "class": "torch.optim.adam.Adam",
                "groups": [{"lr": 0.01, "betas": (0.9, 0.999), "params": ["mlp.0.weight", "mlp.0.bias"]}],
                "state": {"mlp.0.bias": {"step": step, "exp_avg": tensor((24,), 7)}},
                "fields": {}, "extra": {}, "orphans": {},
            },
            "state/scheduler": {"last_epoch": step, "_last_lr": [0.01 / (1 + step)]},
            "loader": {"train": {"epoch": 1, "batch": step, "order": np.arange(8, dtype=np.int64) * step}},
            "rng": {
                "python": (3, np.arange(12, dtype=np.uint32) + np.uint32(step), None),
                "numpy": {"bit_generator": "MT19937", "state": {"key": np.arange(6, dtype=np.uint32), "pos": step}},
                "torch": bytes(range(32)),
            },
            "meta": {"library": "0.1.0", "step": step, "fingerprint": {"threads": "2"}, "content": None, "modules": []},
        }  # fmt: skip
        if everything:
            found["state/everything"] = golden_tree()
        encoded = {name: typed_tree.encode(tree).to_bytes() for name, tree in found.items()}
        return encoded | {"empty": b""}

    def _blob_frames(self, blobs: Mapping[str, bytes]) -> Iterator[EncodedFrame]:
        for name, data in blobs.items():
            yield from frame_encoder.encode_blob_frames(
                name=name, data=data, step=self.step, chunk_bytes=CHUNK_BYTES
            )

    def rot(self, seq: int) -> None:
        """One bit of an entry."""
        key = f"{self.run}/{entry_key(seq)}"
        data = bytearray(self.store.get(key))
        data[len(data) // 2] ^= 0x10
        self.store.put(key, data)

    def intrude(self, attempt: int, like: int) -> None:
        """A checkpoint of an attempt that is fenced, whole in itself, put by something that keeps no rule."""
        state = self.log.refresh()
        entry = state.checkpoints[like]
        data = self.store.get(f"{RUN}/{entry.parts[0].index_key}")
        prefix = f"data/{attempt:020d}/{3:08d}/"
        key = f"{prefix}00000-feedfeedfeedfeed-{entry.parts[0].index_key[-38:]}"
        self.store.put(f"{RUN}/{key}", data)
        part = Part(
            rank=0, index_key=key, boxes=entry.parts[0].boxes, stored_bytes=len(data), covers=entry.parts[0].covers
        )  # fmt: skip
        sealed = seal(
            Checkpoint(
                seq=state.tip + 1, previous=state.tip_hash, writer="feedfeedfeedfeed", at_s=self.now_s, attempt=attempt,
                cut=3, step=entry.step + 500, parts=(part,), tables=entry.tables, encodings={}, rows=0, raw_bytes=0,
                stored_bytes=len(data), stall_s=0, cut_at_s=0, pins=("newest",),
            )
        )  # fmt: skip
        self.store.put(f"{RUN}/{entry_key(state.tip + 1)}", sealed.data)


def _laid_over(tables: Sequence[TableSchema], base: Sequence[Held | None], shares: Sequence[Share]) -> Model:
    """What is restored: what each share builds on, under what it brings."""
    out = blank(tables)
    for below, share in zip(base, shares, strict=True):
        schemas = {table.fqn: table for table in tables}
        for held in share.boxes if below is not None else ():
            at = np.s_[held.row_start : held.row_stop, held.col_start : held.col_stop]
            old, new = below.tables[held.table], out[held.table]
            new.weights[at] = old.weights[at]
            for name, values in old.fields.items():
                new.fields[name][at] = values[at]
        # Oldest step first, and rows after tombstones: what comes last is what is seen.
        for each in sorted(share.frames, key=lambda f: (f.info.step, -f.info.kind)):
            frame = parse_frame(each.data, each.tail)
            info, table = frame.info, schemas[frame.info.table]
            at, new = np.ix_(frame.row_ids(), np.arange(info.col_start, info.col_stop)), out[info.table]
            if info.kind is FrameKind.TOMBSTONE:
                for values in (new.weights, *new.fields.values()):
                    values[at] = 0
                continue
            new.weights[at] = decoder.decode_rows(
                ENCODINGS[info.encoding], frame.scales, frame.biases, frame.codes, frame.exponent, rows=info.rows,
                columns=info.col_stop - info.col_start, exceptions=frame.exceptions, dtype=table.dtype,
            )  # fmt: skip
            for section in frame.fields:
                values = section.values(info.rows)
                if section.stored_dtype != section.spec.dtype:
                    values = quantizer.widened(values, section.stored_dtype)
                new.fields[section.spec.name][at] = values if values.ndim == 2 else values[:, None]
    return out


def blank(tables: Sequence[TableSchema] = TABLES) -> Model:
    """All tables, of zeros."""
    return {
        table.fqn: Arrays(
            np.zeros((table.rows, table.columns), element_type.by_name(table.dtype).carrier),
            {s.name: np.zeros((table.rows, table.columns), element_type.by_name(s.dtype).carrier) for s in table.fields},
        )
        for table in tables
    }  # fmt: skip


@contextmanager
def fixed_tokens() -> Iterator[Chance]:
    """Tokens are drawn from a `Chance` meanwhile."""
    chance = Chance()
    with mock.patch("secrets.token_hex", chance.token_hex):
        yield chance


def make_run(directory: Path) -> tuple[dict[str, bytes], dict[int, Held]]:
    """(objects by key, relative to the run's root, what its living checkpoints hold); `directory` is for the cache."""
    with fixed_tokens() as chance:
        writer = Writer(directory, chance)
        _write(writer)
        return written(writer)


def written(writer: Writer) -> tuple[dict[str, bytes], dict[int, Held]]:
    """What `make_run` gives, of a writer that is done."""
    state = writer.log.refresh()
    living = {seq: writer.checkpoints[seq] for seq in state.checkpoints}
    keys = [info.key for info in writer.store.list(f"{writer.run}/")]
    return {key.removeprefix(f"{writer.run}/"): writer.store.get(key) for key in keys}, living


def _write(w: Writer) -> None:
    everything = [whole(table) for table in TABLES]

    # One rank: all rows, then what changed.
    w.open(workload=WORKLOADS[0], pod=f"{WORKLOADS[0]}-a")
    w.live = blank()
    for i, table in enumerate(TABLES):
        w.train(table, range(table.rows), 1000 * i)
    rows = [w.frame(table, range(table.rows), "fp32") for table in (ITEMS, USERS)]
    first = w.save([Share(everything, [*rows, w.frame(TAGS, range(150), "bf16")])], pins=("first", "paper"))

    items, users = w.train(ITEMS, range(48), 11), w.train(USERS, (1, 2, 17, 29), 12)
    rows = [
        w.frame(ITEMS, items, "q8"),
        w.frame(USERS, users, "q4"),
        w.frame(TAGS, w.train(TAGS, (4, 140), 13), "bf16"),
    ]
    w.save([Share(everything, rows, first)])

    # Since 2 again: rows of 3, some anew, some that q4 cannot hold. Some rows are gone, one of which came back at once.
    w.train(ITEMS, [row for row in range(48) if row % 3 != 1], 21)
    odd = w.live[ITEMS.fqn].weights
    odd[3, 2], odd[9, 0], odd[20], odd[30] = np.nan, np.inf, 0.3, 1e30
    gone = np.array([1, 4, 5, 43], np.int64)
    rest = np.array([row for row in range(48) if row not in (1, 4, 43)], np.int64)
    rows = [
        w.frame(ITEMS, rest, "q4"), tombstone(ITEMS, gone, step=w.step), w.frame(USERS, users, "q8"),
        tombstone(USERS, np.array([8, 9], np.int64), step=w.step), w.frame(TAGS, np.array([4, 140], np.int64), "q8"),
    ]  # fmt: skip
    second = w.save([Share(everything, rows, first)])
    for table, dead in ((ITEMS, (1, 4, 43)), (USERS, (8, 9))):
        for values in (w.live[table.fqn].weights, *w.live[table.fqn].fields.values()):
            values[list(dead)] = 0

    # One after another. Small values, for which float16 scales need an exponent; rows of several steps in one cut.
    items = w.train(ITEMS, range(5, 12), 31, by=2.0**-30)
    users = w.train(USERS, range(0, 30, 2), 32)
    rows = [w.frame(ITEMS, items, "q2"), w.frame(USERS, users[users < 14], "q4", step=w.step - 1)]
    later = w.train(USERS, (2, 4, 25), 33)
    rows += [w.frame(USERS, later, "q2"), w.frame(USERS, users[users >= 14], "q3", step=w.step - 1)]
    third = w.save([Share(everything, rows, second)])

    items, users = w.train(ITEMS, (0, 7, 46), 41), w.train(USERS, range(4, 20), 42)
    rows = [w.frame(ITEMS, items, "q3"), w.frame(USERS, users, "q3", state_encoding="bf16")]
    fourth = w.save([Share(everything, rows, third)], pins=("paper",))

    # What a sidecar does beside.
    w.pass_to("compaction")
    compaction.compact(w.log, third, mover(w.cache))
    w.pass_to("retention")
    append_retirement(w.log, Retention(keep_last=1))
    w.pass_to("collection")
    garbage_collection.collect(w.log, grace_s=0.0, forget_at=1)

    # Another trainer; its second commit rots.
    w.open()
    items, tags = w.train(ITEMS, range(8, 32), 51), w.train(TAGS, range(60, 140), 52)
    rows = [w.frame(ITEMS, items, "q8"), w.frame(TAGS, tags, "q8", step=w.step - 1)]
    rows.append(
        w.frame(TAGS, w.train(TAGS, (7, 61, 99), 53), "bf16")
    )  # a newer step of rows that are there already
    fifth = w.save([Share(everything, rows, fourth)])
    rows = [w.frame(ITEMS, w.train(ITEMS, (0, 1), 54), "fp32")]
    w.rot(w.save([Share(everything, rows, fifth)]))

    # Two ranks. The second one has not heard of the last commit, so it holds more.
    w.open(world_size=2, owner="golden-2", takeover=True, workload=WORKLOADS[1], pod=f"{WORKLOADS[1]}-a")
    boxes = [
        [box(ITEMS, 0, 24, 0, 8), box(USERS, 0, 30, 0, 2), whole(TAGS)],
        [box(ITEMS, 24, 48, 0, 8), box(USERS, 0, 30, 2, 6)],
    ]
    more, users = w.train(ITEMS, (2, 23, 24, 47), 61), w.train(USERS, (0, 3, 28), 62)
    since = np.union1d(items, more)
    shares = [
        Share(
            boxes[0],
            [w.frame(ITEMS, more, "q4", boxes[0][0]), w.frame(USERS, users, "q8", boxes[0][1])],
            fifth,
        ),
        Share(
            boxes[1],
            [w.frame(ITEMS, since, "q4", boxes[1][0]), w.frame(USERS, users, "q4", boxes[1][1])],
            fourth,
        ),
    ]
    sixth = w.save(shares)
    w.intrude(fifth - 1, like=fifth)

    # Two ranks again, tables cut by columns: each has its own value a row.
    w.open(world_size=2, owner="golden-2", workload=WORKLOADS[1], pod=f"{WORKLOADS[1]}-b")
    assert w.log.state.attempts[w.attempt].resumes_from == sixth
    boxes = [
        [box(ITEMS, 0, 48, 0, 3), box(USERS, 0, 11, 0, 6), box(TAGS, 0, 150, 0, 6)],
        [box(ITEMS, 0, 48, 3, 8), box(USERS, 11, 30, 0, 6), box(TAGS, 0, 150, 6, 12)],
    ]
    w.live[ITEMS.fqn].fields["sum"][:, 3:] += np.float32(0.7)
    shares = [
        Share(held, [w.frame(t, range(t.rows), "bf16" if t is TAGS else "fp32", b) for t, b in zip(TABLES, held, strict=True)])
        for held in boxes
    ]  # fmt: skip
    base = w.save(shares, everything=True)
    # What 12 and 15 spoke of stays as long as the attempt lives that left them behind; what it failed to save goes.
    w.store.put(
        f"{RUN}/{pack_key(attempt=w.attempt, cut=0, rank=0, token='feedfeedfeedfeed', n=0)}", b"failed"
    )
    w.pass_to("retention of what never counted")
    append_retirement(
        w.log, Retention(keep_last=99), debris=garbage_collection.debris(w.log, w.log.refresh())
    )
    ids = w.train(ITEMS, (0, 5, 6, 40), 71)
    w.live[ITEMS.fqn].fields["sum"][ids, 3:] *= np.float32(1.1)
    shares = [
        Share(boxes[0], [w.frame(ITEMS, ids, "q8", boxes[0][0])], base),
        Share(boxes[1], [w.frame(ITEMS, ids[1:3], "fp16", boxes[1][0])], base),
    ]
    last = w.save(shares)
    w.train(USERS, (0, 12), 81)
    ids = w.train(ITEMS, (5, 40, 41), 82)
    shares = [
        Share(boxes[0], [w.frame(ITEMS, ids, "bf16", boxes[0][0]), w.frame(USERS, np.array([0]), "q8", boxes[0][1])], last),
        Share(boxes[1], [w.frame(t, range(t.rows), "bf16", b) for t, b in zip(TABLES, boxes[1], strict=True)]),
    ]  # fmt: skip
    w.save(shares, pins=("paper",))
    _leave_unnamed_fold(w)


def _leave_unnamed_fold(w: Writer) -> None:
    """A folded state that no entry names, of the newest one's slot, with one checkpoint only: not to be begun with."""
    name = w.log.listed().folds[0]
    document = _unsealed(w.store.get(f"{RUN}/{folded_state.fold_key(name)}"))
    document["checkpoints"] = document["checkpoints"][:1]
    digest = ""
    while digest < name.digest:  # so that it is the first that a reader comes to
        document["committed"] += 1
        data = canonical({**document, "hash": hashlib.sha256(canonical(document)).hexdigest()})
        digest = hashlib.sha256(data).hexdigest()[:32]
    w.store.put(f"{RUN}/log/fold-{name.seq:020d}-{digest}.json", data)


def _unsealed(data: bytes) -> dict[str, Any]:
    return {name: value for name, value in json.loads(data).items() if name != "hash"}
