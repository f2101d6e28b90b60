"""Loader position and randomness of the batch that was *delivered*, so that a resumed run sees the next one.

`Checkpointer.wrap` puts a `WrappedLoader` between the loader and the training loop. It counts what the loop was
handed, never what workers fetched ahead. Three kinds of loader are understood:

- *stateful*: has `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader and its like): its own state is
  saved, and loaded before the resumed iteration begins;
- *counted*: a torch DataLoader, or any re-iterable: the position is (epoch, batches delivered). A resumed iteration
  skips that many: through the index sampler of a map-style DataLoader (`skip="sampler"`, nothing is fetched), else
  by drawing and dropping (`skip="replay"`). With a `ResumableSampler` the position is one of samples, too: nothing is
  skipped, the rest of that epoch's order is what the resumed pass is made of, in batches of whatever size;
- *callable*: `factory(epoch, start)` gives the iterable of an epoch from batch `start` on.

A shuffled epoch is drawn from the random state at `iter()` and at the first `next()`, so both are kept with the
position, together with what lies below the loader and moves (`belonging`). The resumed iteration is created under the
first, leaves it to the program to draw again what it drew between the two, skips under the second, and only then the
state of the cut is put back, because creating an iterator draws from the default generator and skipping may. From there
on the next batch, and the dropout after it, draw what the lost process would have drawn.

A pass in which no step was taken (evaluation on the training data, statistics, a look at one batch) is no epoch.

A batch delivered after the last `step()` belongs to the next step. Its delivery notes where the loader stood before,
so that `close()` after a `break` cuts the position and the randomness of the step boundary. Loops that pull batches
ahead of use through the wrapper (TorchRec's train pipelines) say `pipelined=True`: then each `step()` consumes one.

Several wrapped loaders know of each other (`company`): zipped, nested, alternated ones resume exactly, or it is said.
Whatever else was seen not to be exact is said, too, once, with the remedy.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from deltashard.errors import CheckpointMismatch, StateError, UserError
from deltashard.loader.belonging import Belongings, Walk, draws, fingerprint
from deltashard.loader.company import Company
from deltashard.loader.deal import left_of, misfit, order_of, used_up
from deltashard.loader.pace import Pace
from deltashard.loader.resumable_sampler import resumable_of
from deltashard.state.position import (
    PassedSampler,
    Position,
    Skip,
    Stateful,
    apply_draws,
    capture_draws,
    is_printed,
    own_sampler,
    samples_by_index,
    through_sampler,
)
from deltashard.state.rng import apply_globals, capture_globals, is_seeds
from deltashard.state.value import encode_value

log = logging.getLogger("deltashard")

_SEEDS = 8
"""So many seeds of other iterators (a validation pass or a few) at the head of an epoch are no draws of the program."""

_STANDARD = frozenset(
    [
        "num_workers",
        "prefetch_factor",
        "pin_memory",
        "pin_memory_device",
        "timeout",
        "worker_init_fn",
        "batch_size",
        "drop_last",
        "persistent_workers",
        "in_order",
        "multiprocessing_context",
        "dataset",
        "sampler",
        "batch_sampler",
        "collate_fn",
        "generator",
    ]
)


class _Pass:
    """One iteration over a loader."""

    def __init__(self, *, epoch: int, delivered: int, clock: int, resumed: Position | None) -> None:
        self.epoch = epoch
        self.delivered = delivered
        self.clock = clock
        self.resumed = resumed
        self.dealt = None if resumed is None else resumed.dealt
        self.iterator: Iterator[Any] = iter(())
        self.start: Mapping[str, Any] | None = None
        self.first: Mapping[str, Any] | None = None
        self.after_iter: Mapping[str, Any] | None = None
        self.sampler: PassedSampler | None = None
        self.prints: dict[int, str] = {}
        self.order: Mapping[str, Any] | None = None
        """How its samples are dealt out to ranks (`deal.order_of`)."""
        self.warm = False
        self.ahead: bool | None = None
        self.handed = 0
        self.asked = False

    def position(self, inner: Any = None) -> Position:
        """Where it stands; `inner`: the loader's own state."""
        return Position(
            epoch=self.epoch,
            delivered=self.delivered,
            start=self.start,
            first=self.first,
            inner=inner,
            warm=self.warm,
            ahead=self.ahead,
            dealt=self.dealt,
            order=self.order,
        )


