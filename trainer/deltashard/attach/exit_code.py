"""Exit code of a process whose run was taken over by another workload.

A restarted container would be rejected repeatedly until the Job's back-off limit is used up. An uncaught `TakenOver`
therefore ends the process with `EXIT_TAKEN_OVER` instead of 1, which a Job's podFailurePolicy can match
(docs/training-scripts.md). The traceback, exit handlers and earlier hooks run as usual. A script may catch the error
instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from deltashard.errors import TakenOver

EXIT_TAKEN_OVER = 79
"""Uncaught `TakenOver`: another workload trains this run. A Job's podFailurePolicy can match it (FailJob)."""


def caused_by_takeover(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, TakenOver):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


_installed = False


def install(on_error: Callable[[BaseException], object]) -> None:
    """Install an exception hook, once per process: calls `on_error` first, and exits with the code on `TakenOver`."""
    global _installed  # noqa: PLW0603 - as global as the hook itself
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        on_error(error)
        before(kind, error, trace)
        if caused_by_takeover(error):
            sys.exit(EXIT_TAKEN_OVER)  # becomes the exit code of the program

    sys.excepthook = hook
