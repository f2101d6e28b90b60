"""The program's memory, read by a thread of ours while training goes on.

Torch frees no memory under a tensor that somebody holds, with one exception: `share_memory_`, and sending a tensor to
another process, put other memory under the same tensor and free what it had. So these wait while a batch is read.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import torch

read_lock = threading.RLock()
"""Held while memory of the program's is read, a batch at a time."""
_MEMORY_MOVING_METHODS = ("_share_fd_cpu_", "_share_filename_cpu_")


@functools.cache
def guard() -> None:
    """From now on nothing moves memory while it is read; once a process."""
    for name in _MEMORY_MOVING_METHODS:
        setattr(torch.UntypedStorage, name, _with_read_lock(getattr(torch.UntypedStorage, name)))


def _with_read_lock(moves: Any) -> Any:
    @functools.wraps(moves)
    def waits(*args: Any, **kwargs: Any) -> Any:
        with read_lock:
            return moves(*args, **kwargs)

    return waits


def _after_fork_in_child() -> None:
    global read_lock  # noqa: PLW0603 - the thread that may hold it is not in the child
    read_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
