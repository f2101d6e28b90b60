"""`deltashard verify`: is what the log promises there, and does it restore?

Always: every log entry is read, its hash chain and the rules between entries are checked, and every folded state by its
content; every index of every live checkpoint is read and checked against its name, its log entry and itself; frames of
a table say `since` one checkpoint, and earlier; every pack is there and has its size; every checkpoint has a complete
plan. Deep: every frame and every tail is read, re-hashed and parsed, and every live checkpoint is restored, table by
table, into memory. Where frames of a table say `since` a live checkpoint, these frames over that one
have to make this one.

A problem names the object, what is wrong, and the checkpoints that need it. A store that cannot be reached is no
problem of the run: that raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from deltashard_checkpoint.errors import DeltashardError, FormatError
from deltashard_checkpoint.format import typed_tree
from deltashard_checkpoint.format.frame import Frame
from deltashard_checkpoint.format.index import Index, Piece, all_encodings
from deltashard_checkpoint.format.object_key import run_key
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.log.chain import chain, closure, parts_of
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, Part, Repaired, Sealed, entry_key, named_fold
from deltashard_checkpoint.log.folded_state import fold_key
from deltashard_checkpoint.log.listing import Listing
from deltashard_checkpoint.log.log_error import LogGap
from deltashard_checkpoint.log.manifest import Manifests
from deltashard_checkpoint.log.replay import fold, void_slots
from deltashard_checkpoint.log.run_state import RunState, Slot, Unreadable
from deltashard_checkpoint.maintenance.garbage_collection import orphaned_prefixes
from deltashard_checkpoint.restore.checkpoint_reader import TableArrays, load_indexes
from deltashard_checkpoint.restore.fetcher import Fetcher
from deltashard_checkpoint.restore.frame_applier import FrameApplier, TableTarget
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint, choose
from deltashard_checkpoint.restore.plan import IncompletePlan, SchemaMismatch, plan_of_new_rows
from deltashard_checkpoint.stores.abc import ObjectNotFound, Store, StoreUnavailable

from deltashard_cli.output import Advance, progress
from deltashard_cli.target import POLICY, Target

_READ_BYTES = 8 << 20
_READERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is not as the log says."""

    object: str
    """Key, relative to the run's root."""
    what: str
    checkpoints: tuple[int, ...]
    """Live checkpoints that need the object."""


