"""Position of a wrapped loader: the start of a pass, the number of deliveries, a fingerprint of the last batch.

If a pipeline fetches ahead of the loop, positions wait in a queue for the steps that use them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from deltashard.errors import CheckpointMismatch
from deltashard.loader.generator import Generators

VERSION = 1

Anchor = tuple[int, bytes | None, Generators | None]
"""(batches delivered, encoded loader state or None if none is loaded, generators after that batch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of the training loop in one loader: `delivered` batches of epoch `epoch` were trained on."""

    epoch: int
    delivered: int = 0
    samples: int = 0
    """Samples of the epoch in those batches, over all ranks that share its order; 0 if unknown."""
    last_samples: int = 0
    """Samples in this rank's last batch."""
    fingerprint: str | None = None
    """Fingerprint of the last batch; None: it cannot be compared."""
    indices: str | None = None
    """Fingerprint of the last batch's indices."""
    first: str | None = None
    """Fingerprint of the first batch of the pass."""
    start: Generators | None = None
    """Generators when the pass began; None at the beginning of an epoch."""
    before: Generators | None = None
    """Generators before the last batch was fetched, if fetching draws in this process."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """The loader's own generators at the snapshot, by location."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    anchors: list[Anchor] = field(default_factory=list)
    end_state: bytes | None = None
    """Encoded state of a stateful loader when its last pass ended."""
    workers_were_running: bool = False
    """Persistent workers were running when the pass began, so it drew no seed."""
    fetch_draws: bool = False
    """Fetching batches is known to move generators, in workers or in this process."""
    kind: str = "counted"
    identity: Mapping[str, Any] = field(default_factory=dict)
    in_use: bool = False
    """A pass over another loader continues within the last batch, which is delivered once more."""
    nested: list[str] | None = None
    """Loaders that make one pass per batch of this loader; None: not known yet."""
    per_step: int = 1
    """Maximum number of batches per step."""
    total: tuple[int, int] | None = None
    """(batches per epoch, consecutive epochs) of epochs that the loop ended itself."""
    reported: Mapping[str, str] = field(default_factory=dict)
    """Warnings that hold for the whole run, by kind; notes after the next restart."""
    ended: bool = False
    """No batch of the epoch is left."""
    order: Mapping[str, Any] | None = None
    """How samples are shared among ranks (`sharding.order_of`); None: unknown."""
    base: Mapping[str, int] | None = None
    """Set if a different number of ranks began the epoch: its rest after `samples` starts at batch `delivered`."""
    unchecked: bool = False
    """The last batch came from a different number of ranks, so it is not drawn again."""
    shared: bool = False
    """All ranks iterate the same batches."""

    @classmethod
    def of(cls, tree: Mapping[str, Any], name: str) -> Position:
        """Decode a position; raises `CheckpointMismatch` for another version of the format."""
        version = tree.get("version")
        if version != VERSION:
            raise CheckpointMismatch(
                f"the position of loader {name!r} has format version {version}, this library reads {VERSION}",
                where="loaders",
                remedy="install the version of deltashard that saved this checkpoint",
            )
        return cls(**{key: value for key, value in tree.items() if key != "version"})

    def tree(self) -> dict[str, Any]:
        return {"version": VERSION, **{each.name: getattr(self, each.name) for each in fields(self)}}


class DeliveryMark(NamedTuple):
    """State of a pass after a delivery."""

    delivered: int = 0
    samples: int = 0
    last_samples: int = 0
    fingerprint: str | None = None
    indices: Any = None
    before: Generators | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class LoaderPass:
    """One iteration over a loader."""

    epoch: int
    started_at: int
    """Steps taken before the pass."""
    start: Generators | None
    workers_were_running: bool = False
    resumed: bool = False
    mark: DeliveryMark = field(default_factory=DeliveryMark)
    first: str | None = None
    delivered_here: int = 0
    """Batches delivered in this process."""
    start_event: int = 0
    ended_at: int = -1
    was_epoch: bool = False
    """Whether a step was taken in this pass, once it is exhausted."""
    iterator: Iterator[Any] = field(default_factory=lambda: iter(()))
    sampler: SkippingSampler | None = None
    anchors: list[Anchor] = field(default_factory=list)
    order: Mapping[str, Any] | None = None
    base: Mapping[str, int] | None = None
    prefetched: list[Any] = field(default_factory=list)
    """At most one batch, already fetched and delivered next."""

    @classmethod
    def at(cls, position: Position, *, started_at: int, order: Mapping[str, Any] | None) -> LoaderPass:
        mark = DeliveryMark(
            position.delivered,
            position.samples,
            position.last_samples,
            position.fingerprint,
            before=position.before,
        )
        return cls(
            epoch=position.epoch,
            started_at=started_at,
            start=position.start,
            workers_were_running=position.workers_were_running,
            resumed=True,
            mark=mark,
            first=position.first,
            order=order,
            base=position.base,
        )


class SkippingSampler:
    """An index sampler that draws and drops its first `skip` entries, so that its random state agrees.

    Each entry is kept until its batch is delivered. The loader requests the first entry immediately with workers, and
    at the first batch without. `advance` draws and drops the skipped entries immediately.
    """

    def __init__(self, entries: Any, *, skip: int, number: int) -> None:
        """`number`: the batch that the last skipped entry belongs to."""
        self._entries = entries
        self._skip = skip
        self._number = number
        self._left = skip
        self._drawn = number
        self._indices: Iterator[Any] = iter(())
        self._kept: deque[tuple[int, Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        self._indices = iter(self._entries)
        self._left, self._drawn = self._skip, self._number
        self._kept.clear()
        return self

    def __next__(self) -> Any:
        self.advance()
        entry = next(self._indices)
        self._drawn += 1
        self._kept.append((self._drawn, entry))
        return entry

    def __len__(self) -> int:
        return len(self._entries)

    def advance(self) -> None:
        """Draw and drop the skipped entries, unless already done."""
        while self._left:
            self._left -= 1
            if next(self._indices, self) is self:
                self._left = 0

    def entry(self, number: int) -> Any:
        """Return the indices of batch `number`, counted from 1, or None if unknown; forgets earlier batches."""
        while self._kept and self._kept[0][0] < number:
            self._kept.popleft()
        return self._kept[0][1] if self._kept and self._kept[0][0] == number else None


class LoaderPlace(NamedTuple):
    """A mark inside a pass, or the beginning of an epoch (`loader_pass` is None)."""

    loader_pass: LoaderPass | None
    epoch: int
    mark: DeliveryMark = DeliveryMark()
    in_use: bool = False
    """The batch of the mark is delivered once more."""


class DeliveryQueue:
    """The last used delivery, followed by deliveries that no step has used yet, oldest first. Each step uses one."""

    def __init__(self, epoch: int, *, step: int) -> None:
        self._places = deque([LoaderPlace(None, epoch)])
        self._step = step

    def add(self, place: LoaderPlace, *, step: int) -> None:
        """Record a delivered batch, or the end of an epoch (`place.loader_pass` is None), after `step`."""
        self._advance(step)
        self._places.append(place)

    def covers(self, step: int) -> bool:
        """Whether there was a delivery for each step up to `step`."""
        return len(self._places) - 1 >= step - self._step

    def last_used(self, step: int) -> LoaderPlace:
        """Return the place last used up to `step`; if the next epoch has begun, its first batch, delivered again."""
        self._advance(step)
        place = self._places[0]
        return (
            self._places[1]._replace(in_use=True)
            if place.loader_pass is None and len(self._places) > 1
            else place
        )

    def _advance(self, step: int) -> None:
        while self._step < step and len(self._places) > 1:
            self._places.popleft()
            self._step += 1
            # The end of an epoch is used with its last batch.
            while len(self._places) > 1 and self._places[1].loader_pass is None:
                self._places.popleft()
        self._step = step
