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

reading = threading.RLock()
"""Held while memory of the program's is read, a batch at a time."""
_MOVES = ("_share_fd_cpu_", "_share_filename_cpu_")


@functools.cache
def guard() -> None:
    """From now on nothing moves memory while it is read; once a process."""
    for name in _MOVES:
        setattr(torch.UntypedStorage, name, _waiting(getattr(torch.UntypedStorage, name)))


def _waiting(moves: Any) -> Any:
    @functools.wraps(moves)
    def waits(*args: Any, **kwargs: Any) -> Any:
        with reading:
            return moves(*args, **kwargs)

    return waits


def _in_child() -> None:
    global reading  # noqa: PLW0603 - the thread that may hold it is not in the child
    reading = threading.RLock()


os.register_at_fork(after_in_child=_in_child)
