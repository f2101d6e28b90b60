"""A loader whose position is that of the batch that was *delivered* to the loop, not of what workers fetched ahead.

`Checkpointer.wrap` puts a `WrappedLoader` between loader and loop. Nothing happens before the first `next()` of a pass:
there order and seeds are drawn, at one instant. Every delivery is marked; a cut takes the last mark of the step
boundary (`lifecycle` says which), so a batch that was fetched after the last `step()` belongs to the next step. A
resumed pass seeks that mark (`seek`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from deltashard.errors import CheckpointMismatch, UserError
from deltashard.loader import generator
from deltashard.loader.fingerprint import fingerprint
from deltashard.loader.lifecycle import PassEvent, PassState, Saved, after, saved_in
from deltashard.loader.loader_access import GUARANTEES, LoaderAccess, Skip
from deltashard.loader.loop_check import LoopCheck
from deltashard.loader.message import in_words
from deltashard.loader.position import LoaderPass, Mark, Position
from deltashard.loader.seek import END, Seek
from deltashard.loader.sharding import batches_after
from deltashard.state.value import encode_value

if TYPE_CHECKING:
    from deltashard.loader.registry import LoaderRegistry, OnChange

log = logging.getLogger("deltashard")

_TRIED_BATCHES = 8
"""So many first batches show whether fetching draws random numbers in this process."""
_ANCHOR_S, _ANCHOR_COSTS = 1.0, 100.0
"""A stateful loader is asked for its state once a second, or after so many times what asking costs."""


class _Place(NamedTuple):
    """What a cut saves: a mark inside a pass, or (`made` is None) the beginning of an epoch."""

    made: LoaderPass | None
    epoch: int
    mark: Mark = Mark()
    in_use: bool = False


class WrappedLoader:
    """Iterates `loader` and knows what was delivered. Made by `Checkpointer.wrap`; attributes pass through."""

    def __init__(
        self,
        registry: LoaderRegistry,
        loader: Any,
        *,
        name: str,
        skip: Skip,
        pipelined: bool,
        shared: bool,
        strict: bool,
    ) -> None:
        """`registry` knows the other loaders; the rest is as in `Checkpointer.wrap`.

        Raises:
            StateError: it cannot be iterated, or only once.
            UserError: an option that does not fit it.
        """
        self.loader = loader
        self.name = name
        self.strict = strict
        self._registry = registry
        self._access = LoaderAccess(loader, skip=skip, shared=shared)
        self._pipelined = pipelined
        self._shared = shared
        self._check = LoopCheck(self._report, pipelined=pipelined)
        self._state = PassState.NONE
        self._epoch = 0
        self._pass: LoaderPass | None = None
        self._first_turn: int | None = None
        """When it was iterated first since the restore."""
        self._pending: Position | None = None
        """Restored, and not used up yet."""
        self._seeds = generator.seeds(generator.own_generators(loader, {}))
        self._replaced = False
        # The step boundary: where the loader stood when a batch was first asked for after step `_moved_at`.
        self._moved_at = -1
        self._boundary: _Place | None = None
        self._boundary_own: Mapping[str, Any] | None = None
        self._ended_at = -1
        """After this step the pass was found at its end, and nothing was delivered."""
        self._unstepped: tuple[int, int] | None = None
        """(steps, events) at the end of a pass without a step: one taken before any other event belongs to it."""
        self._draws, self._tried = False, 0
        # Pipelined: every delivery that is not consumed yet, oldest first, after the one that is.
        self._queue: deque[_Place] = deque([_Place(None, 0)])
        self._consumed_at = registry.clock()
        self._nested: set[str] | None = None
        """Loaders that make one pass for each batch of this one; None: not seen yet."""
        self.passes_within: dict[str, int] = {}
        """Passes of others since the last delivery."""
        self._delivered_event = 0
        self._anchor_due = 0.0
        self._end_state: bytes | None = None
        if self._access.workers and not getattr(loader, "in_order", True):
            self._report("in_order")

    # What programs and the registry see

    @property
    def epoch(self) -> int:
        """Index of the epoch of the next batch: resume with `for epoch in range(loader.epoch, epochs)`."""
        self._use_up()
        return self._pending.epoch if self._pending is not None else self._settled()

    @property
    def delivered(self) -> int:
        """Batches of this epoch that were delivered to the loop."""
        self._use_up()
        if self._pending is not None and (self._pass is None or not self.open):
            return self._pending.delivered - self._pending.in_use
        made = self._pass
        inside = made is not None and saved_in(self._state, **self._facts()) is Saved.INSIDE
        return made.mark.delivered if made is not None and inside else 0

    @property
    def iterated(self) -> bool:
        """Whether a pass has begun."""
        return self._pass is not None

    @property
    def newest(self) -> LoaderPass | None:
        """The newest pass."""
        return self._pass

    @property
    def open(self) -> bool:
        """Whether a pass is under way."""
        return self._state is PassState.OPEN

    @property
    def moved(self) -> bool:
        """Whether a batch was asked for since the last `step()`."""
        now = self._registry.clock()
        return not self._pipelined and self._moved_at == now != self._ended_at

    @property
    def guarantee(self) -> str:
        """Kind of the loader, and what a resumed run gets, in words."""
        made, access = self._pass, self._access
        text = f"{access.kind}: {GUARANTEES[access.kind]}"
        if access.workers_drew:
            text += "; its workers draw random numbers, so all batches of the epoch are read again"
        if made is not None and made.mark.delivered and made.mark.fingerprint is None:
            return text + "; its batches hold nothing that can be compared: unchecked"
        return text + "; the last batch is drawn again and compared"

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not constructed yet (copy, pickle)
            raise AttributeError(name)
        return getattr(self.loader, name)

    def take_over(self, old: WrappedLoader) -> None:
        """Continue where `old`, wrapped under this name before, has ended: the same data, made again."""
        old._replaced = True
        self._epoch, self._check.total = old._settled(ended=True), old._check.total
        self._queue[0] = _Place(None, self._epoch)

    def ahead(self, now: int) -> bool:
        """Whether steps until `now` were on batches that a pipeline fetched before."""
        return self._pipelined and len(self._queue) - 1 >= now - self._consumed_at

    # Restores

    def mismatch(self, tree: Mapping[str, Any]) -> str:
        """How it is another loader than the one that saved `tree` inside an epoch; empty: it is not."""
        return self._access.mismatch(Position.of(tree, self.name))

    def resume(self, tree: Mapping[str, Any], on_change: OnChange) -> None:
        """Make the next pass begin at `tree`.

        Raises:
            CheckpointMismatch: with "refuse", it is another loader; another version's position.
        """
        saved, access = Position.of(tree, self.name), self._access
        own = generator.own_generators(self.loader, {})
        self._epoch, self._end_state = saved.epoch, saved.end_state
        self._nested = None if saved.nested is None else set(saved.nested)
        self._check.resume(saved.per_step, saved.total)
        self._moved_at = -1
        why = access.mismatch(saved)
        if why and on_change == "refuse":
            raise CheckpointMismatch(
                why,
                where=f"loader {self.name!r}",
                remedy="give the loader as it was until the epoch ends; "
                'restore(loaders="restart") begins the epoch again, "continue" leaves out as many batches',
            )
        continues = on_change == "continue" and saved.base is None
        continues &= access.identity()["kind"] == saved.identity.get("kind")
        if why and not continues:
            count = f"{saved.samples} samples" if saved.samples else f"{saved.delivered} batches"
            self._report("identity", why=why, count=count)
        else:
            generator.apply_each(saved.own, own)
            if saved.over and access.mismatch(replace(saved, over=False)):
                self._epoch += 1
            elif saved.delivered:
                if why:
                    self._report("continued", why=why)
                    saved = replace(saved, fingerprint=None, first=None, indices=None)
                self._pending = saved
                self._happen(PassEvent.RESTORED)
            elif access.kind == "stateful" and self._end_state is not None:
                self._load_end_state(self._end_state, own)
            other = [name for name, seed in self._seeds.items() if saved.seeds.get(name, seed) != seed]
            if other:
                self._registry.note(
                    f"loader {self.name!r}: {', '.join(other)} was seeded with another number than before the restart; "
                    "the order of the checkpoint continues"
                )
        self._queue = deque([_Place(None, self._epoch)])
        self._first_turn = None

    def _load_end_state(self, state: bytes, own: Mapping[str, Any]) -> None:
        """What that draws is put back."""
        before = generator.capture(own)
        try:
            self._access.load_state(state)
        except Exception as error:  # noqa: BLE001 - the library's
            self._report("refused", error=in_words(error), epoch=self._epoch, batch=0)
        generator.apply(before, own)

    # Cuts

    def position(self) -> Position:
        """Where the last step boundary was."""
        self._use_up()
        if self._pending is not None:
            return self._pending
        now = self._registry.clock()
        if self._pipelined:
            self._consume(now)
            place = self._queue[0]
            if (
                place.made is None and len(self._queue) > 1
            ):  # the next epoch has begun: deliver its first batch again
                place = self._queue[1]._replace(in_use=True)
        elif self.moved and self._boundary is not None:
            place = self._boundary
        else:
            place = self._place()
        return self._position_of(place)

    def _position_of(self, place: _Place) -> Position:
        made, mark, access = place.made, place.mark, self._access
        own = generator.own_generators(self.loader, {})
        common: dict[str, Any] = {
            "epoch": place.epoch,
            "own": (self._boundary_own if self.moved else None) or generator.capture_each(own),
            "seeds": generator.seeds(own),
            "end_state": self._end_state,
            "kind": access.kind,
            "nested": None if self._nested is None else sorted(self._nested),
            "per_step": self._check.per_step,
            "total": self._check.total,
            "reported": self._registry.reported_of(self.name),
            "shared": self._shared,
        }
        if made is None or not mark.delivered:
            return Position(**common)
        in_use = place.in_use or (not self._pipelined and self._in_use(made))
        return Position(
            **common,
            delivered=mark.delivered,
            samples=mark.samples,
            last_samples=mark.last_samples,
            fingerprint=mark.fingerprint,
            indices=None if mark.indices is None else fingerprint(mark.indices),
            first=made.first,
            start=made.start,
            before=mark.before,
            anchors=[anchor for anchor in made.anchors if anchor[0] <= mark.delivered],
            workers_lived=made.workers_lived,
            workers_drew=access.workers_drew,
            identity=access.identity(),
            in_use=in_use,
            over=not in_use and self._is_over(made, mark),
            order=made.order,
            base=made.base,
        )

    def _is_over(self, made: LoaderPass, mark: Mark) -> bool:
        if self._access.kind == "sampler" and made.order is not None:
            rest: Any = batches_after(self.loader, made.order, mark.samples)
            return len(rest) == 0
        return made.base is None and mark.delivered == self._access.length()

    def _place(self, *, ended: bool = False) -> _Place:
        """Where it stands now; `ended`: another pass begins."""
        made = self._pass
        if made is None or ended or saved_in(self._state, **self._facts()) is not Saved.INSIDE:
            return _Place(None, self._settled(ended=ended))
        return _Place(made, made.epoch, made.mark)

    def _facts(self) -> dict[str, bool]:
        made, now = self._pass, self._registry.clock()
        if made is None:
            return {"was_epoch": False, "stepped_since": False}
        if self._state is PassState.EXHAUSTED:
            late = self._unstepped
            was_epoch = made.was_epoch or (
                late is not None and now > late[0] and late[1] == self._registry.events
            )
        else:
            was_epoch = now > made.begun_at and made.mark.delivered > 0
        return {"was_epoch": was_epoch, "stepped_since": now > made.ended_at}

    def _settled(self, *, ended: bool = False) -> int:
        """The epoch of the next batch; `ended`: another pass begins."""
        made = self._pass
        if made is None:
            return self._epoch
        state, facts = self._state, self._facts()
        if ended and state is not PassState.EXHAUSTED:
            state, facts["stepped_since"] = PassState.LEFT, True
        return made.epoch + (saved_in(state, **facts) is Saved.NEXT_EPOCH)

    def _use_up(self) -> None:
        """A restored position is used up by the first step of a pass that sought it."""
        made = self._pass
        used = made is not None and made.resumed and self._registry.clock() > made.begun_at
        if self._pending is not None and used:
            self._pending = None

    def _consume(self, now: int) -> None:
        """Pipelined: each step uses one delivery; the end of an epoch is used with its last batch."""
        queue = self._queue
        while self._consumed_at < now and len(queue) > 1:
            queue.popleft()
            self._consumed_at += 1
            while len(queue) > 1 and queue[1].made is None:
                queue.popleft()
        self._consumed_at = now

    def _in_use(self, made: LoaderPass) -> bool:
        """Whether a pass over another loader, begun after this one's last batch, goes on within that batch."""
        if not self.open or made is not self._pass:
            return False
        for other in self._registry.open_others(self):
            inner = other.newest
            if inner is None or inner.begun_event < self._delivered_event or not inner.handed:
                continue
            if inner.handed > 1 or other.name in (self._nested or ()):
                return True
            if made.mark.delivered == 1 and self._nested is None:
                self._report("first", other=other.name)
        return False

    # Passes

    def __iter__(self) -> Iterator[Any]:
        if self._replaced:
            raise UserError(
                f"another loader was wrapped as {self.name!r} since, and took this one's position over",
                where="wrap()",
                remedy="give each loader a name= of its own; wrap again under one name only what replaces "
                "the other",
            )
        self._registry.turns += 1
        if self._first_turn is None:
            self._first_turn = self._registry.turns
        return self._run(self._registry.turns)  # a generator: its body begins at the first next()

    def _run(self, turn: int) -> Iterator[Any]:
        registry, access = self._registry, self._access
        own = generator.own_generators(self.loader, registry.state)
        if self._first_turn is not None and self._first_turn < registry.ended_turn < turn:
            self._leave_restored()
        self._ask(own, begins=True)
        made = self._begin(own)
        try:
            while True:
                before = self._ask(own) if made.handed else None
                if made.held:
                    batch = made.held.pop()
                else:
                    before = before or (generator.capture(own) if self._may_draw(made) else None)
                    batch = next(made.iterator, END)
                if batch is END:
                    self._exhausted(made)
                    return
                if before is not None and made.handed and not self._draws and not access.workers:
                    self._draws = not generator.same(before, generator.capture(own))
                    self._tried += 1
                with registry.lock:
                    self._deliver(made, batch, before)
                yield batch
        finally:
            if made is self._pass and self.open:
                made.ended_at = registry.clock()
                self._happen(PassEvent.DROPPED)
                self._keep_end_state()

    def _leave_restored(self) -> None:
        """A `zip` over this loader ended at once, at the end of another one: it left this one's restored pass."""
        if self._pending is not None:
            self._epoch, self._pending, self._pass = self._pending.epoch + 1, None, None
        self._first_turn = None

    def _may_draw(self, made: LoaderPass) -> bool:
        """Whether fetching may move generators of this process: learned from the first batches."""
        if not made.handed:
            return True
        return not self._access.workers and (self._draws or self._tried < _TRIED_BATCHES)

    def _ask(self, own: Mapping[str, Any], *, begins: bool = False) -> Mapping[str, Any] | None:
        """A batch is asked for: the step boundary ends here. Returns generators, where they were captured."""
        registry, made = self._registry, self._pass
        now = registry.clock()
        draws = begins or made is None or self._may_draw(made)
        first = self._moved_at != now
        captured = generator.capture(own) if draws and first else None
        with registry.lock:
            registry.asked(draws=draws)
            if first:
                self._use_up()
                self._moved_at, self._ended_at = now, -1
                self._boundary = self._place(ended=begins) if self._pending is None else None
                self._boundary_own = None
                if captured is not None:
                    self._boundary_own = {
                        k: v for k, v in captured["own"].items() if not k.startswith("state")
                    }
        return captured

    def _begin(self, own: Mapping[str, Any]) -> LoaderPass:
        registry, old = self._registry, self._pass
        self._use_up()
        if old is not None and self.open:  # its iterator is kept somewhere
            old.ended_at = registry.clock()
        made = self._fresh(own) if self._pending is None else self._sought(self._pending, own)
        self._happen(PassEvent.BEGUN)
        self._pass, self._unstepped, self._ended_at = made, None, -1
        registry.events += 1
        made.begun_event = registry.events
        for other in registry.open_others(self):
            within = other.passes_within
            within[self.name] = within.get(self.name, 0) + 1
        return made

    def _fresh(self, own: Mapping[str, Any]) -> LoaderPass:
        registry, access, old = self._registry, self._access, self._pass
        start = generator.capture(own)
        if old is None:
            registry.note_draws(self.name, start["globals"])
        self._epoch = self._settled(ended=True)
        if old is not None and registry.clock() > old.begun_at:
            self._check.epoch_ended(old, by_loop=self._state is not PassState.EXHAUSTED)
        made = LoaderPass(
            epoch=self._epoch,
            begun_at=registry.clock(),
            start=start,
            workers_lived=access.workers_live(),
            order=access.order(self._epoch),
        )
        if access.kind == "stateful":
            made.anchors.append((0, self._end_state, start))
        access.open(made)
        return made

    def _sought(self, position: Position, own: Mapping[str, Any]) -> LoaderPass:
        """A pass that begins at a restored position; what drawing its last batch again moves is put back."""
        registry, access, old = self._registry, self._access, self._pass
        if old is not None and old.resumed and old.handed:
            log.info(
                "loader %r: a pass after restore() took no step: it began where training continues, not at "
                "the beginning of "
                "the epoch. Make it before restore(), or over the loader that is not wrapped",
                self.name,
            )
        entry, held = generator.capture(own), registry.hold_state()
        made = LoaderPass(
            epoch=position.epoch,
            begun_at=registry.clock(),
            start=position.start,
            workers_lived=position.workers_lived,
            resumed=True,
            mark=Mark(
                position.delivered,
                position.samples,
                position.last_samples,
                position.fingerprint,
                None,
                position.before,
            ),
            first=position.first,
            order=position.order or access.order(position.epoch),
            base=position.base,
        )
        found = Seek(self.name, access, made, position, own).run()
        registry.note_draws(self.name, entry["globals"])
        if found.key and not (found.key == "stream" and registry.holds(self.loader)):
            self._report(found.key, epoch=position.epoch, batch=position.delivered, error=found.error)
        if found.restart:
            made.mark, made.first, made.resumed = Mark(), None, False
            made.anchors = [(0, None, position.start)]
            self._pending, self._boundary = None, _Place(None, made.epoch)
            made.held = [found.batch]
        elif position.in_use and found.batch is not END:
            made.held = [found.batch]
            shares = 1 if made.order is None else int(made.order["world"])
            made.mark = Mark(position.delivered - 1, position.samples - position.last_samples * shares)
        if not (found.restart and access.kind == "replayed"):  # a stream stands where it gave its batch
            registry.put_back(held)
        if position.in_use:
            generator.apply_each(position.own, own)
            return made
        mine = registry.cut is not None and registry.clock() == registry.cut_at
        mine &= registry.cut_applied_by in (None, self.name)
        if mine and registry.cut is not None:
            entry = {"globals": registry.cut, "own": position.own}
        generator.apply(entry, {k: g for k, g in own.items() if not k.startswith("state")})
        if mine:
            registry.cut_applied_by = self.name
        return made

    def _deliver(self, made: LoaderPass, batch: Any, before: Mapping[str, Any] | None) -> None:
        registry, access, mark = self._registry, self._access, made.mark
        if made is not self._pass:
            self._report("twice")
        number, printed = mark.delivered + 1, fingerprint(batch)
        indices = None if made.sampler is None else made.sampler.entry(number)
        samples = len(indices) if isinstance(indices, (list, tuple)) else int(indices is not None)
        shares = 1 if made.order is None else int(made.order["world"])
        if access.kind == "stateful":
            self._anchor(made, number)
        made.mark = Mark(number, mark.samples + samples * shares, samples, printed, indices, before)
        made.first = printed if number == 1 else made.first
        made.handed += 1
        registry.delivered()
        if made.handed > 1:
            open_ones = {other.name for other in registry.open_others(self)}
            inner = self.passes_within.keys() - open_ones or not self.passes_within
            self._nested = {name for name, n in self.passes_within.items() if n == 1} if inner else set()
        self.passes_within, self._delivered_event = {}, registry.events
        self._check.delivered(made, registry.clock())
        if self._pipelined:
            self._consume(registry.clock())
            self._queue.append(_Place(made, made.epoch, made.mark))

    def _anchor(self, made: LoaderPass, number: int) -> None:
        """A stateful loader's state behind batch `number`; three are kept."""
        began = time.perf_counter()
        if began < self._anchor_due and number > 1:
            return
        try:
            state = encode_value(self.loader.state_dict()).to_bytes()
        except Exception as error:  # noqa: BLE001 - the user's, or a library's that cannot
            if len(made.anchors) < 2:
                self._access.kind = self._access.fallback
            self._report("no state", error=in_words(error))
            return
        made.anchors = [made.anchors[0], *made.anchors[1:][-1:], (number, state, generator.capture({}))]
        now = time.perf_counter()
        self._anchor_due = now + max(_ANCHOR_S, _ANCHOR_COSTS * (now - began))

    def _keep_end_state(self) -> None:
        if self._access.kind == "stateful":
            with contextlib.suppress(Exception):
                self._end_state = encode_value(self.loader.state_dict()).to_bytes()

    def _exhausted(self, made: LoaderPass) -> None:
        registry = self._registry
        now = registry.clock()
        if made is not self._pass:
            return
        self._happen(PassEvent.STOPPED)
        made.ended_at = now
        short = made.resumed and made.handed < max(1, self._check.per_step)
        if made.resumed and not made.handed:
            registry.turns += 1
            registry.ended_turn = registry.turns
        made.was_epoch = now > made.begun_at or self._pipelined or short
        self._unstepped = None if made.was_epoch or not made.mark.delivered else (now, registry.events)
        if not made.handed or (self._boundary is not None and self._boundary.mark is made.mark):
            self._ended_at = now
        if made.was_epoch:
            self._pending = None
            self._keep_end_state()
        if self._pipelined:
            with registry.lock:
                self._queue.append(_Place(None, made.epoch + 1))

    def _report(self, kind: str, **facts: object) -> None:
        self._registry.report(self, kind, **facts)

    def _happen(self, event: PassEvent) -> None:
        self._state = after(self._state, event)
