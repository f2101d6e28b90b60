"""What is read before a restore asks for it, and what ranks of one pod read for one another."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.format.blob_name import read_by
from deltashard_checkpoint.format.index import Index
from deltashard_checkpoint.log.chain import blob_parts_of, chain, closure
from deltashard_checkpoint.log.manifest import Manifests
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.restore.checkpoint_reader import load_indexes
from deltashard_checkpoint.restore.shared_read import SharedReads
from deltashard_checkpoint.stores.abc import Store

from deltashard_sidecar.session.attachment import Attachment

AHEAD_DEADLINE_S = 10.0
"""For the indexes of a checkpoint that is about to be restored."""
SHARED_IDLE_S = 60.0
"""So long after the last read of a restore, what ranks have read for one another is kept."""


class ReadAhead:
    """Reads of one run's trainers. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shared = SharedReads()
        self._lock = threading.Lock()
        self._reading = ThreadPoolExecutor(thread_name_prefix="ahead")
        self._ahead: dict[str, Future[dict[str, Index]]] = {}
        """By session: indexes that its restore will ask for first, read while the entry of its attempt is put."""
        self._manifests: dict[str, Manifests] = {}

    def close(self) -> None:
        self._reading.shutdown(wait=False, cancel_futures=True)

    def manifests_of(self, run: str) -> Manifests:
        """Reads the manifests of a run, ours or one that is read from."""
        with self._lock:
            if run not in self._manifests:
                self._manifests = {run: Manifests(self._store, run)}
            return self._manifests[run]

    def shared(self, who: Attachment) -> SharedReads | None:
        """What ranks of this pod read of a checkpoint for one another; None for a trainer that has no peers."""
        return self._shared if who.world_size > 1 else None

    def begin(self, who: Attachment, state: RunState, seq: int) -> None:
        """Begin to read the indexes that a restore of this checkpoint will ask for."""
        try:
            state = self.manifests_of(state.run).listing(state, closure(state, (seq,)))
            blobs = read_by(who.rank, who.world_size, state.checkpoints[seq].world_size)
            parts = (
                *(link.part for link in chain(state, seq, who.boxes, strict=False)),
                *blob_parts_of(state, seq, blobs),
            )
        except DeltashardError:
            return  # the restore will say what is wrong
        try:
            ahead = self._reading.submit(
                load_indexes,
                self._store,
                state.run,
                parts,
                deadline_s=AHEAD_DEADLINE_S,
                shared=self.shared(who),
            )
        except RuntimeError:
            return  # the process ends
        with self._lock:
            self._ahead[who.id] = ahead

    def take(self, who: Attachment) -> Mapping[str, Index] | None:
        """Indexes by key that were read ahead for the trainer's restore, once; waits for them. None: none were.

        Only ever a gain of time: the restore asks again for what could not be read, and says what is wrong.
        """
        with self._lock:
            ahead = self._ahead.pop(who.id, None)
        try:
            return None if ahead is None else ahead.result(2 * AHEAD_DEADLINE_S)
        except (Exception, CancelledError):  # noqa: BLE001 - the restore reads them again, and says what is wrong
            return None

    def held(self) -> set[str]:
        """Sessions for which something was read."""
        with self._lock:
            return set(self._ahead)

    def let_go(self, sessions: AbstractSet[str]) -> None:
        """These are over; what ranks shared goes, too, some time after the last read."""
        self._shared.let_go(idle_s=SHARED_IDLE_S)
        with self._lock:
            for session in sessions:
                self._ahead.pop(session, None)
