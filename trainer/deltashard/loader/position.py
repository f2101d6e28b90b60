"""Position of a wrapped loader: the beginning of a pass, the number of deliveries, a fingerprint of the last one.

Where a pipeline fetches ahead of the loop, its places wait in a queue for the steps that use them.
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
"""Of a stateful loader: batches delivered, its encoded state (None: none is loaded), generators after that batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the training loop stands in one loader: `delivered` batches of epoch `epoch` were trained on."""

    epoch: int
    delivered: int = 0
    samples: int = 0
    """Samples of the epoch in those batches, of all ranks that share its order; 0 where they cannot be counted."""
    last_samples: int = 0
    """Samples of this rank's last batch."""
    fingerprint: str | None = None
    """Of the last batch; None: it cannot be compared."""
    indices: str | None = None
    """Fingerprint of the last batch's indices."""
    first: str | None = None
    """Fingerprint of the first batch of the pass."""
    start: Generators | None = None
    """Generators when the pass began; None at the beginning of an epoch."""
    before: Generators | None = None
    """Generators before the last batch was fetched, where fetching draws in this process."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """The loader's own generators at the cut, by where they were found."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    """What torch's generators among them were seeded with."""
    anchors: list[Anchor] = field(default_factory=list)
    end_state: bytes | None = None
    """Encoded state of a stateful loader when its last pass ended."""
    workers_lived: bool = False
    """Persistent workers lived when the pass began: then it drew no seed."""
    drew: bool = False
    """Generators move while batches are fetched, in workers or in this process, as far as is known."""
    kind: str = "counted"
    identity: Mapping[str, Any] = field(default_factory=dict)
    in_use: bool = False
    """A pass over another loader goes on within the last batch: it is delivered once more."""
    nested: list[str] | None = None
    """Loaders that make one pass for each batch of this one; None: not seen yet."""
    per_step: int = 1
    """Batches of one step, at most."""
    total: tuple[int, int] | None = None
    """Epochs that the loop ended itself: after so many batches, in so many epochs running."""
    reported: Mapping[str, str] = field(default_factory=dict)
    """Warnings that hold for the whole run, by kind: they are notes after the next restart."""
    over: bool = False
    """Nothing is left of the epoch for a further batch."""
    order: Mapping[str, Any] | None = None
    """How samples are shared among ranks (`sharding.order_of`); None: unknown."""
    base: Mapping[str, int] | None = None
    """Another number of ranks began this epoch: from batch `delivered` on it is what `samples` samples had left."""
    unchecked: bool = False
    """The last batch was another world's: it is not drawn again."""
    shared: bool = False
    """All ranks iterate the same batches."""

    @classmethod
    def of(cls, tree: Mapping[str, Any], name: str) -> Position:
        """From plain data; raises `CheckpointMismatch` for another version of the format."""
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
    """A pass after one delivery."""

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
    """Steps taken before it."""
    start: Generators | None
    workers_lived: bool = False
    resumed: bool = False
    mark: DeliveryMark = field(default_factory=DeliveryMark)
    first: str | None = None
    delivered_here: int = 0
    """Batches that it delivered in this process."""
    start_event: int = 0
    ended_at: int = -1
    """Steps taken when it ended."""
    was_epoch: bool = False
    """Of an exhausted one: a step was taken in it."""
    iterator: Iterator[Any] = field(default_factory=lambda: iter(()))
    sampler: SkippingSampler | None = None
    anchors: list[Anchor] = field(default_factory=list)
    order: Mapping[str, Any] | None = None
    base: Mapping[str, int] | None = None
    prefetched: list[Any] = field(default_factory=list)
    """A batch that was fetched already, to be delivered next."""

    @classmethod
    def at(cls, position: Position, *, started_at: int, order: Mapping[str, Any] | None) -> LoaderPass:
        """One that begins at a restored position."""
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
            workers_lived=position.workers_lived,
            resumed=True,
            mark=mark,
            first=position.first,
            order=order,
            base=position.base,
        )


class SkippingSampler:
    """An index sampler without its first `skip` entries, which are drawn and dropped, so that its randomness agrees.

    Keeps each entry until its batch is delivered. The loader asks for the first entry when it likes: at once with
    workers, at the first batch without; `advance` passes over the skipped ones now.
    """

    def __init__(self, entries: Any, *, skip: int, number: int) -> None:
        """`number` is that of the batch whose entry is the last one skipped."""
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
        """Pass over the skipped entries, if that has not happened yet."""
        while self._left:
            self._left -= 1
            if next(self._indices, self) is self:
                self._left = 0

    def entry(self, number: int) -> Any:
        """Indices of batch `number`, counted from 1; None: unknown. Those before it are forgotten."""
        while self._kept and self._kept[0][0] < number:
            self._kept.popleft()
        return self._kept[0][1] if self._kept and self._kept[0][0] == number else None


class LoaderPlace(NamedTuple):
    """A mark inside a pass, or (`loader_pass` is None) the beginning of an epoch."""

    loader_pass: LoaderPass | None
    epoch: int
    mark: DeliveryMark = DeliveryMark()
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
        self._advance(step)
        self._places.append(place)

    def covers(self, step: int) -> bool:
        """Whether there were deliveries for all steps until `step`."""
        return len(self._places) - 1 >= step - self._step

    def last_used(self, step: int) -> LoaderPlace:
        """The last one used until `step`. Where the next epoch has begun, its first batch, to be delivered again."""
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
            while (
                len(self._places) > 1 and self._places[1].loader_pass is None
            ):  # an epoch's end is used with its last batch
                self._places.popleft()
        self._step = step
