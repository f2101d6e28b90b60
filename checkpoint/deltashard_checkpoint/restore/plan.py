"""Restore plans: the byte ranges of packs to read, in order, to fill some boxes. Pure.

The log's chain (`chain.chain`) names the parts that cover each box, newest first, and their indexes list the frames. A
plan has blobs first, from the newest checkpoint only, then the frames that overlap a wanted box, newest checkpoint
first and rows before tombstones within one. Adjacent ranges are joined into one request. Tails follow the request of
their frames, in the same order, unless only weights are wanted.

A plan that cannot succeed is rejected before any fetch, with the missing items: boxes without a baseline, a baseline
with fewer rows in frames than in boxes, tables and fields that are not stored, and different shapes and types.
`strict=False` allows tables to grow, shrink or be new, and fields to be absent or of another float type. `Plan.initial`
and `Plan.notes` list everything that then keeps its initial values. `mapping` follows renamed tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deltashard_proto.cause import Cause

from deltashard_checkpoint.errors import InvalidCheckpoint, UserError
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.blob_name import is_read_by
from deltashard_checkpoint.format.frame import FrameInfo, FrameKind
from deltashard_checkpoint.format.frame_layout import MAX_FRAME_BYTES
from deltashard_checkpoint.format.index import Index, Place
from deltashard_checkpoint.format.object_key import parse_index_key
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.chain import ChainLink, describe, difference, intersection
from deltashard_checkpoint.log.entry import Part

MAX_REQUEST_BYTES = MAX_FRAME_BYTES
"""Ranges are joined up to this size: one arena block, one prefetch unit. Stores serve few large requests faster."""
MAX_GAP_BYTES = 64 << 10
"""Largest gap of unneeded bytes between two frames that is cheaper to read than another request."""


class IncompletePlan(UserError):
    """Stored frames do not fill the wanted boxes; `missing` has the gaps, in the target's coordinates."""

    cause = Cause.MISMATCH

    def __init__(
        self, what: str, *, missing: tuple[Box, ...] = (), where: str = "", remedy: str = ""
    ) -> None:
        self.missing = missing
        super().__init__(what, where=where, remedy=remedy)


class SchemaMismatch(UserError):
    """A stored table and the model's table of that name differ in columns, types or fields."""

    cause = Cause.MISMATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One wanted table: its schema in the model, and the boxes to fill."""

    schema: TableSchema
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFrame:
    """One frame, or the tail of one, to fetch."""

    info: FrameInfo
    offset: int
    """Offset within the request's range."""
    seq: int
    """Checkpoint of the frame."""
    baseline: bool
    """Whether its part holds all rows; rows of other frames re-seed the since-baseline marks."""
    table: TableSchema | None
    """Table of the writer; None for blobs."""
    state: bool = False
    """Whether its tail is read by a later request."""
    tail: bool = False
    """Whether this is the tail of the frame that `info` describes."""

    @property
    def span(self) -> slice:
        """Slice of the frame's bytes in the request's range."""
        length = self.info.tail.length if self.tail and self.info.tail else self.info.length
        return slice(self.offset, self.offset + length)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """One byte range of one pack, with its frames or tails in order."""

    key: str
    """Key of the pack, relative to the run's root."""
    offset: int
    length: int
    frames: tuple[PlannedFrame, ...] = ()
    tails: tuple[PlannedFrame, ...] = ()
    """Tails of frames of earlier requests, in the order of those frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Requests of a restore, in the order in which they must be applied."""

    requests: tuple[RangeRequest, ...]
    chain: tuple[int, ...]
    """Seqs of the checkpoints read, newest first."""
    bytes: int
    """Total size of all frames and tails."""
    frames: int
    blobs: tuple[str, ...]
    """Names of the blobs that will be complete."""
    initial: tuple[Box, ...] = ()
    """Boxes that keep their initial values; nonempty only with `strict=False`."""
    notes: tuple[str, ...] = ()
    """Human-readable differences that `strict=False` accepted."""


