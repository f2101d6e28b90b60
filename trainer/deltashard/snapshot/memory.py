"""Reading the program's memory on a background thread while training continues.

Torch frees no memory under a tensor that is referenced, with one exception: `share_memory_`, and sending a tensor to
another process, replace the memory of a tensor and free the old one. These calls wait while a batch is read.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import torch

read_lock = threading.RLock()
"""Held while the program's memory is read, one batch at a time."""
_MEMORY_MOVING_METHODS = ("_share_fd_cpu_", "_share_filename_cpu_")


@functools.cache
def guard() -> None:
    """Make memory-moving methods wait for `read_lock`; idempotent."""
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
