"""`deltashard verify`: check that everything the log references exists and can be restored.

Always checked: every log entry, the hash chain and the rules between entries; the content of every folded state; every
index of every live checkpoint against its name and its log entry; the `since` hints of frames; existence and size of
every pack; a complete restore plan for every live checkpoint. Deep: every frame and every tail is read, hashed and
parsed, and every live checkpoint is restored into memory, table by table. Frames with a `since` hint, applied to the
checkpoint that the hint names, must also yield this checkpoint.

A problem names the object, the fault, and the checkpoints that need the object. An unreachable store raises an error
instead: it is not a problem of the run.
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
    """A difference between the log and the stored objects."""

    object: str
    what: str
    checkpoints: tuple[int, ...]
    """Live checkpoints that need the object."""


class Problems(list[Problem]):
    """The problems found so far."""

    def add(self, key: str, what: str, checkpoints: Iterable[int] = ()) -> None:
        self.append(Problem(object=key, what=what, checkpoints=tuple(checkpoints)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Counts of checked objects, and the problems found."""

    run: str
    deep: bool
    entries: int = 0
    checkpoints: tuple[int, ...] = ()
    indexes: int = 0
    packs: int = 0
    frames: int = 0
    bytes: int = 0
    restored: tuple[int, ...] = ()
    garbage_prefixes: int = 0
    """Orphaned prefixes that no retire entry names yet; `gc` removes them."""
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(target: Target, *, which: str | None = None, deep: bool = False) -> Verification:
    """Check a run, or only checkpoint `which` and its chain. Raises `StoreUnavailable` and other store errors."""
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
    """Return the state folded from every entry of the log, and add the faults of the log to `problems`.

    Bad or missing entries before a valid folded state are problems, too; the result is then the state that readers see.
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
        what = f"{quick.stopped.error.what}; the entries after it cannot be read"
        problems.add(entry_key(quick.stopped.seq), what)
        known |= set(range(quick.stopped.seq, quick.tip + 1))
    for seq, what in behind:
        if seq not in known:
            problems.add(entry_key(seq), f"{what}; readers start from a later folded state")
    if len(there) <= quick.tip:
        return quick
    _check_folds(log, seen, slots, problems)
    state = fold(RunState(run=log.run), slots)
    if state.stopped is not None:
        return quick
    if quick != state and not any(problem.object.startswith("log/fold-") for problem in problems):
        problems.add("log/", "the state read from a folded state differs from the state of all entries")
    return state


def _check_folds(log: RunLog, seen: Listing, slots: Sequence[Slot], problems: Problems) -> None:
    """Check that each folded state that an entry names is the fold of the entries before it."""
    named = {
        name for slot in slots if isinstance(slot, Sealed) and (name := named_fold(slot.entry)) is not None
    }
    for name in sorted(named & set(seen.folds)):
        truth = fold(RunState(run=log.run), slots[: name.seq + 1])
        try:
            stored = log.folds.load(name)
        except FormatError as error:
            problems.add(fold_key(name), error.what)
            continue
        except StoreUnavailable:
            if name in log.listed().folds:
                raise
            continue  # a live run has replaced it by a newer one
        if truth.stopped is None and stored != truth:
            problems.add(fold_key(name), "the folded state differs from the fold of the entries before it")


def _with_listings(target: Target, state: RunState, live: Iterable[int], problems: Problems) -> RunState:
    """Return `state` with the manifests of the checkpoints `live`; an unreadable manifest becomes a problem."""
    manifests = Manifests(target.store, target.run)
    for seq in sorted(live):
        try:
            state = manifests.listing(state, (seq,))
        except FormatError as error:
            needed = sorted(at for at in live if seq in closure(state, (at,)))
            problems.add(f"checkpoint {seq}", str(error), needed)
    return state


def _needs(state: RunState, live: Iterable[int]) -> dict[str, tuple[Part, tuple[int, ...]]]:
    """Return every part that a restore of `live` reads, by index key, with the checkpoints that need it."""
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
    """Whether the parts of a checkpoint are known: it has no manifest, or a readable one."""
    return seq in state.listings or state.checkpoints[seq].listed is None


def _read_indexes(
    target: Target, needed_by: Mapping[str, tuple[Part, tuple[int, ...]]], problems: Problems
) -> dict[str, Index]:
    """Return the readable indexes, and check each against its log entry."""

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
    there: dict[str, int] = {}
    for key, index in indexes.items():
        for pack in index.packs:
            found = sizes.get(pack.key)
            if found is None:
                problems.add(pack.key, "the pack does not exist", needed_by[key][1])
            elif found != pack.bytes:
                what = f"the pack has {found} bytes instead of {pack.bytes}"
                problems.add(pack.key, what, needed_by[key][1])
            else:
                there[pack.key] = found
    return there


def _check_encodings(
    state: RunState, live: Iterable[int], indexes: Mapping[str, Index], problems: Problems
) -> None:
    """Check the encodings in each checkpoint's entry against its indexes, because readers rely on the entry."""
    for seq in sorted(live):
        entry = state.compactions.get(seq, state.checkpoints[seq])
        keys = [part.index_key for part in parts_of(state, seq)] if _is_listed(state, seq) else []
        if not keys or not indexes.keys() >= set(keys):
            continue  # already reported
        if all_encodings(indexes[key].encodings for key in keys) != entry.encodings:
            what = "the entry and the indexes differ in the encodings of tables"
            problems.add(entry_key(entry.seq), what, (seq,))


