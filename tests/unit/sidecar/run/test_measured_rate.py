"""Rates from calls that overlap, and what is assumed before there were any."""

import math

import pytest
from deltashard_checkpoint.maintenance.synthetic import ChainRates
from deltashard_sidecar.run.measured_rate import LEAST_BYTES, MeasuredRates


class Clock:
    """Stands still until it is moved."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_nothing_measured_is_what_is_assumed() -> None:
    assert MeasuredRates().rates(raw_bytes=10, stall_s=0.5) == ChainRates(stall_s=0.5)


def test_calls_at_once_count_their_time_once() -> None:
    clock = Clock()
    measured = MeasuredRates(clock=clock)
    for _ in range(4):  # four at once, two seconds each
        measured.called("put", 2.0, 10 * LEAST_BYTES)
    clock.now_s += 50.0  # nothing under way
    clock.now_s += 2.0
    measured.called("put", 2.0, 40 * LEAST_BYTES)
    measured.called("get_into", 1.0, 5 * LEAST_BYTES)
    rates = measured.rates(raw_bytes=0, stall_s=0.0)
    assert rates.write_bytes_per_s == pytest.approx(20 * LEAST_BYTES)
    assert rates.read_bytes_per_s == pytest.approx(5 * LEAST_BYTES)


def test_small_calls_and_other_kinds_say_nothing() -> None:
    measured = MeasuredRates(clock=Clock())
    measured.called("put", 5.0, LEAST_BYTES - 1)
    measured.called("list", 5.0, 10 * LEAST_BYTES)
    assert measured.rates(raw_bytes=0, stall_s=0.0) == ChainRates()


def test_a_link_that_became_slow_is_seen() -> None:
    clock = Clock()
    measured = MeasuredRates(clock=clock)

    def write(seconds: float, size_bytes: int) -> float:
        clock.now_s += seconds
        measured.called("put", seconds, size_bytes)
        return measured.rates(raw_bytes=0, stall_s=0.0).write_bytes_per_s

    for _ in range(100):
        fast = write(10.0, 10**9)
    for _ in range(40):
        slow = write(10.0, 10**7)
    assert fast == pytest.approx(1e8)
    assert slow < 2e6


def test_encoding_and_slowdown_go_by_bytes() -> None:
    measured = MeasuredRates()
    measured.encoded(10**9, 4.0)
    measured.slowed(10**8, 0.1)
    measured.slowed(10**8, math.nan)
    measured.slowed(10**8, -1.0)
    rates = measured.rates(raw_bytes=2 * 10**9, stall_s=0.0)
    assert rates.encode_s_per_byte == pytest.approx(4e-9)
    assert rates.slowdown_s == pytest.approx(2.0)
