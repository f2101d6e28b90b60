"""A signal at any point of the wait is handled."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from deltashard_sidecar.main import StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield StopSignals()
    for number, handler in before.items():
        signal.signal(number, handler)


def waits(signals: StopSignals, *, signal_at: int) -> tuple[bool, bool]:
    """Return (whether SIGTERM was raised at that line of Python, including the library's; the result of the wait)."""
    lines = 0

    def trace(_frame: FrameType, what: str, _argument: object) -> Any:
        nonlocal lines
        if what == "line":
            lines += 1
            if lines == signal_at:
                signal.raise_signal(signal.SIGTERM)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        received = signals.wait(0.001)
    finally:
        sys.settrace(before)
    return lines >= signal_at, received


@pytest.mark.timeout(60)
def test_signal_at_any_line_of_the_wait_is_handled(signals: StopSignals) -> None:
    line = 1
    while (result := waits(signals, signal_at=line))[0]:
        assert result[1] or signals.wait(0.001), line
        line += 1
    assert line > 2
    assert signals.received_twice()