def _check_hints(
    state: RunState, live: Iterable[int], indexes: Mapping[str, Index], problems: Problems
) -> None:
    """Check that the `since` hints of a table's frames name one earlier checkpoint."""
    for seq in sorted(live):
        for part in parts_of(state, seq) if _is_listed(state, seq) else ():
            hints: dict[str, set[int]] = {}
            for place in indexes[part.index_key].places if part.index_key in indexes else ():
                if place.since is not None:
                    hints.setdefault(place.info.table, set()).add(place.since)
            for table, named in hints.items():
                if len(named) > 1 or max(named) >= seq:
                    slots = ", ".join(map(str, sorted(named)))
                    what = f"frames of {table} have since hints {slots} instead of one earlier checkpoint"
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
    """Read, hash and parse every frame once; return the number of intact frames."""
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
            if fault is not None:  # read again: the bit may have flipped in transit or in memory
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
    """Group neighboring pieces of a pack into ranges of up to `_READ_BYTES`."""
    batch: list[Piece] = []
    for piece in pieces:
        if batch and piece.offset + piece.length - batch[0].offset > _READ_BYTES:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _check_restores(checkpoints: Sequence[OpenCheckpoint], problems: Problems) -> list[int]:
    """Restore each checkpoint into memory, one table at a time; return the seqs of the intact ones."""
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
    """Check that frames with a `since` hint, applied to that checkpoint if it is in `whole`, yield `table`."""
    schema, seq = table.schema, checkpoint.entry.seq
    for part in parts_of(checkpoint.state, seq):
        index = checkpoint.indexes[part.index_key]
        hints = {place.since for place in index.places if place.info.table == schema.fqn} - {None}
        since = hints.pop() if hints else None
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
                    f"{int(differ.sum())} rows of {schema.fqn} (first: {first}) differ from checkpoint {since} "
                    f"with the frames since {since}: the checkpoint restores, "
                    f"but a follower of {since} must read it completely"
                )
                problems.add(part.index_key, what, (seq,))


def _rows_of_box(rows: TableArrays, box: Box) -> TableTarget:
    """Return the part of `rows` in the columns of `box`; fields of one value per row only if it has all columns."""
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
    """Return a bool array [rows of the box] of the rows that differ in any byte; `now` is the whole table."""
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
