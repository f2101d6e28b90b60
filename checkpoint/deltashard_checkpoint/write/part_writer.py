"""Write one rank's part of a snapshot or of a compaction: collect frames, upload packs in parallel, put the index last.

`add` places a frame into the pack being filled, a file in the cache directory, and the frame's tail into a second one:
weights and optimizer state are in separate packs, in the same order. One of a few threads uploads a full pack from a
mapping of its file while the next pack fills. So the heap holds no data, a slow store costs disk space instead of
training time, and uploaded data cannot change. Packs that cannot be uploaded accumulate in the cache until its budget
is used up. `add` then waits for an upload to finish, under a deadline, and fails past it.

`finish` waits for the uploads and puts the index, whose name carries its hash. Until then nothing refers to the packs.
A part that fails leaves garbage only under the prefix of its snapshot; if the store is full, it deletes its packs.
Frames may be added from several threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from deltashard_proto.cause import Cause

from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.cache.pack_spool import PACK_BYTES, CacheFull, PackSpool
from deltashard_checkpoint.crash_point import crash_point, is_armed
from deltashard_checkpoint.errors import DeltashardError, EnvironmentFault, InternalBug
from deltashard_checkpoint.format import object_key
from deltashard_checkpoint.format.frame_encoder import EncodedFrame
from deltashard_checkpoint.format.index import Index, Pack, Place, digest_hex, encode_index
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.stores.abc import Store, StoreFull
from deltashard_checkpoint.stores.deadline import abandon_when, deadline

DEFAULT_UPLOADS = 4
CLEANUP_DEADLINE_S = 5.0
"""Deadline for deleting the packs of a part after its store was found full."""


class UploadFailed(EnvironmentFault):
    """A pack or index could not be stored; the snapshot is lost, and the next one covers its rows."""

    cause = Cause.UNAVAILABLE


class UploadNoSpace(UploadFailed):
    """A pack or index could not be stored because the store is full."""

    cause = Cause.FULL


class PartAborted(EnvironmentFault):
    """The part was aborted (`abort`) before or during this call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTarget:
    """Identity and contents of a part."""

    run: str
    attempt: int
    snapshot_id: int
    step: int
    rank: int
    token: str
    """Token of this process (`key_rule.new_token`), or of the compaction if `compaction`."""
    tables: tuple[TableSchema, ...]
    boxes: tuple[Box, ...]
    covers: int | None
    compaction: bool = False


