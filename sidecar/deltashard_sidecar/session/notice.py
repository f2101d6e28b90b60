"""What a sidecar tells its trainers unasked: commits, failures, save-now, policy, fenced. One queue per attachment.

A queue holds at most `LIMIT` notices; a trainer that does not read loses the oldest. That is safe because nothing
depends on a single notice: AttachReply carries the last commit, a lost commit notice only makes the next cut cover
more, and a fenced attempt is refused again at its next save.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from deltashard_proto.v1 import trainer_pb2 as pb

LIMIT = 256


class Notices:
    """Notices on their way to one trainer. Thread-safe."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._queue: deque[pb.Notice] = deque(maxlen=LIMIT)
        self._closed = False

    def post(self, notice: pb.Notice) -> None:
        with self._ready:
            self._queue.append(notice)
            self._ready.notify_all()

    def close(self) -> None:
        """End every reader once the queue is empty."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def poke(self) -> None:
        """Make readers look at their `alive` again."""
        with self._ready:
            self._ready.notify_all()

    def read(self, alive: Callable[[], bool]) -> Iterator[pb.Notice]:
        """Notices as they come, until closed or until `alive()` is false (call `poke` when it changes)."""
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._closed or not alive())
                if not self._queue or not alive():
                    return  # what is queued is left to the next reader
                notice = self._queue.popleft()
            yield notice
