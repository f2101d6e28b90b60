"""Indexes read ahead: while the entry of an attempt is being put, what its restore will ask for first is on its way.

Only ever a gain of time: an index is found by its key, which carries the hash of its bytes, and what could not be read
ahead is asked for again by the restore, which says what is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.format.index import Index
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.restore.checkpoint_reader import load_indexes
from deltashard_checkpoint.stores.abc import Store

DEADLINE_S = 10.0


class IndexesAhead:
    """The indexes of some parts, on their way since this was made."""

    def __init__(self, store: Store, run: str, parts: Iterable[Part]) -> None:
        self._store = store
        self._run = run
        self._parts = tuple(parts)
        self._found: Mapping[str, Index] = {}
        self._done = threading.Event()
        threading.Thread(target=self._load, name="ahead", daemon=True).start()

    def take(self) -> Mapping[str, Index]:
        """By index key; empty when they could not be read. Waits for them."""
        self._done.wait(2 * DEADLINE_S)
        return self._found

    def _load(self) -> None:
        try:
            self._found = load_indexes(self._store, self._run, self._parts, deadline_s=DEADLINE_S)
        except DeltashardError:
            pass
        finally:
            self._done.set()
