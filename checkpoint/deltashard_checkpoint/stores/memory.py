"""A store in this process's memory: the reference implementation, used by model tests.

`memory://name` is one store per name and process, like a bucket; `MemoryStore()` is a separate store. Keys are kept
sorted, so listing bisects. One lock makes every operation atomic.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator

from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.stores.abc import Buffer, ObjectExists, ObjectInfo, ObjectNotFound, Store
from deltashard_checkpoint.stores.key_rule import check_key, check_prefix

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class MemoryStore(Store):
    """Objects in a dict; `clock` (seconds since the epoch) provides their times and `now_s`."""

    def __init__(self, *, url: str = "memory://", clock: Callable[[], float] = time.time) -> None:
        self.url = url
        self.clock = clock
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._keys: list[str] = []
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """Return the process's store of this name, created on first use."""
        with _named_lock:
            if name not in _named:
                _named[name] = cls(url=f"memory://{name}")
            return _named[name]

    def put(self, key: str, data: Buffer) -> None:
        self._put(check_key(key), bytes(data), create_only=False)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._put(check_key(key), bytes(data), create_only=True)

    def _put(self, key: str, data: bytes, *, create_only: bool) -> None:
        with self._lock:
            if key in self._objects:
                if create_only:
                    raise ObjectExists("object exists", where=f"{self.url}/{key}")
            else:
                insort(self._keys, key)
            self._objects[key] = (data, self.clock())

    def get(self, key: str) -> bytes:
        return self._object(key)[0]

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        data = self._object(key)[0][offset : offset + len(view)]
        view[: len(data)] = data
        if len(data) < len(view):
            raise CorruptObject(
                f"object ends {len(view) - len(data)} bytes before offset {offset} + {len(view)}",
                where=f"{self.url}/{key}",
            )

    def head(self, key: str) -> ObjectInfo:
        data, modified_at_s = self._object(key)
        return ObjectInfo(key=key, size_bytes=len(data), modified_at_s=modified_at_s)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield from one consistent snapshot of the keys, unlike a real store."""
        check_prefix(prefix)
        found = []
        with self._lock:
            first = max(bisect_left(self._keys, prefix), bisect_right(self._keys, start_after))
            for key in self._keys[first:]:
                if not key.startswith(prefix):
                    break
                data, modified_at_s = self._objects[key]
                found.append(ObjectInfo(key=key, size_bytes=len(data), modified_at_s=modified_at_s))
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._lock:
                if self._objects.pop(check_key(key), None) is not None:
                    del self._keys[bisect_left(self._keys, key)]

    def now_s(self) -> float:
        return self.clock()

    def _object(self, key: str) -> tuple[bytes, float]:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectNotFound("no such object", where=f"{self.url}/{key}")
        return found