def pack_size(pack_bytes: int, cache: PackCache) -> int:
    """Return the pack size, at most `pack_bytes`, at which one pack of each kind fills while another uploads."""
    return min(pack_bytes, cache.budget_bytes // 4)


@dataclass(slots=True)
class _Filling:
    """A pack that is being filled."""

    number: int
    """Position among all packs of the part."""
    key: str
    spool: PackSpool
    state: bool
    """Whether it holds tails."""
    writers: int = 0
    full: bool = False
    places: list[Place] = field(default_factory=list)


class PartWriter:
    """Writer of one part. Exactly one of `finish` and `abort` ends it; leaving the context aborts it."""

    def __init__(
        self,
        store: Store,
        target: PartTarget,
        cache: PackCache,
        *,
        pack_bytes: int = PACK_BYTES,
        uploads: int = DEFAULT_UPLOADS,
        deadline_s: float = 3600.0,
    ) -> None:
        """`uploads` packs upload in parallel; `deadline_s` bounds the whole part, from construction to the index."""
        self.target = target
        self._store = store
        self._cache = cache
        self._pack_bytes = pack_size(pack_bytes, cache)
        self._deadline_at_s = time.monotonic() + deadline_s
        self._placing = threading.Lock()  # held while a place is chosen, which may wait for space
        self._state = threading.Lock()  # guards everything below; never held while waiting
        self._packs: list[_Filling] = []
        self._filling: dict[bool, _Filling | None] = {False: None, True: None}
        self._puts: list[Future[None]] = []
        self._failure: BaseException | None = None
        self._ended = False
        self._raw_bytes = 0
        self._pool = ThreadPoolExecutor(uploads, thread_name_prefix="upload")
        self.index: Index | None = None
        """The written index; None before `finish`."""

    def add(self, frame: EncodedFrame, *, since: int | None = None, duplicated_rows: int = 0) -> None:
        """Append a whole frame and its tail; the buffer may be reused after the return.

        The index records `since` and `duplicated_rows` for the frame (`Place`).

        Raises `CacheFull` if no space became free in time, `UploadFailed` if an earlier pack failed, and `PartAborted`.
        """
        pieces = self._place(frame, since=since, duplicated_rows=duplicated_rows)
        with contextlib.ExitStack() as written:
            for filling, _, _ in pieces:
                written.callback(self._written, filling)
            try:
                for filling, offset, data in pieces:
                    filling.spool.write(offset, data)
            except BaseException as error:
                self._fail(error)
                raise

    def finish(self) -> Part:
        """Wait for all uploads, put the index, set `index`, and return the part for the log entry.

        Raises `UploadFailed` (with the store's error as its cause) or `PartAborted`; the part is aborted then.
        """
        try:
            return self._finish()
        except BaseException:
            self.abort()
            raise

    def _finish(self) -> Part:
        with self._placing:
            for state in self._filling:
                self._close(state)
        with self._state:
            self._raise_if_ended()
            if any(not pack.spool.closed for pack in self._packs):
                raise InternalBug("finish was called while frames were being added", where=self._where)
            puts = list(self._puts)
        try:
            for put in puts:
                put.result(max(0.0, self._deadline_at_s - time.monotonic()))
            part = self._put_index()
        except (CancelledError, FutureTimeout):
            with self._state:
                self._raise_if_ended()
            raise UploadFailed(
                "packs were not uploaded in time", where=self._where, remedy="is the store reachable?"
            ) from None
        except DeltashardError as error:
            self._fail(error)
            raise self._upload_failed(self._failure or error) from error
        with self._state:
            self._raise_if_ended()
            self._ended = True
        self._pool.shutdown(wait=False)
        return part

    def abort(self) -> None:
        """Abort the part: cancel pending and running uploads and delete local files. Idempotent."""
        with self._state:
            if self._ended:
                return
            self._ended = True
            packs = list(self._packs)
            idle = [pack for pack in packs if pack.writers == 0]
        self._cache.wake()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for pack in idle:
            self._discard(pack)
        if isinstance(self._failure, StoreFull):
            self._delete_uploaded()

    def _delete_uploaded(self) -> None:
        """Delete the packs that this part has put, to free space in a full store.

        IMPORTANT: only a part without an index may do so, because no entry can ever name its packs. Otherwise each
        retry on a full store would leave more garbage in it.
        """
        puts = list(self._puts)
        with contextlib.suppress(DeltashardError), deadline(CLEANUP_DEADLINE_S):
            wait_for(puts, timeout=CLEANUP_DEADLINE_S)
            self._store.delete([object_key.run_key(self.target.run, pack.key) for pack in self._packs])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def _where(self) -> str:
        t = self.target
        return f"run {t.run}, attempt {t.attempt}, snapshot {t.snapshot_id}, rank {t.rank}"

    def _raise_if_ended(self) -> None:
        if self._failure is not None:
            raise self._upload_failed(self._failure) from self._failure
        if self._ended:
            raise PartAborted("the part was aborted or has finished", where=self._where)

    def _upload_failed(self, cause: BaseException) -> UploadFailed:
        kind = UploadNoSpace if isinstance(cause, StoreFull) else UploadFailed
        return kind(
            f"a pack could not be stored: {cause}",
            where=self._where,
            remedy="make the store reachable, with free space; changed rows stay marked until a save succeeds",
        )

    def _fail(self, error: BaseException) -> None:
        with self._state:
            if self._failure is None and not self._ended:
                self._failure = error
        self._cache.wake()

    def _stopped(self) -> bool:
        return self._ended or self._failure is not None

    def _place(
        self, frame: EncodedFrame, *, since: int | None, duplicated_rows: int
    ) -> list[tuple[_Filling, int, memoryview]]:
        """Return (pack, offset, bytes) for the frame and its tail, in current or new packs."""
        info = frame.info
        lengths = [info.length] if info.tail is None else [info.length, info.tail.length]
        data = [frame.data] if frame.tail is None else [frame.data, frame.tail]
        if lengths != [len(each) for each in data] or max(lengths) > self._pack_bytes:
            raise InternalBug(
                f"frame of {lengths} bytes in buffers of {[len(each) for each in data]}, packs of {self._pack_bytes}"
            )
        with self._placing:
            spots = self._reserve(lengths)
            with self._state:
                self._raise_if_ended()
                (filling, offset), (tail, tail_offset) = spots[0], spots[-1]
                for each, _ in spots:
                    each.writers += 1
                place = Place(
                    pack=filling.number,
                    offset=offset,
                    info=info,
                    since=since,
                    duplicated_rows=duplicated_rows,
                )
                if info.tail is not None:
                    place = replace(place, tail_pack=tail.number, tail_offset=tail_offset)
                filling.places.append(place)
                # Each row counts once: bytes beyond those of the rows count as blobs.
                self._raw_bytes += 0 if duplicated_rows else frame.raw_bytes
        return [(*spot, each) for spot, each in zip(spots, data, strict=True)]

    def _reserve(self, lengths: Sequence[int]) -> list[tuple[_Filling, int]]:
        """Reserve places for a frame and its tail, if any; the caller holds the placing lock.

        No pack is being filled while this waits for cache space. Otherwise writers that share a cache, each with one
        kind of pack and waiting for the other, would deadlock.
        """
        kinds = [False, True][: len(lengths)]
        wanted = [
            state
            for state, length in zip(kinds, lengths, strict=True)
            if (filling := self._filling[state]) is None or not filling.spool.fits(length)
        ]
        if wanted:
            with self._state:
                self._raise_if_ended()
            for state in wanted:
                self._close(state)
            try:
                self._open_packs(wanted, wait_s=0.0)
            except CacheFull:
                for state in self._filling:
                    self._close(state)
                self._open_packs(kinds, wait_s=self._deadline_at_s - time.monotonic())
        spots = []
        for state, length in zip(kinds, lengths, strict=True):
            filling = self._filling[state]
            assert filling is not None
            spots.append((filling, filling.spool.reserve(length)))
        return spots

    def _close(self, state: bool) -> None:
        """Close the pack of this kind: upload it now, or leave the upload to its last writer."""
        with self._state:
            filling, self._filling[state] = self._filling[state], None
            if filling is None:
                return
            filling.full = True
            ready = filling.writers == 0
        if ready:
            self._upload(filling)

    def _open_packs(self, kinds: Sequence[bool], *, wait_s: float) -> None:
        """Open a pack of frames (False), of tails (True), or both; raises `CacheFull` if there is no space."""
        number = len(self._packs)
        keys = [self._pack_key(state) for state in kinds]
        try:
            spools = self._cache.create_all(
                [object_key.run_key(self.target.run, key) for key in keys],
                capacity_bytes=self._pack_bytes,
                wait_s=wait_s,
                stopped=self._stopped,
            )
        except EnvironmentFault:
            with self._state:
                self._raise_if_ended()  # raises the reason for the lack of space
            raise
        opened = [
            _Filling(number + n, key, spool, state)
            for n, (key, spool, state) in enumerate(zip(keys, spools, kinds, strict=True))
        ]
        with self._state:
            self._packs += opened
            ended = self._ended
            if not ended:
                self._filling |= {filling.state: filling for filling in opened}
        if ended:
            for filling in opened:
                self._discard(filling)
            raise PartAborted("the part was aborted", where=self._where)

    def _pack_key(self, state: bool) -> str:
        t = self.target
        n = sum(pack.state is state for pack in self._packs)
        if t.compaction:
            return object_key.compaction_pack_key(token=t.token, n=n, state=state)
        return object_key.pack_key(
            attempt=t.attempt, snapshot_id=t.snapshot_id, rank=t.rank, token=t.token, n=n, state=state
        )

    def _written(self, filling: _Filling) -> None:
        with self._state:
            filling.writers -= 1
            last = filling.writers == 0
            upload = last and filling.full and not self._stopped()
            discard = last and self._ended
        if upload:
            self._upload(filling)
        elif discard:
            self._discard(filling)

    def _upload(self, filling: _Filling) -> None:
        try:
            self._cache.seal(filling.spool)
            with self._state:
                if self._ended:
                    return
                self._puts.append(self._pool.submit(self._put, filling))
        except BaseException as error:
            if self._ended:
                raise PartAborted("the part was aborted", where=self._where) from error
            self._fail(error)
            raise

    def _put(self, filling: _Filling) -> None:
        key = object_key.run_key(self.target.run, filling.key)
        try:
            if self._stopped():
                return
            with (
                self._cache.mapped(key) as data,
                deadline(self._deadline_at_s - time.monotonic()),
                # A finished part keeps no thread, and no mapping of a file that the budget does not count.
                abandon_when(self._stopped),
            ):
                crash_point("pack.before_put")
                during = threading.Thread(target=crash_point, args=("pack.during_put",))
                if is_armed("pack.during_put"):
                    during.start()
                self._store.put(key, data)
                if during.ident is not None:
                    during.join()  # a scheduled crash happens before the part continues, however late its thread runs
                crash_point("pack.after_put")
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._cache.unpin(key)

    def _put_index(self) -> Part:
        t = self.target
        places = [place for pack in self._packs for place in sorted(pack.places, key=lambda p: p.offset)]
        index = Index(
            run=t.run,
            attempt=t.attempt,
            snapshot_id=t.snapshot_id,
            step=t.step,
            rank=t.rank,
            token=t.token,
            tables=t.tables,
            packs=tuple(Pack(key=pack.key, bytes=pack.spool.size_bytes) for pack in self._packs),
            places=tuple(places),
            boxes=t.boxes,
            covers=t.covers,
            raw_bytes=self._raw_bytes,
        )
        data = encode_index(index)
        if t.compaction:
            key = object_key.compaction_index_key(token=t.token, xxh3=digest_hex(data))
        else:
            key = object_key.index_key(
                attempt=t.attempt,
                snapshot_id=t.snapshot_id,
                rank=t.rank,
                token=t.token,
                xxh3=digest_hex(data),
            )
        crash_point("index.before_put")
        with deadline(self._deadline_at_s - time.monotonic()), abandon_when(self._stopped):
            self._store.put(object_key.run_key(t.run, key), data)
        crash_point("index.after_put")
        self.index = index
        stored_bytes = sum(pack.bytes for pack in index.packs) + len(data)
        return Part(rank=t.rank, index_key=key, boxes=t.boxes, stored_bytes=stored_bytes, covers=t.covers)

    def _discard(self, pack: _Filling) -> None:
        """Remove a pack's local file; a running upload has its own mapping."""
        with contextlib.suppress(OSError):
            self._cache.discard(pack.spool)
