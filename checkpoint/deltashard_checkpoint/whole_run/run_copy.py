"""A run, or one checkpoint with all it builds on, copied into a new run: of the same store or of another.

Data first, each object checked on its way by the hash that names it or stands in its index; then `log/HINT`, which says
where the log will end; then genesis, the newest entry, and those between. A log that ends before the slot of HINT, or
has a hole, has lost entries for every reader (`LogGap`), so a copy that was killed is never taken for a whole run, and
no trainer can begin one of its own there. (Builds from before HINT counted see the hole.) Genesis is created only if
absent: whoever begins a run of that name first has it.

Everything put is a function of the source and the name (`transcript`), so a copy goes on where it was: what is there
and whole is passed over. Before HINT is there it goes on with the source's newest moment, afterwards with that one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import (
    CorruptObject,
    InternalBug,
    InvalidCheckpoint,
)
from deltashard_checkpoint.format.frame import check_digest
from deltashard_checkpoint.format.index import Place
from deltashard_checkpoint.format.layout import Layout, layout_key
from deltashard_checkpoint.log.commit_log import DEFAULT_DEADLINE_S, RunLog
from deltashard_checkpoint.log.entry import Sealed, entry_key, seq_of
from deltashard_checkpoint.log.listing import Hint
from deltashard_checkpoint.log.manifest import Manifest, manifest_key
from deltashard_checkpoint.log.part_list import PartList
from deltashard_checkpoint.stores.abc import ObjectExists, ObjectNotFound
from deltashard_checkpoint.whole_run import transcript
from deltashard_checkpoint.whole_run.copy_draft import LOG_WORKERS, Draft, TargetTaken, draft
from deltashard_checkpoint.whole_run.remains import Remains, remains
from deltashard_checkpoint.whole_run.transcript import Moved

WORKERS = 8
IN_FLIGHT_BYTES = 256 << 20
"""Of packs that are in memory at once (one that is larger is alone)."""
_TURNS = 3
"""So often a copy begins anew because the source retired something under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What a copy did."""

    run: str
    seq: int
    """The newest checkpoint, in the copy."""
    source_seq: int
    """What the source calls it."""
    step: int
    through: int
    """The last slot of the source's log that the copy knows."""
    checkpoints: int
    objects: int
    """Data objects put."""
    bytes: int
    passed_over: int
    """Data objects that were there already, and whole."""
    entries: int
    """Log entries put; 0: the copy was whole already."""


def copy(made: Draft, *, advance: Callable[[int], None] = lambda _bytes: None) -> Copied:
    """Make the copy, or go on with it. May be killed at any instant and begun again.

    Raises `TargetTaken`, `InvalidCheckpoint` for an object of the source that is not whole, `EnvironmentFault` when the
    source let one go meanwhile, and store errors.
    """
    moved = _moved(made)
    log = _log_of(made, moved)
    state = transcript.folded(log, made.target.run)
    wanted = {made.numbers.seqs.get(seq, seq) for seq in made.seqs}
    if state.stopped is not None or state.checkpoints.keys() != wanted:
        what = "the copy's log does not read as it was meant"
        raise InternalBug(what, where=f"run {made.target.run}")
    missing = _missing(made, log)
    newest = state.newest()
    assert newest is not None
    put = _Put(made, advance)
    if missing:
        put.data(moved)
        _put_log(made, log, missing)
    source_seq = made.seq if made.seq is not None else newest.seq
    return Copied(
        run=made.target.run,
        seq=newest.seq,
        source_seq=source_seq,
        step=newest.step,
        through=made.state.tip,
        checkpoints=len(wanted),
        objects=put.objects,
        bytes=put.bytes,
        passed_over=put.passed_over,
        entries=len(missing),
    )


