"""Tables, frames and whole runs for the format's tests: small, deterministic, written by the real writers."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.codecs import quantizer
from deltashard_checkpoint.format import frame_encoder
from deltashard_checkpoint.format.blob_name import parse_blob_name
from deltashard_checkpoint.format.frame import FrameKind
from deltashard_checkpoint.format.frame_encoder import EncodedFrame
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.object_key import new_token
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.commit import commit_parts
from deltashard_checkpoint.write.part_writer import PartTarget, PartWriter
from deltashard_checkpoint.write.report import PartReport

RUN = "team/run-1"


def schema(
    fqn: str = "embeddings.items.weight",
    rows: int = 200,
    columns: int = 8,
    dtype: str = "float32",
    *,
    pointwise: bool = True,
) -> TableSchema:
    fields = [FieldSpec(name="sum", kind="rowwise", dtype="float32")]
    if pointwise:
        fields.append(FieldSpec(name="exp_avg", kind="pointwise", dtype="float32"))
    return TableSchema(fqn=fqn, rows=rows, columns=columns, dtype=dtype, fields=tuple(fields))


def whole(table: TableSchema) -> Box:
    return box(table, 0, table.rows, 0, table.columns)


def box(table: TableSchema, row_start: int, row_stop: int, col_start: int, col_stop: int) -> Box:
    return Box(
        table=table.fqn, row_start=row_start, row_stop=row_stop, col_start=col_start, col_stop=col_stop
    )


class SampleModel:
    """A table's live values, as a trainer would hold them."""

    def __init__(self, table: TableSchema, seed: int = 0) -> None:
        self.table = table
        self.rng = np.random.default_rng(seed)
        shape = (table.rows, table.columns)
        self.weights = self.rng.standard_normal(shape).astype(np.float32)
        self.fields = {
            spec.name: self.rng.random(shape if spec.kind == "pointwise" else (table.rows,)).astype(
                np.float32
            )
            for spec in table.fields
        }

    def train(self, share: float = 0.2) -> np.ndarray:
        """Change a share of the rows; return their ids, ascending."""
        ids = np.flatnonzero(self.rng.random(self.table.rows) < share).astype(np.int64)
        self.weights[ids] += self.rng.standard_normal((len(ids), self.table.columns)).astype(np.float32)
        for values in self.fields.values():
            values[ids] += 1
        return ids

    def block(self, ids: np.ndarray | range) -> RowBlock:
        at = np.asarray(ids)
        return RowBlock.of_whole_rows(
            self.table, ids, self.weights[at], {name: values[at] for name, values in self.fields.items()}
        )

    def frames(
        self,
        ids: np.ndarray | range,
        held: Box | None = None,
        *,
        step: int = 1,
        encoding: str = "fp32",
        per_frame: int | None = None,
        search: quantizer.Search | None = None,
    ) -> list[EncodedFrame]:
        """Return frames of these rows, in the columns and rows of a box."""
        held = held or whole(self.table)
        ids = np.asarray(ids, np.int64)
        ids = ids[(ids >= held.row_start) & (ids < held.row_stop)]
        columns, options = (
            slice(held.col_start, held.col_stop),
            EncodeOptions(encoding=ENCODINGS[encoding], search=search),
        )
        out = []
        for at in range(0, len(ids), per_frame or max(len(ids), 1)):
            some = ids[at : at + (per_frame or len(ids))]
            fields = {name: values[some] for name, values in self.fields.items()}
            block = RowBlock(
                schema=self.table, ids=some, weights=np.ascontiguousarray(self.weights[some, columns]),
                fields={n: np.ascontiguousarray(v[:, columns]) if v.ndim == 2 else v for n, v in fields.items()},
                columns=range(held.col_start, held.col_stop),
            )  # fmt: skip
            out.append(frame_encoder.encode_rows(block, options, step=step))
        return out


