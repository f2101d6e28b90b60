"""Takes snapshots: decides whether one may be taken, sends it, and bounds how long it holds training.

    audits -> Begin -> the sidecar's answer selects the rows -> copy -> finish: the save is in flight (`outcome`)

Failures are counted and logged once per cause, the marks stay set, and training continues; only `FencedError` leaves
this module. All waits for the sidecar within a snapshot share the budget `save_stream.HOLD_S`. Copying has the
sidecar's stall budget, and ends earlier if the sidecar stops answering.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.vocabulary import DEFAULT_STATE_ENCODING, INCONSISTENT_KEY
from deltashard_proto.block_reason import BlockReason
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.attachment import RunMember
from deltashard.attach.interruption import must_propagate
from deltashard.attach.pinned import pin
from deltashard.attach.session import Link
from deltashard.errors import (
    DeltashardError,
    FencedError,
    SaveFailed,
    SidecarUnavailable,
    TakenOver,
    UserError,
)
from deltashard.program import TrainingLoop
from deltashard.restore.content_hash import ContentHashes
from deltashard.save.capture import Capture
from deltashard.save.handle import InFlightSave
from deltashard.save.outcome import SnapshotOutcomes
from deltashard.save.precopy_scheduler import table_snapshots
from deltashard.save.records import SaveRecords
from deltashard.save.snapshot_gate import MESSAGE, Asker, SnapshotGate
from deltashard.save.step_order import StepOrderCheck
from deltashard.snapshot import save_stream
from deltashard.snapshot.block_writer import BlockWriter, TableSnapshot
from deltashard.snapshot.precopy import Precopy, RefreshedCopy, TablePrecopy
from deltashard.snapshot.save_stream import MAX_STALL_S, SaveStream, SnapshotFailed
from deltashard.state.value import array_of
from deltashard.tracking.marks import DirtyCounts, Mode
from deltashard.tracking.snapshot_base import SnapshotBase
from deltashard.tracking.tracking import TrackedTable

log = logging.getLogger("deltashard")


@dataclass(slots=True, kw_only=True)
class SnapshotRows:
    """How the rows of a snapshot were copied."""

    mode: Mode
    full: bool = True
    """Whether the snapshot has all rows of all tables."""
    ahead: int = 0
    """Number of rows copied ahead of the snapshot."""
    recopied: int = 0
    """Number of those rows that were copied again."""
    tables: list[tuple[TrackedTable, TablePrecopy]] = field(default_factory=list)
    """Tables with rows copied ahead."""


class SnapshotTaker:
    """Takes snapshots, one in flight at a time; used on the training thread only."""

    def __init__(
        self,
        loop: TrainingLoop,
        member: RunMember,
        records: SaveRecords,
        outcomes: SnapshotOutcomes,
        *,
        base: SnapshotBase,
        contents: ContentHashes | None,
        validate: Callable[[], bool] | None,
        metadata: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`metadata` returns entries that every commit carries."""
        self.capture = Capture(loop.program, loop.loaders, rank=member.rank)
        self._program = loop.program
        self._tracking = loop.program.tracking
        self._clock = loop.clock
        self._step_boundary = loop.step_boundary
        self._loaders = loop.loaders
        self._attachment = member.attachment
        self._session = member.attachment.session
        self._attempt = member.attempt
        self._listener = member.listener
        self._requests = records.requests
        self._failure_tracker = records.failure_tracker
        self._stats = records.stats
        self._term = records.term
        self._outcomes = outcomes
        self._precopy = outcomes.precopy
        self._base = base
        self._contents = contents
        self._validate = validate
        self._metadata = metadata
        self._order = StepOrderCheck(
            self._tracking, loop.program.state, loop.clock, pass_ended=lambda: loop.loaders.pass_ended
        )

    def close(self) -> None:
        self._order.close()

    def gate(self, *, at_step: bool = False) -> SnapshotGate:
        """Return the current blocking reasons; `at_step`: within `step()`, to which the last optimizer step belongs."""
        return SnapshotGate.of(
            torn=self._step_boundary.torn,
            stepped=not at_step and self._clock.stepped and bool(self._tracking.optimizers),
            accumulating=not self._clock.whole,
            moved=self._step_boundary.moved or self._loaders.batch_requested,
            in_flight=self._outcomes.in_flight or self._outcomes.copying is not None,
            # A link whose events are not applied yet does not count: the outcome of the previous save is unknown.
            away=self._attachment.link is None,
            unopened=self._attempt.late is not None,
            backing_off=self._failure_tracker.backing_off,
        )

    def record_blocked(self, wait: BlockReason, *, quiet: bool = False) -> None:
        """Record why no snapshot is taken now: for the pending requests, and in the counter of skips."""
        self._requests.record_blocked(MESSAGE[wait])
        if wait in (BlockReason.STEPPED, BlockReason.ACCUMULATING, BlockReason.MOVED):
            return  # taken after the next optimizer step
        # Only a disconnected sidecar needs a report; the other reasons pass.
        if not (quiet and wait in (BlockReason.IN_FLIGHT, BlockReason.BACK_OFF)):
            self._failure_tracker.skipped(wait)

    def begin_precopy(self, step: int, *, at_step: bool) -> None:
        """Begin to copy rows ahead of the snapshot that is due at the end of `step`."""
        link = self._attachment.link
        if link is not None and self.gate(at_step=at_step).block_reason(Asker.TIMER) is None:
            self._precopy.begin_for_step(link, step)

    def veto(self) -> SaveFailed | None:
        """Return and count the error if `validate()` vetoes a snapshot now."""
        if self._validate is None:
            return None
        try:
            if self._validate():
                return None
        except BaseException as error:
            if must_propagate(error):
                raise
            log.debug("validate() failed", exc_info=error)
            failure = SaveFailed(
                f"validate() raised {type(error).__name__}: {error}",
                where="validate=",
                remedy="validate() must return a bool; nothing is saved while it raises",
            )
            self._failure_tracker.failed("validate", failure)
            return failure
        step = self._clock.step
        failure = SaveFailed(
            f"validate() vetoed the save at step {step}", where="validate=", remedy="see validate="
        )
        self._failure_tracker.vetoed(failure)
        return failure

    def take(
        self,
        link: Link,
        reason: str,
        *,
        urgent: bool = False,
        latest_s: float = math.inf,
        snapshot_id: int | None = None,
    ) -> None:
        """Take one snapshot by `latest_s` (monotonic). `snapshot_id`: its number, as ordered by the group.

        After SIGTERM it ends within the grace period; a program that survives the signal saves as before.

        Raises `FencedError`, and errors of the user's signal handlers.
        """
        if self._term is not None and (remaining_s := self._term.remaining_s):
            latest_s = min(latest_s, time.monotonic() + remaining_s)
        try:
            self._take(link, reason, urgent=urgent, latest_s=latest_s, snapshot_id=snapshot_id)
        except SnapshotFailed as failure:
            if failure.cause in (Cause.FENCED, Cause.TAKEN_OVER):
                kind = TakenOver if failure.cause == Cause.TAKEN_OVER else FencedError
                self._session.fence(
                    kind(str(failure), remedy="end this process; the newer one continues training")
                )
                self._outcomes.apply()  # fails pending saves, and raises
            if failure.cause == "silent" and (silent := self._session.link) is not None:
                self._session.suspect(silent, str(failure))
            self._failure_tracker.failed(failure.cause, failure)
        except FencedError:
            if self._session.fenced is not None:
                self._outcomes.apply()  # as above
            raise
        except DeltashardError as error:
            away = isinstance(error, SidecarUnavailable)
            self._failure_tracker.failed(
                "gone" if away else "state" if isinstance(error, UserError) else "error", error
            )
        except BaseException as error:
            # Errors of the user's getters, of memory or of the channel must not end training.
            if must_propagate(error):
                raise
            log.debug("save failed", exc_info=error)
            self._failure_tracker.failed("error", error)
        finally:
            # A snapshot left in COPYING would block every later one.
            if (flight := self._outcomes.copying) is not None:
                self._outcomes.not_taken(flight, SaveFailed("interrupted", where="save"), again=False)

    def _take(
        self, link: Link, reason: str, *, urgent: bool, latest_s: float, snapshot_id: int | None
    ) -> None:
        began_s = time.perf_counter() - self._precopy.began_s
        number = snapshot_id or self._attempt.next_snapshot
        step = self._clock.step
        flight = InFlightSave(
            snapshot_id=number, step=step, reason=reason, urgent=urgent, handles=self._requests.take()
        )
        try:
            self._outcomes.begin(flight)
            self._precopy.stop()
            counts = self._check()
            holds = save_stream.URGENT_HOLDS if urgent or latest_s < math.inf else 1
            hold_s = min(time.monotonic() + save_stream.HOLD_S * holds, latest_s)
            if self._program.schemas != link.tables:
                self._precopy.drop("schema")
                link = self._reattach_with_schemas(hold_s)
            self._attempt.begin_snapshot(number)
            with self._session.hold_link(link):
                copied = self._send(link, flight, counts, began_s, hold_s=hold_s, latest_s=latest_s)
            self._outcomes.staged(flight, copied.mode, full=copied.full, tables=copied.tables)
        except BaseException as error:
            if self._outcomes.in_flight:
                raise  # the sidecar has the snapshot: a later part failed
            if self._contents is not None:
                self._contents.discard_staged()
            # A snapshot of all ranks has failed on all of them; requesting it again here would wait for the others.
            again = isinstance(error, SnapshotFailed) and error.cause == Cause.BUSY and snapshot_id is None
            self._outcomes.not_taken(flight, error, again=again)
            raise
        self._order.arm()
        stall_s = time.perf_counter() - began_s
        self._clock.record_stall(stall_s)
        self._stats.snapshots += 1
        self._stats.stalls_s.append(stall_s)
        self._listener.emit(
            "snapshot", step=step, snapshot_id=number, mode=copied.mode, stall_s=stall_s, reason=reason
        )

    def _check(self) -> DirtyCounts:
        self._tracking.synchronize()
        self._outcomes.report_inconsistent()
        self._outcomes.count_faults(len(self._tracking.audit_before_commit(ahead=self._precopy.checks_done)))
        counts = self._tracking.refresh()
        if self._tracking.regrown:
            self._base.ask_full()
        return counts

    def _reattach_with_schemas(self, until_s: float) -> Link:
        link = self._session.reattach(until_s=until_s)
        if link is None:
            raise SnapshotFailed("gone", "the sidecar disconnected while tables were described again")
        self._outcomes.adopt(link)
        return link

    def _send(
        self,
        link: Link,
        flight: InFlightSave,
        counts: DirtyCounts,
        began_s: float,
        *,
        hold_s: float,
        latest_s: float,
    ) -> SnapshotRows:
        snapshot_id = flight.snapshot_id

        def ended(failure: SnapshotFailed | None) -> None:
            if failure is not None:
                self._session.post(lambda: self._outcomes.failed(snapshot_id, failure))

        ahead = self._precopy.take(link)
        stream = self._precopy.streams.take(link) if ahead is None else ahead.stream
        writer: BlockWriter | None = None
        try:
            stream.begin(self._begin(link, flight, counts), ended)
            if not self._precopy.enabled:
                # While the answer is on its way: the rows no longer change, and the previous sample was checked.
                self._tracking.audit_sample()
            snapshots = table_snapshots(self._program)
            refreshed = (
                {}
                if ahead is None or ahead.mode is None
                else self._refresh_copies(ahead, ahead.mode, snapshots)
            )
            begun = flight.begun = stream.begun(hold_s)
            crash_point("snapshot.begun")
            mode = self._base.mode(begun)
            if self._base.needs_rebase(begun):
                self._tracking.rebase()
                self._base.rebased()
            until_s = min(time.monotonic() + (begun.stall_budget_s or MAX_STALL_S), latest_s)
            writer = self._writer(link, stream, until_s, ahead, begun)
            if ahead is not None and ahead.mode != mode:
                refreshed = {}
            # Fresh rows are separated in all tables, or in none.
            apart = begun.fresh_first and (not refreshed or (ahead is not None and ahead.fresh_first))
            copied = self._write_tables(writer, mode, snapshots, ahead, refreshed, fresh_first=apart)
            content = None if self._contents is None else self._content(self._contents, writer)
            for name, tree in self.capture.blobs(flight.step, content):
                writer.blob(name, tree)
            writer.flush()
            crash_point("snapshot.before_seal")
            self._precopy.snapshot_taken(
                ahead,
                ahead=copied.ahead,
                recopied=copied.recopied,
                rows=writer.copied.rows,
                raw_bytes=writer.copied.raw_bytes,
            )
            seal = self._seal(flight, writer, content, copied)
            seal.stall_s = time.perf_counter() - began_s
            seal.snapshot_at_s = time.time() - seal.stall_s
            stream.seal(seal)
            crash_point("snapshot.after_seal")
        except BaseException as error:
            if writer is not None:
                writer.stop()
            stalled = (
                isinstance(error, SnapshotFailed) and error.cause == Cause.DEADLINE and writer is not None
            )
            stream.abort(Cause.STALL_BUDGET if stalled else type(error).__name__)
            raise
        flight.mark_staged()
        return copied

    def _begin(self, link: Link, flight: InFlightSave, counts: DirtyCounts) -> pb.SaveRequest.Begin:
        begin = pb.SaveRequest.Begin(
            session=link.session,
            step=flight.step,
            snapshot_id=flight.snapshot_id,
            reason=flight.reason,
            urgent=flight.urgent,
            dirty_rows_commit=counts.commit,
            dirty_rows_baseline=counts.baseline,
            total_rows=counts.total,
        )
        self._base.declare(begin)
        return begin

    def _writer(
        self,
        link: Link,
        stream: SaveStream,
        until_s: float,
        ahead: Precopy | None,
        begun: pb.SaveReply.Begun,
    ) -> BlockWriter:
        def block() -> int:
            return stream.block(until_s)

        if ahead is not None:
            ahead.writer.redirect(block=block, send=stream.send)
            return ahead.writer
        observe = None if self._contents is None else self._observe(self._contents, link, begun)
        return BlockWriter(
            link.arena, block=block, send=stream.send, observe=observe, pin=partial(pin, link.arena)
        )

    def _refresh_copies(
        self, ahead: Precopy, mode: Mode, snapshots: Sequence[tuple[TrackedTable, TableSnapshot]]
    ) -> dict[TrackedTable, tuple[TablePrecopy, RefreshedCopy]]:
        """Return the copies made ahead that a snapshot of `mode` can use, updated to this step."""
        known = {each.table: each for each in ahead.tables}
        found = {}
        for table, snapshot_id in snapshots:
            mine = known.get(table)
            if mine is not None and (refreshed := mine.refresh_copy(snapshot_id, mode)) is not None:
                found[table] = mine, refreshed
            elif mine is not None and mine.has_unmarked_writes:
                self._stats.audit_faults += 1
                table.fall_back_to_hashing(
                    "rows copied ahead of a snapshot differ from the rows at it: they are written untracked (through "
                    ".data) for a while, and changed back"
                )
        return found

    def _write_tables(
        self,
        writer: BlockWriter,
        mode: Mode,
        snapshots: Sequence[tuple[TrackedTable, TableSnapshot]],
        ahead: Precopy | None,
        refreshed: Mapping[TrackedTable, tuple[TablePrecopy, RefreshedCopy]],
        *,
        fresh_first: bool,
    ) -> SnapshotRows:
        """Copy the rows of every table that were not copied ahead.

        `fresh_first`: write the rows changed since the newest commit separately, before the rest.
        """
        copied = SnapshotRows(mode=mode, tables=[(table, mine) for table, (mine, _) in refreshed.items()])
        if ahead is not None:
            copied.ahead = ahead.hand_over(mine for mine, _ in refreshed.values())
        for table, snapshot_id in snapshots:
            if table in refreshed:
                _, now = refreshed[table]
                copied.full &= now.full
                copied.recopied += now.recopied
                now.write(writer, fresh_first=fresh_first)
            elif fresh_first:
                fresh, older = table.marks.select("since_commit"), table.marks.select_older(mode)
                copied.full &= table.marks.count(mode) == table.marks.rows
                writer.table(replace(snapshot_id, selection=fresh), fresh=True)
                writer.table(replace(snapshot_id, selection=older), fresh=False)
            else:
                selection = table.select_rows(mode)
                copied.full &= selection.all
                writer.table(replace(snapshot_id, selection=selection))
        return copied

    def _seal(
        self,
        flight: InFlightSave,
        writer: BlockWriter,
        content: Mapping[str, str] | None,
        copied: SnapshotRows,
    ) -> pb.SaveRequest.Seal:
        metadata = flight.metadata | dict(self._metadata())
        if named := self._outcomes.inconsistent:
            metadata[INCONSISTENT_KEY] = ",".join(named)
        if content is not None:
            metadata |= {f"content/{fqn}": value for fqn, value in content.items()}
        return pb.SaveRequest.Seal(
            rows=writer.copied.rows,
            raw_bytes=writer.copied.raw_bytes,
            metadata=metadata,
            full=copied.full,
            precopied_rows=copied.ahead,
            recopied_rows=copied.recopied,
            slowdown_s=self._precopy.slowdown_s if copied.ahead else 0.0,
            pins=flight.pins,
        )

    def _content(self, contents: ContentHashes, writer: BlockWriter) -> dict[str, str]:
        writer.flush()
        saved = {table.key for table in self._tracking.saved}
        return {key: value for key, value in contents.finish_snapshot().items() if key in saved}

    def _observe(
        self, contents: ContentHashes, link: Link, begun: pb.SaveReply.Begun
    ) -> Callable[[TableSnapshot, Any, list[torch.Tensor]], None]:
        state_encoding = (
            begun.state_encoding or self._attachment.policy.state_encoding or DEFAULT_STATE_ENCODING
        )

        def observe(snapshot: TableSnapshot, ids: Any, parts: list[torch.Tensor]) -> None:
            contents.add_batch(
                link.tables[snapshot.position],
                snapshot.box,
                ids if isinstance(ids, range) else ids.numpy(),
                [array_of(part) for part in parts],
                encoding=begun.encodings.get(link.tables[snapshot.position].fqn, begun.encoding),
                state_encoding=state_encoding,
            )

        return observe
