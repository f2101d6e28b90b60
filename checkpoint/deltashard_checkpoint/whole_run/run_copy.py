"""Copy a run to another store under its own name, or start a new run from one checkpoint.

    1. Data, layouts and folded states. Packs are checked by their frames' hashes, others by the hash in their name.
    2. `log/HINT`: where the log will end, and that it is not complete yet.
    3. The entries of the log, oldest first, created only if absent.
    4. `log/HINT` again: the log is complete.

A log that ends before HINT's slot, or has a hole, reads as a log with lost entries (`LogGap`). So no reader accepts an
interrupted copy as a complete run, and no trainer starts one there. A repeated call skips complete objects. Genesis is
created only if absent: a run of that name that another process starts first stays, with its HINT.

A copy of a run has the source's bytes under the source's keys, so a later call updates it, unless the copy advanced
separately. A new run has three entries. Its rows are moved as in a compaction (`row_mover`), into one part without a
layout; leftovers of an interrupted call are under the same prefix and are removed with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import (
    CorruptObject,
    ForeignObject,
    InternalBug,
    InvalidCheckpoint,
    UserError,
)
from deltashard_checkpoint.format.canonical_json import canonical, content_digest
from deltashard_checkpoint.format.index import Index, Piece, digest_hex
from deltashard_checkpoint.format.layout import layout_key
from deltashard_checkpoint.format.object_key import new_token, parse_index_key, validate_new_run
from deltashard_checkpoint.log.chain import chain, closure, parts_of
from deltashard_checkpoint.log.commit_log import DEFAULT_DEADLINE_S, RunLog
from deltashard_checkpoint.log.entry import AttemptOpened, Checkpoint, Entry, Genesis, Sealed, entry_key
from deltashard_checkpoint.log.entry_codec import document_of, seal
from deltashard_checkpoint.log.folded_state import fold_key
from deltashard_checkpoint.log.listing import REMOVAL, Hint
from deltashard_checkpoint.log.log_error import stopped
from deltashard_checkpoint.log.manifest import Manifests, manifest_key
from deltashard_checkpoint.log.replay import fold
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.maintenance.row_mover import move_checkpoint
from deltashard_checkpoint.maintenance.user_entry import resolve_checkpoint
from deltashard_checkpoint.restore.checkpoint_reader import load_indexes, read_consistent
from deltashard_checkpoint.stores.abc import ObjectExists, ObjectNotFound
from deltashard_checkpoint.whole_run.incomplete_state import IncompleteState
from deltashard_checkpoint.write.part_writer import PartTarget

WORKERS = 8
LOG_WORKERS = 16
IN_FLIGHT_BYTES = 256 << 20
"""Bytes of packs in memory at once (a larger pack is alone)."""
FIRST_ATTEMPT, FIRST_SNAPSHOT = 1, 1
"""First attempt and snapshot of a run started from a checkpoint."""


class TargetTaken(UserError):
    """A run of that name exists, and is not a copy of this source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """Result of a copy."""

    run: str
    seq: int | None
    """Newest checkpoint of the copy; None if it has none."""
    source_seq: int | None
    """Its seq in the source."""
    step: int | None
    checkpoints: int
    through: int
    """Last slot of the source's log in the copy."""
    objects: int
    """Data objects put."""
    bytes: int
    skipped: int
    """Complete data objects that existed already."""
    entries: int
    """Log entries put; 0: the copy was complete already."""


