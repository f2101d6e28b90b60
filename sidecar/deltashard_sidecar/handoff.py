"""Markers under `closing/`: this pod is terminating and still uploads a save.

A replacement pod's Open waits for the marker's removal (bounded, see `closing.wait_for_closing`) and resumes from that
save. So the marker is written when the pod receives its stop signal, before the trainer begins the save, and is removed
when the urgent save has ended or the trainer is gone. Markers are best effort, on one thread: a slow store delays no
save, and a marker that was never removed is ignored once it is old.
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
    """Markers of this process. Thread-safe."""

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
        with self._lock:
            left, self._marked = self._marked, set()
        last = [self._work.submit(self._mark, attempt, begun=False) for attempt in left]
        # Earlier requests run first: there is one thread and one queue.
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