def _roots(loader: Any) -> dict[str, object]:
    """Where what moves is looked for; a stateful loader keeps its own order."""
    stateful = isinstance(loader, Stateful)
    if not isinstance(loader, DataLoader):
        return {} if stateful else {"loader": loader}
    names = ["dataset", "collate_fn"]
    if not stateful:
        names += ["sampler", "batch_sampler", "generator"]
        names += [n for n in vars(loader) if not n.startswith("_") and n not in _STANDARD]
    return {n: getattr(loader, n, None) for n in names}


class WrappedLoader:
    """Iterates `loader` and knows what was delivered. Made by `Checkpointer.wrap`; attributes pass through."""

    def __init__(
        self,
        loader: Any,
        *,
        clock: Callable[[], int],
        skip: Skip = "sampler",
        pipelined: bool = False,
        shared: bool = False,
        name: str = "loader",
        company: Company | None = None,
    ) -> None:
        """`clock` returns the number of `step()` calls so far; `company`: the other loaders of the Checkpointer.

        `shared`: all ranks iterate the same batches (see `deal`).
        """
        if isinstance(loader, Iterator):
            raise StateError(
                f"{type(loader).__name__} is an iterator, which can only be consumed once",
                where="wrap()",
                remedy="give the loader itself, a re-iterable, or a callable factory(epoch, start)",
            )
        if not callable(loader) and not isinstance(loader, Iterable):
            raise StateError(
                f"{type(loader).__name__} cannot be iterated",
                where="wrap()",
                remedy="give an iterable, or a callable factory(epoch, start)",
            )
        self.loader = loader
        self.name = name
        self._clock = clock
        self._skip = skip
        self._pipelined = pipelined
        self._shared = shared
        self._stateful = isinstance(loader, Stateful)
        self._factory = callable(loader) and not isinstance(loader, Iterable)
        self._torch = isinstance(loader, DataLoader)
        self._workers = loader.num_workers if self._torch else 0
        self._persistent = bool(self._workers and loader.persistent_workers and not self._stateful)
        # A loader with an __iter__ of its own may count in it: it is replayed.
        plain = self._torch and type(loader).__iter__ is DataLoader.__iter__ and not self._stateful
        self._by_sampler = plain and samples_by_index(loader) and skip == "sampler"
        self._sampler = resumable_of(loader)
        # Its order and batches are known: a position is one of samples.
        self._seeded = plain and self._sampler is not None and order_of(loader) is not None
        self._watched = (
            self._by_sampler and (shared or own_sampler(loader)) and not (self._persistent or self._seeded)
        )
        if shared and self._sampler is not None and self._sampler.world_size > 1:
            raise UserError(
                f"shared=True says that all ranks iterate the same batches, and the ResumableSampler deals out shares "
                f"to {self._sampler.world_size}",
                where="wrap()",
                remedy="leave shared=True out, or give the sampler rank=0, world_size=1 on all ranks",
            )
        self._company = company or Company(clock)
        self._member = self._company.join(name)
        self._pace = Pace(self._company, self._member)
        # Not a method of this one: in a cycle its iterator would be the collector's, which waits 5 s for each worker.
        self._belongings = Belongings(partial(_roots, loader))
        self._warn_of(self._belongings.walk())
        self._position = Position(epoch=0, delivered=0)
        self._pass: _Pass | None = None
        self._closed_at: int | None = None
        self._broken = self._asked = self._replaced = self._rearmed = False
        self._again: Mapping[str, Any] | None = None
        self._resume: Position | None = None
        self._resume_tree: Mapping[str, Any] = {}
        self._taken_up_at = -1
        """The step after which a resumed pass began: until the next one training stands where the checkpoint does."""
        # Pipelined: every delivery not yet consumed, oldest first, after the position that is.
        self._ahead: deque[Position] = deque([self._position])
        self._consumed_at = clock()
        # The boundary: where the loader stood when a batch was first asked for after step `_moved_at`.
        self._moved_at = -1
        self._boundary = self._position
        # After step `_ended_at` the pass was found at its end, and nothing was handed over: no batch of a next step.
        self._ended_at = -1
        # A pass without a step ended after (step, event of the company): a step taken before any other event is its.
        self._unstepped: tuple[int, int] | None = None
        # Fetching in this process may draw from the global generators; fetching in workers does not.
        self._fetch_draws = self._workers == 0

    @property
    def epoch(self) -> int:
        """Index of the epoch the next batch belongs to: resume with `for epoch in range(loader.epoch, epochs)`."""
        return (self._resume or self._current()).epoch

    @property
    def delivered(self) -> int:
        """Batches of this epoch the loop was handed."""
        self._asked = True
        return (self._resume or self._current()).delivered

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not constructed yet (copy, pickle)
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _warn_of(self, walk: Walk) -> None:
        if self._persistent:
            log.warning(
                "a DataLoader with persistent_workers=True resumes where it was and in the same order, but random "
                "numbers that its workers draw are others: leave it out for a bit-exact resume, if the dataset draws"
            )
        if self._workers and draws(
            Walk({n: v for n, v in _roots(self.loader).items() if n in ("dataset", "collate_fn")})
        ):
            if self._stateful:
                self._say(
                    "workers draw",
                    "draws random numbers in its workers, by all appearances: these do not resume exactly with a "
                    "stateful loader; draw them from the sample's index, or use a DataLoader with skip='replay'",
                )
            elif self._by_sampler:
                self._say(
                    "workers draw",
                    "draws random numbers in its workers, by all appearances: wrap(..., skip='replay') fetches the "
                    "skipped batches again, so that these resume exactly; skip='sampler' does not",
                )
        if self._workers and not getattr(self.loader, "in_order", True):
            self._say(
                "in_order",
                "hands batches over in whatever order its workers finish (in_order=False): a resume goes on after as "
                "many batches, which need not be those that were handed over. Leave in_order=False out",
            )
        if walk.iterators and not self._workers:
            self._say(
                "iterators",
                "holds iterators, whose position is not part of the checkpoint: %s. Count instead, or give the loader "
                "state_dict and load_state_dict",
                ", ".join(walk.iterators[:3]),
            )

    def _say(self, key: str, what: str, *arguments: object) -> None:
        self._company.say(f"{key} {self.name}", f"the loader %r {what}", self.name, *arguments)

    # What a checkpoint takes and gives back

    def _current(self) -> Position:
        """The position now; after a broken-off pass, and steps since, it is the next epoch's begin."""
        unstepped = self._unstepped
        if unstepped is not None and self._clock() > unstepped[0] and self._company.events == unstepped[1]:
            self._unstepped = None
            self._position = replace(self._position, epoch=self._position.epoch + 1)
        if self._closed_at is not None and self._clock() > self._closed_at:
            self._closed_at = None
            self._position = Position(epoch=self._position.epoch + 1, delivered=0, inner=self._position.inner)
        return self._position

    def capture(self) -> dict[str, Any]:
        """The position of the last step boundary, as plain data."""
        now = self._clock()
        if self._resume is not None or now == self._taken_up_at:
            return dict(self._resume_tree)
        self._pace.cutting(now)
        if self._pipelined:
            while self._consumed_at < now and len(self._ahead) > 1:
                self._ahead.popleft()
                self._consumed_at += 1
            self._consumed_at = now
            position = self._ahead[0]
        elif self._moved_at != now:
            position = self._with_inner(self._current())
            if self._company.in_use(self._member):
                position = self._with_again(position)
        elif self._stateful and self._boundary.delivered and self.moved:
            log.warning(
                "the batch delivered after the last step() is counted as used: a stateful loader cannot be put back "
                "by one batch; call step() once per batch"
            )
            position = self._with_inner(self._position)
        else:
            position = self._boundary
        tree = position.tree()
        tree["order"] = self._saved_order(position)
        tree["habits"] = self._member.habits()
        tree["last"] = self._company.last == self.name
        tree["per_step"] = max(self._pace.most, self._resume_tree.get("per_step", 1))
        tree["prints"] = {} if self._pass is None else dict(self._pass.prints)
        tree["deal"] = self._deal(position)
        # Behind workers the sampler is ahead of what was delivered: replaying brings it there.
        inside = position.start is not None and self._workers > 0
        tree["things"] = None if inside else self._things()
        if tree["things"] and self.moved and self._fetch_draws:
            self._say(
                "moved",
                "was asked for a batch after the last step(), and generators or counters below it may have moved with "
                "that batch: the checkpoint holds them as they are now. Save right after step()",
            )
        return tree

    def boundary_rng(self) -> Mapping[str, Any] | None:
        """Global random state of the last step boundary if batches were delivered since, else None (it is now)."""
        company = self._company
        return company.boundary_rng if not self._pipelined and company.moved_at == self._clock() else None

    @property
    def moved(self) -> bool:
        """Whether a batch was asked for since the last `step()`."""
        now = self._clock()
        return not self._pipelined and self._moved_at == now != self._ended_at

    def resume(self, tree: Mapping[str, Any], rng: Mapping[str, Any] | None) -> None:
        """Make the next iteration go on from `tree`, under the random state `rng` of the cut."""
        position = Position.of(tree)
        if (why := self.why_not(tree)) is not None:
            raise why
        if position.inner is not None and not self._stateful:
            raise CheckpointMismatch(
                f"the checkpoint holds the state of a stateful loader, {type(self.loader).__name__} has none",
                where="wrap()",
                remedy="wrap the same kind of loader as the run that saved",
            )
        if position.inner is None and self._stateful and position.delivered:
            raise CheckpointMismatch(
                f"the checkpoint counted batches of a loader without state, {type(self.loader).__name__} keeps its own",
                where="wrap()",
                remedy="wrap the same kind of loader as the run that saved",
            )
        live, saved = self._order(), position.order
        if saved is not None and saved["over"] and misfit(saved, live):
            position = Position(epoch=position.epoch + 1, delivered=0)
        elif saved is not None and live is not None and live["a_batch"] != saved["a_batch"]:
            position = replace(position, dealt={"at": position.delivered, "used": used_up(position)})
        company, member, habits = self._company, self._member, tree.get("habits") or {}
        if company.cut is not rng or company.cut_at != self._clock():
            company.resuming(rng)
        self._resume, self._resume_tree = position, dict(tree)
        self._moved_at = -1
        member.waits = position.again is not None or (position.start is not None and position.delivered > 0)
        member.inside = member.waits
        member.row, company.row = habits.get("row", 0), 0
        member.after |= set(habits.get("after", ()))
        member.nests |= set(habits.get("nests", ()))
        if tree.get("last"):
            company.last = self.name
            company.expected = frozenset(habits.get("after", ()))
            company.used = set()
        company.things[self.name] = self._put_things
        self._put_things()

    def _deal(self, position: Position) -> Any:
        """What another number of ranks must know to go on at `position`: see `deal`. None: they cannot."""
        if self._shared:
            return "shared"
        order = position.order
        if order is None or not position.delivered or position.again is not None or not self._by_sampler:
            return None
        return {k: v for k, v in order.items() if k != "a_batch"} | {"used": used_up(position)}

    def _saved_order(self, position: Position) -> dict[str, Any] | None:
        """A ResumableSampler's, and whether nothing of it is left for another batch: then another order may follow."""
        order = position.order if self._seeded else None
        if order is None:
            return None
        rest: Any = left_of(self.loader, order, used_up(position))
        return {**order, "over": position.again is None and len(rest) == 0}

    def _order(self, *, epoch: int | None = None) -> Mapping[str, Any] | None:
        """See `deal.order_of`; of that epoch, where the sampler may not have been told of it."""
        order = order_of(self.loader) if self._by_sampler or self._seeded else None
        return order if order is None or epoch is None else {**order, "epoch": epoch}

    def why_not(self, tree: Mapping[str, Any]) -> CheckpointMismatch | None:
        """Why it cannot deal out what is left of a saved epoch; None: it can, or has not to."""
        if not (tree["delivered"] or tree.get("again")):
            return None
        order, dealt, live = tree.get("order"), tree.get("dealt"), self._order()
        why = ""
        if order and order["over"]:
            return None
        if order or dealt:
            why = misfit(order or tree["deal"], live)
            if not self._by_sampler and (
                dealt or not order or (live and live["a_batch"] != order["a_batch"])
            ):
                why = "it has no index sampler, or skip='replay', which fetches the same batches of the whole epoch"
        elif self._seeded:
            why = "it draws from a ResumableSampler now, and the run that saved had another order"
        if not why:
            return None
        return CheckpointMismatch(
            f"what is left of epoch {tree['epoch']} of loader {self.name!r} cannot be dealt out: {why}",
            where="wrap()",
            remedy="wrap the same loader as the run that saved, for the ranks that there are, before restore(); "
            "restore(strict=False) begins that epoch's data anew then",
        )

    def take_over(self, old: WrappedLoader) -> None:
        """Go on where `old`, wrapped under this name before, has ended: the same data, made anew for the next epoch."""
        old._replaced = True
        position = old._current()
        counted = position.delivered and old._stepped()
        self._position = Position(epoch=position.epoch + (1 if counted else 0), delivered=0)
        self._ahead = deque([self._position])

    def _stepped(self) -> bool:
        """Whether a step was taken since the last pass began."""
        return self._pass is not None and (self._pipelined or self._clock() > self._pass.clock)

    @property
    def iterated(self) -> bool:
        """Whether a pass has begun."""
        return self._pass is not None

    def _things(self) -> dict[str, Any]:
        try:
            return self._belongings.capture()
        except Exception as error:  # noqa: BLE001 - a user's object; a save never harms training
            self._say("things", "holds objects that cannot be looked at (%s): they are not saved", error)
            return {}

    def _put_things(self) -> None:
        self._apply_things(self._resume_tree.get("things") or {})

    def _apply_things(self, held: Mapping[str, Any]) -> None:
        misfits = self._belongings.apply(held)
        printed = [path for path in misfits if "print" in held[path]]
        self._say_misfits("misfits", "not bit-exact:", [path for path in misfits if path not in printed])
        self._say_misfits(
            "printed",
            "exact only if it does not decide what samples hold (a cache or a counter does not): otherwise",
            printed,
        )

    def _say_misfits(self, key: str, resume: str, paths: list[str]) -> None:
        if paths:
            self._say(
                key,
                "holds what moved in the lost process and cannot be put back: %s. The resume is %s draw it by epoch "
                "(a generator seeded with seed + epoch), or keep it small, or give it in state=",
                ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else ""),
                resume,
            )

    def _moment(self) -> dict[str, Any]:
        """Generators and belongings, as they are now."""
        return capture_draws(self.loader) | {"things": self._things()}

    def _apply_inside(self, moment: Mapping[str, Any]) -> None:
        """Within a pass: behind workers the sampler is ahead, and where it belongs by having been replayed."""
        if self._workers:
            apply_globals(moment["globals"])
        else:
            self._apply_moment(moment)

    def _apply_moment(self, moment: Mapping[str, Any]) -> None:
        apply_draws(self.loader, moment)
        self._apply_things(moment.get("things") or {})

    # Iteration

    def __iter__(self) -> Iterator[Any]:
        if self._replaced:
            raise UserError(
                f"another loader was wrapped as {self.name!r} since, and took this one's position over",
                where="wrap()",
                remedy="give each loader a name= of its own; wrap anew under one name only what replaces the other",
            )
        now = self._clock()
        self._ended_at = -1
        resume = self._resume or self._resumed_for_nothing(now)
        if resume is not None:
            self._taken_up_at = now
        if resume is not None and resume.start is None:  # it was in no pass: this one is new
            self._position = resume
            if self._stateful and resume.inner is not None:
                self.loader.load_state_dict(resume.inner)
            resume = None
        self._resume = None
        self._note_move(draws=True)
        if resume is None:
            self._pass = self._fresh_pass(now)
            self._company.began(self._member)
        else:
            # The same pass as in the lost process, for the others, too.
            self._pass = self._resumed_pass(resume, now)
            self._company.began(self._member)
            self._member.resume(resume.delivered, self._resume_tree.get("habits") or {})
        self._pace.began()
        self._closed_at = self._unstepped = None
        current = self._pass
        self._position = current.position()
        if resume is not None:
            self._ahead = deque([replace(resume, order=current.order)])
            self._consumed_at = now
        return self._run(current)

    def _resumed_for_nothing(self, now: int) -> Position | None:
        """Where to resume once more: a resumed pass in which no step was taken counts for nothing."""
        last = self._pass
        if last is None or last.resumed is None or now > last.clock or self._position.epoch > last.epoch:
            return None
        # A zip in which a loader is at its end is over, for the loaders that were not asked any more, and for those
        # that gave one batch more.
        if self._rearmed or not last.asked or self._company.ended_at == now:
            return None
        if last.handed:
            self._say(
                "for nothing",
                "was iterated after the restore without a step(): that pass began where training goes on, not at the "
                "beginning. Make it before restore(), or over the loader that is not wrapped",
            )
        self._rearmed = True
        return last.resumed

    def _fresh_pass(self, now: int) -> _Pass:
        position = self._current()
        # A broken-off epoch is over; an iteration in which no step was taken is the same epoch begun anew.
        resumed = self._pass is not None and self._pass.resumed is not None
        over = position.delivered > 0 and (self._stepped() or resumed)
        if over and self._broken and not self._asked and position.delivered != self._length():
            self._say(
                "broken",
                "was left after %d batches of an epoch: a resumed epoch goes on at its position, so that a count of "
                "the loop's own (enumerate) begins again. Count with loader.delivered",
                position.delivered,
            )
        self._broken = False
        made = _Pass(epoch=position.epoch + (1 if over else 0), delivered=0, clock=now, resumed=None)
        made.start = self._moment()
        made.warm, made.ahead = self._is_warm(), bool(self._workers)
        self._tell_epoch(made.epoch)
        made.order = self._order()
        if self._seeded and self._by_sampler:
            made.iterator, made.sampler = self._enter(made, 0)
        elif self._watched:
            made.iterator, made.sampler = through_sampler(
                self.loader, 0, warm=False, prints=made.prints, to_print=fingerprint
            )
        else:
            made.iterator = iter(self.loader(made.epoch, 0)) if self._factory else iter(self.loader)
        return made

    def _tell_epoch(self, epoch: int) -> None:
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def _enter(self, made: _Pass, used: int, skip: int = 0) -> tuple[Iterator[Any], PassedSampler]:
        """A pass over what its order has left after `used` samples, without the first `skip` batches of that."""
        assert made.order is not None
        rest = left_of(self.loader, made.order, used)
        return through_sampler(self.loader, skip, warm=made.warm, instead=rest)

    def _length(self) -> int | None:
        try:
            return len(self.loader)
        except TypeError:
            return None

    def _is_warm(self) -> bool:
        return self._persistent and getattr(self.loader, "_iterator", None) is not None

    def _resumed_pass(self, resume: Position, now: int) -> _Pass:
        made = _Pass(epoch=resume.epoch, delivered=resume.delivered, clock=now, resumed=resume)
        timely = self._company.timely(self.name)
        # A loader first used later than the restore (evaluation) must not turn the clock back: whatever creating and
        # skipping draws is undone instead.
        entry = None if timely else self._moment()
        assert resume.start is not None
        if timely:
            self._look_at_head(resume.start)
        self._apply_moment(resume.start)
        made.start, made.first = resume.start, resume.first
        made.warm, made.ahead = resume.warm, resume.ahead
        self._tell_epoch(resume.epoch)
        saved = self._resume_tree.get("deal")
        made.order = self._order(epoch=saved["epoch"] if isinstance(saved, Mapping) else None)
        if self._stateful:
            if resume.inner is not None:
                self.loader.load_state_dict(resume.inner)
            made.iterator = iter(self.loader)
        elif self._factory:
            made.iterator = iter(self.loader(resume.epoch, resume.delivered))
        elif self._seeded and self._by_sampler:
            made.iterator, made.sampler = self._enter(made, used_up(resume))
        elif resume.dealt is not None:
            made.iterator, made.sampler = self._enter(
                made, resume.dealt["used"], resume.delivered - resume.dealt["at"]
            )
        elif self._by_sampler:
            made.iterator, made.sampler = through_sampler(
                self.loader,
                resume.delivered,
                warm=made.warm,
                prints=made.prints if self._watched else None,
                to_print=fingerprint,
                before=self._before_order(resume),
            )
        else:
            if made.warm and not self._is_warm():
                iter(self.loader)
                self._apply_moment(made.start)
            made.iterator = iter(self.loader)
        made.after_iter = capture_draws(self.loader)
        if entry is not None:
            self._apply_inside(entry)
        else:
            self._company.left = capture_globals()
        return made

    def _order_state(self, resume: Position) -> Mapping[str, Any] | None:
        """The random state under which the lost process drew its order; None: right after its iterator was created.

        Workers have the order drawn then, a loader without them draws it at its first batch. Persistent workers that
        lived before draw no seed of their own at first.
        """
        return resume.start if resume.warm else None if resume.ahead else resume.first

    def _before_order(self, resume: Position) -> Callable[[], None] | None:
        """What to do before workers have the order drawn, at once; None: they draw as the lost process did."""
        state = self._order_state(resume)
        known = resume.warm or resume.ahead is not None
        if state is None or not known or not self._workers or not resume.begun:
            return None
        return partial(apply_draws, self.loader, state)

    def _order_drawn_under(self, current: _Pass, resume: Position) -> Mapping[str, Any]:
        """What to put back before a resumed pass passes over what was delivered."""
        created, first = current.after_iter, resume.first
        assert created is not None
        if self._workers or not self._torch or self._stateful:
            return first or created
        state = self._order_state(resume) or created
        unknown = resume.ahead is None and not resume.warm and first is not None
        if unknown and not _same(state["globals"]["torch"], created["globals"]["torch"]):
            self._say(
                "ahead",
                "goes on in an epoch that a process of an older version began. If that one had workers "
                "(num_workers), and this one has none, the rest of this epoch comes in another order: some samples "
                "come twice, others not at all. Give it workers until the epoch is over",
            )
        return state

    def _look_at_head(self, start: Mapping[str, Any]) -> None:
        """Say when somebody drew since the restore, and not what was drawn at the head of this epoch."""
        left = self._company.left
        if left is None:
            return
        now = capture_globals()
        drawn = [
            kind
            for kind, state in now.items()
            if not _same(state, left.get(kind))
            and not _same(state, start["globals"].get(kind))
            and not (kind == "torch" and is_seeds(left["torch"], state, most=_SEEDS))
        ]
        if drawn:
            self._say(
                "head",
                "goes on in the middle of an epoch, and random numbers (%s) were drawn between restore() and its "
                "first batch: if they are used in this epoch (negative samples, an order), they are not those of the "
                "lost process. Seed by epoch what is drawn at the head of an epoch: np.random.seed(seed + epoch)",
                ", ".join(drawn),
            )

    def _arrive(self, current: _Pass) -> None:
        """Before the first batch of a resumed pass: skip, then put back the random state of the cut."""
        resume = current.resumed
        assert resume is not None
        company = self._company
        timely = company.timely(self.name)
        entry = None if timely else self._moment()
        begun = resume.begun
        if begun:
            self._apply_inside(self._order_drawn_under(current, resume))
            if current.sampler is not None:
                current.sampler.advance()
            elif not self._stateful and not self._factory:
                self._replay(current, resume.delivered)
            self._check_order(current)
        if begun and resume.again is not None:
            self._apply_inside(resume.again)
            company.repeated = True
            company.left = None
        elif entry is not None:
            self._apply_inside(entry)
        elif begun:
            company.put_back(self.name)
        if not begun:
            current.first, current.ahead = self._moment(), bool(self._workers)

    def _replay(self, current: _Pass, count: int) -> None:
        for number in range(1, count + 1):
            batch = next(current.iterator, self)
            if batch is self:
                return
            if is_printed(number):
                current.prints[number] = fingerprint(batch)

    def _check_order(self, current: _Pass) -> None:
        """What was passed over must be what was delivered."""
        recorded = self._resume_tree.get("prints") or {}
        differ = [n for n, p in recorded.items() if n <= current.delivered and current.prints.get(n, p) != p]
        if differ:
            self._say(
                "order",
                "does not give what it gave in the lost process: batch %d of the epoch is another one. Its data or "
                "order changed, or it draws, while it is iterated, from a generator that training draws from, too: "
                "give it a generator of its own, or state_dict and load_state_dict",
                min(differ),
            )

    def _run(self, current: _Pass) -> Iterator[Any]:
        company, member = self._company, self._member
        # Only what is passed over by fetching is compared by content.
        by_content = not (self._stateful or self._factory or self._by_sampler)
        waits = current.resumed is not None
        again = current.resumed.again if current.resumed is not None else None
        try:
            while True:
                first = current.handed == 0
                self._note_move(draws=self._fetch_draws or first)
                now = self._clock()
                current.asked = True
                if self._pass is not current:
                    self._say(
                        "twice", "is iterated by two loops at once: only the later one's position is saved"
                    )
                if now > current.clock and company.cut is not None:
                    company.stepped_in(member)
                if waits:
                    waits = False
                    self._arrive(current)
                elif first:
                    current.first = self._moment()
                if member.encloses and not (first and again is not None):
                    again = current.first if first and current.resumed is None else self._moment()
                self._again = again
                try:
                    batch = next(current.iterator)
                except StopIteration:
                    self._exhausted(current)
                    return
                current.delivered += 1
                current.handed += 1
                if by_content and is_printed(current.delivered):
                    current.prints[current.delivered] = fingerprint(batch)
                inner = self.loader.state_dict() if self._pipelined and self._stateful else None
                self._position = current.position(inner)
                if self._pipelined:
                    self._ahead.append(self._position)
                else:
                    company.delivering(member, now)
                    self._pace.delivering(now)
                again = None
                yield batch
        finally:
            if self._pass is current and member.open:
                self._left(current)

    def _exhausted(self, current: _Pass) -> None:
        now = self._company.exhausted_at = self._clock()
        self._member.open = False
        inner = self.loader.state_dict() if self._stateful else None
        self._company.expected = None
        if now > current.clock:
            self._company.exhausted(self._member)
        # Without a step it was no epoch; but one that was resumed at its end was, or with too little left for a step.
        was_one = self._pipelined or now > current.clock
        if current.resumed is not None and not was_one:
            repeated = 1 if current.resumed.again is not None else 0
            if current.handed == 0:
                self._company.ended_at = now
            was_one = current.handed - repeated < max(1, self._resume_tree.get("per_step", 1))
        self._position = Position(epoch=current.epoch + (1 if was_one else 0), delivered=0, inner=inner)
        self._unstepped = None if was_one or not current.delivered else (now, self._company.events)
        self._ended_at = now if self._boundary.delivered == current.delivered else -1
        self._pace.ended(now)

    def _left(self, current: _Pass) -> None:
        """The iterator was dropped before its end."""
        self._member.open = False
        if not self._pipelined:
            self._closed_at = self._clock()
            # A zip whose other loader was at its end is no loop that was left.
            self._broken = current.clock < self._closed_at != self._company.exhausted_at

    def _note_move(self, *, draws: bool) -> None:
        now = self._clock()
        if not self._pipelined:
            self._company.moving(draws=draws)
        if self._moved_at != now:
            self._moved_at = now
            self._boundary = self._current()

    def _with_inner(self, position: Position) -> Position:
        if not self._stateful or position.inner is not None or not position.delivered:
            return position
        return replace(position, inner=self.loader.state_dict())

    def _with_again(self, position: Position) -> Position:
        """Its last batch is still in use: a resumed pass delivers it once more."""
        again = self._again or (position.first if position.delivered == 1 else None)
        if self._stateful or again is None or not position.delivered:
            self._say(
                "in use",
                "was cut while a pass over another loader, within one of its batches, goes on: this checkpoint cannot "
                "deliver that batch again, a resume goes on with the next one. A later one can, unless it is stateful",
            )
            return position
        return replace(position, delivered=position.delivered - 1, again=again)


def _same(one: Any, other: Any) -> bool:
    """Whether two captured states are equal."""
    return encode_value(one).to_bytes() == encode_value(other).to_bytes()