def copy_run(
    source: RunLog,
    target: RunLog,
    *,
    open_progress: Callable[[int], Callable[[int], None]] = lambda _total: lambda _bytes: None,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> CopyResult:
    """Copy the run, continue a copy, or update it. May be killed at any time and repeated.

    `open_progress` receives the bytes of all packs and returns a function that is called with the bytes of each
    finished pack. Raises `TargetTaken`, `LogStopped`, `InvalidCheckpoint` for a corrupt source, and store errors.
    """
    if source.store.url == target.store.url:
        raise UserError(
            "a run cannot be copied onto itself",
            where=source.store.url,
            remedy="name another store, or a checkpoint (-c) and another name (--as)",
        )
    validate_new_run(target.run)
    return read_consistent(
        source, lambda state: _copy(source, target, state, open_progress), deadline_s=deadline_s
    )


def start_run(
    source: RunLog,
    target: RunLog,
    which: str,
    cache: PackCache,
    *,
    owner: str | None = None,
    resume: bool = False,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> CopyResult:
    """Start the run `target` from one checkpoint of the source, with all its rows.

    `cache` holds packs in transit. `owner` owns the new run; None: the source's owner. With `resume`, an interrupted
    copy continues with its original checkpoint, whatever `which` selects now. May be killed at any time and repeated.

    Raises `TargetTaken`, `CompactionUnsupported` for a chain whose column shards changed or that holds tombstones,
    `InvalidCheckpoint`, the errors of `resolve_checkpoint`, and store errors.
    """
    validate_new_run(target.run)

    def start(state: RunState) -> CopyResult:
        started_from = _started_from(target, state) if resume and not target.hint().whole else None
        return _start(
            source, target, state, which if started_from is None else f"seq:{started_from}", cache, owner
        )

    return read_consistent(source, start, deadline_s=deadline_s)


# A whole run


def _copy(
    source: RunLog, target: RunLog, state: RunState, open_progress: Callable[[int], Callable[[int], None]]
) -> CopyResult:
    if state.stopped is not None:
        raise stopped(state)
    _check_barrier(target, target.hint(), state.tip)
    listed = source.listed()
    slots = [seq for seq in listed.seqs if seq <= state.tip]

    with ThreadPoolExecutor(LOG_WORKERS) as pool:
        entries = dict(zip(slots, pool.map(source.slot_bytes, slots), strict=True))
    missing = _missing(target, entries)
    live = Manifests(source.store, source.run).listing(state, state.checkpoints)
    parts = [part for seq in sorted(live.checkpoints) for part in parts_of(live, seq)]
    indexes = load_indexes(source.store, source.run, parts)
    put = _DataWriter(source, target)
    put.advance = open_progress(sum(pack.bytes for index in indexes.values() for pack in index.packs))
    put.packs(indexes)
    crash_point("cp.after_packs")
    for key, digest in _small_objects(live, indexes):
        put.put_small(key, digest)
    for name in listed.folds:
        with suppress(InvalidCheckpoint):  # a missing or corrupt one is ignored in the copy as in the source
            put.put_small(fold_key(name), _hash_matches(content_digest, name.digest))
    crash_point("cp.after_data")
    if missing or not target.hint().whole:
        _put_log(
            target, entries, missing, Hint(fold=max((n.seq for n in listed.folds), default=-1), seq=state.tip)
        )
    newest = state.newest()
    return CopyResult(
        run=target.run,
        seq=None if newest is None else newest.seq,
        source_seq=None if newest is None else newest.seq,
        step=None if newest is None else newest.step,
        checkpoints=len(state.checkpoints),
        through=state.tip,
        objects=put.objects,
        bytes=put.bytes,
        skipped=put.skipped,
        entries=len(missing),
    )


def _hash_matches(hashed: Callable[[bytes], str], digest: str) -> Callable[[bytes], bool]:
    return lambda data: hashed(data) == digest


def _small_objects(
    state: RunState, indexes: Mapping[str, Index]
) -> Iterator[tuple[str, Callable[[bytes], bool]]]:
    """Yield (key, function that verifies its bytes) of all indexes, manifests and layouts of live checkpoints."""
    for key in indexes:
        yield key, _hash_matches(digest_hex, parse_index_key(key).xxh3)
    layouts = {each.layout for each in state.attempts.values() if each.layout}
    for entry in state.checkpoints.values():
        if (listed := entry.listed) is not None and entry.seq not in state.compactions:
            key = manifest_key(entry.attempt, entry.snapshot_id, listed.manifest)
            yield key, _hash_matches(content_digest, listed.manifest)
    for digest in sorted(layouts):
        yield layout_key(digest), _hash_matches(digest_hex, digest)


class _DataWriter:
    """Puts the data objects of a copy, each after verification."""

    def __init__(self, source: RunLog, target: RunLog) -> None:
        self._source = source
        self._target = target
        self._existing = {
            info.key[len(target.run) + 1 :]: info.size_bytes
            for space in ("data/", "layout/", "log/fold-")
            for info in target.store.list(target.key(space))
        }
        self._lock = threading.Condition()
        self._in_flight = 0
        self.advance: Callable[[int], None] = lambda _bytes: None
        self.objects = 0
        self.skipped = 0
        self.bytes = 0

    def packs(self, indexes: Mapping[str, Index]) -> None:
        """Copy all packs; raises `InvalidCheckpoint` and store errors."""
        found = [
            (pack.key, pack.bytes, pieces) for index in indexes.values() for pack, pieces in index.pieces()
        ]
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="copy") as pool:
            for _ in pool.map(lambda pack: self._pack(*pack), found):
                pass

    def _pack(self, key: str, size: int, pieces: Sequence[Piece]) -> None:
        with self._reserve_memory(size):
            buffer = bytearray(size)
            if self._existing.get(key) == size and self._read_verified(self._target, key, buffer, pieces):
                self._count(size, put=False)
                return
            if not self._read_verified(self._source, key, buffer, pieces, strict=True):
                raise InvalidCheckpoint(
                    f"{key} does not match its index: a frame does not match its hash",
                    where=self._source.key(key),
                    remedy="`deltashard verify --deep` lists the checkpoints that need it",
                )
            self._target.store.put(self._target.key(key), buffer)
        self._count(size, put=True)

    def _read_verified(
        self, log: RunLog, key: str, buffer: bytearray, pieces: Sequence[Piece], *, strict: bool = False
    ) -> bool:
        """Read a pack into `buffer`; return whether all frames match the index. `strict`: it must exist."""
        view = memoryview(buffer)
        for _ in range(2):  # a bit error may have happened locally or on the network
            try:
                log.store.get_into(log.key(key), 0, view)
                for piece in pieces:
                    piece.check(view[piece.offset :][: piece.length])
            except ObjectNotFound as error:
                if strict:
                    raise InvalidCheckpoint(f"{key} does not exist", where=log.key(key)) from error
                return False
            except (CorruptObject, ForeignObject):
                continue
            return True
        return False

    def put_small(self, key: str, matches: Callable[[bytes], bool]) -> None:
        """Copy an object whose name has its hash; raises `InvalidCheckpoint` and store errors."""
        if key in self._existing and matches(self._target.store.get(self._target.key(key))):
            self._count(0, put=False)
            return
        try:
            data = self._source.store.get(self._source.key(key))
        except ObjectNotFound as error:
            raise InvalidCheckpoint(f"{key} does not exist", where=self._source.key(key)) from error
        if not matches(data):
            raise InvalidCheckpoint(f"{key} does not match the hash in its name", where=self._source.key(key))
        self._target.store.put(self._target.key(key), data)
        self._count(0, put=True)

    @contextmanager
    def _reserve_memory(self, size: int) -> Iterator[None]:
        """Wait until another `size` bytes fit into memory."""
        with self._lock:
            self._lock.wait_for(lambda: not self._in_flight or self._in_flight + size <= IN_FLIGHT_BYTES)
            self._in_flight += size
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= size
                self._lock.notify_all()

    def _count(self, size: int, *, put: bool) -> None:
        with self._lock:
            self.objects += put
            self.bytes += size if put else 0
            self.skipped += not put
        self.advance(size)


# A new run of one checkpoint


def _start(
    source: RunLog, target: RunLog, state: RunState, which: str, cache: PackCache, owner: str | None
) -> CopyResult:
    seq = resolve_checkpoint(state, which).seq
    entry = state.checkpoints[seq]
    token = _token(entry)
    _check_barrier(target, target.hint(), 2)
    done = partial(
        CopyResult, run=target.run, seq=2, source_seq=seq, step=entry.step, checkpoints=1, through=state.tip, skipped=0
    )  # fmt: skip
    if there := target.listed().seqs:
        _check_started_from(target, state, seq)
        if there[-1] >= 2:  # before any row is moved
            if there != (0, 1, 2) or _writer(target, 2) != token:
                raise _target_taken(target)
            _put_whole_hint(target, Hint(seq=2))
            return done(objects=0, bytes=0, entries=0)
    state = Manifests(source.store, source.run).listing(state, closure(state, (seq,)))
    part, index = move_checkpoint(
        source,
        state,
        seq,
        tuple(chain(state, seq)),
        target.store,
        PartTarget(
            run=target.run,
            attempt=FIRST_ATTEMPT,
            snapshot_id=FIRST_SNAPSHOT,
            step=entry.step,
            rank=0,
            token=new_token(),
            tables=entry.tables,
            boxes=tuple(box for each in parts_of(state, seq) for box in each.boxes),
            covers=None,
        ),
        cache=cache,
    )
    crash_point("cp.after_data")
    common: dict[str, Any] = {"previous": "", "writer": token, "at_s": entry.at_s}
    owner = state.owner if owner is None else owner
    genesis = Genesis(seq=0, run=target.run, owner=owner, **common)
    opened = AttemptOpened(seq=FIRST_ATTEMPT, world_size=1, resumes_from=None, owner=owner, **common)
    first = replace(
        entry, seq=2, attempt=FIRST_ATTEMPT, snapshot_id=FIRST_SNAPSHOT, parts=(part,), listed=None, writer=token,
        encodings=index.encodings, rows=index.rows, raw_bytes=index.raw_bytes, stored_bytes=part.stored_bytes,
        directive="close", pins=state.pins_of(seq),
    )  # fmt: skip
    entries = _sealed_log(target.run, (genesis, opened, first))
    missing = _missing(target, entries)
    _put_log(target, entries, missing, Hint(seq=first.seq))
    return done(objects=len(index.packs) + 1, bytes=part.stored_bytes, entries=len(missing))


def _token(entry: Checkpoint) -> str:
    """Return the writer token of a run started from this checkpoint; it identifies an interrupted copy."""
    return content_digest(canonical(document_of(entry)))[:16]


def _check_started_from(target: RunLog, state: RunState, seq: int) -> None:
    """Raise `TargetTaken` unless the target is an interrupted copy of this checkpoint."""
    started_from = _started_from(target, state)
    if started_from is None or target.hint().whole:
        raise _target_taken(target)
    if started_from != seq:
        raise TargetTaken(
            f"run {target.run!r} is an interrupted copy of checkpoint {started_from}",
            where=target.store.url,
            remedy=f"pass -c seq:{started_from} to continue; `deltashard rm --ended` removes it",
        )


def _started_from(target: RunLog, state: RunState) -> int | None:
    """Return the source's checkpoint from which the target was started."""
    return {_token(entry): each for each, entry in state.checkpoints.items()}.get(_writer(target, 0))


def _writer(target: RunLog, seq: int) -> str:
    slot = target.read_slot(seq) if seq in target.listed(seq).seqs else None
    return slot.entry.writer if isinstance(slot, Sealed) else ""


def _sealed_log(run: str, entries: Sequence[Entry]) -> dict[int, bytes]:
    """Return the bytes of a log of these entries, after validation."""
    sealed, previous = [], ""
    for entry in entries:
        sealed.append(seal(replace(entry, previous=previous)))
        previous = sealed[-1].hash
    if fold(RunState(run=run), sealed).stopped is not None:
        raise InternalBug("the log of a new run breaks a rule", where=f"run {run}")
    return {each.entry.seq: each.data for each in sealed}


# The log


def _missing(target: RunLog, entries: Mapping[int, bytes], first: int = 0) -> list[int]:
    """Return the slots from `first` on that are missing in the target.

    Raises `TargetTaken` if the target has another log.
    """
    there = target.listed(first).seqs

    def same(seq: int) -> bool:
        return seq in entries and _is_ours(target, seq, entries)

    with ThreadPoolExecutor(LOG_WORKERS) as pool:
        for matches in pool.map(same, there):
            if not matches:
                raise _target_taken(target)
    return sorted({seq for seq in entries if seq >= first} - frozenset(there))


def _target_taken(target: RunLog) -> TargetTaken:
    return TargetTaken(
        f"run {target.run!r} exists in the target, and is not a copy of this run",
        where=target.store.url,
        remedy="use another run name; `deltashard rm` removes the remains of an interrupted copy",
    )


def _put_log(target: RunLog, entries: Mapping[int, bytes], missing: Sequence[int], whole: Hint) -> None:
    target.probe()
    before = _hint(target)
    _check_barrier(target, Hint.of(before), whole.seq)
    if missing:  # copying data takes time: a run may have been started or advanced since
        missing = _missing(target, entries, missing[0])
    # IMPORTANT: HINT first. It keeps readers away from a log that is not complete yet.
    mark = replace(whole, whole=False)
    target.put_hint(mark)
    crash_point("cp.after_hint")

    def put(seq: int) -> None:
        try:
            target.store.put_if_absent(target.key(entry_key(seq)), entries[seq])
        except ObjectExists:
            if not _is_ours(target, seq, entries):
                raise _target_taken(target) from None

    try:
        for seq in missing[:1]:
            put(seq)
        crash_point("cp.after_first_entry")
        with ThreadPoolExecutor(LOG_WORKERS) as pool:
            for _ in pool.map(put, missing[1:-1]):
                pass
        crash_point("cp.before_last_entry")
        for seq in missing[1:][-1:]:
            put(seq)
    except BaseException as error:
        # Another process started or advanced a run of this name: remove the barrier.
        if isinstance(error, TargetTaken) or (
            missing and not _is_ours(target, missing[0], entries, absent=True)
        ):
            target.store.put(target.key("log/HINT"), before)
        raise
    crash_point("cp.after_last_entry")
    _put_whole_hint(target, whole)


def _put_whole_hint(target: RunLog, whole: Hint) -> None:
    """Put the HINT of a complete log, unless a longer copy or a trainer has put its own."""
    if target.hint() == replace(whole, whole=False):
        target.put_hint(whole)


def _is_ours(target: RunLog, seq: int, entries: Mapping[int, bytes], *, absent: bool = False) -> bool:
    """Return whether the target's slot holds these bytes; with `absent`, or is empty."""
    try:
        return target.store.get(target.key(entry_key(seq))) == entries[seq]
    except ObjectNotFound:
        return absent


def _check_barrier(target: RunLog, hint: Hint, seq: int) -> None:
    """Raise if a removal or a longer copy is in progress, whose HINT must stay; this log ends at slot `seq`."""
    if hint.whole or hint.seq <= seq:
        return
    left = IncompleteState.REMOVING if hint == REMOVAL else IncompleteState.COPYING
    raise TargetTaken(
        f"run {target.run!r} is {left} in the target by another process",
        where=target.store.url,
        remedy=left.remedy,
    )


def _hint(target: RunLog) -> bytes:
    try:
        return target.store.get(target.key("log/HINT"))
    except ObjectNotFound:
        return b""
