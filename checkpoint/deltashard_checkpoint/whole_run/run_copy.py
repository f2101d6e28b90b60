"""A run copied into another store under its own name, and one checkpoint made the first of a new run.

    1. Data, layouts and folded states. Packs are checked by their frames' hashes, all else by the hash in its name.
    2. `log/HINT`: where the log will end, and that it is not whole yet.
    3. The entries of the log, oldest first, created only if absent.
    4. `log/HINT` again: the log is whole.

A log that ends before the slot of HINT, or has a hole, has lost entries for every reader (`LogGap`). So a copy that was
killed is never taken for a whole run, and no trainer begins one there. Called again it passes over what is there and
whole. Genesis is created only if absent: a run of that name that another process begins first stays, with its HINT.

A copy of a run has the source's bytes under the source's keys, so a later call brings it up to date, unless it went on
by itself. A new run has three entries. Its rows are moved as a compaction moves them (`row_mover`), into one part
without a layout; what a call that was killed has put of it lies under the same prefix, and goes with it.
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
"""Of packs that are in memory at once (one that is larger is alone)."""
FIRST_ATTEMPT, FIRST_CUT = 1, 1
"""Of a new run that a checkpoint begins."""


class TargetTaken(UserError):
    """A run of that name is there, and is no copy of this source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """What a copy did."""

    run: str
    seq: int | None
    """The newest checkpoint, in the copy; None: it has none."""
    source_seq: int | None
    """What the source calls it."""
    step: int | None
    checkpoints: int
    through: int
    """The last slot of the source's log that the copy knows."""
    objects: int
    """Data objects put."""
    bytes: int
    skipped: int
    """Data objects that were there already, and whole."""
    entries: int
    """Log entries put; 0: the copy was whole already."""


def copy_run(
    source: RunLog,
    target: RunLog,
    *,
    open_progress: Callable[[int], Callable[[int], None]] = lambda _total: lambda _bytes: None,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> CopyResult:
    """Copy the run, or continue a copy, or bring it up to date. May be killed at any instant and begun again.

    `open_progress` takes the bytes of all packs and returns the function that is called with the bytes of each one done.
    Raises `TargetTaken`, `LogStopped`, `InvalidCheckpoint` for an object of the source that is not whole, and store
    errors.
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
    """Begin the run `target` with one checkpoint of the source, which holds all its rows there.

    `cache` holds packs on their way. `owner` has the new run; None: the source's. `resume`: a copy that was cut short
    goes on with the checkpoint that it began with, whatever `which` means by now.
    May be killed at any instant and begun again.
    Raises `TargetTaken`, `CompactionUnsupported` for a chain whose column shards changed or that holds tombstones,
    `InvalidCheckpoint`, what `resolve_checkpoint` raises, and store errors.
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
        with suppress(InvalidCheckpoint):  # one that is gone or rotten counts for nothing, here as there
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
    """(key, whether bytes are its) of all indexes, manifests and layouts that live checkpoints need."""
    for key in indexes:
        yield key, _hash_matches(digest_hex, parse_index_key(key).xxh3)
    layouts = {each.layout for each in state.attempts.values() if each.layout}
    for entry in state.checkpoints.values():
        if (listed := entry.listed) is not None and entry.seq not in state.compactions:
            key = manifest_key(entry.attempt, entry.cut, listed.manifest)
            yield key, _hash_matches(content_digest, listed.manifest)
    for digest in sorted(layouts):
        yield layout_key(digest), _hash_matches(digest_hex, digest)


class _DataWriter:
    """Puts the data objects of a copy, each once it was checked."""

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
        """Raises `InvalidCheckpoint` and store errors."""
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
                    f"{key} is not what its index says: a frame does not match its hash",
                    where=self._source.key(key),
                    remedy="`deltashard verify --deep` says which checkpoints need it",
                )
            self._target.store.put(self._target.key(key), buffer)
        self._count(size, put=True)

    def _read_verified(
        self, log: RunLog, key: str, buffer: bytearray, pieces: Sequence[Piece], *, strict: bool = False
    ) -> bool:
        """Read a pack into `buffer`; whether all in it is as its index says. `strict`: it must be there."""
        view = memoryview(buffer)
        for _ in range(2):  # the wrong bit may have been ours, or the network's
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
        """An object whose name has its hash. Raises `InvalidCheckpoint` and store errors."""
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
        """Wait until `size` bytes more may be in memory."""
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
            cut=FIRST_CUT,
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
        entry, seq=2, attempt=FIRST_ATTEMPT, cut=FIRST_CUT, parts=(part,), listed=None, writer=token,
        encodings=index.encodings, rows=index.rows, raw_bytes=index.raw_bytes, stored_bytes=part.stored_bytes,
        directive="close", pins=state.pins_of(seq),
    )  # fmt: skip
    entries = _sealed_log(target.run, (genesis, opened, first))
    missing = _missing(target, entries)
    _put_log(target, entries, missing, Hint(seq=first.seq))
    return done(objects=len(index.packs) + 1, bytes=part.stored_bytes, entries=len(missing))


