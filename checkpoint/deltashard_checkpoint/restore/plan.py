"""Restore plans: which byte ranges of which packs must be read, in which order, to fill some boxes. Pure.

The log's chain (`chain.chain`) says which parts speak for which boxes, newest first; their indexes say which frames
they have. A plan takes blobs first, from the newest checkpoint only, then the frames that meet a wanted box, newest
checkpoint first and rows before tombstones within one; ranges that lie next to each other are put into one request.
Tails follow the request of their frames, in the same order, unless weights alone are wanted.

A plan that cannot succeed is refused before a byte is fetched, with what is missing: boxes that no baseline reaches,
a baseline whose frames have fewer rows than its boxes, tables and fields that are not stored, shapes and types that
differ. `strict=False` lets tables grow, shrink or be new, and fields be absent or of another float type; what then
keeps its initial values is in `Plan.initial` and `Plan.notes`, never silent. `mapping` follows renamed tables.
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
"""Ranges are joined up to this size: one arena block, one prefetch unit. A store answers few large requests sooner."""
MAX_GAP_BYTES = 64 << 10
"""Unneeded bytes between two frames that are cheaper to read than another request."""


class IncompletePlan(UserError):
    """What is stored does not fill what is wanted; `missing` has the boxes, in the target's coordinates."""

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
    """One table that is wanted: its schema in the model, and the boxes of it to fill."""

    schema: TableSchema
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFrame:
    """One frame, or the tail of one, to fetch."""

    info: FrameInfo
    offset: int
    """Within the request's range."""
    seq: int
    """The checkpoint it comes from."""
    baseline: bool
    """Whether its part holds all rows; rows of other frames re-seed the since-baseline marks."""
    table: TableSchema | None
    """Of the writer; None for blobs."""
    state: bool = False
    """Whether its tail is read, too: by a request behind this one."""
    tail: bool = False
    """It is the tail of the frame that `info` is of."""

    @property
    def span(self) -> slice:
        """Its bytes in the request's range."""
        length = self.info.tail.length if self.tail and self.info.tail else self.info.length
        return slice(self.offset, self.offset + length)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """One byte range of one pack, with the frames, or the tails, in it, in order."""

    key: str
    """Of the pack, relative to the run's root."""
    offset: int
    length: int
    frames: tuple[PlannedFrame, ...] = ()
    tails: tuple[PlannedFrame, ...] = ()
    """Of frames of requests before, in the order of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to fetch, in the order in which it must be applied."""

    requests: tuple[RangeRequest, ...]
    chain: tuple[int, ...]
    """Seqs of the checkpoints that are read, newest first."""
    bytes: int
    """Of all frames and tails."""
    frames: int
    blobs: tuple[str, ...]
    """Names of the blobs that will be whole."""
    initial: tuple[Box, ...] = ()
    """Boxes that keep their initial values (never empty only with `strict=False`)."""
    notes: tuple[str, ...] = ()
    """What `strict=False` let pass, for people."""


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
    """The plan that fills `wants` from `links` (newest first) whose indexes are in `index`, by index key.

    Args:
        links: of `chain.chain`, for (at least) the boxes wanted, in *stored* names.
        indexes: by `part.index_key`, of the links' parts and of `blob_parts`.
        wants: schemas and boxes of the model. The stored table is `mapping.get(fqn, fqn)`.
        seq: the checkpoint that is restored.
        blob_parts: the parts of that checkpoint that hold the blobs wanted (`chain.blob_parts_of`); none: no blobs.
        blobs: names of the blobs wanted, whosoever they are, absent ones are refused; None: all that `rank` reads.
        rank: who restores: its own blobs are read beside those for all. None: nobody's own are.
        world_size: how many restore, None: as many as saved; see `blob_name.is_read_by`.
        strict: refuse every difference between model and checkpoint.
        mapping: target name -> stored name, for renamed tables.
        weights_only: fields of the model are not wanted, stored fields are no difference.

    Raises:
        IncompletePlan: naming table, rows and columns, or blobs, that nothing fills.
        SchemaMismatch: naming table, field and difference.
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
    # Blobs first: a restore compares them with the program before rows change it. As they lie in the packs, so that
    # ranges join: each chunk says where in which blob it goes.
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
    """The frames of a part that say `since`: over the rows of that checkpoint they make those of checkpoint `seq`."""
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
    """A request in the making."""

    key: str
    start: int
    end: int

    def try_extend(self, key: str, offset: int, length: int) -> bool:
        """Whether bytes of a pack are read with these; the range has them then."""
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
    """Frames joined into byte ranges as they come, and behind those of each range their tails."""

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
    """What of the two schemas differs, as notes; raises `SchemaMismatch` where that may not be."""
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
            remedy="strict=False accepts this and says so in its report",
        )
    return [f"{model.fqn}: {text}" for text in sorted(found)]


def field_differences(model: Iterable[FieldSpec], stored: Iterable[FieldSpec]) -> tuple[list[str], list[str]]:
    """How fields of the model differ from the stored ones: (where a lenient restore continues, where none can)."""
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
    """What the baselines of the chain speak for, by table."""
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
    """A part that holds all its rows has at least as many (rows x columns) in frames as in boxes, table by table.

    Tombstones count for nothing in what a trainer wrote: a few bytes name any number of them, and restores give memory
    for each row. A compaction has those of the deltas that it replaces, in place of their rows.
    Rows that a frame repeats are counted where they are first.
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
    """Chunks begin at 0, none occurs twice, and they can carry the blob: memory for it is taken with the first.

    Their ends are in the frames and are checked as they are assembled.
    """
    offsets = sorted(info.blob_offset for info in chunks)
    if offsets[0] != 0 or len(set(offsets)) != len(offsets) or len({info.blob_bytes for info in chunks}) != 1:
        raise InvalidCheckpoint("chunks of a blob are missing or occur twice", where=name)
    if (carried := sum(info.length for info in chunks)) < chunks[0].blob_bytes:
        raise InvalidCheckpoint(f"a blob of {chunks[0].blob_bytes} bytes in chunks of {carried}", where=name)


def _ordered(
    links: Iterable[ChainLink], indexes: Mapping[str, Index], wanted: Iterable[Box]
) -> Iterator[tuple[ChainLink, Place, TableSchema]]:
    """Frames that meet a wanted box, in the order they must be applied.

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
