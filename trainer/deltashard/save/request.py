"""Requested saves whose snapshot is not taken yet, and the urgent request.

A request stays pending until its snapshot is taken; an exact save (see `handle`) only until its step is over.
"""

from __future__ import annotations

from deltashard.errors import SaveFailed
from deltashard.save.failure_tracker import SaveFailureTracker
from deltashard.save.handle import SaveHandle, split_compatible


class Requests:
    """Pending requests of a Checkpointer. `request_urgent` is safe in signal handlers, `add` on any thread."""

    def __init__(self, failure_tracker: SaveFailureTracker) -> None:
        self._failure_tracker = failure_tracker
        self._handles: list[SaveHandle] = []
        self.urgent: str | None = None
        """Reason of the urgent request, if any."""

    def __bool__(self) -> bool:
        return bool(self._handles)

    @property
    def reason(self) -> str:
        return self.urgent or (self._handles[0].reason if self._handles else "timer")

    @property
    def open(self) -> bool:
        """Whether a request is still unfinished."""
        return any(not handle.done for handle in self._handles)

    def add(self, handle: SaveHandle) -> None:
        self._handles.append(handle)

    def request_urgent(self, reason: str, *, fresh: bool = True) -> None:
        """Request an urgent save; `fresh`: its first try skips the back-off."""
        self.urgent = reason
        if fresh:
            self._failure_tracker.skip_backoff()

    def take(self) -> list[SaveHandle]:
        """Remove and return the requests that one snapshot can satisfy."""
        taken, self._handles = split_compatible(self._handles)
        return taken

    def requeue(self, handles: list[SaveHandle]) -> None:
        """Put back requests whose snapshot did not begin, as the oldest."""
        self._handles = handles + self._handles

    def record_blocked(self, why: str) -> None:
        """Record in the pending handles why no snapshot is taken now."""
        for handle in self._handles:
            handle.not_taken_reason = why

    def fail(self, error: Exception) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.finish(error=error)

    def drop(self, handle: SaveHandle, error: Exception) -> None:
        """Fail one request that cannot complete or whose outcome will remain unknown."""
        if handle in self._handles:
            self._handles.remove(handle)
        handle.finish(error=error)

    def bind_exact(self, step: int, *, whole: bool) -> None:
        """Bind unbound exact saves to `step` if it is `whole`; fail exact saves of earlier steps."""
        for handle in [handle for handle in self._handles if handle.exact]:
            if handle.requested_step is None:
                if whole:
                    handle.requested_step = step
            elif handle.requested_step != step:
                self.drop(
                    handle,
                    SaveFailed(
                        f"step {handle.requested_step} was not captured, because "
                        f"{handle.not_taken_reason or 'another save was'}, and training has continued: this pin "
                        "and metadata were not meant for a later step",
                        where=f"save({handle.reason!r})",
                        remedy="wait() for it before the next step, or save() again",
                    ),
                )

    @property
    def has_inexact(self) -> bool:
        return any(not handle.exact for handle in self._handles)

    def exact_at(self, step: int) -> bool:
        return any(handle.exact and handle.requested_step == step for handle in self._handles)

    def fail_exact(self, step: int, why: str) -> None:
        """Fail exact saves of `step`, which the ranks did not take together."""
        for handle in [each for each in self._handles if each.exact and each.requested_step == step]:
            self.drop(
                handle,
                SaveFailed(
                    f"step {step} was not captured, because {why}",
                    where=f"save({handle.reason!r})",
                    remedy="call save() with the same pin and metadata on every rank after the same step",
                ),
            )

    def fail_unbound(self, step: int) -> None:
        """Fail exact saves requested after the last `step()`, since their step will not come."""
        for handle in [h for h in self._handles if h.exact and h.requested_step != step]:
            self.drop(
                handle,
                SaveFailed(
                    "it was requested between two steps, and close() came before the second",
                    where=f"save({handle.reason!r})",
                    remedy="call save() right after step()",
                ),
            )
