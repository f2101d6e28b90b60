"""Saves that were asked for and are not cut yet, and the urgent wish.

What was asked for stays asked for until it is cut, but an exact save (see `handle`) only as long as its step lasts.
"""

from __future__ import annotations

from deltashard.errors import SaveFailed
from deltashard.save.failure_tracker import SaveFailureTracker
from deltashard.save.handle import SaveHandle, split_compatible


class Requests:
    """Of one Checkpointer; `request_urgent` may be called from a signal handler or any thread, `add` from any thread."""

    def __init__(self, failure_tracker: SaveFailureTracker) -> None:
        self._failure_tracker = failure_tracker
        self._handles: list[SaveHandle] = []
        self.urgent: str | None = None
        """Why a save is wanted at once; None: none is."""

    def __bool__(self) -> bool:
        return bool(self._handles)

    @property
    def reason(self) -> str:
        return self.urgent or (self._handles[0].reason if self._handles else "timer")

    @property
    def open(self) -> bool:
        """Whether one of them was not settled otherwise."""
        return any(not handle.done for handle in self._handles)

    def add(self, handle: SaveHandle) -> None:
        self._handles.append(handle)

    def request_urgent(self, reason: str, *, fresh: bool = True) -> None:
        """An urgent save is wanted; `fresh`: its first try does not wait for the back-off."""
        self.urgent = reason
        if fresh:
            self._failure_tracker.skip_backoff()

    def take(self) -> list[SaveHandle]:
        """Those that one cut can satisfy, which are not asked for any more."""
        taken, self._handles = split_compatible(self._handles)
        return taken

    def requeue(self, handles: list[SaveHandle]) -> None:
        """Their cut was not begun: they are the oldest again."""
        self._handles = handles + self._handles

    def record_blocked(self, why: str) -> None:
        """No cut now: remember why for who asked."""
        for handle in self._handles:
            handle.not_taken_reason = why

    def fail(self, error: Exception) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.finish(error=error)

    def drop(self, handle: SaveHandle, error: Exception) -> None:
        """This one will never be, or nobody will ever tell."""
        if handle in self._handles:
            self._handles.remove(handle)
        handle.finish(error=error)

    def bind_exact(self, step: int, *, whole: bool) -> None:
        """`step` is what exact saves of before mean, if it is `whole`; those of an older one are lost, by name."""
        for handle in [handle for handle in self._handles if handle.exact]:
            if handle.requested_step is None:
                if whole:
                    handle.requested_step = step
            elif handle.requested_step != step:
                self.drop(
                    handle,
                    SaveFailed(
                        f"step {handle.requested_step} was not cut, because {handle.not_taken_reason or 'another save was'}, and "
                        "training has gone on: this pin and metadata were not meant for a later step",
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
        """Exact saves that mean `step`, which the ranks do not cut together."""
        for handle in [each for each in self._handles if each.exact and each.requested_step == step]:
            self.drop(
                handle,
                SaveFailed(
                    f"step {step} was not cut, because {why}",
                    where=f"save({handle.reason!r})",
                    remedy="call save() with the same pin and metadata on every rank after the same step",
                ),
            )

    def fail_unbound(self, step: int) -> None:
        """Exact saves that were asked for after the last `step()`: no step they could mean will come."""
        for handle in [h for h in self._handles if h.exact and h.requested_step != step]:
            self.drop(
                handle,
                SaveFailed(
                    "it was asked for between two steps, and close() came before the second",
                    where=f"save({handle.reason!r})",
                    remedy="save() right after step()",
                ),
            )
