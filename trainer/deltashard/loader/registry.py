"""The wrapped loaders of one Checkpointer: what they must know of one another, of the cut, and what was reported.

The global generators of a restored cut are put back at the end of the first seek after the restore. A loader that seeks
later (the second one of a `zip`, an inner loop) leaves no trace in them.
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
"""What becomes of an epoch whose loader is another one now."""

_MAX_STATE_BYTES = 1 << 20
"""Larger entries of `state=` (a model's averages) belong to no loader."""


class LoaderRegistry:
    """Loaders by name; on the training thread, but for the deliveries of one that another thread iterates."""

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
        """Held where a delivery and a cut may meet."""
        self.state = dict(state or {})
        self._sources = [each for each in sources if each.name in self.state]
        self.loaders: dict[str, WrappedLoader] = {}
        self.pending_positions: dict[str, Any] = {}
        """Restored positions of loaders that were not wrapped yet."""
        self.events = 0
        """Passes begun and batches delivered."""
        self.snapshot_rng: Mapping[str, Any] | None = None
        """Global generators of the restored cut."""
        self.snapshot_step = -1
        self.rng_applied_by: str | None = None
        self._on_change: OnChange = "restart"
        # The step boundary: global generators when a batch was first asked for after step `requested_at`.
        self.requested_at = -1
        self._boundary: Mapping[str, Any] | None = None
        self._delivered_at = clock()
        self._exhausted_loaders: dict[str, int] = {}
        """Loaders at their end whose turn it was, by name: the step after which a batch of the other one came."""
        self._resumed: dict[str, Any] = {}
        """Restored positions that a loader was given."""
        self.exhausted_at = -1
        """The step after which a pass was found at its end last."""
        self.iterations = 0
        """Iterators asked for, and restored passes found at their end."""
        self.ended_iteration = 0
        """Of the last restored pass that was found at its end."""
        self._reported: dict[tuple[str, str], str] = {}
        self._notes: list[str] = []

    @property
    def pass_ended(self) -> bool:
        """Whether a pass was found at its end since the last `step()`: what follows belongs to the end of an epoch."""
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
            # A program that makes its loader for each epoch wraps those of earlier epochs first: none is reported yet.
            wrapped.resume(self._resumed[name], self._on_change, at_first_pass=True)
        return wrapped

    # Cuts

    def stepped(self) -> None:
        if not self.loaders:
            return
        if self.clock() > self._delivered_at + 1:
            self._check_steps_without_batch()
        if self._exhausted_loaders:
            self._check_exhausted_loaders()

    def record_request(self, *, draws: bool) -> None:
        """A batch is asked for, after which generators may have moved: the step boundary ends here."""
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
        """(global generators, positions by name) of the last step boundary, as plain data."""
        now = self.clock()
        with self.lock:
            self.stepped()
            positions = {name: loader.position().tree() for name, loader in self.loaders.items()}
        # A pass that was only found at its end took no batch: the generators of now are those of the boundary.
        rng: Mapping[str, Any] | None = self._boundary if self.batch_requested else None
        if self.snapshot_rng is not None and now == self.snapshot_step:
            rng = self.snapshot_rng
        return rng or capture_globals(), positions | self.pending_positions

    def _check_steps_without_batch(self) -> None:
        """Each step needs a batch since the last one, but for the first one after a restore, which may end an epoch."""
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

    # Restores

    def mismatches(self, positions: Mapping[str, Any]) -> dict[str, str]:
        """Of the wrapped ones, those that are other loaders than the saved ones, by name, and how."""
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
        """Restored positions by name: taken now, or when such a loader is wrapped. Returns notes for `Restored`.

        Args:
            positions: by name, as they were saved.
            rng: the global generators of the cut; the caller puts them back.
            step: of the cut.
            on_change: see `Checkpointer.restore`.
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
        """Entries of `state=` up to 1 MiB, as they are now."""
        held = []
        for source in self._sources:
            if any(source.subject is loader.loader for loader in self.loaders.values()):
                continue
            try:
                tree = encode_value(source.get())
            except (StateError, UnsupportedValue):
                continue  # the next cut reports it
            if tree.total_bytes <= _MAX_STATE_BYTES:
                held.append((source, tree.to_bytes()))
        return held

    @staticmethod
    def restore_state(held: list[tuple[ValueSource, bytes]]) -> None:
        """Put back those of `capture_state` that moved since."""
        for source, data in held:
            if encode_value(source.get()).to_bytes() != data:
                source.set(decode_value(data))

    def check_draws(self, name: str, entry: Mapping[str, Any]) -> None:
        """`entry`: global generators when the first batch after the restore was asked for."""
        first = (
            self.snapshot_rng is not None
            and self.clock() == self.snapshot_step
            and self.rng_applied_by is None
        )
        if first and not same(entry, self.snapshot_rng):
            self.report(name, "drawn")

    def is_in_state(self, loader: Any) -> bool:
        """Whether the loader's data, or the loader itself, is an entry of `state=`, which says where it stands."""
        return any(
            value is loader or value is getattr(loader, "dataset", self) for value in self.state.values()
        )

    # Reports

    def report(self, name: str, kind: str, /, *, strict: bool = False, **facts: object) -> None:
        """See `message`; raises `CheckpointMismatch` for what is an error with `strict`."""
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
        """What was reported of one loader and holds for the whole run."""
        return {
            key: text for (owner, key), text in self._reported.items() if owner == name and key in LASTING
        }

    def open_others(self, loader: WrappedLoader) -> list[WrappedLoader]:
        return [other for other in self.loaders.values() if other is not loader and other.open]

    def open_passes(self, loader: WrappedLoader) -> list[LoaderPass]:
        return [each.newest for each in self.open_others(loader) if each.newest is not None]

    def close(self) -> None:
        """No position is asked for any more: each loader is its program's alone, and ends with it."""
        self.loaders.clear()
