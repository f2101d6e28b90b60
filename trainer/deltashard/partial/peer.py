"""Detects dead ranks. On this machine each rank holds a lock that ends with its process, and marks a regular exit.

Ranks elsewhere (another machine, another pod) send heartbeats to the store of the process group. They do so from a
separate thread, hence also while the training thread is inside a collective. A collective that loses such a rank raises
an error. An unreachable store was lost with the rank that hosted it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from torch.distributed import DistError

from deltashard.attach.lock import is_free, trainer_lock, trainer_locks
from deltashard.errors import GroupLost
from deltashard.group.group_store import GroupStore

BEAT_INTERVAL_S, BEAT_INTERVAL_PER_RANK_S = 1.0, 0.005
"""Seconds between heartbeats: the larger of the first and of the second times the world size."""
BEAT_TIMEOUT_S = 5.0
"""A rank elsewhere is dead after so many seconds without a heartbeat."""
_LEFT = b"left"


class Peers:
    """The other ranks: those of this machine by lock files, others by heartbeats."""

    def __init__(self, runtime: Path | None, local: int) -> None:
        """`runtime`: directory with the locks of this machine's ranks; None: no rank is visible there, as in a pod."""
        self._runtime = runtime
        self._local = local
        self._seen: set[Path] = set()
        self._beats: _HeartbeatThread | None = None
        if runtime is not None:
            _left_marker(trainer_lock(runtime, local)).unlink(missing_ok=True)

    def register_peers(self) -> None:
        if self._runtime is not None:
            mine = trainer_lock(self._runtime, self._local)
            self._seen = {
                path for path in trainer_locks(self._runtime) if path != mine and not _is_free(path)
            }

    def start_heartbeat(self, prefix: str, rank: int, world_size: int) -> None:
        """Send heartbeats, and poll those of ranks elsewhere, under keys with `prefix`, if there are such ranks."""
        if self._beats is not None:
            self._beats.close()
        has_remote_ranks = len(self._seen) + 1 < world_size
        self._beats = _HeartbeatThread(prefix, rank, world_size) if has_remote_ranks else None

    @property
    def has_remote_ranks(self) -> bool:
        return self._beats is not None

    @property
    def dead(self) -> bool:
        """Whether a rank is gone without a regular exit."""
        here = any(not _left_marker(path).exists() and _is_free(path) for path in self._seen)
        return here or (self._beats is not None and self._beats.dead)

    def is_peer_failure(self, error: BaseException) -> bool:
        """Whether `error` comes from a collective that lost a rank elsewhere."""
        # gloo raises plain RuntimeErrors that begin with the gloo source file where the connection ended.
        return self.has_remote_ranks and (isinstance(error, DistError) or "gloo/transport/" in str(error))

    def leave(self) -> None:
        if self._runtime is not None:
            with contextlib.suppress(OSError):  # the runtime directory was wiped
                _left_marker(trainer_lock(self._runtime, self._local)).touch()
        self.close(leaving=True)

    def close(self, *, leaving: bool = False) -> None:
        if self._beats is not None:
            self._beats.close(leaving=leaving)


class _HeartbeatThread:
    """Heartbeat thread of one rank; it polls the others only after `dead` was first read."""

    def __init__(self, prefix: str, rank: int, world_size: int) -> None:
        self._prefix, self._rank, self._world_size = prefix, rank, world_size
        self._interval_s = max(BEAT_INTERVAL_S, BEAT_INTERVAL_PER_RANK_S * world_size)
        self._stop, self._poll_enabled = threading.Event(), threading.Event()
        self._leaving = False
        self._last_beats: dict[int, tuple[bytes, float]] = {}
        self._dead = False
        self._thread = threading.Thread(target=self._run, name="deltashard-beats", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> bool:
        """Whether a rank was silent for too long, counted from the first read of this property."""
        self._poll_enabled.set()
        return self._dead

    def close(self, *, leaving: bool = False) -> None:
        self._leaving |= leaving
        self._stop.set()
        self._thread.join(timeout=BEAT_INTERVAL_S)

    def _run(self) -> None:
        try:
            store, number = GroupStore(self._prefix), 0
            while not self._stop.wait(self._interval_s if number else 0.0):
                number += 1
                store.put(f"beat/{self._rank}", str(number).encode())
                if self._poll_enabled.is_set():
                    self._poll_peers(store)
            if self._leaving:
                store.put(f"beat/{self._rank}", _LEFT)
        except GroupLost:
            self._dead = True  # the store was lost with the rank or agent that hosted it

    def _poll_peers(self, store: GroupStore) -> None:
        beats = store.get_all([f"beat/{rank}" for rank in range(self._world_size)])
        now_s = time.monotonic()
        for rank, beat in enumerate(beats or ()):
            if self._last_beats.get(rank, (b"", 0.0))[0] != beat:
                self._last_beats[rank] = beat, now_s
        silent_s = max(BEAT_TIMEOUT_S, 3 * self._interval_s)
        self._dead = any(
            beat != _LEFT and now_s - at_s > silent_s for beat, at_s in self._last_beats.values()
        )


def _left_marker(lock: Path) -> Path:
    return lock.with_suffix(".left")


def _is_free(path: Path) -> bool:
    try:
        return is_free(path)
    except OSError:
        return False  # unknown
