"""A listing that can be taken up again: where it broke off, the next step opens another after the last key it gave.

A generator that raised is over: asked again it says that there is nothing more, and a listing cut short looks whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from deltashard_checkpoint.stores.abc import ObjectInfo


class Listing:
    """The objects that `opener(start_after)` lists, one `step` each."""

    def __init__(self, opener: Callable[[str], Iterator[ObjectInfo]], start_after: str) -> None:
        self._opener = opener
        self._last = start_after
        self._keys: Iterator[ObjectInfo] | None = None

    def step(self) -> ObjectInfo | None:
        """The next object; None at the end. Raises what the listing raises; the step after that goes on behind it."""
        try:
            if self._keys is None:
                self._keys = self._opener(self._last)
            found = next(self._keys, None)
        except BaseException:
            self._keys = None
            raise
        if found is not None:
            self._last = found.key
        return found