def write_part(
    store: Store, cache: PackCache, target: PartTarget, frames: Iterable[EncodedFrame], *,
    extra: Mapping[str, Any] | None = None, **options: Any,
) -> PartReport:  # fmt: skip
    """Put a rank's part; return what a commit needs of it, with `extra` added."""
    with PartWriter(store, target, cache, **options) as writer:
        for frame in frames:
            writer.add(frame)
        part, index = writer.finish(), writer.index
    assert index is not None
    return PartReport(
        part=part, tables=target.tables, encodings=index.encodings, rows=index.rows, raw_bytes=index.raw_bytes,
        common_blobs=index.common_blobs, **{"stall_s": 0.0, **(extra or {})},
    )  # fmt: skip


class SampleRun:
    """A run on a store, written through parts and the log, one rank at a time."""

    def __init__(
        self, directory: Path, *, store: Store | None = None, run: str = RUN, world_size: int = 1,
        layout: Sequence[Sequence[Box]] | None = None, **opening: Any,
    ) -> None:  # fmt: skip
        self.run = run
        self.store = store or MemoryStore()
        self.cache = PackCache(directory / "cache", budget_bytes=256 << 20)
        self.log = RunLog(self.store, run)
        self.open(world_size, layout, **opening)

    def open(self, world_size: int, layout: Sequence[Sequence[Box]] | None = None, **opening: Any) -> None:
        """Open a new attempt, with an optional new size; `layout`, the boxes of each rank, makes it one of format 2."""
        kept = None
        if layout is not None:
            held = [each for boxes in layout for each in boxes]
            shapes = {
                fqn: (max(b.row_stop for b in held if b.table == fqn), max(b.col_stop for b in held if b.table == fqn))
                for fqn in {each.table for each in held}
            }  # fmt: skip
            kept = Layout.of(world_size, shapes, dict(enumerate(layout)))
        self.world_size = world_size
        self.layout = "" if kept is None else kept.digest
        opening = {"owner": "tests", "layout": None if kept is None else kept.data, **opening}
        self.attempt = open_attempt(self.log, world_size=world_size, **opening).attempt
        self.snapshot_id = 0

    def save(
        self,
        tables: Sequence[TableSchema],
        ranks: Sequence[tuple[Sequence[Box], Sequence[EncodedFrame]]],
        *,
        step: int,
        covers: int | None = None,
        blobs: Mapping[str, bytes] | None = None,
        pack_bytes: int = 1 << 20,
        extra: Mapping[str, Any] | None = None,
    ) -> int:
        """Commit one snapshot, (boxes, frames) of each rank; rank 0 also has the unassigned blobs. Return the seq."""
        self.snapshot_id += 1
        reports = []
        for rank, (boxes, frames) in enumerate(ranks):
            target = PartTarget(
                run=self.run, attempt=self.attempt, snapshot_id=self.snapshot_id, step=step, rank=rank, token=new_token(),
                tables=tuple(tables), boxes=tuple(boxes), covers=covers,
            )  # fmt: skip
            written = list(frames)
            for name, data in (blobs or {}).items():
                owner = parse_blob_name(name)[0] or 0
                if rank == (owner if owner < len(ranks) else 0):
                    written += frame_encoder.encode_blob_frames(
                        name=name, data=data, step=step, chunk_bytes=4096
                    )
            options = {"extra": extra, "pack_bytes": pack_bytes}
            reports.append(write_part(self.store, self.cache, target, written, **options))

        def commit(log: RunLog, each: PartReport) -> int:
            return commit_parts(
                log, attempt=self.attempt, snapshot_id=self.snapshot_id, step=step, world_size=self.world_size, reports=[each],
                layout=self.layout, deadline_s=30,
            ).seq  # fmt: skip

        with ThreadPoolExecutor(len(reports)) as pool:
            (seq,) = set(pool.map(commit, [self.log.fork() for _ in reports], reports))
        self.log.refresh()
        return seq


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def fixed(shape: tuple[int, ...], salt: int) -> np.ndarray:
    """Return float32 values in [-1, 1) that no library's version can change: integer arithmetic, exactly representable."""
    mixed = (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(salt)) * np.uint64(2654435761)
    mixed %= np.uint64(2**24)
    return (mixed.astype(np.float64) / 2**23 - 1).astype(np.float32).reshape(shape)


