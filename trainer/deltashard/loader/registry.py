"""The wrapped loaders of one Checkpointer: state shared between loaders, snapshots and reports.

The first seek after a restore ends by restoring the global generators of the snapshot. Loaders that seek later (the
second one of a `zip`, an inner loop) leave the global generators unchanged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from deltashard_checkpoint.format.typed_tree import UnsupportedValue

from deltashard.errors import CheckpointMismatch, StateError, UserError
from deltashard.loader.generator import same
from deltashard.loader.loader_access import Skip
from deltashard.loader.message import LASTING, MESSAGES
from deltashard.loader.position import LoaderPass
from deltashard.loader.wrapped_loader import WrappedLoader
from deltashard.state.rng import capture_globals
from deltashard.state.value import ValueSource, decode_value, encode_value

log = logging.getLogger("deltashard")

OnChange = Literal["restart", "continue", "refuse"]
"""Action for an epoch whose loader has changed."""

_MAX_STATE_BYTES = 1 << 20


class LoaderRegistry:
    """Loaders by name. Used on the training thread, except for deliveries of a loader that another thread iterates."""

    def __init__(
        self,
        clock: Callable[[], int],
        *,
        state: Mapping[str, Any] | None = None,
        sources: Sequence[ValueSource] = (),
    ) -> None:
        """`clock` returns the number of `step()` calls so far; `state` and `sources` are the entries of `state=`."""
        self.clock = clock
        self.lock = threading.Lock()
        """Held where a delivery and a snapshot may run concurrently."""
        self.state = dict(state or {})
        self._sources = [each for each in sources if each.name in self.state]
        self.loaders: dict[str, WrappedLoader] = {}
        self.pending_positions: dict[str, Any] = {}
        self.events = 0
        """Number of passes begun plus batches delivered."""
        self.snapshot_rng: Mapping[str, Any] | None = None
        self.snapshot_step = -1
        self.rng_applied_by: str | None = None
        self._on_change: OnChange = "restart"
        # The step boundary: global generators when a batch was first requested after step `requested_at`.
        self.requested_at = -1
        self._boundary: Mapping[str, Any] | None = None
        self._delivered_at = clock()
        self._exhausted_loaders: dict[str, int] = {}
        """Exhausted interleaved loaders, by name: the step after which the other loader delivered a batch."""
        self._resumed: dict[str, Any] = {}
        self.exhausted_at = -1
        """The step after which a pass was last exhausted."""
        self.iterations = 0
        """Iterators created, plus restored passes found exhausted."""
        self.ended_iteration = 0
        """`iterations` at the last restored pass that was found exhausted."""
        self._reported: dict[tuple[str, str], str] = {}
        self._notes: list[str] = []

    @property
    def pass_ended(self) -> bool:
        """Whether a pass was exhausted since the last `step()`, so that current calls belong to the end of an epoch."""
        return self.exhausted_at == self.clock()

    @property
    def batch_requested(self) -> bool:
        return any(loader.batch_requested for loader in self.loaders.values())

    def wrap(
        self,
        loader: Any,
        *,
        name: str = "loader",
        skip: Skip = "auto",
        pipelined: bool = False,
        shared: bool = False,
        strict: bool = False,
    ) -> WrappedLoader:
        old = self.loaders.get(name)
        unused = old is not None and old.newest is None
        if unused and name not in self._resumed:
            raise UserError(
                f"a loader {name!r} is wrapped already", where="wrap()", remedy="give it another name="
            )
        if isinstance(loader, WrappedLoader):
            raise UserError(
                "this loader is wrapped already: its position would be resumed twice",
                where="wrap()",
                remedy="wrap the loader itself, once",
            )
        wrapped = WrappedLoader(
            self, loader, name=name, skip=skip, pipelined=pipelined, shared=shared, strict=strict
        )
        if old is not None:
            wrapped.continue_from(old)
        self.loaders[name] = wrapped
        if name in self.pending_positions:
            self._resumed[name] = self.pending_positions.pop(name)
        if name in self._resumed and (old is None or unused):
            # A program that creates a loader per epoch wraps those of earlier epochs first, so none is reported yet.
            wrapped.resume(self._resumed[name], self._on_change, at_first_pass=True)
        return wrapped

    def stepped(self) -> None:
        if not self.loaders:
            return
        if self.clock() > self._delivered_at + 1:
            self._check_steps_without_batch()
        if self._exhausted_loaders:
            self._check_exhausted_loaders()

    def record_request(self, *, draws: bool) -> None:
        """Record a request for a batch, which ends the step boundary; `draws`: fetching it may move generators."""
        now = self.clock()
        if self.requested_at != now:
            self.requested_at = now
            self._boundary = None
        if draws and self._boundary is None:
            self._boundary = capture_globals()

    def delivered(self, loader_pass: LoaderPass) -> None:
        self.stepped()
        self.events += 1
        self._delivered_at = self.clock()
        for name, loader in self.loaders.items():
            if (
                not loader.open
                and loader.newest is not loader_pass
                and loader.nesting.was_interleaved_with(loader_pass)
            ):
                self._exhausted_loaders[name] = self._delivered_at

    def capture(self) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return (global generators, positions by name) of the last step boundary, as plain data."""
        now = self.clock()
        with self.lock:
            self.stepped()
            positions = {name: loader.position().tree() for name, loader in self.loaders.items()}
        # An exhausted pass delivered no batch, so the current generators are those of the boundary.
        rng: Mapping[str, Any] | None = self._boundary if self.batch_requested else None
        if self.snapshot_rng is not None and now == self.snapshot_step:
            rng = self.snapshot_rng
        return rng or capture_globals(), positions | self.pending_positions

    def _check_steps_without_batch(self) -> None:
        """Report a step without a new batch, except the first one after a restore, which may end an epoch."""
        now = self.clock()
        used = [loader for loader in self.loaders.values() if loader.newest is not None]
        if not used or any(loader.has_prefetched(now) for loader in used):
            return
        self._delivered_at = now
        self.report(used[0].name, "no batch")

    def _check_exhausted_loaders(self) -> None:
        now = self.clock()
        for name, step in list(self._exhausted_loaders.items()):
            if now > step:
                del self._exhausted_loaders[name]
                if not self.loaders[name].open:
                    self.report(name, "no batch")

    def mismatches(self, positions: Mapping[str, Any]) -> dict[str, str]:
        """Return {name: reason} for wrapped loaders that differ from the saved ones."""
        found = {
            name: loader.mismatch(positions[name])
            for name, loader in self.loaders.items()
            if name in positions
        }
        return {name: why for name, why in found.items() if why}

    def resume(
        self,
        positions: Mapping[str, Any],
        rng: Mapping[str, Any] | None,
        *,
        step: int,
        on_change: OnChange = "restart",
    ) -> list[str]:
        """Apply restored positions now, or when a loader of that name is wrapped; returns notes for `Restored`.

        Args:
            positions: Saved positions by name.
            rng: Global generators of the snapshot; the caller restores them.
            step: Step of the snapshot.
            on_change: See `Checkpointer.restore`.
        """
        self.snapshot_rng, self.snapshot_step, self.rng_applied_by = rng, step, None
        self._delivered_at = step
        self._on_change = on_change
        self.requested_at = -1
        self._notes = []
        for name, tree in positions.items():
            for key, text in tree.get("reported", {}).items():
                self._reported[name, key] = text
                self._notes.append(f"reported earlier in this run: {text}")
            if name in self.loaders:
                self._resumed[name] = tree
                self.loaders[name].resume(tree, on_change)
            else:
                self.pending_positions[name] = tree
        notes, self._notes = self._notes, []
        return notes

    def capture_state(self) -> list[tuple[ValueSource, bytes]]:
        """Return the current entries of `state=` up to 1 MiB; larger ones are not part of a loader."""
        held = []
        for source in self._sources:
            if any(source.subject is loader.loader for loader in self.loaders.values()):
                continue
            try:
                tree = encode_value(source.get())
            except (StateError, UnsupportedValue):
                continue  # the next snapshot reports it
            if tree.total_bytes <= _MAX_STATE_BYTES:
                held.append((source, tree.to_bytes()))
        return held

    @staticmethod
    def restore_state(held: list[tuple[ValueSource, bytes]]) -> None:
        for source, data in held:
            if encode_value(source.get()).to_bytes() != data:
                source.set(decode_value(data))

    def check_draws(self, name: str, entry: Mapping[str, Any]) -> None:
        """Report draws since the restore; `entry`: global generators when the first batch was requested."""
        first = (
            self.snapshot_rng is not None
            and self.clock() == self.snapshot_step
            and self.rng_applied_by is None
        )
        if first and not same(entry, self.snapshot_rng):
            self.report(name, "drawn")

    def is_in_state(self, loader: Any) -> bool:
        """Whether the loader or its dataset is an entry of `state=`, which then holds its position."""
        return any(
            value is loader or value is getattr(loader, "dataset", self) for value in self.state.values()
        )

    def report(self, name: str, kind: str, /, *, strict: bool = False, **facts: object) -> None:
        """Report a message of `MESSAGES`; with `strict`, raises `CheckpointMismatch` for messages marked strict."""
        message = MESSAGES[kind]
        what = message.what.format(**facts)
        if strict and message.strict:
            raise CheckpointMismatch(what, where=f"loader {name!r}", remedy=message.remedy)
        text = f"loader {name!r}: {what}" + (f". {message.remedy}" if message.remedy else "")
        if message.level != "warning":
            log.info("%s", text)
            if message.level == "note":
                self._notes.append(text)
        elif (name, kind) not in self._reported:
            self._reported[name, kind] = text
            log.warning("%s", text)

    def lasting_reports(self, name: str) -> dict[str, str]:
        """Return the reports about one loader that hold for the whole run."""
        return {
            key: text for (owner, key), text in self._reported.items() if owner == name and key in LASTING
        }

    def open_others(self, loader: WrappedLoader) -> list[WrappedLoader]:
        return [other for other in self.loaders.values() if other is not loader and other.open]

    def open_passes(self, loader: WrappedLoader) -> list[LoaderPass]:
        return [each.newest for each in self.open_others(loader) if each.newest is not None]

    def close(self) -> None:
        self.loaders.clear()
