"""Decides whether an exception caught in a save belongs to the training loop or only to the save.

An exception of user code inside a save (a getter of `state=`, `validate=`, `on_event=`) fails that save and never
training, whatever its class: an `AssertionError`, a `MemoryError`, a `sys.exit()`. An exception of the user's *signal
handler* during a save is the program's way to stop and must propagate. Python calls handlers between two instructions
of the running code, so such an exception has the handler's frame in its traceback.
"""

from __future__ import annotations

import functools
import signal
from types import CodeType
from typing import Any

from deltashard.attach.term_signal import TermHandler


def must_propagate(error: BaseException) -> bool:
    """Whether `error`, caught around user code in a save, must be raised into the training loop."""
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return True
    codes: set[CodeType] = {TermHandler._on_term.__code__}  # noqa: SLF001 - it calls the user's handler that it replaced
    unknown = False
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            code = _code_of(handler)
            unknown |= code is None
            if code is not None:
                codes.add(code)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    # A handler without a Python frame is not recognisable: exceptions that only end programs are attributed to it.
    return unknown and not isinstance(error, Exception)


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a function, method, partial or callable object; None for C code."""
    for _ in range(8):
        if isinstance(handler, functools.partial):
            handler = handler.func
        elif hasattr(handler, "__func__"):
            handler = handler.__func__
        elif isinstance(code := getattr(handler, "__code__", None), CodeType):
            return code
        elif hasattr(type(handler), "__call__"):  # noqa: B004 - looks up the Python function of `__call__`
            handler = type(handler).__call__
        else:
            break
    return None
