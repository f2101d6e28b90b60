"""How the process ends when its run belongs to another workload now: with an exit code of its own.

A container that is simply restarted would be refused again, and again, until the Job's patience is used up. So an
uncaught `TakenOver` ends the process with `EXIT_TAKEN_OVER` instead of Python's 1, and a Job's podFailurePolicy can
tell it (docs/training-scripts.md). Everything else about the end stays: the traceback, exit handlers, whatever hook
was there before. A script that catches the error decides for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from deltashard.errors import TakenOver

EXIT_TAKEN_OVER = 79
"""Exit code after an uncaught `TakenOver`: the first number after those of sysexits.h, and no signal's."""


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
    """Have `on_error` get an uncaught error first, and `TakenOver` end the process with the code; once a process."""
    global _installed  # noqa: PLW0603 - as global as the hook itself
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        on_error(error)
        before(kind, error, trace)
        if caused_by_takeover(error):
            sys.exit(EXIT_TAKEN_OVER)  # Python takes it from here as the exit of the program

    sys.excepthook = hook
