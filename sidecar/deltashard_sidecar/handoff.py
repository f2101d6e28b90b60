"""Markers under `closing/`: this pod terminates, and still uploads a save.

A replacement pod's Open waits for the marker to go (bounded, see `closing.wait_for_closing`) and resumes from that cut.
So the marker is put when the pod gets its stop signal, before the trainer has even cut, and goes when the urgent save
has ended, whichever way, or the trainer is gone. Best effort, on one thread: a slow store delays no save, and a marker
that was not removed is passed over once it is old.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.stores.deadline import deadline
from deltashard_checkpoint.write.closing import mark_closing, unmark_closing

from deltashard_sidecar.run.run import Run
from deltashard_sidecar.telemetry.structured_logging import explain

MARK_DEADLINE_S = 3.0
END_DEADLINE_S = 4.0


class PendingUploadMarkers:
    """The markers of this process. Thread-safe."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._marked: set[int] = set()
        self._work = ThreadPoolExecutor(1, thread_name_prefix="closing")

    def begin(self, attempts: Iterable[int]) -> None:
        with self._lock:
            new = set(attempts) - self._marked
            self._marked |= new
        for attempt in new:
            self._work.submit(self._mark, attempt, begun=True)

    def end(self, attempt: int | None) -> None:
        with self._lock:
            if attempt not in self._marked:
                return
            self._marked.discard(attempt)
        self._work.submit(self._mark, attempt, begun=False)

    def end_all(self) -> None:
        """The process ends: waits a moment for what the store is still to hear."""
        with self._lock:
            left, self._marked = self._marked, set()
        last = [self._work.submit(self._mark, attempt, begun=False) for attempt in left]
        # What was asked for before goes first: one thread, one queue.
        wait([*last, self._work.submit(lambda: None)], END_DEADLINE_S)
        self._work.shutdown(wait=False, cancel_futures=True)

    def _mark(self, attempt: int, *, begun: bool) -> None:
        if begun and self._run.removed is not None:
            return
        try:
            with deadline(MARK_DEADLINE_S):
                (mark_closing if begun else unmark_closing)(self._run.log, attempt, self._run.token)
        except DeltashardError as error:
            self._run.logger.warning("pending_upload.mark_failed", **explain(error))