def sample_frames() -> dict[str, EncodedFrame]:
    """Return one frame of every shape that the format has, deterministic.

    Ranges are plain: the quality of a search may change with any release, the meaning of its codes may not.
    """
    plain = quantizer.PLAIN
    table = schema()
    model = SampleModel(table)
    model.weights = fixed((200, 8), 1)
    model.fields = {"sum": fixed((200,), 2) + np.float32(1), "exp_avg": fixed((200, 8), 3)}
    sparse = np.array([3, 4, 9, 50, 51, 52, 120, 199], np.int64)
    dense_mask = np.flatnonzero(np.arange(200) % 3 != 1).astype(np.int64)
    found = {
        f"rows-{name}": model.frames(range(40), step=11, encoding=name, search=plain)[0]
        for name in ("fp32", "q8", "q4", "q3", "q2")
    }
    found["rows-deltas"] = model.frames(sparse, step=12, encoding="q4", search=plain)[0]
    found["rows-bitmap"] = model.frames(dense_mask, step=13, encoding="q8", search=plain)[0]
    found["rows-columns"] = model.frames(
        sparse, box(table, 0, 200, 2, 6), step=14, encoding="q8", search=plain
    )[0]
    found["rows-bf16-state"] = frame_encoder.encode_rows(
        model.block(sparse),
        EncodeOptions(encoding=ENCODINGS["q8"], state_encoding="bf16", search=plain),
        step=15,
    )
    odd = model.weights[:40].copy()
    odd[1, 2], odd[5], odd[7, 0] = np.nan, 0.3, np.inf
    found["rows-exceptions"] = frame_encoder.encode_rows(
        RowBlock.of_whole_rows(
            table, range(40), odd, {name: values[:40] for name, values in model.fields.items()}
        ),
        EncodeOptions(encoding=ENCODINGS["q4"], search=plain),
        step=16,
    )
    half = TableSchema(fqn="half", rows=16, columns=6, dtype="bfloat16")
    found["rows-bf16"] = frame_encoder.encode_rows(
        RowBlock.of_whole_rows(half, range(2, 9), np.arange(42, dtype=np.uint16).reshape(7, 6), {}),
        EncodeOptions(encoding=ENCODINGS["bf16"]),
        step=17,
    )
    found["blob"] = frame_encoder.encode_blob(
        name="dense/mlp.0.weight", offset=64, blob_bytes=400, chunk=bytes(range(200)), step=18
    )
    found["blob-empty"] = frame_encoder.encode_blob(name="rng", offset=0, blob_bytes=0, chunk=b"", step=19)
    found["tombstones"] = tombstone(table, sparse, step=20)
    return found


def tombstone(table: TableSchema, ids: np.ndarray, *, step: int) -> EncodedFrame:
    """Return a frame that the library reads and does not write yet, made from its documented layout."""
    from deltashard_checkpoint.codecs import row_id
    from deltashard_checkpoint.format.frame import FrameInfo

    kind, id_bytes = row_id.encode_ids(ids)
    row_min, row_max = int(ids[0]), int(ids[-1])
    meta = frame_encoder._rows_meta(table, (0, table.columns), (row_min, row_max), None)
    layout = frame_encoder._Layout([len(meta), len(id_bytes)])
    view = memoryview(bytearray(layout.end))
    for part, data in zip(layout.views(view), (meta, id_bytes), strict=True):
        part[:] = data
    digest = frame_encoder._seal(
        view, kind=FrameKind.TOMBSTONE, meta=len(meta), ids=len(id_bytes), ids_kind=kind, rows=len(ids), step=step
    )  # fmt: skip
    info = FrameInfo(
        kind=FrameKind.TOMBSTONE, length=layout.end, digest=digest, step=step, table=table.fqn, row_min=row_min,
        row_max=row_max, rows=len(ids), col_start=0, col_stop=table.columns,
    )  # fmt: skip
    return EncodedFrame(info=info, data=view, raw_bytes=0)
