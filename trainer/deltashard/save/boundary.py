"""What a Checkpointer knows, and how news changes it: the state of one trainer, owned by the training thread.

News comes from the session thread as events (an attachment, its loss, a commit, a failed save, a notice) and is only
applied here, at a step boundary or while the training thread waits: marks, handles and counters need no locks.

    save in flight --commit--> its marks drop, its handles are told, the covers of the next cut move on
                   --failed, or the sidecar restarted--> its marks merge back, handles are told, back off
    fenced         every boundary from now on raises
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from deltashard_proto.arena_layout import STEP
from deltashard_proto.cause import heard
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.interruption import leaves
from deltashard.attach.launcher import Launcher
from deltashard.attach.session import Attached, FencedOff, Link, Lost, Session
from deltashard.attach.term_signal import TermHandler
from deltashard.errors import UserError
from deltashard.loader.company import Company
from deltashard.loader.wrapped_loader import WrappedLoader
from deltashard.restore.content_hash import Contents
from deltashard.save.handle import Commit, Flight, SaveHandle, Stats
from deltashard.save.save_stream import CutFailed, StreamAhead
from deltashard.save.stance import Stance
from deltashard.save.step_order import OrderWatch
from deltashard.state.contract import contracts_of, refuse_model
from deltashard.state.fingerprint import fingerprint
from deltashard.state.origin import Origin
from deltashard.state.value import check_value, sources
from deltashard.tracking.tracking import Tracking

log = logging.getLogger("deltashard")

LONGEST_BACK_OFF_S = 60.0


def _settled(handle: SaveHandle, timeout_s: float | None) -> None:
    handle.settled.wait(timeout_s)


class Boundary:
    """State and events; `Resuming`, `Saving` and `Checkpointer` build on it, one subject each."""

    _session: Session
    _launcher: Launcher
    _term: TermHandler | None
    _line: Any
    url: str
    run: str

    def __init__(
        self,
        tracking: Tracking,
        state: dict[str, Any],
        *,
        fresh: bool,
        validate: Callable[[], bool] | None,
        content_hash: bool | None,
        on_event: Callable[[str, Mapping[str, Any]], None] | None,
    ) -> None:
        self._tracking = tracking
        tracking.report = self._tracking_event
        self._state = state
        self._origin = Origin(
            {table.fqn: table.param for table in tracking.tables} | dict(tracking.inventory.dense)
        )
        self._contracts = contracts_of(tracking.model, lambda: tracking.inventory)
        tracking.left_out = frozenset().union(*(each.left_out for each in self._contracts))
        self._sources = sources(
            self._state, refuse=lambda name, held: refuse_model(name, held, tracking.inventory)
        )
        self._sources += [each.source for each in self._contracts]
        self._fresh = fresh
        self._validate = validate
        self._on_event = on_event
        wanted = (
            content_hash
            if content_hash is not None
            else os.environ.get("DELTASHARD_CONTENT_HASH", "0") == "1"
        )
        self._contents = Contents() if wanted else None
        self._loaders: dict[str, WrappedLoader] = {}
        self._company = Company(lambda: self._step)
        self._pending_loaders: dict[str, Any] = {}
        self._pending_rng: Any = None
        self._fingerprint = fingerprint()
        self._order = OrderWatch(self._tracking, self._state)
        self._stance = Stance(self._tracking)
        for view in self._tracking.optimizers:
            check_value(view.capture(), where=f"optimizer {view.index}")

        self.stats = Stats()
        self._step = 0
        self._step_is_boundary = True
        self._attention = True
        self._awake = threading.Event()
        self._thread = threading.current_thread()
        self._opened = False
        self._attempt: int | None = None
        self._cut = 0
        self._flight: Flight | None = None
        self._ahead = StreamAhead(lambda: self._session.link)
        self._requests: list[SaveHandle] = []
        self._urgent: str | None = None
        self._since_commit: int | None = None
        self._since_baseline: int | None = None
        self._force_full = False
        self._faults = 0
        self._committed_step: int | None = None
        self._resumed_step: int | None = None
        self._not_before_s = 0.0
        self._back_off_s = 0.0
        self._said: set[str] = set()
        self._closed = False
        self._looked_for_forgotten = False
        self._policy = pb.Policy()
        self._epoch = 0

    def _alert(self) -> None:
        self._attention = True
        self._awake.set()

    def _refuse_closed(self, where: str) -> None:
        """Raises `UserError` after `close()`."""
        if self._closed:
            raise UserError(
                "this Checkpointer is closed", where=where, remedy="make a new one, it resumes with restore()"
            )

    def _apply_events(self) -> None:
        """What the session thread heard since the last time; raises `FencedError`."""
        events = self._session.events
        while events:
            event = events.popleft()
            if isinstance(event, Attached):
                self._adopt(event.link)
                self._emit("attached", session=event.link.session)
            elif isinstance(event, Lost):
                self._emit("sidecar_lost", why=event.why)
            elif isinstance(event, FencedOff):
                pass
            elif isinstance(event, pb.Notice):
                self._apply_notice(event)
            else:
                event()
        if self._session.fenced is not None:
            self._attention = True  # every later step() raises as well
            self._fail_requests(self._session.fenced)
            if self._flight is not None:
                self._flight.failed(self._session.fenced)
                self._flight = None
            raise self._session.fenced

    def _apply_notice(self, notice: pb.Notice) -> None:
        kind = notice.WhichOneof("kind")
        if kind == "committed":
            self._committed(Commit.of(notice.committed))
        elif kind == "save_failed":
            failed = notice.save_failed
            cause = heard(failed)
            self._flight_failed(failed.cut, cause, CutFailed(cause, failed.message))
        elif kind == "save_now":
            if notice.save_now.urgent:
                self._hurry(notice.save_now.reason or "urgent")
            else:
                handle = SaveHandle(reason=notice.save_now.reason, pin=None, metadata={}, waiter=_settled)
                self._requests.append(handle)
        elif kind == "policy":
            self._policy = notice.policy

    def _adopt(self, link: Link) -> None:
        """A new attachment: its line, its policy, and what it knows of the save in flight."""
        restarted = link.reply.epoch != self._epoch
        self._line, self._epoch, self._policy = link.line, link.reply.epoch, link.reply.policy
        self._line[STEP] = self._step
        self._ahead.open()
        if link.reply.HasField("last_commit"):
            self._committed(Commit.of(link.reply.last_commit))
        flight = self._flight
        if flight is not None and restarted:
            self._flight_failed(
                flight.cut, "gone", CutFailed("gone", "the sidecar was restarted during the save")
            )

    def _committed(self, commit: Commit) -> None:
        if commit.attempt != self._attempt:
            return
        if self._since_commit is not None and commit.seq <= self._since_commit:
            return
        self._tracking.committed(commit.cut, baseline=commit.baseline)
        self._since_commit = commit.seq
        if commit.baseline:
            self._since_baseline = commit.seq
        self._committed_step = commit.step
        self.stats.commits += 1
        self.stats.last_commit = commit
        self._said.clear()
        self._back_off_s = self._not_before_s = 0.0
        if self._flight is not None and self._flight.cut == commit.cut:
            flight, self._flight = self._flight, None
            for handle in flight.handles:
                handle.settle(commit=commit)
        self._emit("committed", commit=commit)

    def _fail_requests(self, error: Exception) -> None:
        """What was asked for and is not cut will not be."""
        requests, self._requests = self._requests, []
        for handle in requests:
            handle.settle(error=error)

    def _flight_failed(self, cut: int, cause: str, error: Exception) -> None:
        self._tracking.failed(cut)
        flight = self._flight
        if flight is None or flight.cut != cut:
            return
        self._flight = None
        flight.failed(error)
        self._save_failed(cause, error)

    def _save_failed(self, cause: str, error: BaseException) -> None:
        """Count it, say it once per cause until a save succeeds, and do not try again at every step."""
        self.stats.failures[cause] += 1
        if cause != "busy":
            self._back_off_s = min(max(0.5, 2 * self._back_off_s), LONGEST_BACK_OFF_S)
            self._not_before_s = time.monotonic() + self._back_off_s
        if cause not in self._said:
            self._said.add(cause)
            log.warning("a save failed at step %d, the next one covers its rows: %s", self._step, error)
        self._emit("save_failed", cause=cause, error=str(error), step=self._step)

    def _hurry(self, reason: str) -> None:
        """An urgent save is wanted: its first try does not wait for the back-off, later ones do."""
        self._urgent = reason
        self._not_before_s = self._back_off_s = 0.0

    def _skip(self, cause: str, *, quiet: bool = False) -> None:
        if quiet:
            return
        self.stats.skipped[cause] += 1
        self._emit("skipped", cause=cause, step=self._step)

    def _tracking_event(self, name: str, facts: Mapping[str, Any]) -> None:
        """From within an optimizer's step: told at the next boundary."""
        if name == "state_thrown_away":
            self.stats.state_thrown_away += 1
        self._session.post(lambda: self._emit(name, **facts))

    def _emit(self, name: str, **facts: Any) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(name, facts)
        except BaseException as error:
            if leaves(error):
                raise
            self.stats.event_errors += 1
            if self.stats.event_errors == 1:
                log.warning("on_event(%r, ...) raised, training goes on", name, exc_info=error)