def copied(
    source: RunLog,
    target: RunLog,
    which: str | None,
    run: Callable[[Draft], Copied],
    *,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> Copied:
    """What `run` makes of a draft: from the start again when the source retired something under it, a few times."""
    for turn in range(_TURNS):
        try:
            return run(draft(source, target, which, deadline_s=deadline_s))
        except InvalidCheckpoint:
            # What is gone because it was retired meanwhile is no damage: the newer moment does not have it.
            tip = source.state.tip
            if turn + 1 == _TURNS or source.refresh(deadline_s=deadline_s).tip == tip:
                raise
    raise AssertionError


def _moved(made: Draft) -> Moved:
    moved = Moved()
    run = made.target.run
    for key, index in made.indexes.items():
        moved.indexes[key] = transcript.moved_index(index, key, run=run, numbers=made.numbers)
    for seq in made.seqs:
        entry = made.state.checkpoints[seq]
        keys = [part.index_key for part in made.state.listings.get(seq, entry.parts)]
        moved.grown[seq] = sum(moved.indexes[key].grown for key in keys if key in moved.indexes)
        if entry.listed is not None:
            moved.manifests[seq] = _manifest(made, moved, seq).listed
    return moved


def _manifest(made: Draft, moved: Moved, seq: int) -> Manifest:
    listing = made.state.listings[seq]
    assert isinstance(listing, PartList)
    return transcript.moved_manifest(
        made.state.checkpoints[seq], listing.listed, moved, run=made.target.run, numbers=made.numbers
    )


def _log_of(made: Draft, moved: Moved) -> list[bytes]:
    run = made.target.run
    if made.seq is None:
        return transcript.whole(made.slots, moved, run=run)
    (genesis,) = made.slots
    assert isinstance(genesis, Sealed)
    return transcript.excerpt(made.state, made.seq, moved, genesis, run=run, numbers=made.numbers)


def _missing(made: Draft, log: Sequence[bytes]) -> list[int]:
    """Slots of the copy's log that are not there yet. Raises `TargetTaken` when what is there is not its."""
    there = sorted(seq for key in made.there if (seq := seq_of(key)) is not None)
    target = made.target

    def same(seq: int) -> bool:
        return seq < len(log) and target.store.get(target.key(entry_key(seq))) == log[seq]

    with ThreadPoolExecutor(LOG_WORKERS) as pool:
        for seq, fits in zip(there, pool.map(same, there), strict=True):
            if not fits:
                raise _taken(target, seq)
    return [seq for seq in range(len(log)) if seq not in frozenset(there)]


def _taken(target: RunLog, seq: int) -> TargetTaken:
    if remains(target.store, target.key("")) is Remains.COPYING:
        return TargetTaken(
            f"run {target.run!r} is a copy that was cut short, of something else: its log entry {seq} says so",
            where=target.store.url,
            remedy="call `deltashard cp` as before; where the source has let go what was copied then, or changed it, "
            "`deltashard rm` removes what is there",
        )
    return TargetTaken(
        f"run {target.run!r} is there, and is no copy of this: its log entry {seq} says something else",
        where=target.store.url,
        remedy="name another run; a copy that went on is a run of its own",
    )


class _Put:
    """Puts the data objects of a copy."""

    def __init__(self, made: Draft, advance: Callable[[int], None]) -> None:
        self._made = made
        self._advance = advance
        self._lock = threading.Condition()
        self._in_flight = 0
        self.objects = 0
        self.passed_over = 0
        self.bytes = 0

    def data(self, moved: Moved) -> None:
        """Packs, then indexes, then manifests and layouts. Raises `InvalidCheckpoint` and store errors."""
        made = self._made
        packs = [
            (pack.key, pack.bytes, [place for place in index.places if place.pack == number])
            for index in made.indexes.values()
            for number, pack in enumerate(index.packs)
        ]
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="copy") as pool:
            for _ in pool.map(lambda pack: self._pack(*pack), packs):
                pass
            crash_point("cp.after_packs")
            for _ in pool.map(self._small, [(index.key, index.data) for index in moved.indexes.values()]):
                pass
        for seq in sorted(moved.manifests):
            manifest = _manifest(made, moved, seq)
            entry = made.state.checkpoints[seq]
            key = manifest_key(made.numbers.attempt(entry.attempt), entry.cut, moved.manifests[seq].manifest)
            self._small((key, manifest.data))
        for digest in sorted(self._layouts()):
            if layout_key(digest) in made.there:
                self._count(0, put=False)
                continue
            data = made.source.store.get(made.source.key(layout_key(digest)))
            Layout.decode(data, digest=digest)
            self._small((layout_key(digest), data))
        crash_point("cp.after_data")

    def _layouts(self) -> set[str]:
        """Digests of the layouts that the copy's attempts have."""
        state, attempts = self._made.state, self._made.state.attempts
        if self._made.seq is None:
            return {each.layout for each in attempts.values() if each.layout}
        return {state.checkpoints[seq].layout for seq in self._made.seqs} - {""}

    def _pack(self, key: str, size: int, places: Sequence[Place]) -> None:
        made, target_key = self._made, self._made.numbers.key(key)
        with self._room(size):
            buffer = bytearray(size)
            if made.there.get(target_key) == size and self._holds(made.target, target_key, buffer, places):
                self._count(size, put=False)
                return
            if not self._holds(made.source, key, buffer, places, strict=True):
                raise InvalidCheckpoint(
                    f"{key} is not what its index says: a frame does not match its hash",
                    where=made.source.key(key),
                    remedy="`deltashard verify --deep` says which checkpoints need it",
                )
            made.target.store.put(made.target.key(target_key), buffer)
        self._count(size, put=True)

    def _holds(
        self, log: RunLog, key: str, buffer: bytearray, places: Sequence[Place], *, strict: bool = False
    ) -> bool:
        """Read a pack into `buffer`, and whether every frame of it has its hash; `strict`: it must be there."""
        view = memoryview(buffer)
        for _ in range(2):  # the wrong bit may have been ours, or the network's
            try:
                log.store.get_into(log.key(key), 0, view)
                for place in places:
                    check_digest(view[place.offset :][: place.info.length], place.info.digest)
            except ObjectNotFound as error:
                if strict:
                    raise InvalidCheckpoint(f"{key} does not exist", where=log.key(key)) from error
                return False
            except CorruptObject:
                continue
            return True
        return False

    def _small(self, item: tuple[str, bytes]) -> None:
        key, data = item
        target = self._made.target
        if self._made.there.get(key) == len(data) and target.store.get(target.key(key)) == data:
            self._count(0, put=False)
            return
        target.store.put(target.key(key), data)
        self._count(0, put=True)

    @contextmanager
    def _room(self, size: int) -> Iterator[None]:
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
            self.passed_over += not put
        self._advance(size)


