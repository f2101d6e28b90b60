"""What a cut saves of a loader, and the queue of such places where a pipeline fetches ahead of the loop."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from deltashard.loader.position import LoaderPass, Mark


class LoaderPlace(NamedTuple):
    """A mark inside a pass, or (`made` is None) the beginning of an epoch."""

    made: LoaderPass | None
    epoch: int
    mark: Mark = Mark()
    in_use: bool = False
    """The batch of the mark is delivered once more."""


class DeliveryQueue:
    """Deliveries that no step has used yet, oldest first, after the one that was used last. Each step uses one."""

    def __init__(self, epoch: int, *, step: int) -> None:
        """At the beginning of `epoch`, after `step`."""
        self._places = deque([LoaderPlace(None, epoch)])
        self._step = step

    def add(self, place: LoaderPlace, *, step: int) -> None:
        """A batch was delivered, or (`place.made` is None) an epoch ended, after `step`."""
        self._use(step)
        self._places.append(place)

    def covers(self, step: int) -> bool:
        """Whether there were deliveries for all steps until `step`."""
        return len(self._places) - 1 >= step - self._step

    def used(self, step: int) -> LoaderPlace:
        """The last one used until `step`. Where the next epoch has begun, its first batch, to be delivered again."""
        self._use(step)
        place = self._places[0]
        return (
            self._places[1]._replace(in_use=True) if place.made is None and len(self._places) > 1 else place
        )

    def _use(self, step: int) -> None:
        while self._step < step and len(self._places) > 1:
            self._places.popleft()
            self._step += 1
            while (
                len(self._places) > 1 and self._places[1].made is None
            ):  # an epoch's end is used with its last batch
                self._places.popleft()
        self._step = step
