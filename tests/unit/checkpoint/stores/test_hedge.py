"""Hedged reads: who wins, what is written, how many; by events, on no clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.stores import hedge
from deltashard_checkpoint.stores.abc import ObjectNotFound, StoreUnavailable
from deltashard_checkpoint.stores.deadline import deadline, remaining_s
from deltashard_checkpoint.stores.gate import Gate, deliver, through
from deltashard_checkpoint.stores.hedge import Durations, HedgingStore
from deltashard_checkpoint.stores.memory import MemoryStore

WAIT_S = 60.0
Answer = Callable[[], bytes]


class Scripted(MemoryStore):
    """Its n-th read does what the n-th answer does; all that is received goes through `deliver`."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked = 0
        self.taken = threading.Condition()

    def get(self, key: str) -> bytes:
        """What the script says."""
        with self.taken:
            answer = self.answers[self.asked]
            self.asked += 1
            self.taken.notify_all()
        return answer()

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """The same, delivered."""
        deliver(out, 0, self.get(key))


class Ordered(HedgingStore):
    """Asks for nothing more before what it asked for has its answer: the n-th request is the n-th to get one."""

    def _start(self, *arguments: Any, **options: Any) -> None:
        assert isinstance(self.inner, Scripted)
        with self.inner.taken:
            before = self.inner.asked
            super()._start(*arguments, **options)
            assert self.inner.taken.wait_for(lambda: asked(self) > before, WAIT_S)


class Held:
    """An answer that comes when it is let go."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.answer = answer
        self.begun = threading.Event()
        self.go = threading.Event()
        self.over = threading.Event()

    def __call__(self) -> bytes:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        try:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer
        finally:
            self.over.set()


def at_once(answer: bytes | Exception) -> Held:
    held = Held(answer)
    held.go.set()
    return held


def hedging(*answers: Answer, late: bool = True, **options: object) -> tuple[HedgingStore, list[str]]:
    """A store that takes every read for overdue at once (`late`) or none ever; and what it told."""
    told: list[str] = []

    def overdue(ended: threading.Event, _seconds: float) -> bool:
        return late or not ended.wait(WAIT_S)

    return Ordered(Scripted(*answers), hedged=told.append, overdue=overdue, **options), told  # type: ignore[arg-type]


def asked(store: HedgingStore) -> int:
    assert isinstance(store.inner, Scripted)
    return store.inner.asked


def test_a_read_in_time_is_asked_once() -> None:
    """And its errors are the store's own."""
    for answer, error in (
        (b"x", None),
        (ObjectNotFound("no"), ObjectNotFound),
        (StoreUnavailable("503"), StoreUnavailable),
    ):
        store, told = hedging(at_once(answer), late=False)
        if error is None:
            assert store.get("k") == b"x"
        else:
            with pytest.raises(error):
                store.get("k")
        assert (asked(store), told) == (1, [])


def test_the_second_answer_wins_and_the_first_writes_nothing_afterwards() -> None:
    """The memory belongs to somebody else by then."""
    hung = Held(b"WRONG")
    store, told = hedging(hung, at_once(b"right"))
    out = bytearray(b".....")
    store.get_into("k", 0, memoryview(out))
    assert out == b"right"
    assert told == ["won"]
    out[:] = b"other"
    hung.go.set()
    assert hung.over.wait(WAIT_S)
    join()
    assert out == b"other"


def test_the_first_answer_wins_all_the_same() -> None:
    """When it comes before the second's."""
    first, second = Held(b"first"), Held(b"other")
    store, told = hedging(first, second)
    out = bytearray(5)
    reading = threading.Thread(target=store.get_into, args=("k", 0, memoryview(out)))
    reading.start()
    assert second.begun.wait(WAIT_S)
    first.go.set()
    reading.join(WAIT_S)
    assert (bytes(out), told) == (b"first", ["lost"])
    second.go.set()
    join()
    assert out == b"first"


def test_the_first_breaks_as_the_second_is_asked() -> None:
    """Then the second's answer is the result, whatever it is."""
    for answer in (b"right", ObjectNotFound("gone")):
        first, second = Held(StoreUnavailable("reset")), Held(answer)
        store, told = hedging(first, second)

        def let_go(first: Held = first, second: Held = second) -> None:
            assert second.begun.wait(WAIT_S)
            first.go.set()
            assert first.over.wait(WAIT_S)
            second.go.set()

        helper = threading.Thread(target=let_go)
        helper.start()
        if isinstance(answer, bytes):
            assert store.get("k") == answer
        else:
            with pytest.raises(ObjectNotFound):
                store.get("k")
        helper.join(WAIT_S)
        assert told == ["won"]