def _put_log(made: Draft, log: Sequence[bytes], missing: Sequence[int]) -> None:
    """Write the copy's log: HINT, genesis, the newest entry, and then those between, one of them at the very end."""
    target = made.target
    target.probe()
    before, first = _hint(target), missing[0]
    if first == 0 and _genesis_of_others(target, log[0]):
        raise _taken(target, 0)  # data may have taken hours: somebody began a run of this name
    # IMPORTANT: HINT first. It is what keeps everyone away from a log that is not whole yet.
    target.leave_hint(Hint(seq=len(log) - 1, whole=False))
    crash_point("cp.after_hint")

    def put(seq: int) -> None:
        key = target.key(entry_key(seq))
        try:
            target.store.put_if_absent(key, log[seq])
        except ObjectExists:
            if target.store.get(key) != log[seq]:
                raise _taken(target, seq) from None

    try:
        put(first)
    except BaseException:
        # Somebody began a run of this name, or went on with it, just now: it must not be kept shut.
        if first == 0 and _genesis_of_others(target, log[0]):
            target.store.put(target.key("log/HINT"), before or b"")
        raise
    crash_point("cp.after_genesis")
    # IMPORTANT: the newest comes next, and the entry that closes the hole at the very end. Builds that believe a
    # listing, whatever HINT says, see the hole.
    later = sorted(missing[1:], reverse=True)
    for seq in later[:1]:
        put(seq)
    crash_point("cp.after_newest_entry")
    with ThreadPoolExecutor(LOG_WORKERS) as pool:
        for _ in pool.map(put, later[1:-1]):
            pass
    crash_point("cp.before_last_entry")
    for seq in later[1:][-1:]:
        put(seq)
    crash_point("cp.after_last_entry")
    target.leave_hint(Hint(seq=len(log) - 1))


def _genesis_of_others(target: RunLog, mine: bytes) -> bool:
    """Whether slot 0 of the target is taken, and not by this copy."""
    try:
        return target.store.get(target.key(entry_key(0))) != mine
    except ObjectNotFound:
        return False


def _hint(target: RunLog) -> bytes | None:
    try:
        return target.store.get(target.key("log/HINT"))
    except ObjectNotFound:
        return None
