"""Named crash points: tests can kill the process at every step of a commit.

`DELTASHARD_CRASH_AT=commit.after_index:2` sends SIGKILL to this process the second time it reaches
`commit.after_index`. If the variable is unset, a call costs one comparison with None.
"""

from __future__ import annotations

import os
import signal

_name, _, _nth = os.environ.get("DELTASHARD_CRASH_AT", "").partition(":")
_armed: str | None = _name or None
_left = int(_nth or 1)


def crash_point(name: str) -> None:
    """Kill this process immediately, without clean-up, if a test armed the crash point `name`."""
    global _left  # noqa: PLW0603 - one counter per process is the point
    if _armed is not None and _armed == name:
        _left -= 1
        if _left <= 0:  # another thread may have decremented it further
            os.kill(os.getpid(), signal.SIGKILL)


def is_armed(name: str) -> bool:
    """Whether a test armed `name`. For points that only a second thread can reach (`pack.during_put`)."""
    return _armed is not None and _armed == name