def restore_plan(  # noqa: PLR0913
    links: Sequence[ChainLink],
    indexes: Mapping[str, Index],
    wants: Iterable[Want],
    *,
    seq: int,
    blob_parts: Iterable[Part] = (),
    blobs: Collection[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    strict: bool = True,
    mapping: Mapping[str, str] | None = None,
    weights_only: bool = False,
) -> Plan:
    """Return the plan that fills `wants` from `links` (newest first); `indexes` are those of the links, by index key.

    Args:
        links: of `chain.chain`, for (at least) the boxes wanted, in *stored* names.
        indexes: by `part.index_key`, of the links' parts and of `blob_parts`.
        wants: schemas and boxes of the model. The stored table is `mapping.get(fqn, fqn)`.
        seq: the checkpoint that is restored.
        blob_parts: the parts of that checkpoint with the wanted blobs (`chain.blob_parts_of`); none: no blobs.
        blobs: names of the blobs wanted, of any rank, all required; None: all that `rank` reads.
        rank: the restoring rank, which reads its own blobs and those for all. None: only those for all.
        world_size: number of restoring ranks; None: as many as saved; see `blob_name.is_read_by`.
        strict: reject every difference between model and checkpoint.
        mapping: target name -> stored name, for renamed tables.
        weights_only: do not read fields; stored fields are not a difference.

    Raises:
        IncompletePlan: with the table, rows and columns, or blobs, that are not stored.
        SchemaMismatch: with the table, field and difference.
        InvalidCheckpoint: a baseline with fewer rows than its boxes, or a blob with a hole.
    """
    notes: list[str] = []
    initial: list[Box] = []
    missing: list[Box] = []
    wanted: list[Box] = []  # stored names
    stored = _newest_schemas(links, indexes)
    reached = _baseline_boxes(links)
    for want in wants:
        name = (mapping or {}).get(want.schema.fqn, want.schema.fqn)
        if name not in stored:
            initial += want.boxes
            notes.append(f"{want.schema.fqn}: not in the checkpoint, keeps its initial values")
            continue
        table = stored[name]
        notes += _differences(want.schema, table, weights_only=weights_only, strict=strict)
        whole = Box(table=name, row_start=0, row_stop=table.rows, col_start=0, col_stop=table.columns)
        for box in want.boxes:
            renamed = replace(box, table=name)
            initial += [replace(piece, table=want.schema.fqn) for piece in difference(renamed, whole)]
            common = intersection(renamed, whole)
            if common is not None:
                wanted.append(common)
                missing += [replace(piece, table=want.schema.fqn) for piece in _subtract(common, reached)]
    if missing or (initial and strict):
        absent = tuple(missing or initial)
        raise IncompletePlan(
            f"checkpoint {seq} does not hold {describe(absent)}",
            missing=absent,
            remedy="restore another checkpoint"
            if missing
            else "new or grown tables keep their initial values with strict=False; renamed ones need a mapping",
        )
    _check_baselines(links, indexes)
    held: dict[str, list[FrameInfo]] = {}
    chunks: list[tuple[Index, Place]] = []
    for part in blob_parts:
        index = indexes[part.index_key]
        mine = [
            place
            for place in index.places
            if place.info.kind is FrameKind.BLOB
            and (is_read_by(rank, world_size, place.info.name) if blobs is None else place.info.name in blobs)
        ]
        for place in sorted(mine, key=lambda place: (place.pack, place.offset)):
            held.setdefault(place.info.name, []).append(place.info)
            chunks.append((index, place))
    if absent_blobs := sorted(set(blobs or ()) - held.keys()):
        raise IncompletePlan(f"checkpoint {seq} does not hold the blobs {absent_blobs}")
    for name, infos in held.items():
        _check_blob(name, infos)
    requests = _Requests(state=not weights_only)
    # Blobs first: a restore compares them with the program before rows change it. They are in pack order so that ranges
    # join; each chunk carries its blob name and offset.
    for index, place in chunks:
        requests.add(index, place, seq, None, baseline=True)
    for link, place, table in _ordered(links, indexes, wanted):
        requests.add(indexes[link.part.index_key], place, link.seq, table, baseline=link.part.covers is None)
    return Plan(
        requests=requests.done(),
        chain=tuple(dict.fromkeys((seq, *(link.seq for link in links)))),
        bytes=requests.bytes,
        frames=requests.frames,
        blobs=tuple(sorted(held)),
        initial=tuple(initial),
        notes=tuple(notes),
    )


def plan_of_new_rows(seq: int, index: Index, table: TableSchema) -> Plan:
    """Return a plan of the frames of a part that have `since`: applied to that checkpoint's rows, they give `seq`."""
    requests = _Requests(state=True)
    for place in sorted(index.places, key=lambda place: place.application_order):
        if place.since is not None and place.info.table == table.fqn:
            requests.add(index, place, seq, table, baseline=False)
    return Plan(
        requests=requests.done(), chain=(seq,), bytes=requests.bytes, frames=requests.frames, blobs=(),
        initial=(), notes=(),
    )  # fmt: skip


@dataclass(slots=True)
class _Range:
    """A request under construction."""

    key: str
    start: int
    end: int

    def try_extend(self, key: str, offset: int, length: int) -> bool:
        """Extend the range by bytes of a pack if they are close enough; return whether it was extended."""
        gap = offset - self.end
        if (
            key != self.key
            or not 0 <= gap <= MAX_GAP_BYTES
            or offset + length - self.start > MAX_REQUEST_BYTES
        ):
            return False
        self.end = offset + length
        return True


class _Requests:
    """Frames joined into byte ranges in order, each range followed by its tails."""

    def __init__(self, *, state: bool) -> None:
        self.bytes = 0
        self.frames = 0
        self._state = state
        self._requests: list[RangeRequest] = []
        self._range = _Range("", 0, 0)
        self._frames: list[PlannedFrame] = []
        self._tails: list[tuple[str, int, PlannedFrame]] = []

    def add(self, index: Index, place: Place, seq: int, table: TableSchema | None, *, baseline: bool) -> None:
        key, info = index.packs[place.pack].key, place.info
        self.bytes += info.length
        self.frames += 1
        if not self._range.try_extend(key, place.offset, info.length):
            self._close()
            self._range = _Range(key, place.offset, place.offset + info.length)
        planned = PlannedFrame(
            info=info, offset=place.offset - self._range.start, seq=seq, baseline=baseline, table=table,
            state=self._state and info.tail is not None,
        )  # fmt: skip
        self._frames.append(planned)
        if planned.state:
            self._tails.append((index.packs[place.tail_pack].key, place.tail_offset, planned))

    def done(self) -> tuple[RangeRequest, ...]:
        self._close()
        return tuple(self._requests)

    def _close(self) -> None:
        if not self._frames:
            return
        at = self._range
        self._requests.append(
            RangeRequest(key=at.key, offset=at.start, length=at.end - at.start, frames=tuple(self._frames))
        )
        joined: list[tuple[_Range, list[PlannedFrame]]] = []
        for key, offset, planned in self._tails:
            assert planned.info.tail is not None
            length = planned.info.tail.length
            self.bytes += length
            if not joined or not joined[-1][0].try_extend(key, offset, length):
                joined.append((_Range(key, offset, offset + length), []))
            at, tails = joined[-1]
            tails.append(replace(planned, offset=offset - at.start, tail=True))
        for at, tails in joined:
            self._requests.append(
                RangeRequest(key=at.key, offset=at.start, length=at.end - at.start, tails=tuple(tails))
            )
        self._frames, self._tails = [], []


def _newest_schemas(links: Iterable[ChainLink], indexes: Mapping[str, Index]) -> dict[str, TableSchema]:
    found: dict[str, TableSchema] = {}
    for link in links:
        held = {box.table for box in link.boxes}
        for table in indexes[link.part.index_key].tables:
            if table.fqn in held:
                found.setdefault(table.fqn, table)
    return found


def _differences(model: TableSchema, stored: TableSchema, *, weights_only: bool, strict: bool) -> list[str]:
    """Return the accepted differences of two schemas as notes; raises `SchemaMismatch` for the others."""
    if model.columns != stored.columns:
        raise SchemaMismatch(
            f"{stored.columns} columns are stored, the model has {model.columns}", where=model.fqn
        )
    found = []
    if model.rows < stored.rows:
        found.append(f"{stored.rows} rows are stored, the model has {model.rows}: the others are dropped")
    if model.rows > stored.rows:
        found.append(
            f"{stored.rows} rows are stored, the model has {model.rows}: the new ones keep initial values"
        )
    if model.dtype != stored.dtype:
        found.append(f"weights are stored as {stored.dtype}, the model has {model.dtype}: converted")
    if not weights_only:
        faults, fatal = field_differences(model.fields, stored.fields)
        if fatal:
            raise SchemaMismatch("; ".join(fatal), where=model.fqn)
        ours = {spec.name for spec in model.fields}
        found += faults
        found += [
            f"field {spec.name} is stored, the model has none: dropped"
            for spec in stored.fields
            if spec.name not in ours
        ]
    if found and strict and model.rows <= stored.rows:
        raise SchemaMismatch(
            "; ".join(sorted(found)),
            where=model.fqn,
            remedy="strict=False accepts this and lists it in its report",
        )
    return [f"{model.fqn}: {text}" for text in sorted(found)]


def field_differences(model: Iterable[FieldSpec], stored: Iterable[FieldSpec]) -> tuple[list[str], list[str]]:
    """Return the field differences between model and store: (those a lenient restore accepts, those it cannot)."""
    theirs = {spec.name: spec for spec in stored}
    faults, fatal = [], []
    for spec in model:
        name, other = spec.name, theirs.get(spec.name)
        if other is None:
            faults.append(f"field {name} is not stored: keeps its initial values")
        elif other.kind != spec.kind:
            fatal.append(f"field {name} is stored {other.kind}, the model has it {spec.kind}")
        elif other.dtype != spec.dtype:
            text = f"field {name} is stored as {other.dtype}, the model has {spec.dtype}"
            floats = all(element_type.by_name(each.dtype).floating for each in (spec, other))
            (faults if floats else fatal).append(f"{text}: converted" if floats else text)
    return faults, fatal


def _baseline_boxes(links: Iterable[ChainLink]) -> dict[str, list[Box]]:
    """Return the boxes that the baselines of the chain cover, by table."""
    found: dict[str, list[Box]] = {}
    for link in links:
        if link.part.covers is None:
            for held in link.boxes:
                found.setdefault(held.table, []).append(held)
    return found


def _subtract(box: Box, reached: Mapping[str, Iterable[Box]]) -> list[Box]:
    rest = [box]
    for held in reached.get(box.table, ()):
        rest = [piece for each in rest for piece in difference(each, held)]
    return rest


def _check_baselines(links: Iterable[ChainLink], indexes: Mapping[str, Index]) -> None:
    """Check that each baseline part has at least as many (rows x columns) in frames as in boxes, per table.

    A trainer's tombstones do not count: a few bytes can name any number of them, and a restore allocates memory for
    each row. A compaction holds tombstones of the deltas that it replaces, in place of rows. Repeated rows count once.
    """
    for link in links:
        if link.part.covers is not None:
            continue
        area: Counter[str] = Counter()
        for box in link.part.boxes:
            area[box.table] += (box.row_stop - box.row_start) * (box.col_stop - box.col_start)
        held: Counter[str] = Counter()
        compacted = parse_index_key(link.part.index_key).attempt is None
        for place in indexes[link.part.index_key].places:
            if place.info.kind is FrameKind.TOMBSTONE and not compacted:
                continue
            held[place.info.table] += place.rows * (place.info.col_stop - place.info.col_start)
        for table in {box.table for box in link.boxes}:
            if held[table] < area[table]:
                raise InvalidCheckpoint(
                    f"a baseline holds {held[table]} of {area[table]} weights of {table}",
                    where=link.part.index_key,
                )


def _check_blob(name: str, chunks: list[FrameInfo]) -> None:
    """Check that chunks begin at 0, none repeats, and their sizes can add up to the blob.

    The first chunk allocates the blob's memory. The frames hold the chunks' ends, which are checked during assembly.
    """
    offsets = sorted(info.blob_offset for info in chunks)
    if offsets[0] != 0 or len(set(offsets)) != len(offsets) or len({info.blob_bytes for info in chunks}) != 1:
        raise InvalidCheckpoint("chunks of a blob are missing or occur twice", where=name)
    if (carried := sum(info.length for info in chunks)) < chunks[0].blob_bytes:
        raise InvalidCheckpoint(f"a blob of {chunks[0].blob_bytes} bytes in chunks of {carried}", where=name)


def _ordered(
    links: Iterable[ChainLink], indexes: Mapping[str, Index], wanted: Iterable[Box]
) -> Iterator[tuple[ChainLink, Place, TableSchema]]:
    """Yield the frames that overlap a wanted box, in the order in which they must be applied.

    Newest checkpoint first; within one by `Place.application_order`.
    """
    by_table: dict[str, list[Box]] = {}
    for box in wanted:
        by_table.setdefault(box.table, []).append(box)
    for link in sorted(links, key=lambda link: -link.seq):
        pieces: dict[str, list[Box]] = {}
        for held in link.boxes:
            for box in by_table.get(held.table, ()):
                if (common := intersection(box, held)) is not None:
                    pieces.setdefault(held.table, []).append(common)
        index = indexes[link.part.index_key]
        tables = {table.fqn: table for table in index.tables}
        chosen = [
            place
            for place in index.places
            if place.info.kind is not FrameKind.BLOB
            and any(overlaps(place.info, box) for box in pieces.get(place.info.table, ()))
        ]
        chosen.sort(key=lambda place: place.application_order)
        for place in chosen:
            yield link, place, tables[place.info.table]


def overlaps(info: FrameInfo, box: Box) -> bool:
    rows = info.row_min < box.row_stop and info.row_max >= box.row_start
    return rows and info.col_start < box.col_stop and info.col_stop > box.col_start
