"""A loader whose position is that of the batch *delivered* to the loop, not of batches that workers fetched ahead.

`Checkpointer.wrap` puts a `WrappedLoader` between loader and loop. Order and seeds are drawn at the first `next()` of a
pass. Every delivery is marked. A snapshot takes the last mark of the step boundary (see `lifecycle`), so a batch
fetched after the last `step()` belongs to the next step. A resumed pass seeks to that mark (`seek`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from deltashard.errors import CheckpointMismatch, UserError
from deltashard.loader import generator
from deltashard.loader.fingerprint import fingerprint
from deltashard.loader.lifecycle import PassEvent, PassState, SavedPosition, after, position_to_save
from deltashard.loader.loader_access import LoaderAccess, Skip
from deltashard.loader.loader_state import LoaderState
from deltashard.loader.loop_check import LoopCheck, Nesting
from deltashard.loader.position import DeliveryMark, DeliveryQueue, LoaderPass, LoaderPlace, Position
from deltashard.loader.seek import END, Seek

if TYPE_CHECKING:
    from deltashard.loader.registry import LoaderRegistry, OnChange

_PROBE_BATCHES = 8
"""Number of first batches that show whether fetching draws random numbers in this process."""


class WrappedLoader:
    """Iterates `loader` and tracks deliveries. Created by `Checkpointer.wrap`; other attributes are forwarded."""

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
        """Raises `StateError` if the loader cannot be iterated repeatedly, `UserError` for an unsuitable option."""
        self.loader = loader
        self.name = name
        self._registry = registry
        self._access = LoaderAccess(loader, skip=skip, shared=shared)
        self._pipelined = pipelined
        self._shared = shared
        # Not a bound method: in a reference cycle, the garbage collector would end the workers.
        self._report = partial(registry.report, name, strict=strict)
        self._check = LoopCheck(self._report, pipelined=pipelined)
        self._state = PassState.NONE
        self._epoch = 0
        self.newest: LoaderPass | None = None
        self._first_iteration: int | None = None
        self._pending: Position | None = None
        """Restored position that is not used up yet."""
        self._seeds = generator.seeds(generator.own_generators(loader, {}))
        self._replaced = False
        self._change_report: Callable[[], None] | None = None
        self._delivered_was_read = True
        # The step boundary: the loader's place when a batch was first requested after step `_requested_at`.
        self._requested_at = -1
        self._boundary: LoaderPlace | None = None
        self._boundary_own: Mapping[str, Any] | None = None
        self._ended_at = -1
        """The step after which the pass was exhausted without a delivery."""
        self._ended_without_step: tuple[int, int] | None = None
        """(steps, events) at the end of a pass without a step; a step before any other event belongs to that pass."""
        self._draws_rng, self._probed_batches = False, 0
        self._queue = DeliveryQueue(0, step=registry.clock())
        self.nesting = Nesting(self._report)
        self._own_state = LoaderState(self._access, self._report)
        if self._access.workers and not getattr(loader, "in_order", True):
            self._report("in_order")

    @property
    def epoch(self) -> int:
        """Index of the epoch of the next batch: resume with `for epoch in range(loader.epoch, epochs)`."""
        self._expire_pending()
        return self._pending.epoch if self._pending is not None else self._next_epoch()

    @property
    def delivered(self) -> int:
        """Batches of this epoch that were delivered to the loop."""
        self._delivered_was_read = True
        self._expire_pending()
        if self._pending is not None and (self.newest is None or not self.open):
            return self._pending.delivered - self._pending.in_use
        loader_pass = self.newest
        inside = (
            loader_pass is not None and position_to_save(self._state, **self._facts()) is SavedPosition.INSIDE
        )
        return loader_pass.mark.delivered if loader_pass is not None and inside else 0

    @property
    def open(self) -> bool:
        return self._state is PassState.OPEN

    @property
    def batch_requested(self) -> bool:
        now = self._registry.clock()
        return not self._pipelined and self._requested_at == now != self._ended_at

    @property
    def guarantee(self) -> str:
        mark = DeliveryMark() if self.newest is None else self.newest.mark
        return self._access.guarantee(unchecked=mark.delivered > 0 and mark.fingerprint is None)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not constructed yet (copy, pickle)
            raise AttributeError(name)
        return getattr(self.loader, name)

    def continue_from(self, old: WrappedLoader) -> None:
        """Continue where `old`, previously wrapped under this name, ended: the same data in a new loader."""
        old._replaced = True
        self._epoch, self._check.total = old._next_epoch(ended=True), old._check.total
        self._queue = DeliveryQueue(self._epoch, step=self._registry.clock())

    def has_prefetched(self, now: int) -> bool:
        """Whether the steps up to `now` used batches that a pipeline had fetched before."""
        return self._pipelined and self._queue.covers(now)

    def mismatch(self, tree: Mapping[str, Any]) -> str:
        """Return how this loader differs from the one that saved `tree` inside an epoch; empty: it does not."""
        return self._access.mismatch(Position.of(tree, self.name))

    def resume(self, tree: Mapping[str, Any], on_change: OnChange, *, at_first_pass: bool = False) -> None:
        """Make the next pass begin at `tree`; raises `CheckpointMismatch` for "refuse" or an unknown version."""
        saved, access = Position.of(tree, self.name), self._access
        own = generator.own_generators(self.loader, {})
        self._epoch, self._own_state.at_end = saved.epoch, saved.end_state
        self.nesting.inner = None if saved.nested is None else set(saved.nested)
        self._check.resume(saved.per_step, saved.total)
        self._requested_at = -1
        why = access.mismatch(saved)
        if why and on_change == "refuse":
            raise CheckpointMismatch(
                why,
                where=f"loader {self.name!r}",
                remedy="keep the loader unchanged until the epoch ends; "
                'restore(loaders="restart") restarts the epoch, "continue" skips the same number of batches',
            )
        continues = on_change == "continue" and saved.base is None
        continues &= access.identity()["kind"] == saved.identity.get("kind")
        if why and not continues:
            count = f"{saved.samples} samples" if saved.samples else f"{saved.delivered} batches"
            self._change_report = partial(self._report, "identity", why=why, count=count)
        else:
            generator.apply_each(saved.own, own)
            between = saved.identity and (saved.ended or not saved.delivered)
            if between and (changes := access.changes(saved, ignore=("shares",))):
                self._report("next epochs", changes=", ".join(changes))
            if saved.ended and access.mismatch(replace(saved, ended=False)):
                self._epoch += 1
            elif saved.delivered:
                if why:
                    self._change_report = partial(self._report, "continued", why=why)
                    saved = replace(saved, fingerprint=None, first=None, indices=None)
                self._pending = saved
                self._transition(PassEvent.RESTORED)
            else:
                self._own_state.load(own, epoch=self._epoch)
            if other := [name for name, seed in self._seeds.items() if saved.seeds.get(name, seed) != seed]:
                self._report("seed", names=", ".join(other))
        self._queue = DeliveryQueue(self._epoch, step=self._registry.snapshot_step)
        self._first_iteration = None
        self._delivered_was_read = False
        if not at_first_pass:
            self._report_change()

    def _report_change(self) -> None:
        changed, self._change_report = self._change_report, None
        if changed is not None:
            changed()

    def position(self) -> Position:
        self._expire_pending()
        if self._pending is not None:
            return self._pending
        now = self._registry.clock()
        if self._pipelined:
            place = self._queue.last_used(now)
        elif self.batch_requested and self._boundary is not None:
            place = self._boundary
        else:
            place = self._place()
        return self._position_of(place)

    def _position_of(self, place: LoaderPlace) -> Position:
        loader_pass, mark, access = place.loader_pass, place.mark, self._access
        own = generator.own_generators(self.loader, {})
        common: dict[str, Any] = {
            "epoch": place.epoch,
            "own": (self._boundary_own if self.batch_requested else None) or generator.capture_each(own),
            "seeds": generator.seeds(own),
            "end_state": self._own_state.at_end,
            "kind": access.kind,
            "identity": access.identity(),
            "nested": None if self.nesting.inner is None else sorted(self.nesting.inner),
            "per_step": self._check.per_step,
            "total": self._check.total,
            "reported": self._registry.lasting_reports(self.name),
            "shared": self._shared,
        }
        if loader_pass is None or not mark.delivered:
            return Position(**common)
        in_use = place.in_use
        if not self._pipelined and self.open and loader_pass is self.newest:
            others = [(other.name, other.newest) for other in self._registry.open_others(self)]
            in_use = self.nesting.in_use(loader_pass, others)
        return Position(
            **common,
            delivered=mark.delivered,
            samples=mark.samples,
            last_samples=mark.last_samples,
            fingerprint=mark.fingerprint,
            indices=None if mark.indices is None else fingerprint(mark.indices),
            first=loader_pass.first,
            start=loader_pass.start,
            before=mark.before,
            anchors=[anchor for anchor in loader_pass.anchors if anchor[0] <= mark.delivered],
            workers_were_running=loader_pass.workers_were_running,
            fetch_draws=access.workers_drew
            or self._draws_rng
            or (not access.workers and not self._probed_batches),
            in_use=in_use,
            ended=not in_use and access.is_epoch_complete(loader_pass, mark),
            order=loader_pass.order,
            base=loader_pass.base,
        )

    def _place(self, *, ended: bool = False) -> LoaderPlace:
        """Return the current place; `ended`: another pass begins."""
        loader_pass = self.newest
        if (
            loader_pass is None
            or ended
            or position_to_save(self._state, **self._facts()) is not SavedPosition.INSIDE
        ):
            return LoaderPlace(None, self._next_epoch(ended=ended))
        return LoaderPlace(loader_pass, loader_pass.epoch, loader_pass.mark)

    def _facts(self) -> dict[str, bool]:
        loader_pass, now = self.newest, self._registry.clock()
        if loader_pass is None:
            return {"was_epoch": False, "stepped_since": False}
        if self._state is PassState.EXHAUSTED:
            late = self._ended_without_step
            was_epoch = loader_pass.was_epoch or (
                late is not None and now > late[0] and late[1] == self._registry.events
            )
        else:
            was_epoch = now > loader_pass.started_at and loader_pass.mark.delivered > 0
        return {"was_epoch": was_epoch, "stepped_since": now > loader_pass.ended_at}

    def _next_epoch(self, *, ended: bool = False) -> int:
        """Return the epoch of the next batch; `ended`: another pass begins."""
        loader_pass = self.newest
        if loader_pass is None:
            return self._epoch
        state, facts = self._state, self._facts()
        if ended and state is not PassState.EXHAUSTED:
            state, facts["stepped_since"] = PassState.ABANDONED, True
        return loader_pass.epoch + (position_to_save(state, **facts) is SavedPosition.NEXT_EPOCH)

    def _expire_pending(self) -> None:
        loader_pass = self.newest
        used = (
            loader_pass is not None
            and loader_pass.resumed
            and self._registry.clock() > loader_pass.started_at
        )
        if self._pending is not None and used:
            self._pending = None

    def __iter__(self) -> Iterator[Any]:
        if self._replaced:
            raise UserError(
                f"another loader was later wrapped as {self.name!r} and took over this one's position",
                where="wrap()",
                remedy="give each loader its own name=; reuse a name only for a loader that replaces the "
                "previous one",
            )
        self._registry.iterations += 1
        if self._first_iteration is None:
            self._first_iteration = self._registry.iterations
        return self._run(self._registry.iterations)  # a generator: its body begins at the first next()

    def _run(self, iteration: int) -> Iterator[Any]:
        registry, access = self._registry, self._access
        own = generator.own_generators(self.loader, registry.state)
        if self._first_iteration is not None and self._first_iteration < registry.ended_iteration < iteration:
            self._abandon_restored()
        self._request_batch(own, begins=True)
        loader_pass = self._start_pass(own)
        try:
            while True:
                before = self._request_batch(own) if loader_pass.delivered_here else None
                if loader_pass.prefetched:
                    batch = loader_pass.prefetched.pop()
                else:
                    before = before or (generator.capture(own) if self._may_draw(loader_pass) else None)
                    batch = next(loader_pass.iterator, END)
                if batch is END:
                    self._on_exhausted(loader_pass)
                    return
                if (
                    before is not None
                    and loader_pass.delivered_here
                    and not self._draws_rng
                    and not access.workers
                ):
                    self._draws_rng = not generator.same(before, generator.capture(own))
                    self._probed_batches += 1
                with registry.lock:
                    self._deliver(loader_pass, batch, before)
                yield batch
        finally:
            if loader_pass is self.newest and self.open:
                loader_pass.ended_at = registry.clock()
                self._transition(PassEvent.DROPPED)
                self._own_state.pass_ended()
                self._epoch_ended(loader_pass, by_loop=True)

    def _epoch_ended(self, loader_pass: LoaderPass, *, by_loop: bool) -> None:
        if self._registry.clock() > loader_pass.started_at:
            self._check.epoch_ended(loader_pass, by_loop=by_loop)

    def _abandon_restored(self) -> None:
        """Drop the restored pass after a `zip` over this loader ended at once because another loader was exhausted."""
        if self._pending is not None:
            self._epoch, self._pending, self.newest = self._pending.epoch + 1, None, None
        self._first_iteration = None

    def _may_draw(self, loader_pass: LoaderPass) -> bool:
        """Whether fetching may move generators of this process, as observed on the first batches."""
        if not loader_pass.delivered_here:
            return True
        return not self._access.workers and (self._draws_rng or self._probed_batches < _PROBE_BATCHES)

    def _request_batch(self, own: Mapping[str, Any], *, begins: bool = False) -> Mapping[str, Any] | None:
        """Record a request for a batch, which ends the step boundary; returns generators if they were captured."""
        registry, loader_pass = self._registry, self.newest
        now = registry.clock()
        draws = begins or loader_pass is None or self._may_draw(loader_pass)
        first = self._requested_at != now
        captured = generator.capture(own) if draws and first else None
        with registry.lock:
            registry.record_request(draws=draws)
            if first:
                self._expire_pending()
                self._requested_at, self._ended_at = now, -1
                self._boundary = self._place(ended=begins) if self._pending is None else None
                self._boundary_own = None
                if captured is not None:
                    self._boundary_own = {
                        k: v for k, v in captured["own"].items() if not k.startswith("state")
                    }
        return captured

    def _start_pass(self, own: Mapping[str, Any]) -> LoaderPass:
        registry, old = self._registry, self.newest
        self._expire_pending()
        self._report_change()
        if old is not None and self.open:  # its iterator still exists
            old.ended_at = registry.clock()
            self._epoch_ended(old, by_loop=True)
        loader_pass = (
            self._new_pass(own) if self._pending is None else self._seek_restored(self._pending, own)
        )
        self._transition(PassEvent.STARTED)
        self.newest, self._ended_without_step, self._ended_at = loader_pass, None, -1
        registry.events += 1
        loader_pass.start_event = registry.events
        self.nesting.pass_started(registry.open_passes(self))
        for other in registry.open_others(self):
            other.nesting.other_pass_started(self.name)
        return loader_pass

    def _new_pass(self, own: Mapping[str, Any]) -> LoaderPass:
        registry, access, old = self._registry, self._access, self.newest
        start = generator.capture(own)
        if old is None:
            registry.check_draws(self.name, start["globals"])
        self._epoch = self._next_epoch(ended=True)
        loader_pass = LoaderPass(
            epoch=self._epoch,
            started_at=registry.clock(),
            start=start,
            workers_were_running=access.workers_live(),
            order=access.order(self._epoch),
        )
        if access.kind == "stateful":
            loader_pass.anchors.append((0, self._own_state.at_end, start))
        access.open(loader_pass)
        return loader_pass

    def _seek_restored(self, position: Position, own: Mapping[str, Any]) -> LoaderPass:
        """Begin a pass at a restored position; side effects of drawing its last batch again are undone."""
        registry, access, old = self._registry, self._access, self.newest
        if old is not None and old.resumed and old.delivered_here:
            self._report("no step")
        if not self._delivered_was_read:
            self._report("continues", batch=position.delivered, epoch=position.epoch)
        entry, held = generator.capture(own), registry.capture_state()
        order = position.order or access.order(position.epoch)
        loader_pass = LoaderPass.at(position, started_at=registry.clock(), order=order)
        found = Seek(self.name, access, loader_pass, position, own, self._report).run()
        registry.check_draws(self.name, entry["globals"])
        if found.key and not (found.key == "stream" and registry.is_in_state(self.loader)):
            self._report(found.key, epoch=position.epoch, batch=position.delivered, error=found.error)
        if found.restart:
            loader_pass.mark, loader_pass.first, loader_pass.resumed = DeliveryMark(), None, False
            loader_pass.anchors = [(0, None, position.start)]
            self._pending, self._boundary = None, LoaderPlace(None, loader_pass.epoch)
            loader_pass.prefetched = [found.batch]
        elif position.in_use and found.batch is not END:
            loader_pass.prefetched = [found.batch]
            shares = 1 if loader_pass.order is None else int(loader_pass.order["world"])
            loader_pass.mark = DeliveryMark(
                position.delivered - 1, position.samples - position.last_samples * shares
            )
        if not (found.restart and access.kind == "replayed"):  # a stream stays where it returned its batch
            registry.restore_state(held)
        if position.in_use:
            generator.apply_each(position.own, own)
            return loader_pass
        mine = registry.snapshot_rng is not None and registry.clock() == registry.snapshot_step
        mine &= registry.rng_applied_by in (None, self.name)
        if mine and registry.snapshot_rng is not None:
            entry = {"globals": registry.snapshot_rng, "own": position.own}
        generator.apply(entry, {k: g for k, g in own.items() if not k.startswith("state")})
        if mine:
            registry.rng_applied_by = self.name
        return loader_pass

    def _deliver(self, loader_pass: LoaderPass, batch: Any, before: Mapping[str, Any] | None) -> None:
        registry, mark = self._registry, loader_pass.mark
        if loader_pass is not self.newest:
            self._report("twice")
        number, printed = mark.delivered + 1, fingerprint(batch)
        indices = None if loader_pass.sampler is None else loader_pass.sampler.entry(number)
        samples = len(indices) if isinstance(indices, (list, tuple)) else int(indices is not None)
        shares = 1 if loader_pass.order is None else int(loader_pass.order["world"])
        self._own_state.anchor(loader_pass, number)
        loader_pass.mark = DeliveryMark(
            number, mark.samples + samples * shares, samples, printed, indices, before
        )
        loader_pass.first = printed if number == 1 else loader_pass.first
        loader_pass.delivered_here += 1
        registry.delivered(loader_pass)
        self.nesting.delivered(
            loader_pass, registry.events, {other.name for other in registry.open_others(self)}
        )
        self._check.delivered(loader_pass, registry.clock())
        if self._pipelined:
            self._queue.add(
                LoaderPlace(loader_pass, loader_pass.epoch, loader_pass.mark), step=registry.clock()
            )

    def _on_exhausted(self, loader_pass: LoaderPass) -> None:
        registry = self._registry
        now = registry.clock()
        if loader_pass is not self.newest:
            return
        self._transition(PassEvent.STOPPED)
        loader_pass.ended_at = registry.exhausted_at = now
        self._epoch_ended(loader_pass, by_loop=False)
        if now > loader_pass.started_at and not self._pipelined:
            self.nesting.pass_ended(loader_pass, registry.open_passes(self))
        short = loader_pass.resumed and self._check.shorter_than_step(loader_pass.delivered_here)
        if loader_pass.resumed and not loader_pass.delivered_here:
            registry.iterations += 1
            registry.ended_iteration = registry.iterations
        loader_pass.was_epoch = now > loader_pass.started_at or self._pipelined or short
        self._ended_without_step = (
            None if loader_pass.was_epoch or not loader_pass.mark.delivered else (now, registry.events)
        )
        if not loader_pass.delivered_here or (
            self._boundary is not None and self._boundary.mark is loader_pass.mark
        ):
            self._ended_at = now
        if loader_pass.was_epoch:
            self._pending = None
            self._own_state.pass_ended()
        if self._pipelined:
            with registry.lock:
                self._queue.add(LoaderPlace(None, loader_pass.epoch + 1), step=now)

    def _transition(self, event: PassEvent) -> None:
        self._state = after(self._state, event)
