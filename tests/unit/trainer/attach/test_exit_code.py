"""The exit code after another workload takes over the run, and the exceptions that propagate out of a save."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deltashard.attach import exit_code
from deltashard.attach.interruption import must_propagate
from deltashard.errors import FencedError, TakenOver


def because(error: Exception, cause: Exception) -> Exception:
    """Return `error` as Python raises it for `raise error from cause`."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "takeover"),
    [
        (TakenOver("taken over"), True),
        (because(RuntimeError("the loop broke"), TakenOver("taken over")), True),
        (FencedError("fenced"), False),
        (because(ValueError("any"), KeyError("x")), False),
    ],
)
def test_uncaught_takeover_has_its_own_exit_code(
    error: Exception, takeover: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is set after the traceback, also when a framework wraps the error. Other codes do not change."""
    seen: list[tuple[str, BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: seen.append(("before", error)))
    monkeypatch.setattr(exit_code, "_installed", False)
    exit_code.install(lambda error: seen.append(("takeover", error)))
    exit_code.install(lambda error: seen.append(("second", error)))
    code = None
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as ended:
        code = ended.code
    assert code == (79 if takeover else None)
    assert seen == [("takeover", error), ("before", error)]


class HandlerExit(Exception):
    """The exception that a user's signal handler raises."""


def _raise(error: BaseException, *_: Any) -> None:
    raise error


class _CallableHandler:
    def method(self, *_: Any) -> None:
        raise HandlerExit

    __call__ = method


@pytest.fixture
def usr1() -> Iterator[Callable[[Any], BaseException]]:
    """Install a handler of SIGUSR1, raise the signal and return the exception."""
    before = signal.getsignal(signal.SIGUSR1)

    def out_of(handler: Any) -> BaseException:
        signal.signal(signal.SIGUSR1, handler)
        with pytest.raises(BaseException) as raised:
            signal.raise_signal(signal.SIGUSR1)
        return raised.value

    yield out_of
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "handler",
    [
        lambda *_: _raise(SystemExit(3)),
        functools.partial(_raise, HandlerExit()),
        _CallableHandler().method,
        _CallableHandler(),
    ],
)
def test_signal_handler_exception_leaves_a_save(
    usr1: Callable[[Any], BaseException], handler: Callable[..., Any]
) -> None:
    """Handlers are callables of any kind, and Ctrl-C. The same exception of a user's getter does not propagate."""
    assert must_propagate(usr1(handler))
    assert must_propagate(KeyboardInterrupt())
    for kind in (HandlerExit, IndexError, MemoryError, SystemExit):
        with pytest.raises(kind) as raised:
            raise kind("in a getter")
        assert not must_propagate(raised.value)
