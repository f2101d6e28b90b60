"""Named instants at which a test may kill the process: one call at every commit point, nothing else.

`DELTASHARD_CRASH_AT=commit.after_index:2` kills this process with SIGKILL, as a lost node would, the second time it
passes `commit.after_index`. Unset (always, outside tests) a call is one comparison with None.
"""

from __future__ import annotations

import os
import signal

_name, _, _nth = os.environ.get("DELTASHARD_CRASH_AT", "").partition(":")
_armed: str | None = _name or None
_left = int(_nth or 1)


def crash_point(name: str) -> None:
    """Die here, at once and without clean-up, if a test armed this point."""
    global _left  # noqa: PLW0603 - one counter per process is the point
    if _armed is not None and _armed == name:
        _left -= 1
        if _left <= 0:  # another thread may have counted on since
            os.kill(os.getpid(), signal.SIGKILL)


def is_armed(name: str) -> bool:
    """Whether a test armed this point: for instants that only a second thread can meet (`pack.during_put`)."""
    return _armed is not None and _armed == name
