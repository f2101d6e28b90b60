"""SIGTERM and SIGINT: the first asks the process to stop, the second not to wait for anything.

IMPORTANT: Python runs a handler between two bytecodes of the main thread. That thread may hold any lock at that moment,
also that of the `threading.Event` it waits for: `Event.set()` in a handler can then wait for ever. `put()` of a
`SimpleQueue` is documented as safe there.
"""

from __future__ import annotations

import queue
import signal


class StopSignals:
    """Those that came; installed when made, which only the main thread can."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._taken = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._came.put(number)

    def wait(self, timeout_s: float) -> bool:
        """Take the next one, if it comes in time; whether it did."""
        try:
            self._came.get(timeout=timeout_s)
        except queue.Empty:
            return False
        self._taken += 1
        return True

    def again(self) -> bool:
        """Whether a second one came, also where nobody waited for the first."""
        return self._taken + self._came.qsize() > 1
