"""Thread-safe arena: the mapped file, the block ledger under one lock, writer locks, control lines.

A restarted sidecar opens the same file again (its pages are already charged to the pod) with a new epoch, which voids
all grants of older epochs. The kernel knows whether a trainer may still be writing: a live one holds a POSIX record
lock on its control line, which the kernel releases however the process ends.
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
    """The arena file cannot be created (the memory volume is full or not writable), or was truncated."""


class ArenaKeeper:  # noqa: PLR0904
    """The arena of this pod and the ownership of its blocks. Thread-safe."""

    def __init__(self, path: Path, *, blocks: int, block_bytes: int) -> None:
        """Create the arena, or open the existing file; raises `ArenaUnavailable` or `NotPrivate`."""
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
        """Raise `ArenaUnavailable` for a truncated file, before a missing page ends this process with SIGBUS.

        A truncation between this check and the access still does, like a kill would.
        """
        if not self.whole:
            remedy = "do not touch the runtime directory; this sidecar stops now, and the next one creates it again"
            where = str(self.arena.path)
            raise ArenaUnavailable("the arena's file was truncated", where=where, remedy=remedy)

    def writer_pid(self, rank: int) -> int | None:
        """Return the pid that holds the rank's writer lock (0 for a process in another pid namespace), or None."""
        start, length = self.arena.line_lock_range(rank)
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self.arena.fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else int(pid)

    def sweep(self) -> None:
        """Release quarantine and embargo of writers that are gone."""
        with self._lock:
            suspects = self.ledger.embargo | self.ledger.quarantined_ranks()
            gone = {rank for rank in suspects if self.writer_pid(rank) is None}
            for rank in gone:
                self._release_quarantined(rank)
        if gone:
            self._notify_freed()

    def attached(self, rank: int) -> bool:
        """Admit the rank's new process, whose older copies have stopped; returns False if the arena is too small."""
        with self._lock:
            if not self.ledger.admit(rank):
                return False
            self._release_quarantined(rank)
        self._notify_freed()
        return True

    def copies_stopped(self, rank: int) -> None:
        """Release quarantined blocks of `rank`: its trainer begins a save, so no earlier one is still being written."""
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
        """Return the bytes of a batch of `rank` at (block, offset); `closes`: its previous block, now complete."""
        with self._lock:
            self._refuse_truncated()
            self.ledger.check_granted(rank, index)
            if offset % 64 or offset < 0 or length < 0 or offset + length > self.block_bytes:
                raise NotGranted(f"[{offset}, {offset + length}) is outside block {index}", where="arena")
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
        """Release granted blocks (`indexes`) once their batches are encoded: the trainer has stopped writing."""
        with self._lock:
            self.ledger.release_granted(rank, indexes)
        self._notify_freed()

    def release_serving(self, rank: int) -> None:
        with self._lock:
            self.ledger.release_serving(rank)
        self._notify_freed()

    def quarantine(self, rank: int, use: Use, indexes: Collection[int] | None = None) -> int:
        """Quarantine blocks of a broken save (GRANTED) or restore (SERVING) stream; returns their number."""
        with self._lock:
            moved = len(self.ledger.quarantine(rank, use, indexes))
        self.sweep()
        return moved

    def take_serving(self, rank: int, *, should_stop: Callable[[], bool], wait_s: float = 0.5) -> int | None:
        """Wait for a block to hold frames for `rank`; returns None once `should_stop()`."""
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
        """Call `callback` after blocks became free. It replaces the rank's previous callback; None removes it."""
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
        """Return (seconds, reason) of the save that has been blocked the longest, as trainers report, or (0, "")."""
        lines = map(self.arena.line, ranks)
        states = ((int(line[BLOCKED_SINCE_NS]), int(line[BLOCKED_WHY])) for line in lines)
        since_ns, why = min((each for each in states if each[0]), default=(0, 0))
        return (
            (max(0.0, (time.time_ns() - since_ns) / 1e9), format_block_reason(why)) if since_ns else (0.0, "")
        )

    def write_control_line(self, rank: int, *, save_at_step: int, urgent: bool) -> None:
        line = self.arena.line(rank)
        line[URGENT] = int(urgent)
        line[SAVE_AT_STEP] = save_at_step
        line[HEARTBEAT_NS] = time.monotonic_ns()

    def close(self) -> None:
        """Return the blocks' memory to the system, unless a live trainer may still write to it.

        The file and its control lines remain: the next sidecar reads the trainer's last step from them.
        """
        if all(self.writer_pid(rank) is None for rank in range(LINES)):
            self.arena.release_blocks()
