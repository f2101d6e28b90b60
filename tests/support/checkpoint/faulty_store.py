"""A wrapper that injects faults into any store: by seed, by script, or by a switch.

Random faults occur with the probabilities of `rates` from one seeded generator, so a failed schedule is reproducible.
`fail_next` arms one fault for the next operation that matches. `down = True` refuses everything. The faults are known
from real object stores and networks; none breaks a guarantee of `Store` that a client relies on:

- `UNAVAILABLE`: 503 or connection refused; the operation had no effect.
- `LOST_ACK`: the operation took effect, and the answer was lost (also: a time-out after success).
- `DELAYED`: a put that timed out for the client and takes effect later: after some other operation, at
  `flush_delayed()`, or never if the process that sent it has ended by then. A 404 read in between proves nothing.
- `TRUNCATED`: a read breaks off; half of the destination is overwritten.
- `FLIPPED`: a read delivers one wrong bit, once.
- `STALE_LIST`: a listing would lack the last put; a store that keeps its guarantee returns an error.
"""

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from deltashard_checkpoint.stores.abc import Buffer, ObjectExists, ObjectInfo, Store, StoreUnavailable


class Fault(StrEnum):
    """The possible faults; the module docstring describes them."""

    UNAVAILABLE = "unavailable"
    LOST_ACK = "lost_ack"
    DELAYED = "lands_late"
    TRUNCATED = "truncated"
    FLIPPED = "flipped"
    STALE_LIST = "stale_list"


_WRITES = frozenset({Fault.UNAVAILABLE, Fault.LOST_ACK, Fault.DELAYED})
_READS = frozenset({Fault.UNAVAILABLE, Fault.TRUNCATED, Fault.FLIPPED})
_APPLIES: dict[str, frozenset[Fault]] = {
    **dict.fromkeys(("put", "put_if_absent"), _WRITES),
    **dict.fromkeys(("get", "get_into"), _READS),
    **dict.fromkeys(("head", "now"), frozenset({Fault.UNAVAILABLE})),
    "list": frozenset({Fault.UNAVAILABLE, Fault.TRUNCATED, Fault.STALE_LIST}),
    "delete": frozenset({Fault.UNAVAILABLE, Fault.LOST_ACK}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operation that reached the store, and its fault."""

    operation: str
    key: str
    fault: Fault | None


@dataclass(slots=True, kw_only=True)
class _Armed:
    fault: Fault
    operation: str | None
    key_contains: str
    remaining: int


class FaultyStore(Store):
    """`inner` with injected faults; thread-safe; `calls` records every operation."""

    def __init__(self, inner: Store, *, seed: int = 0, rates: Mapping[Fault, float] | None = None) -> None:
        self.inner = inner
        self.url = inner.url
        self.down = False
        self.rates = dict(rates or {})
        self.calls: list[Call] = []
        self._random = random.Random(seed)
        self._armed: list[_Armed] = []
        self._delayed: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def fail_next(
        self, fault: Fault, *, operation: str | None = None, key_contains: str = "", times: int = 1
    ) -> None:
        """Arm `fault` for the next `times` operations that match and that it applies to."""
        if operation is not None and fault not in _APPLIES[operation]:
            raise ValueError(f"{fault} does not apply to {operation}")
        armed = _Armed(fault=fault, operation=operation, key_contains=key_contains, remaining=times)
        with self._lock:
            self._armed.append(armed)

    def flush_delayed(self, *, apply: bool = True) -> int:
        """Apply every delayed put, or discard it if not `apply`; return their number."""
        with self._lock:
            late, self._delayed = self._delayed, []
        if apply:
            for effect in late:
                effect()
        return len(late)

    def put(self, key: str, data: Buffer) -> None:
        self._write("put", key, data, self.inner.put)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._write("put_if_absent", key, data, self.inner.put_if_absent)

    def _write(self, operation: str, key: str, data: Buffer, write: Callable[[str, Buffer], None]) -> None:
        fault = self._inject_fault(operation, key)
        if fault is Fault.DELAYED:
            copy = bytes(data)

            def apply() -> None:
                with suppress(ObjectExists):
                    write(key, copy)

            with self._lock:
                self._delayed.append(apply)
            raise StoreUnavailable("injected: timed out; the put may land later", where=key)
        if fault is Fault.LOST_ACK:
            with suppress(ObjectExists):  # then the lost answer was a refusal
                write(key, data)
            raise StoreUnavailable("injected: acknowledgement lost", where=key)
        write(key, data)

    def get(self, key: str) -> bytes:
        fault = self._inject_fault("get", key)
        data = self.inner.get(key)
        if fault is Fault.TRUNCATED:
            raise StoreUnavailable("injected: answer truncated", where=key)
        if fault is Fault.FLIPPED and data:
            flipped = bytearray(data)
            self._flip(memoryview(flipped))
            return bytes(flipped)
        return data

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        fault = self._inject_fault("get_into", key)
        view = out.cast("B")
        if fault is Fault.TRUNCATED:
            self.inner.get_into(key, offset, view[: len(view) // 2])
            raise StoreUnavailable("injected: answer truncated", where=key)
        self.inner.get_into(key, offset, view)
        if fault is Fault.FLIPPED and len(view):
            self._flip(view)

    def head(self, key: str) -> ObjectInfo:
        self._inject_fault("head", key)
        return self.inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        fault = self._inject_fault("list", prefix)
        found = self.inner.list(prefix, start_after=start_after)
        return self._truncate_list(prefix, list(found)) if fault is Fault.TRUNCATED else found

    @staticmethod
    def _truncate_list(prefix: str, found: Sequence[ObjectInfo]) -> Iterator[ObjectInfo]:
        yield from found[: len(found) // 2]
        raise StoreUnavailable("injected: listing broke off", where=prefix)

    def delete(self, keys: Iterable[str]) -> None:
        some = list(keys)
        fault = self._inject_fault("delete", some[0] if some else "")
        self.inner.delete(some)
        if fault is Fault.LOST_ACK:
            raise StoreUnavailable("injected: acknowledgement lost", where=some[0] if some else "")

    def now_s(self) -> float:
        self._inject_fault("now", "")
        return self.inner.now_s()

    def close(self) -> None:
        self.inner.close()

    def _inject_fault(self, operation: str, key: str) -> Fault | None:
        """Sometimes apply a delayed put; choose this call's fault; raise if the fault raises."""
        with self._lock:
            landing = self._delayed.pop(0) if self._delayed and self._random.random() < 0.5 else None
        if landing is not None:
            landing()
        with self._lock:
            fault = Fault.UNAVAILABLE if self.down else self._choose(operation, key)
            self.calls.append(Call(operation=operation, key=key, fault=fault))
        if fault is Fault.UNAVAILABLE:
            raise StoreUnavailable("injected: 503 ServiceUnavailable", where=key)
        if fault is Fault.STALE_LIST:
            raise StoreUnavailable("injected: 503, no consistent listing now", where=key)
        return fault

    def _choose(self, operation: str, key: str) -> Fault | None:
        applies = _APPLIES[operation]
        for armed in self._armed:
            if armed.fault in applies and armed.operation in {None, operation} and armed.key_contains in key:
                armed.remaining -= 1
                if armed.remaining == 0:
                    self._armed.remove(armed)
                return armed.fault
        point = self._random.random() if self.rates else 1.0
        for fault, rate in self.rates.items():
            if fault in applies:
                if point < rate:
                    return fault
                point -= rate
        return None

    def _flip(self, view: memoryview) -> None:
        with self._lock:
            position = self._random.randrange(len(view))
            bit = self._random.randrange(8)
        view[position] ^= 1 << bit
