"""Whose exception it is: what a save's own code raised stays in it, what a signal handler raised leaves."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deltashard.attach.interruption import leaves


class Preempted(Exception):
    """What a user's handler raises."""


def _raise(error: BaseException, *_: Any) -> None:
    raise error


class _Handler:
    def method(self, *_: Any) -> None:
        raise Preempted

    def __call__(self, *_: Any) -> None:
        raise Preempted


@pytest.fixture
def usr1() -> Iterator[Callable[[Any], BaseException]]:
    """Installs a handler of SIGUSR1, raises the signal, and returns what came out."""
    before = signal.getsignal(signal.SIGUSR1)

    def out_of(handler: Any) -> BaseException:
        signal.signal(signal.SIGUSR1, handler)
        try:
            signal.raise_signal(signal.SIGUSR1)
        except BaseException as error:
            return error
        raise AssertionError("the handler raised nothing")

    yield out_of
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", [AssertionError, IndexError, MemoryError, SystemExit, RuntimeError])
def test_what_user_code_raises_stays(kind: type[BaseException]) -> None:
    with pytest.raises(kind) as raised:
        _raise(kind("in a getter"))
    assert not leaves(raised.value)


def test_keyboard_interrupts_leave() -> None:
    assert leaves(KeyboardInterrupt())


@pytest.mark.parametrize(
    "handler",
    [
        lambda *_: _raise(Preempted()),
        lambda *_: _raise(SystemExit(3)),
        functools.partial(_raise, Preempted()),
        _Handler().method,
        _Handler(),
    ],
)
def test_what_a_signal_handler_raises_leaves(
    usr1: Callable[[Any], BaseException], handler: Callable[..., Any]
) -> None:
    """Functions, partials, methods and callable objects, of exceptions and of those that end programs."""
    assert leaves(usr1(handler))


def test_the_same_class_raised_elsewhere_stays(usr1: Callable[[Any], BaseException]) -> None:
    assert leaves(usr1(_Handler().method))
    with pytest.raises(Preempted) as raised:
        _raise(Preempted())
    assert not leaves(raised.value)
