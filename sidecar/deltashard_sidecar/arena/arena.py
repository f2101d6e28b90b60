"""The shell around the arena: the mapped file, the block ledger under one lock, writer locks, control lines.

A restarted sidecar re-opens the same file (its pages are charged to the pod already) with a new epoch, which voids
every block an older epoch granted. Whether a trainer may still be writing is asked of the kernel: a live one holds a
POSIX record lock on its control line, and a lock dies with its process, whatever killed it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from deltashard_checkpoint.errors import EnvironmentFault
from deltashard_checkpoint.private_file import open_private
from deltashard_proto.arena_layout import (
    BLOCKED_SINCE_NS,
    BLOCKED_WHY,
    HEARTBEAT_NS,
    LINES,
    NEVER,
    SAVE_AT_STEP,
    STEP,
    STEP_TIME_NS,
    URGENT,
    Arena,
    ArenaShape,
)
from deltashard_proto.block_reason import format_block_reason

from deltashard_sidecar.arena.block import BlockLedger, NotGranted, Use

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


class ArenaUnavailable(EnvironmentFault):
    """The arena file cannot be made (the memory volume is full or not writable), or was truncated."""


class ArenaKeeper:  # noqa: PLR0904
    """The arena of this pod and who may touch which block of it. Thread-safe."""

    def __init__(self, path: Path, *, blocks: int, block_bytes: int) -> None:
        """Make the arena, or take over the one that is there; raises `ArenaUnavailable`, or `NotPrivate`."""
        self.epoch = time.time_ns()
        fd = -1
        try:
            fd = open_private(path, os.O_RDWR | os.O_CREAT, 0o660)
            self.arena = Arena.create(path, fd, ArenaShape(blocks=blocks, block_bytes=block_bytes))
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ArenaUnavailable(
                f"cannot allocate an arena of {blocks} blocks of {block_bytes} bytes: {error.strerror}",
                where=str(path),
                remedy="free memory in the volume, or set a smaller arena_bytes",
            ) from error
        shape = self.arena.shape
        self.block_bytes = block_bytes
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.ledger = BlockLedger(total=shape.blocks, block_bytes=block_bytes)
        for rank in range(LINES):
            line = self.arena.line(rank)
            line[SAVE_AT_STEP], line[URGENT] = NEVER, 0
            if self.writer_pid(rank) is not None:
                self.ledger.embargo.add(rank)

    @property
    def total_bytes(self) -> int:
        return self.arena.shape.total_bytes

    @property
    def whole(self) -> bool:
        return self.arena.whole

    def _refuse_truncated(self) -> None:
        """Before memory of a block is touched: a page that was cut off would end this process with SIGBUS.

        A file that is truncated between this look and the touch still does, as a kill would.
        """
        if not self.whole:
            remedy = (
                "leave the runtime directory to the sidecar; it stops now, and the next one makes it again"
            )
            where = str(self.arena.path)
            raise ArenaUnavailable("the arena's file was truncated", where=where, remedy=remedy)

    def writer_pid(self, rank: int) -> int | None:
        """The process that holds the rank's writer lock (0 when it lives in another pid namespace), or None."""
        start, length = self.arena.line_lock_range(rank)
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self.arena.fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else int(pid)

    def sweep(self) -> None:
        """Free what quarantine and embargo held for writers that are gone."""
        with self._lock:
            suspects = self.ledger.embargo | self.ledger.quarantined_ranks()
            gone = {rank for rank in suspects if self.writer_pid(rank) is None}
            for rank in gone:
                self._release_quarantined(rank)
        if gone:
            self._notify_freed()

    def attached(self, rank: int) -> bool:
        """The rank's (new) process attached, its older copies have stopped; False when the arena is too small."""
        with self._lock:
            if not self.ledger.admit(rank):
                return False
            self._release_quarantined(rank)
        self._notify_freed()
        return True

    def copies_stopped(self, rank: int) -> None:
        """The trainer of `rank` began anew: nothing of its earlier saves is still being written."""
        with self._lock:
            self.ledger.release_quarantined(rank)
        self._notify_freed()

    def _release_quarantined(self, rank: int) -> None:
        self.ledger.embargo.discard(rank)
        self.ledger.release_quarantined(rank)

    def remove_rank(self, rank: int) -> None:
        with self._lock:
            self.ledger.remove_rank(rank)
        line = self.arena.line(rank)
        line[SAVE_AT_STEP], line[URGENT] = NEVER, 0
        self._notify_freed()

    def grant(self, rank: int) -> list[int]:
        with self._lock:
            return self.ledger.grant(rank)

    def received(self, rank: int, index: int, offset: int, length: int, *, closes: int | None) -> memoryview:
        """A batch of `rank` lies at (block, offset); `closes` is the block it wrote before. Returns its bytes."""
        with self._lock:
            self._refuse_truncated()
            self.ledger.check_granted(rank, index)
            if offset % 64 or offset < 0 or length < 0 or offset + length > self.block_bytes:
                raise NotGranted(f"[{offset}, {offset + length}) lies outside block {index}", where="arena")
            self.ledger.received(index)
            freed = closes is not None and self.ledger.closed(closes)
        if freed:
            self._notify_freed()
        return self.arena.block(index)[offset : offset + length]

    def encoded(self, index: int) -> None:
        with self._lock:
            freed = self.ledger.encoded(index)
        if freed:
            self._notify_freed()

    def release_granted(self, rank: int, indexes: Collection[int] | None = None) -> None:
        """The trainer said that it stopped: its blocks (`indexes`) go back as soon as their batches are encoded."""
        with self._lock:
            self.ledger.release_granted(rank, indexes)
        self._notify_freed()

    def release_serving(self, rank: int) -> None:
        with self._lock:
            self.ledger.release_serving(rank)
        self._notify_freed()

    def quarantine(self, rank: int, use: Use, indexes: Collection[int] | None = None) -> int:
        """The save (GRANTED) or restore (SERVING) stream of `rank` broke: returns how many blocks were set aside."""
        with self._lock:
            moved = len(self.ledger.quarantine(rank, use, indexes))
        self.sweep()
        return moved

    def take_serving(self, rank: int, *, should_stop: Callable[[], bool], wait_s: float = 0.5) -> int | None:
        """Wait for a block to put frames for `rank` into; None once `should_stop()`."""
        with self._freed:
            while not should_stop():
                self._refuse_truncated()
                index = self.ledger.take_serving(rank)
                if index is not None:
                    return index
                self._freed.wait(wait_s)
        return None

    def served(self, rank: int, index: int) -> None:
        with self._lock:
            self.ledger.served(rank, index)
        self._notify_freed()

    def counts(self) -> dict[str, int]:
        with self._lock:
            return self.ledger.counts()

    def on_free(self, rank: int, callback: Callable[[], None] | None) -> None:
        """Call `callback` whenever blocks became free, until it is replaced or set to None."""
        with self._lock:
            if callback is None:
                self._callbacks.pop(rank, None)
            else:
                self._callbacks[rank] = callback

    def _notify_freed(self) -> None:
        with self._freed:
            self._freed.notify_all()
            callbacks = list(self._callbacks.values())
        for callback in callbacks:
            callback()

    def step_of(self, rank: int) -> int:
        return int(self.arena.line(rank)[STEP])

    def step_time_s(self, rank: int) -> float:
        return float(self.arena.line(rank)[STEP_TIME_NS]) / 1e9

    def blocked(self, ranks: Iterable[int]) -> tuple[float, str]:
        """(seconds, why) of the save that is due and blocked for longest, by the trainers' word; (0, ""): none is."""
        lines = map(self.arena.line, ranks)
        words = ((int(line[BLOCKED_SINCE_NS]), int(line[BLOCKED_WHY])) for line in lines)
        since_ns, why = min((each for each in words if each[0]), default=(0, 0))
        return (
            (max(0.0, (time.time_ns() - since_ns) / 1e9), format_block_reason(why)) if since_ns else (0.0, "")
        )

    def write_control_line(self, rank: int, *, save_at_step: int, urgent: bool) -> None:
        line = self.arena.line(rank)
        line[URGENT] = int(urgent)
        line[SAVE_AT_STEP] = save_at_step
        line[HEARTBEAT_NS] = time.monotonic_ns()

    def close(self) -> None:
        """This sidecar ends: the blocks' memory goes back, unless a trainer lives that may still write them.

        The file and its control lines stay: the next one learns from them how far the trainer had come.
        """
        if all(self.writer_pid(rank) is None for rank in range(LINES)):
            self.arena.release_blocks()