def test_the_first_broke_before_the_second_was_asked() -> None:
    """No race is left: the error goes to whoever retries, and nothing is asked twice."""
    broken = Held(StoreUnavailable("reset"))

    def overdue(ended: threading.Event, _seconds: float) -> bool:
        broken.go.set()
        assert ended.wait(WAIT_S)
        return True  # the clock said so just before

    store = HedgingStore(Scripted(broken), overdue=overdue)
    with pytest.raises(StoreUnavailable, match="reset"):
        store.get("k")
    assert asked(store) == 1


def test_both_break() -> None:
    """The first one's error; a definite answer of either would have counted instead."""
    store, told = hedging(first := Held(StoreUnavailable("reset")), second := Held(StoreUnavailable("503")))

    def let_go() -> None:
        assert first.begun.wait(WAIT_S)
        assert second.begun.wait(WAIT_S)  # before the first one breaks: else nothing is asked twice
        for one in (first, second):
            one.go.set()
            assert one.over.wait(WAIT_S)

    helper = threading.Thread(target=let_go)
    helper.start()
    with pytest.raises(StoreUnavailable):
        store.get("k")
    helper.join(WAIT_S)
    assert told == ["failed"]
    silent = Held(b"too late")
    store, _ = hedging(silent, at_once(CorruptObject("short")))
    with pytest.raises(CorruptObject):
        store.get("k")
    silent.go.set()


def test_second_requests_are_bounded() -> None:
    """One too many is not sent, and said; a place is free again once a second request has ended."""
    held = [Held(b"first"), Held(b"second"), Held(b"fourth")]
    store, told = hedging(*held[:2], at_once(b"third"), held[2], at_once(b"fifth"), concurrent=1)
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(store.get("a")))
    reading.start()
    assert held[1].begun.wait(WAIT_S)
    assert store.get("b") == b"third"
    assert told == ["refused"]
    held[1].go.set()
    reading.join(WAIT_S)
    assert found == [b"second"]
    assert store.get("c") == b"fifth"
    assert told == ["refused", "won", "won"]
    held[0].go.set()
    held[2].go.set()


def test_both_requests_are_under_the_callers_deadline() -> None:
    """The threads that ask know it."""
    seen: list[float] = []
    both = threading.Barrier(2)

    def looking() -> bytes:
        seen.append(remaining_s())
        both.wait(WAIT_S)
        return b"x"

    store, _ = hedging(looking, looking)
    with deadline(1000.0):
        store.get("k")
    join()
    assert len(seen) == 2
    assert all(0 < left_s <= 1000.0 for left_s in seen)


def test_what_is_too_long() -> None:
    """A multiple of the median of the size class, at least a second; with few known a slow link's time."""
    durations = Durations()
    assert durations.too_long_s(0) == hedge.FIRST_S
    assert durations.too_long_s(8 << 20) == hedge.FIRST_S + 2.0
    for _ in range(8):
        durations.add(8 << 20, 2.0)
        durations.add(100, 0.01)
    durations.add(8 << 20, 1000.0)  # one outlier moves no median
    assert durations.too_long_s(8 << 20) == 6.0
    assert durations.too_long_s(100) == hedge.SHORTEST_S
    assert durations.too_long_s(1 << 20) == hedge.FIRST_S + 0.25, "another class"


def test_a_closed_gate_hangs_up_only_its_own_request() -> None:
    """A connection that carries another request by now is left alone, and so is one whose request has ended."""

    class Line:
        def __init__(self) -> None:
            self.hung_up: list[Gate] = []

        def hang_up(self, gate: Gate) -> None:
            self.hung_up.append(gate)

    line, gate, ended = Line(), Gate(), Gate()
    gate.carried_by(line)
    ended.carried_by(line)
    ended.carried_by(None)
    gate.close()
    ended.close()
    assert line.hung_up == [gate]
    with through(gate), suppress(StoreUnavailable):
        deliver(memoryview(out := bytearray(1)), 0, b"x")
    assert out == b"\0"


def join() -> None:
    """Every reading thread has ended."""
    for thread in threading.enumerate():
        if thread.name == "read":
            thread.join(WAIT_S)
