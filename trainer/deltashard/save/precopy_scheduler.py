"""Decides when rows are copied ahead of the next snapshot (`snapshot.precopy`), and measures the result.

    due by time      the snapshot waits for the copy, at most MAX_PRECOPY_S, and takes the step at which it ends
    due at a step    the copy begins ahead of that step by the duration of the last copy
    ordered          as above; the proposed step is later by the duration of the copy
    requested        `save()` and urgent saves are taken at once and use what was copied by then

Correctness does not depend on it: a snapshot without a copy ahead copies all rows while training waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.attachment import RunMember
from deltashard.attach.pinned import pin
from deltashard.attach.session import Link
from deltashard.program import Program, TrainingLoop
from deltashard.save.lifecycle import SnapshotEvent, SnapshotPhase
from deltashard.save.records import SaveRecords
from deltashard.snapshot import memory
from deltashard.snapshot.block_writer import TableSnapshot
from deltashard.snapshot.precopy import MIN_PRECOPY_BYTES, Precopy, can_precopy, copying_thread
from deltashard.snapshot.save_stream import PreopenedStream
from deltashard.tracking.marks import RowSelection
from deltashard.tracking.snapshot_base import SnapshotBase
from deltashard.tracking.tracking import TrackedTable

MAX_PRECOPY_S = 10.0
"""Seconds for which a due snapshot waits for the copy."""
INITIAL_LOOKAHEAD_STEPS = 4
"""Steps by which a copy begins ahead of a known step before anything was measured."""
MAX_LOOKAHEAD_STEPS = 1 << 10
MAX_LEAD_S = 2.0
"""Seconds by which a copy may delay an order."""
BYTES_PER_S = 1e9
"""Copy rate assumed before anything was measured."""
MARGIN, MAX_MARGIN = 1.5, 12.0
"""Factor on the expected duration of a copy; doubled each time that a copy ends too late."""
_NO_SELECTION = RowSelection(all=False, ids=None)


class PrecopyScheduler:
    """Schedules copies ahead for a Checkpointer; used on the training thread only."""

    def __init__(
        self,
        loop: TrainingLoop,
        member: RunMember,
        records: SaveRecords,
        *,
        base: SnapshotBase,
        enabled: bool,
    ) -> None:
        """`enabled`: rows may be read while training continues."""
        self.enabled = enabled
        self._program = loop.program
        self._clock = loop.clock
        self._session = member.attachment.session
        self._base = base
        self._counts = records.stats.precopy
        self._state = records.state
        self.streams = PreopenedStream(lambda: self._session.link)
        self._pool: ThreadPoolExecutor | None = None
        self._now: Precopy | None = None
        self._scheduled_step: int | None = None
        """Step of the announced snapshot, which does not change."""
        self._last_snapshot = self._clock.step, time.monotonic()
        self._began_at, self._steps_before, self._began_s = 0, 0.0, 0.0
        self._bytes_per_s, self._margin = BYTES_PER_S, MARGIN
        self.lead_s = 0.0
        """Seconds by which a copy should begin ahead of its snapshot."""
        self.slowdown_s = 0.0
        """Total seconds by which steps during the last used copy were longer than the steps before."""
        self._clock.set_lookahead(INITIAL_LOOKAHEAD_STEPS if enabled else 0)

    def prepare(self, link: Link | None) -> None:
        """Open the call of the next snapshot and pin its arena in advance."""
        self.streams.open()
        if link is not None and self._program.tracking.on_cuda:
            pin(link.arena)

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run `job` on the copying thread, before its next copy."""
        self._pool = self._pool or copying_thread()
        return self._pool.submit(job)

    def submit_check(self, look: Callable[[], None]) -> Future[None]:
        """Run `look` on the copying thread under the read lock of the program's memory."""

        def read() -> None:
            with memory.read_lock:
                look()

        return self.submit(read)

    @property
    def began_s(self) -> float:
        """Seconds for which the start of the current copy held training."""
        return 0.0 if self._now is None else self._began_s

    def begin_for_step(self, link: Link, step: int) -> None:
        """Begin copying for a snapshot due at the future `step`, once per step."""
        if step != self._scheduled_step:
            self._scheduled_step = step
            self._begin(link)

    def should_postpone(self, link: Link, step: int) -> bool:
        """Return whether a snapshot due since `step`, without a waiter, should wait for a copy."""
        if step == self._scheduled_step:
            return False
        if self._now is None:
            self._begin(link)
        now = self._now
        return now is not None and not now.done and time.monotonic() - now.began_s < MAX_PRECOPY_S

    def _begin(self, link: Link) -> None:
        if self._now is not None or not self.enabled:
            return
        began_s = time.perf_counter()
        tables = [
            (table, snapshot)
            for table, snapshot in table_snapshots(self._program)
            if can_precopy(table, snapshot)
        ]
        every = self._base.full or self._base.commit is None
        least = sum(
            table.marks.count("all" if every else "since_commit") * snapshot.row_bytes
            for table, snapshot in tables
        )
        if not tables or least < MIN_PRECOPY_BYTES:
            return
        pool = self._pool = self._pool or copying_thread()
        begin = pb.SaveRequest.Begin(session=link.session, step=self._clock.step, reason="ahead")
        self._base.declare(begin)
        self._steps_before = self._seconds_per_step()
        self._began_at = self._clock.step
        self._now = Precopy(
            self.streams.take(link),
            link,
            session=self._session,
            tables=tables,
            begin=begin,
            mode=self._base.mode,
            pool=pool,
            checks=self._program.tracking.audit_ahead(),
        )
        self._state.transition(SnapshotEvent.AHEAD)
        self._began_s = time.perf_counter() - began_s

    def _seconds_per_step(self) -> float:
        step, at_s = self._last_snapshot
        steps = self._clock.step - step
        return (time.monotonic() - at_s) / steps if steps > 0 else 0.0

    def stop(self) -> None:
        """Stop copying, because a snapshot begins or the memory being read may go away."""
        if self._now is not None:
            self._now.stop()

    @property
    def checks_done(self) -> bool:
        """Whether the audits that precede a snapshot were just done."""
        return self._now is not None and self._now.checks_done

    def take(self, link: Link) -> Precopy | None:
        """Return what was copied ahead and hand over its call, or None if there is nothing for this link."""
        now = self._now
        if now is None or now.link is not link or now.stream.over.is_set():
            self.drop("sidecar disconnected")
            return None
        self._now = None
        return now

    def drop(self, why: str) -> None:
        now, self._now = self._now, None
        if now is None:
            return
        if self._state.now is SnapshotPhase.PRECOPY:
            self._state.transition(SnapshotEvent.DROP)
        now.stop()
        now.stream.cancel(why)
        self.streams.open()
        self._counts.discarded[why] += 1

    def snapshot_taken(
        self, used: Precopy | None, *, ahead: int, recopied: int, rows: int, raw_bytes: int
    ) -> None:
        """Record a snapshot of `rows`: `ahead` of them were copied ahead, of which `recopied` were copied twice."""
        now_s, step = time.monotonic(), self._clock.step
        step_s = self._seconds_per_step()
        if used is not None:
            steps = step - self._began_at
            step_s = self._steps_before or step_s
            took_s = used.until_s - used.began_s
            self.slowdown_s = max(0.0, took_s - steps * step_s) if steps and step_s else 0.0
            counts = self._counts
            counts.snapshots += bool(ahead)
            counts.precopied_rows += ahead
            counts.recopied_rows += recopied
            counts.stalled_rows += rows - ahead
            counts.slowdown_s += self.slowdown_s
            if used.incomplete_reason:
                counts.discarded[used.incomplete_reason] += 1
            if used.bytes:
                self._bytes_per_s = used.bytes / max(used.copied_s, 1e-6)
            late = used.incomplete_reason == "stopped"
            self._margin = min(2 * self._margin, MAX_MARGIN) if late else max(0.9 * self._margin, MARGIN)
        copy_s = self._margin * raw_bytes / self._bytes_per_s if raw_bytes >= MIN_PRECOPY_BYTES else 0.0
        self.lead_s = min(copy_s, MAX_LEAD_S)
        steps_ahead = (
            INITIAL_LOOKAHEAD_STEPS
            if not step_s
            else 1 + math.ceil(min(copy_s / step_s, MAX_LOOKAHEAD_STEPS))
        )
        self._clock.set_lookahead(steps_ahead if self.enabled else 0)
        self._last_snapshot = step, now_s

    def close(self) -> None:
        self.drop("closed")
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def table_snapshots(program: Program) -> list[tuple[TrackedTable, TableSnapshot]]:
    """Locate the rows of every table; which rows a snapshot takes is selected later."""
    positions = {schema.fqn: position for position, schema in enumerate(program.schemas)}
    return [
        (
            table,
            TableSnapshot(
                position=positions[table.fqn],
                fqn=table.fqn,
                key=table.key,
                box=table.box,
                weights=table.param,
                fields=tuple(table.state_tensors().values()),
                selection=_NO_SELECTION,
            ),
        )
        for table in program.tracking.saved
    ]
