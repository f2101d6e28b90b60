"""Seeks a pass to a restored position: its last batch is drawn again, compared and dropped.

| kind     | seek                                                  | if the batch differs                            |
|----------|-------------------------------------------------------|-------------------------------------------------|
| sampler  | the last batch's samples as before, then the rest     | warning                                         |
| counted  | the index sampler without n - 1 entries               | all n are read again, compared at batch 1 and n |
| replayed | from the beginning                                    | if batch 1 differs, no batch is dropped         |
| factory  | factory(epoch, n - 1)                                 | warning                                         |
| stateful | the newest state before batch n, then further batches | warning; after a rejected state, an older one   |

If workers were seen to draw random numbers, or if the last batch is among the first ones of each worker (which prove
nothing), all n batches are read again immediately, so that each worker's generators are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deltashard.errors import CheckpointMismatch
from deltashard.loader import generator
from deltashard.loader.fingerprint import fingerprint
from deltashard.loader.loader_access import LoaderAccess, indices_fingerprint
from deltashard.loader.message import describe_error
from deltashard.loader.position import LoaderPass, Position
from deltashard.state.value import decode_value

END = object()
"""Returned instead of a batch at the end of a loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeekResult:
    """The last batch, drawn again."""

    batch: Any
    key: str = ""
    """Kind of the message to report; empty: none."""
    error: str = ""
    restart: bool = False
    """The epoch restarts: `batch` is its first one and is not dropped."""


class Seek:
    """One seek of one loader."""

    def __init__(
        self,
        name: str,
        access: LoaderAccess,
        loader_pass: LoaderPass,
        position: Position,
        own: Mapping[str, Any],
        report: Callable[..., None],
    ) -> None:
        self._name = name
        self._report = report
        self._access = access
        self._loader_pass = loader_pass
        self._position = position
        self._own = own

    def run(self) -> SeekResult:
        """Seek past the last batch and return it; generators end where that batch left them."""
        position, access = self._position, self._access
        assert position.start is not None
        generator.apply(position.start, self._own)
        if position.unchecked:
            access.open(self._loader_pass, skip=position.delivered)
            if self._loader_pass.sampler is not None:
                self._loader_pass.sampler.advance()
            return SeekResult(batch=END)
        if access.kind == "stateful":
            return self._resume_from_state()
        if access.kind == "replayed":
            return self._replay()
        return self._skip()

    def _skip(self) -> SeekResult:
        position, access, loader_pass = self._position, self._access, self._loader_pass
        n = position.delivered
        access.workers_drew |= position.fetch_draws
        same_batches = position.base is None and position.indices is not None
        same_batches &= position.identity.get("batch_size") == access.identity().get("batch_size")
        readable = access.skip == "auto" and same_batches and not loader_pass.workers_were_running
        at_once = readable and access.workers and (access.workers_drew or n <= 2 * access.workers)
        if at_once and (batch := self._reread()) is not None:
            return SeekResult(batch=batch)
        access.open(loader_pass, skip=n - 1, last=position.last_samples)
        batch = self._draw(1)
        if self._equal(position.fingerprint, batch):
            return SeekResult(batch=batch)
        indices = indices_fingerprint(loader_pass.sampler, n)
        if loader_pass.sampler is None or (position.indices is not None and indices != position.indices):
            return SeekResult(batch=batch, key="order")
        kept = loader_pass.iterator, loader_pass.sampler
        if readable and not at_once:
            if (other := self._reread()) is not None:
                return SeekResult(batch=other)  # random draws while samples are read are reproduced, too
            loader_pass.iterator, loader_pass.sampler = kept
        return SeekResult(batch=batch, key="content")

    def _reread(self) -> Any | None:
        """Read all n batches from the beginning; returns the last one, or None if the first or the last one differs."""
        position = self._position
        assert position.start is not None
        self._report("read again", batch=position.delivered, epoch=position.epoch)
        generator.apply(position.start, self._own)
        self._access.open(self._loader_pass, kind="replayed")
        batch = self._draw(position.delivered, first=position.first)
        if batch is not END and self._equal(position.fingerprint, batch):
            return batch
        generator.apply(position.start, self._own)
        return None

    def _replay(self) -> SeekResult:
        position, loader_pass = self._position, self._loader_pass
        self._access.open(loader_pass)
        batch = self._draw(1) if position.delivered == 1 else next(loader_pass.iterator, END)
        if position.delivered > 1 and self._equal(position.first, batch):
            batch = self._draw(position.delivered - 1)
        elif not self._equal(position.first, batch):
            return SeekResult(batch=batch, key="stream", restart=True)
        if self._equal(position.fingerprint, batch):
            return SeekResult(batch=batch)
        return SeekResult(batch=batch, key="other order")

    def _resume_from_state(self) -> SeekResult:
        """Resume from the newest accepted state before the last batch; torchdata rejects some states.

        The state after that batch is the last resort, because then no batch can be compared.
        """
        position, loader_pass = self._position, self._loader_pass
        assert position.start is not None
        n, error = position.delivered, None
        anchors = [anchor for anchor in position.anchors if anchor[0] <= n]
        for at, state, generators in sorted(anchors, key=lambda a: (a[0] < n, a[0]), reverse=True):
            try:
                generator.apply(position.start, self._own)
                if state is not None and at == 0:  # saved at the end of the previous epoch
                    self._access.load_end_state(state, self._own)
                elif state is not None:
                    self._access.loader.load_state_dict(decode_value(state))
                # Skips what was sampled, with the generators at the beginning of the pass.
                self._access.open(loader_pass)
                generator.apply(generators or position.start, self._own)
                loader_pass.anchors = sorted(anchors, key=lambda a: a[0])
                batch = END if at == n else self._draw(n - at)
            except Exception as raised:  # noqa: BLE001 - library code; an older state may work
                error = raised
                continue
            if at == n or self._equal(position.fingerprint, batch):
                return SeekResult(batch=batch)
            return SeekResult(batch=batch, key="state")
        return self._restart_after_refusal(error)

    def _restart_after_refusal(self, error: Exception | None) -> SeekResult:
        position, loader_pass = self._position, self._loader_pass
        assert position.start is not None
        generator.apply(position.start, self._own)
        try:
            self._access.open(loader_pass)
            batch = next(loader_pass.iterator, END)
        except Exception as raised:
            raise CheckpointMismatch(
                f"its load_state_dict() rejected its saved state ({describe_error(error)}), and epoch {position.epoch} "
                "cannot be restarted",
                where=f"loader {self._name!r}",
                remedy="keep the loader unchanged until the epoch ends",
            ) from raised
        return SeekResult(batch=batch, key="refused", error=describe_error(error), restart=True)

    def _draw(self, count: int, *, first: str | None = None) -> Any:
        """Draw `count` batches; returns the last one, or END if there is none or if the first one is not `first`."""
        loader_pass, before = self._loader_pass, self._position.before
        batch: Any = END
        for k in range(count):
            if k == count - 1 and before is not None:
                if loader_pass.sampler is not None:
                    loader_pass.sampler.advance()
                generator.apply(before, self._own)
            batch = next(loader_pass.iterator, END)
            if batch is END or (k == 0 and not self._equal(first, batch)):
                return END
        return batch

    @staticmethod
    def _equal(saved: str | None, batch: Any) -> bool:
        return batch is not END and (saved is None or fingerprint(batch) == saved)