class Problems(list[Problem]):
    """What is found on the way."""

    def add(self, key: str, what: str, checkpoints: Iterable[int] = ()) -> None:
        self.append(Problem(object=key, what=what, checkpoints=tuple(checkpoints)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was checked, and what was found."""

    run: str
    deep: bool
    entries: int = 0
    checkpoints: tuple[int, ...] = ()
    indexes: int = 0
    packs: int = 0
    frames: int = 0
    bytes: int = 0
    restored: tuple[int, ...] = ()
    """Checkpoints that were restored whole, into memory (deep)."""
    garbage_prefixes: int = 0
    """Prefixes that nothing needs and no retire entry names yet: `gc` takes care of them."""
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(target: Target, *, which: str | None = None, deep: bool = False) -> Verification:
    """Check a run, or only checkpoint `which` and what it needs. Raises `StoreUnavailable` and other store errors."""
    log = RunLog(target.store, target.run)
    problems = Problems()
    try:
        state = read_log(log, problems)
    except LogGap as gap:
        problems.add("log/", gap.what)
        return Verification(run=target.run, deep=deep, problems=tuple(problems))
    live = frozenset(state.checkpoints)
    if which is not None:
        live = closure(state, (choose(state, which).seq,))
    state = _with_listings(target, state, live, problems)
    needed_by = _needs(state, live)
    indexes = _read_indexes(target, needed_by, problems)
    sizes = {
        info.key[len(target.run) + 1 :]: info.size_bytes for info in target.store.list(f"{target.run}/data/")
    }
    packs = _check_packs(indexes, needed_by, sizes, problems)
    _check_encodings(state, live, indexes, problems)
    _check_hints(state, live, indexes, problems)
    broken = {seq for problem in problems for seq in problem.checkpoints}
    whole = [state.checkpoints[seq] for seq in sorted(live - broken)]
    opened = [
        OpenCheckpoint(store=target.store, state=state, entry=entry, indexes=indexes) for entry in whole
    ]
    planned = [checkpoint for checkpoint in opened if _check_plan(checkpoint, problems)]
    frames = sum(len(place.pieces) for index in indexes.values() for place in index.places)
    restored: list[int] = []
    if deep:
        hashed = _check_frames(target, indexes, needed_by, packs, problems)
        frames = hashed
        broken = {seq for problem in problems for seq in problem.checkpoints}
        restored = _check_restores([c for c in planned if c.entry.seq not in broken], problems)
    return Verification(
        run=target.run,
        deep=deep,
        entries=state.tip + 1,
        checkpoints=tuple(sorted(live)),
        indexes=len(indexes),
        packs=len(packs),
        frames=frames,
        bytes=sum(packs.values()),
        restored=tuple(restored),
        garbage_prefixes=0 if state.stopped else len(orphaned_prefixes(log, state, read_only=True)),
        problems=tuple(problems),
    )


def read_log(log: RunLog, problems: Problems) -> RunState:
    """The state, folded from every entry of the log, and what is wrong with them.

    What is bad or missing behind a folded state that the log vouches for is a problem too, and the state is that one's.
    Raises `LogGap` and store errors.
    """
    quick = log.refresh(deadline_s=POLICY.deadline_s)
    seen = log.listed()
    there = [seq for seq in seen.seqs if seq <= quick.tip]
    with ThreadPoolExecutor(_READERS) as pool:
        slots = list(pool.map(log.read_slot, there))
    entries = [slot.entry for slot in slots if isinstance(slot, Sealed)]
    known = void_slots(slots) | {
        seq for entry in entries if isinstance(entry, Repaired) for seq in entry.lost
    }
    behind = [
        *((seq, "the entry is missing") for seq in sorted(set(range(quick.tip + 1)) - set(there))),
        *((slot.seq, slot.error.what) for slot in slots if isinstance(slot, Unreadable)),
    ]
    if quick.stopped is not None:
        what = f"{quick.stopped.error.what}; what follows it in the log cannot be followed"
        problems.add(entry_key(quick.stopped.seq), what)
        known |= set(range(quick.stopped.seq, quick.tip + 1))
    for seq, what in behind:
        if seq not in known:
            problems.add(entry_key(seq), f"{what}; readers begin with a folded state of what follows it")
    if len(there) <= quick.tip:
        return quick
    _check_folds(log, seen, slots, problems)
    state = fold(RunState(run=log.run), slots)
    if state.stopped is not None:
        return quick
    if quick != state and not any(problem.object.startswith("log/fold-") for problem in problems):
        problems.add("log/", "what a folded state leads to is not what the log says")
    return state


def _check_folds(log: RunLog, seen: Listing, slots: Sequence[Slot], problems: Problems) -> None:
    """The folded states that entries name: are they the fold of the entries before them?"""
    named = {
        name for slot in slots if isinstance(slot, Sealed) and (name := named_fold(slot.entry)) is not None
    }
    for name in sorted(named & set(seen.folds)):
        truth = fold(RunState(run=log.run), slots[: name.seq + 1])
        try:
            said = log.folds.load(name)
        except FormatError as error:
            problems.add(fold_key(name), error.what)
            continue
        except StoreUnavailable:
            if name in log.listed().folds:
                raise
            continue  # the run goes on: newer ones have taken its place
        if truth.stopped is None and said != truth:
            problems.add(fold_key(name), "the folded state is not that of the entries before it")


def _with_listings(target: Target, state: RunState, live: Iterable[int], problems: Problems) -> RunState:
    """`state` with what the manifests of these checkpoints list, and a problem for each that cannot be read."""
    manifests = Manifests(target.store, target.run)
    for seq in sorted(live):
        try:
            state = manifests.listing(state, (seq,))
        except FormatError as error:
            needed = sorted(at for at in live if seq in closure(state, (at,)))
            problems.add(f"checkpoint {seq}", str(error), needed)
    return state


def _needs(state: RunState, live: Iterable[int]) -> dict[str, tuple[Part, tuple[int, ...]]]:
    """Every part that live checkpoints read, by index key, with the checkpoints that need it."""
    found: dict[str, tuple[Part, tuple[int, ...]]] = {}
    for seq in sorted(live):
        if not all(_is_listed(state, at) for at in closure(state, (seq,))):
            continue  # a manifest of its chain cannot be read
        parts = {part.index_key: part for at in closure(state, (seq,)) for part in parts_of(state, at)}
        read = {link.part.index_key for link in chain(state, seq)} | {
            p.index_key for p in parts_of(state, seq)
        }
        for key in sorted(read):
            before = found[key][1] if key in found else ()
            found[key] = (parts[key], (*before, seq))
    return found


def _is_listed(state: RunState, seq: int) -> bool:
    """Whether the parts of a checkpoint are known: its manifest, if it has one, could be read."""
    return seq in state.listings or state.checkpoints[seq].listed is None


def _read_indexes(
    target: Target, needed_by: Mapping[str, tuple[Part, tuple[int, ...]]], problems: Problems
) -> dict[str, Index]:
    """The indexes that can be read and are what their log entries say."""

    def read(key: str) -> Index | FormatError:
        try:
            return load_indexes(target.store, target.run, (needed_by[key][0],), workers=1)[key]
        except FormatError as error:
            return error

    indexes = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for key, found in zip(needed_by, pool.map(read, needed_by), strict=True):
            part, seqs = needed_by[key]
            if isinstance(found, FormatError):
                problems.add(key, found.what, seqs)
                continue
            indexes[key] = found
            if found.covers != part.covers or set(found.boxes) != set(part.boxes):
                problems.add(key, "the index and its log entry differ in what the part covers", seqs)
    return indexes


def _check_packs(
    indexes: Mapping[str, Index],
    needed_by: Mapping[str, tuple[Part, tuple[int, ...]]],
    sizes: Mapping[str, int],
    problems: Problems,
) -> dict[str, int]:
    """Sizes of the packs that are there, by key."""
    there: dict[str, int] = {}
    for key, index in indexes.items():
        for pack in index.packs:
            found = sizes.get(pack.key)
            if found is None:
                problems.add(pack.key, "the pack does not exist", needed_by[key][1])
            elif found != pack.bytes:
                what = f"the pack has {found} bytes, its index says {pack.bytes}"
                problems.add(pack.key, what, needed_by[key][1])
            else:
                there[pack.key] = found
    return there


def _check_encodings(
    state: RunState, live: Iterable[int], indexes: Mapping[str, Index], problems: Problems
) -> None:
    """A reader of a checkpoint may rely on what its entry says of the encodings of its rows."""
    for seq in sorted(live):
        entry = state.compactions.get(seq, state.checkpoints[seq])
        keys = [part.index_key for part in parts_of(state, seq)] if _is_listed(state, seq) else []
        if not keys or not indexes.keys() >= set(keys):
            continue  # told of already
        if all_encodings(indexes[key].encodings for key in keys) != entry.encodings:
            what = "the entry and the indexes differ in the encodings of tables"
            problems.add(entry_key(entry.seq), what, (seq,))


def _check_hints(
    state: RunState, live: Iterable[int], indexes: Mapping[str, Index], problems: Problems
) -> None:
    """What the frames of a table say `since` is one checkpoint, and an earlier one."""
    for seq in sorted(live):
        for part in parts_of(state, seq) if _is_listed(state, seq) else ():
            said: dict[str, set[int]] = {}
            for place in indexes[part.index_key].places if part.index_key in indexes else ():
                if place.since is not None:
                    said.setdefault(place.info.table, set()).add(place.since)
            for table, named in said.items():
                if len(named) > 1 or max(named) >= seq:
                    slots = ", ".join(map(str, sorted(named)))
                    what = f"frames of {table} say since {slots}, not one earlier checkpoint"
                    problems.add(part.index_key, what, (seq,))


def _check_plan(checkpoint: OpenCheckpoint, problems: Problems) -> bool:
    try:
        checkpoint.plan(checkpoint.entry.tables, blobs=checkpoint.blob_names)
    except (FormatError, IncompletePlan, SchemaMismatch) as error:
        problems.append(_not_restorable(checkpoint.entry, error))
        return False
    return True


def _check_frames(
    target: Target,
    indexes: Mapping[str, Index],
    needed_by: Mapping[str, tuple[Part, tuple[int, ...]]],
    packs: Mapping[str, int],
    problems: Problems,
) -> int:
    """Read, hash and parse every frame once; how many were whole."""
    jobs = [
        (pack.key, pieces, needed_by[key][1])
        for key, index in indexes.items()
        for pack, pieces in index.pieces()
        if pack.key in packs
    ]
    whole = 0
    total = sum(piece.length for _, pieces, _ in jobs for piece in pieces)
    with progress("hashing frames", total) as advance, ThreadPoolExecutor(_READERS) as pool:

        def check(job: tuple[str, list[Piece], tuple[int, ...]]) -> tuple[int, Problems]:
            key, pieces, seqs = job
            return _check_pack(target.store, run_key(target.run, key), key, pieces, seqs, advance)

        for count, found in pool.map(check, jobs):
            whole += count
            problems.extend(found)
    return whole


def _check_pack(
    store: Store, key: str, name: str, pieces: Sequence[Piece], seqs: tuple[int, ...], advance: Advance
) -> tuple[int, Problems]:
    problems = Problems()
    whole = 0
    for batch in _batches(pieces):
        start = batch[0].offset
        buffer = memoryview(bytearray(batch[-1].offset + batch[-1].length - start))
        try:
            store.get_into(key, start, buffer)
        except (FormatError, ObjectNotFound) as error:
            problems.add(name, error.what, seqs)
            return whole, problems
        for piece in batch:
            view = buffer[piece.offset - start :][: piece.length]
            fault = _frame_error(view, piece)
            if fault is not None:  # once more from the store: the wrong bit may have been ours
                store.get_into(key, piece.offset, view)
                fault = _frame_error(view, piece)
            if fault is None:
                whole += 1
            else:
                subject = piece.info.table or f"blob {piece.info.name}"
                kind = "tail" if piece.tail else "frame"
                what = f"{kind} at {piece.offset} (+{piece.length}) of {subject}: {fault.what}"
                problems.add(name, what, seqs)
            advance(piece.length)
    return whole, problems


def _frame_error(view: memoryview, piece: Piece) -> FormatError | None:
    try:
        found = piece.check(view)
        if isinstance(found, Frame) and found.table is not None:
            found.row_ids()
    except FormatError as error:
        return error
    return None


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Neighbours in a pack, up to `_READ_BYTES` together."""
    batch: list[Piece] = []
    for piece in pieces:
        if batch and piece.offset + piece.length - batch[0].offset > _READ_BYTES:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _check_restores(checkpoints: Sequence[OpenCheckpoint], problems: Problems) -> list[int]:
    """Restore each into memory, one table at a time; the seqs of those that are whole."""
    total = sum(each.plan(each.entry.tables, blobs=each.blob_names).bytes for each in checkpoints)
    whole: dict[int, OpenCheckpoint] = {}
    with progress("restoring checkpoints", total) as advance:
        for checkpoint in checkpoints:
            try:
                for table in checkpoint.tables(advance=advance):
                    _check_since(checkpoint, table, whole, problems)
                for name, blob in checkpoint.blobs(checkpoint.blob_names, advance=advance).items():
                    _check_tree(name, blob)
            except (FormatError, IncompletePlan, SchemaMismatch) as error:
                problems.append(_not_restorable(checkpoint.entry, error))
            else:
                whole[checkpoint.entry.seq] = checkpoint
    return list(whole)


def _check_since(
    checkpoint: OpenCheckpoint,
    table: TableArrays,
    whole: Mapping[int, OpenCheckpoint],
    problems: Problems,
) -> None:
    """Follow: what frames of a table say `since` over that checkpoint, if it is of `whole`, makes this one's rows."""
    schema, seq = table.schema, checkpoint.entry.seq
    for part in parts_of(checkpoint.state, seq):
        index = checkpoint.indexes[part.index_key]
        said = {place.since for place in index.places if place.info.table == schema.fqn} - {None}
        since = said.pop() if said else None
        before = None if since is None else whole.get(since)
        if before is None or schema not in before.entry.tables:
            continue
        try:
            followed = [
                _rows_of_box(before.span(schema, box.row_start, box.row_stop), box)
                for box in index.boxes
                if box.table == schema.fqn
            ]
            applier = FrameApplier(followed)
            plan = plan_of_new_rows(seq, index, schema)
            for fetched in Fetcher(checkpoint.store, checkpoint.state.run).fetch(plan):
                applier.apply(fetched.frame)
        except (FormatError, IncompletePlan, SchemaMismatch, ObjectNotFound) as error:
            what = f"{schema.fqn} cannot be followed from checkpoint {since}: {error.what}"
            problems.add(part.index_key, what, (seq,))
            continue
        for each in followed:
            differ = _differing(table, each)
            if differ.any():
                first = each.box.row_start + int(np.flatnonzero(differ)[0])
                what = (
                    f"{int(differ.sum())} rows of {schema.fqn} (first: {first}) are not those of checkpoint {since} "
                    f"with the frames that say since {since}: the checkpoint restores, "
                    f"a follower of {since} must read it whole"
                )
                problems.add(part.index_key, what, (seq,))


def _rows_of_box(rows: TableArrays, box: Box) -> TableTarget:
    """The columns of `box` of its rows. Fields of one value a row are of all columns: a box of some is without them."""
    columns = slice(box.col_start, box.col_stop)
    return TableTarget(
        schema=rows.schema,
        box=box,
        weights=rows.weights[:, columns],
        fields={
            name: values[:, columns] if values.ndim == 2 else values
            for name, values in rows.fields.items()
            if values.ndim == 2 or box.col_stop - box.col_start == rows.schema.columns
        },
    )


def _differing(now: TableArrays, then: TableTarget) -> npt.NDArray[np.bool_]:
    """Which rows of a box differ in a byte: bool [rows]; `now` is the whole table."""
    box = then.box
    rows, columns = slice(box.row_start, box.row_stop), slice(box.col_start, box.col_stop)
    differ = np.zeros(box.row_stop - box.row_start, np.bool_)
    for mine, other in [
        (now.weights, then.weights),
        *((now.fields[name], values) for name, values in then.fields.items()),
    ]:
        one = mine[rows][:, columns] if mine.ndim == 2 else mine[rows]
        pair = [np.ascontiguousarray(each).view(np.uint8).reshape(len(differ), -1) for each in (one, other)]
        differ |= (pair[0] != pair[1]).any(axis=1)
    return differ


def _check_tree(name: str, blob: memoryview) -> None:
    try:
        typed_tree.decode(blob)
    except FormatError as error:
        raise type(error)(f"blob {name}: {error.what}") from error


def _not_restorable(entry: Checkpoint, error: DeltashardError) -> Problem:
    what = f"checkpoint {entry.seq} does not restore: {error.what}"
    return Problem(object=error.where or entry_key(entry.seq), what=what, checkpoints=(entry.seq,))
