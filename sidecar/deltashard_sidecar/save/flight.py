"""Which save a rank has in flight: at most one, and the next begins when the last is over."""

from __future__ import annotations

import threading
from collections.abc import Callable

from deltashard_sidecar.save.save import Save


class Flights:
    """Newest save of each local rank. Thread-safe; reading takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rank: dict[int, Save] = {}

    def begin(self, rank: int, make: Callable[[], Save]) -> Save | None:
        """The save that `make` begins for the rank; None, and nothing is made, while its last one is not over."""
        with self._lock:
            running = self._by_rank.get(rank)
            if running is not None and not (running.over.is_set() and running.stream_over.is_set()):
                return None
            save = make()
            self._by_rank[rank] = save
        return save

    def of_rank(self, rank: int) -> Save | None:
        """Newest save of the rank, in flight or over."""
        return self._by_rank.get(rank)

    def newest(self) -> list[Save]:
        """Newest save of each rank, in flight or over."""
        return list(self._by_rank.values())

    def in_flight(self) -> list[Save]:
        """Saves that have not ended."""
        return [save for save in list(self._by_rank.values()) if not save.over.is_set()]

    def staging(self) -> list[Save]:
        return [save for save in list(self._by_rank.values()) if save.staging]
