"""The key-value store of the process group: set, poll and compare-and-set.

Each thread has its own connection, because a store serves one call at a time per connection. Calls do not wait inside
the store, since torch warns on stderr of every wait that times out; callers poll. The store lives in torchrun's agent
or in rank 0. When that process ends the group is about to end, and `GroupLost` is raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed import distributed_c10d

from deltashard.errors import GroupLost

_FAILURES: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    OSError,
)  # torch's DistStoreError is a RuntimeError


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise `GroupLost` if a call of the store within the context fails."""
    try:
        yield
    except _FAILURES as error:
        raise GroupLost(
            f"the store of the process group does not answer: {str(error).splitlines()[0]}",
            where="torch.distributed",
            remedy="it ends with torchrun's agent, or with rank 0: restart all ranks",
        ) from None


class GroupStore:
    """One thread's connection, under a prefix of keys; every call may raise `GroupLost`."""

    def __init__(self, prefix: str) -> None:
        with _translate_errors():
            # torch has no public access to the store of the user's process group.
            default: Any = distributed_c10d._get_default_store()  # noqa: SLF001
            self._store: Any = distributed_c10d.PrefixStore(prefix, default.clone())

    def put(self, key: str, value: bytes) -> None:
        with _translate_errors():
            self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        """Return the value of `key`, or None if it is not set."""
        found = self.get_all([key])
        return None if found is None else found[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of all `keys`, or None if one of them is not set."""
        with _translate_errors():
            if not self._store.check(list(keys)):
                return None
            if len(keys) > 1 and self._store.has_extended_api():
                return list(self._store.multi_get(list(keys)))
            return [self._store.get(key) for key in keys]

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        """Set `key` to `value` if it is absent, and return its value."""
        with _translate_errors():
            # IMPORTANT: the expectation "" matches an absent key; with any other expectation an absent key is not set.
            found: bytes = self._store.compare_set(key, "", value)
            return found

    def delete(self, key: str) -> None:
        """Delete `key`, where the store supports that."""
        with _translate_errors(), contextlib.suppress(NotImplementedError):
            self._store.delete_key(key)
