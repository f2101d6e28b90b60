"""Outcomes of snapshots: applies the session's event queue to marks, handles, counters and state.

    attached    adopts the link; a save in flight fails if the sidecar was restarted since
    committed   clears the marks, finishes the handles and makes the commit the next base; repeats have no effect
    failed      sets the marks again, fails the handles and starts the back-off; a later report of a commit still counts
    save now    requests a save, as `save()` does

Events are applied on the training thread, at a boundary or while it waits, so that marks, handles and counters need no
locks. Once the attempt is fenced, every call of `apply` raises.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from deltashard_checkpoint.deciding.precision import SAFE_BITS, match_tables, parse_encodings
from deltashard_checkpoint.vocabulary import BITS_RULES, bits_of
from deltashard_proto.cause import parse_cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.attachment import RunMember
from deltashard.attach.interruption import must_propagate
from deltashard.attach.lifecycle import AttachEvent, AttachState
from deltashard.attach.session import Attached, FencedOff, Link, Lost
from deltashard.errors import SaveFailed
from deltashard.program import TrainingLoop
from deltashard.save.comparison import Comparison
from deltashard.save.handle import Commit, InFlightSave, SaveHandle
from deltashard.save.lifecycle import SnapshotEvent, SnapshotPhase
from deltashard.save.precopy_scheduler import PrecopyScheduler
from deltashard.save.records import SaveRecords
from deltashard.snapshot.precopy import TablePrecopy
from deltashard.snapshot.save_stream import SnapshotFailed
from deltashard.tracking.marks import Mode
from deltashard.tracking.snapshot_base import SnapshotBase
from deltashard.tracking.tracking import TrackedTable

log = logging.getLogger("deltashard")


class SnapshotOutcomes:
    """Outcomes of the snapshots of a Checkpointer; used on the training thread only."""

    def __init__(
        self,
        loop: TrainingLoop,
        member: RunMember,
        records: SaveRecords,
        *,
        base: SnapshotBase,
        precopy: PrecopyScheduler,
    ) -> None:
        self.precopy = precopy
        self._clock = loop.clock
        self._program = loop.program
        self._tracking = loop.program.tracking
        self._attachment = member.attachment
        self._session = member.attachment.session
        self._attempt = member.attempt
        self._listener = member.listener
        self._requests = records.requests
        self._failure_tracker = records.failure_tracker
        self._stats = records.stats
        self._watchdog = records.watchdog
        self._state = records.state
        self._base = base
        self.comparison = Comparison(precopy.submit, on_found=lambda: self._session.post(self._note_snapshot))
        self._last: InFlightSave | None = None
        """Newest snapshot, which the state describes."""
        self._inconsistent: list[InFlightSave] = []
        """Inconsistent snapshots that no later commit has named yet."""
        self._step_saves: list[InFlightSave] = []
        """Snapshots of the most recent snapshot step, whatever their outcome, newest last."""
        self._save_calls = 0, 0
        """(step, number of `save()` calls at that step)."""
        self.committed_step: int | None = None
        """Step of this attempt's newest commit."""
        self._declined: int | None = None
        """Snapshot that this rank has declined but not yet reported to the sidecar."""
        self._lost_snapshot: int | None = None
        """Snapshot lost with its sidecar, which cannot have informed the other ranks."""

    @property
    def in_flight(self) -> bool:
        return self._state.now is SnapshotPhase.STAGED

    @property
    def copying(self) -> InFlightSave | None:
        """The snapshot being copied, if any; only getters of `state=` and signal handlers run meanwhile."""
        return self._last if self._state.now is SnapshotPhase.COPYING else None

    @property
    def _in_flight_save(self) -> InFlightSave | None:
        return self._last if self.in_flight else None

    def apply(self) -> None:
        """Apply the events received by the session thread; raises `FencedError`."""
        while (event := self._session.next_event()) is not None:
            if isinstance(event, Attached):
                after = self._attempt.transition(AttachEvent.ATTACH)
                # A snapshot may have described its tables again, which replaced this link by one that is already
                # adopted.
                if after is not AttachState.CLOSED and event.link is self._session.link:
                    self.adopt(event.link)
                self._listener.emit("attached", session=event.link.session)
            elif isinstance(event, Lost):
                self._attempt.transition(AttachEvent.LOSE)
                self._listener.emit("sidecar_lost", why=event.why)
            elif isinstance(event, FencedOff):
                self._attempt.transition(AttachEvent.FENCE)
            elif isinstance(event, pb.Notice):
                self._apply_notice(event)
            else:
                event()
        if self._session.fenced is not None:
            self._clock.request_boundary()  # every later step() raises as well
            self._requests.fail(self._session.fenced)
            self._fail_in_flight(self._session.fenced)
            raise self._session.fenced

    def _apply_notice(self, notice: pb.Notice) -> None:
        kind = notice.WhichOneof("kind")
        if kind == "committed":
            self._committed(Commit.of(notice.committed))
        elif kind == "save_failed":
            failed = notice.save_failed
            self.failed(failed.snapshot_id, SnapshotFailed(parse_cause(failed.cause), failed.message))
        elif kind == "save_now":
            if notice.save_now.urgent:
                self._requests.request_urgent(notice.save_now.reason or "urgent")
            else:
                self._requests.add(SaveHandle(reason=notice.save_now.reason, pin=None, metadata={}))
        elif kind == "policy":
            self._attachment.set_policy(notice.policy)

    def opened(self) -> None:
        self._watchdog.begin(restored=self._attempt.resumed_step is not None)
        self.precopy.prepare(self._attachment.link)

    def adopt(self, link: Link) -> None:
        """Adopt a new link, including what its reply reports about the save in flight."""
        self.precopy.drop("sidecar disconnected")
        restarted = self._attachment.adopt(link)
        self.precopy.prepare(link)
        if link.reply.HasField("last_commit"):
            self._committed(Commit.of(link.reply.last_commit))
        if restarted and (flight := self._in_flight_save) is not None:
            self.failed(
                flight.snapshot_id, SnapshotFailed("gone", "the sidecar was restarted during the save")
            )
        lost, self._lost_snapshot = self._lost_snapshot, None
        if restarted and lost is not None and lost != link.reply.last_commit.snapshot_id:
            self.decline_later(lost)

    def drain(self, until_s: float) -> bool:
        """Wait until the save in flight ends or `until_s` (monotonic); return whether it ended."""
        while self.in_flight:
            self._clock.clear_wake()
            self.apply()
            remaining_s = until_s - time.monotonic()
            if not self.in_flight:
                break
            if remaining_s <= 0:
                return False
            self._clock.pause(min(remaining_s, 0.2))
        return True

    def begin(self, flight: InFlightSave) -> None:
        """Record the start of a snapshot, before rows are copied."""
        self._add_step_save(flight)
        self._last = flight
        self._state.transition(SnapshotEvent.TAKE)

    def staged(
        self,
        flight: InFlightSave,
        mode: Mode,
        *,
        full: bool,
        tables: Sequence[tuple[TrackedTable, TablePrecopy]],
    ) -> None:
        """Record that the rows of `mode` were handed over; `full`: all rows; `tables` had rows copied ahead."""
        self._state.transition(SnapshotEvent.SEAL)
        self._requests.urgent = None
        self._watchdog.taken()
        self._tracking.snapshot_taken(flight.snapshot_id, mode, full=full)
        if self.precopy.enabled:
            self._tracking.audit_sample(self.precopy.submit_check)
            self.comparison.begin(flight, tables)
        self._base.snapshot_taken()

    def not_taken(self, flight: InFlightSave, error: BaseException, *, again: bool) -> None:
        """Record that copying failed; `again`: put the requests back into the queue."""
        if self.copying is not None:  # None if the interruption came earlier
            self._state.transition(SnapshotEvent.FAIL)
        self.precopy.drop("no snapshot")
        if again:
            self._requests.requeue(flight.handles)
        else:
            flight.failed(error if isinstance(error, Exception) else SaveFailed("interrupted", where="save"))

    def _committed(self, commit: Commit) -> None:
        if commit.attempt != self._attempt.number or not self._base.is_new_commit(commit.seq):
            return
        self._tracking.committed(commit.snapshot_id, baseline=commit.baseline)
        self._base.committed(commit.seq, baseline=commit.baseline)
        self.committed_step = commit.step
        self._watchdog.committed(commit.step)
        self._inconsistent = [each for each in self._inconsistent if each.snapshot_id >= commit.snapshot_id]
        self._stats.commits += 1
        self._stats.last_commit = commit
        self._failure_tracker.committed()
        if (flight := self._in_flight_save) is not None and flight.snapshot_id == commit.snapshot_id:
            self._state.transition(SnapshotEvent.COMMIT)
            flight.committed(commit)
        self._listener.emit("committed", commit=commit)

    def failed(self, snapshot_id: int, failure: SnapshotFailed) -> None:
        self._tracking.failed(snapshot_id)
        if (flight := self._in_flight_save) is None or flight.snapshot_id != snapshot_id:
            return
        if failure.cause == "gone":
            self._lost_snapshot = snapshot_id
        self._fail_in_flight(failure)
        self._failure_tracker.failed(failure.cause, failure)

    def _fail_in_flight(self, error: Exception) -> None:
        if (flight := self._in_flight_save) is not None:
            self._state.transition(SnapshotEvent.FAIL)
            flight.failed(error)

    def close(self, *, until_s: float) -> None:
        """Fail all requests and the save in flight; report an inconsistent last snapshot by `until_s`."""
        self._requests.fail(SaveFailed("the checkpointer was closed", where="save"))
        self.precopy.close()
        self._fail_in_flight(SaveFailed("not durable when the checkpointer was closed", where="save"))
        self.report_inconsistent(until_s, last=True)

    def _add_step_save(self, flight: InFlightSave) -> None:
        self._step_saves = [each for each in self._step_saves if each.step == flight.step] + [flight]

    @property
    def inconsistent(self) -> list[str]:
        """Commits to name in the metadata of the next commit."""
        return [f"seq:{each.commit.seq}" for each in self._inconsistent if each.commit is not None]

    def check_snapshot(self, until_s: float = math.inf) -> bool:
        """Return whether the last snapshot is inconsistent, by `until_s` (monotonic), and request a full save if so."""
        found = self.report_inconsistent(until_s)
        if found:
            self._requests.add(SaveHandle(reason="inconsistent", pin=None, metadata={}))
            self._clock.request_boundary()
        return found

    def _note_snapshot(self) -> None:
        self.check_snapshot()

    def report_inconsistent(self, until_s: float = math.inf, *, last: bool = False) -> bool:
        """Report an inconsistent last snapshot; the next one takes all rows. `last`: no snapshot follows."""
        found = self.comparison.result(until_s)
        if found is None:
            return False
        step = found.snapshot.step
        self._inconsistent.append(found.snapshot)
        self.count_faults(found.count)
        log.error(
            "the checkpoint of step %d may not be restored exactly: %s. %s",
            step,
            found,
            "No save follows it: restore the one before it"
            if last
            else "The next save is a full one, and names this checkpoint in its metadata; restore that one instead",
        )
        tables = {fault.table: fault.rows for fault in found.faults}
        self._listener.emit("snapshot_inconsistent", step=step, tables=tables, why=str(found))
        return True

    def count_faults(self, faults: int) -> None:
        """Count faults of an audit or a comparison; any fault makes the next snapshot a full one."""
        self._stats.audit_faults += faults
        if faults:
            self._base.ask_full(faults=faults)

    @property
    def coarse(self) -> InFlightSave | None:
        """The durable save of the current step if chosen bits left a table with fewer than 8 bits."""
        last = self._step_saves[-1] if self._step_saves else None
        if last is None or last.commit is None or last.step != self._clock.step or last.reason == "close":
            return None
        policy, begun = self._attachment.policy, last.begun
        if begun is None or policy.bits_goal not in BITS_RULES:
            return None
        tables = [table.fqn for table in self._program.schemas]
        own, _ = match_tables(parse_encodings(policy.tables, where="tables"), tables)
        chosen = (begun.encodings.get(table, begun.encoding) for table in tables if table not in own)
        return last if any((bits_of(encoding) or 0) < SAFE_BITS for encoding in chosen) else None

    def join(self, handle: SaveHandle) -> bool:
        """Let `handle` share the snapshot that all ranks took at the current step; return False if there is none.

        A rank may take that snapshot within `step()` and only then call `save()` as the others did. Another snapshot
        would
        wait for ranks that continue training. Each failed snapshot answers one call on every rank, whether it failed
        before
        or after the call.
        """
        step = self._clock.step
        self._save_calls = step, 1 + (self._save_calls[1] if self._save_calls[0] == step else 0)
        here = [flight for flight in self._step_saves if flight.step == step]
        failed = sum(flight.error is not None for flight in here)
        if not here or (here[-1].error is not None and self._save_calls[1] > failed):
            return False
        here[-1].join(handle)
        return True

    def decline_later(self, snapshot_id: int) -> None:
        """Decline snapshot `snapshot_id` of all ranks; `send_decline` reports it to the sidecar."""
        self._declined = snapshot_id
        if all(flight.snapshot_id != snapshot_id for flight in self._step_saves):
            flight = InFlightSave(snapshot_id=snapshot_id, step=self._clock.step, reason="none")
            self._add_step_save(flight)
            flight.failed(SaveFailed("this rank could not take part in it", where="save"))

    def send_decline(self) -> None:
        """Report a declined snapshot to the sidecar, so that no other rank waits for this one."""
        link, snapshot_id = self._attachment.link, self._declined
        if snapshot_id is None or link is None or self.in_flight:
            return
        self._declined = None
        self._attempt.begin_snapshot(snapshot_id)
        try:
            stream = self.precopy.streams.take(link)
            begin = pb.SaveRequest.Begin(
                session=link.session, step=self._clock.step, snapshot_id=snapshot_id, reason="none"
            )
            stream.begin(begin, lambda _failure: None)
            stream.abort("no part")
        except Exception as error:
            if must_propagate(error):
                raise
            log.debug("snapshot %d could not be declined: %s", snapshot_id, error)
