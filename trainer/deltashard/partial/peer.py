"""Which ranks died. On this machine each holds a lock that goes with its process, and who leaves in order says so.

Of a rank elsewhere (another machine, another pod) no kernel tells. It *beats* in the store of the process group, from
a thread of its own, so also while its training thread stands in a collective; and a collective that it leaves by dying
says so itself. A store that does not answer went with the rank that had it.
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
"""How often a rank beats: the longer of these, the second by world size."""
BEAT_TIMEOUT_S = 5.0
"""Without a beat for so long, a rank elsewhere is dead."""
_LEFT = b"left"


class Peers:
    """The other ranks: of this machine by the files in a directory of theirs, of others by their beats."""

    def __init__(self, runtime: Path | None, local: int) -> None:
        """`runtime` has the locks of this machine's ranks; None: no rank is seen there, as in a pod."""
        self._runtime = runtime
        self._local = local
        self._seen: set[Path] = set()
        self._beats: _HeartbeatThread | None = None
        if runtime is not None:
            _left_marker(trainer_lock(runtime, local)).unlink(missing_ok=True)

    def register_peers(self) -> None:
        """All ranks are here: who holds a lock now is one of them."""
        if self._runtime is not None:
            mine = trainer_lock(self._runtime, self._local)
            self._seen = {
                path for path in trainer_locks(self._runtime) if path != mine and not _is_free(path)
            }

    def start_heartbeat(self, prefix: str, rank: int, world_size: int) -> None:
        """Beat, and hear of the ranks that are elsewhere, if there are any, by keys under `prefix`."""
        if self._beats is not None:
            self._beats.close()
        has_remote_ranks = len(self._seen) + 1 < world_size
        self._beats = _HeartbeatThread(prefix, rank, world_size) if has_remote_ranks else None

    @property
    def has_remote_ranks(self) -> bool:
        return self._beats is not None

    @property
    def dead(self) -> bool:
        """Whether one of them is gone that did not leave in order."""
        here = any(not _left_marker(path).exists() and _is_free(path) for path in self._seen)
        return here or (self._beats is not None and self._beats.dead)

    def is_peer_failure(self, error: BaseException) -> bool:
        """Whether `error` is a collective's that says by itself that it lost a rank elsewhere."""
        # gloo raises plain RuntimeErrors, which begin with the file of its own that met the end of a connection.
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
    """One rank's thread; it looks at the others only once somebody asks."""

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
        """Whether a rank was silent for long enough; the first time that this is asked begins to count."""
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
            self._dead = True  # it went with the rank, or the agent, that had it

    def _poll_peers(self, store: GroupStore) -> None:
        said = store.get_all([f"beat/{rank}" for rank in range(self._world_size)])
        now_s = time.monotonic()
        for rank, word in enumerate(said or ()):
            if self._last_beats.get(rank, (b"", 0.0))[0] != word:
                self._last_beats[rank] = word, now_s
        silent_s = max(BEAT_TIMEOUT_S, 3 * self._interval_s)
        self._dead = any(
            word != _LEFT and now_s - at_s > silent_s for word, at_s in self._last_beats.values()
        )


def _left_marker(lock: Path) -> Path:
    return lock.with_suffix(".left")


def _is_free(path: Path) -> bool:
    try:
        return is_free(path)
    except OSError:
        return False  # nothing is known