def _token(entry: Checkpoint) -> str:
    """The writer of a run that this checkpoint begins: a copy that was cut short is known by it."""
    return content_digest(canonical(document_of(entry)))[:16]


def _check_started_from(target: RunLog, state: RunState, seq: int) -> None:
    """Raises `TargetTaken` unless what is there was begun with this checkpoint, and was cut short."""
    started_from = _started_from(target, state)
    if started_from is None or target.hint().whole:
        raise _target_taken(target)
    if started_from != seq:
        raise TargetTaken(
            f"run {target.run!r} was begun there with checkpoint {started_from}, and cut short",
            where=target.store.url,
            remedy=f"say -c seq:{started_from} to continue; `deltashard rm --ended` removes it",
        )


def _started_from(target: RunLog, state: RunState) -> int | None:
    """The checkpoint of the source that what is there was begun with."""
    return {_token(entry): each for each, entry in state.checkpoints.items()}.get(_writer(target, 0))


def _writer(target: RunLog, seq: int) -> str:
    slot = target.read_slot(seq) if seq in target.listed(seq).seqs else None
    return slot.entry.writer if isinstance(slot, Sealed) else ""


def _sealed_log(run: str, entries: Sequence[Entry]) -> dict[int, bytes]:
    """The bytes of a log of these entries, judged by the law."""
    sealed, previous = [], ""
    for entry in entries:
        sealed.append(seal(replace(entry, previous=previous)))
        previous = sealed[-1].hash
    if fold(RunState(run=run), sealed).stopped is not None:
        raise InternalBug("the log of a new run breaks a rule", where=f"run {run}")
    return {each.entry.seq: each.data for each in sealed}


# The log


def _missing(target: RunLog, entries: Mapping[int, bytes], first: int = 0) -> list[int]:
    """Slots, from `first` on, that are not at the target yet.

    Raises `TargetTaken` when what is there is another log's.
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
        f"run {target.run!r} is there, and is no copy of this",
        where=target.store.url,
        remedy="name another run; what a copy that was cut short has left, `deltashard rm` removes",
    )


def _put_log(target: RunLog, entries: Mapping[int, bytes], missing: Sequence[int], whole: Hint) -> None:
    target.probe()
    before = _hint(target)
    _check_barrier(target, Hint.of(before), whole.seq)
    if missing:  # putting data took its time: somebody may have begun a run, or gone on with it
        missing = _missing(target, entries, missing[0])
    # IMPORTANT: HINT first. It keeps everyone away from a log that is not whole yet.
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
        # Somebody began a run of this name, or went on with it, just now: it must not be kept shut.
        if isinstance(error, TargetTaken) or (
            missing and not _is_ours(target, missing[0], entries, absent=True)
        ):
            target.store.put(target.key("log/HINT"), before)
        raise
    crash_point("cp.after_last_entry")
    _put_whole_hint(target, whole)


def _put_whole_hint(target: RunLog, whole: Hint) -> None:
    """Leave HINT of a log that is whole now, unless a longer copy or a trainer has left its own."""
    if target.hint() == replace(whole, whole=False):
        target.put_hint(whole)


def _is_ours(target: RunLog, seq: int, entries: Mapping[int, bytes], *, absent: bool = False) -> bool:
    """Whether the target's slot holds these bytes; `absent`: or nothing."""
    try:
        return target.store.get(target.key(entry_key(seq))) == entries[seq]
    except ObjectNotFound:
        return absent


def _check_barrier(target: RunLog, hint: Hint, seq: int) -> None:
    """Refuse what ends at slot `seq` beside a removal, or a copy that goes further: its HINT must stand."""
    if hint.whole or hint.seq <= seq:
        return
    left = IncompleteState.REMOVING if hint == REMOVAL else IncompleteState.COPYING
    raise TargetTaken(
        f"run {target.run!r} is {left} there, by somebody else", where=target.store.url, remedy=left.remedy
    )


def _hint(target: RunLog) -> bytes:
    try:
        return target.store.get(target.key("log/HINT"))
    except ObjectNotFound:
        return b""
