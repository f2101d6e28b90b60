"""One cut: what is sent, and how it ends; `save_loop` says when one is taken.

    take      audits -> Begin -> covers says which rows -> copy -> seal -> marks move to pending: the save is in flight
    committed its marks drop, its handles are told, the covers of the next cut move on
    failed    (or the sidecar restarted) its marks merge back, handles are told, back off

Whatever goes wrong with a save is counted and logged once per cause, the marks stay, and training goes on: only
`FencedError` leaves this module. All waiting for the sidecar within one cut has one budget, `save_stream.HOLD_S`;
copying has the sidecar's stall budget, and ends sooner when the sidecar does not answer any more.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.deciding.precision import SAFE, by_table, encodings_of
from deltashard_checkpoint.vocabulary import (
    BITS_RULES,
    DEFAULT_STATE_ENCODING,
    INCONSISTENT_KEY,
    bits_of,
)
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.attachment import SidecarAttachment
from deltashard.attach.interruption import leaves
from deltashard.attach.lifecycle import TrainingAttempt
from deltashard.attach.listener import Listener
from deltashard.attach.pinned import pin
from deltashard.attach.session import Link
from deltashard.cut import save_stream
from deltashard.cut.block_writer import BlockWriter, TableCut
from deltashard.cut.precopy import Precopy, Renewed, TableAhead
from deltashard.cut.save_stream import LONGEST_S, CutFailed, SaveStream, StreamAhead
from deltashard.errors import (
    DeltashardError,
    FencedError,
    SaveFailed,
    SidecarUnavailable,
    TakenOver,
    UserError,
)
from deltashard.restore.content_hash import Contents
from deltashard.save.capture import Capture
from deltashard.save.comparison import Comparison
from deltashard.save.handle import Commit, Flight, SaveHandle, Stats
from deltashard.save.head_start import HeadStart
from deltashard.save.request import Requests
from deltashard.save.setback import Setbacks
from deltashard.save.step_order import OrderWatch
from deltashard.save.watchdog import Watchdog
from deltashard.state.value import array_of
from deltashard.tracking.cut_base import CutBase
from deltashard.tracking.marks import DirtyCounts, Mode, RowSelection
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import TrackedTable

log = logging.getLogger("deltashard")


_Cuts = Sequence[tuple[TrackedTable, TableCut]]
_NOT_CHOSEN = RowSelection(all=False, ids=None)


@dataclass(slots=True, kw_only=True)
class _Copied:
    """How the rows of a cut were copied."""

    full: bool = True
    """Whether they are all rows of all tables."""
    ahead: int = 0
    """Rows that were copied ahead of the cut."""
    again: int = 0
    """Of these, rows that were copied once more."""


class Saver:
    """Takes cuts, one in flight at a time, and hears how they end; on the training thread only."""

    def __init__(  # noqa: PLR0913
        self,
        capture: Capture,
        *,
        clock: StepClock,
        attachment: SidecarAttachment,
        attempt: TrainingAttempt,
        base: CutBase,
        requests: Requests,
        setbacks: Setbacks,
        stats: Stats,
        listener: Listener,
        watchdog: Watchdog,
        contents: Contents | None,
        validate: Callable[[], bool] | None,
        precopy: bool = True,
        said: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`said` is metadata that every commit carries; `precopy`: rows may be copied ahead of cuts."""
        self._said = said
        self._capture = capture
        self._program = capture.program
        self._tracking = capture.program.tracking
        self._clock = clock
        self._attachment = attachment
        self._session = attachment.session
        self._attempt = attempt
        self._base = base
        self._requests = requests
        self._setbacks = setbacks
        self._stats = stats
        self._listener = listener
        self._watchdog = watchdog
        self._contents = contents
        self._validate = validate
        self._order = OrderWatch(
            self._tracking, self._program.state, clock, pass_ended=lambda: capture.pass_ended
        )
        self._ahead = StreamAhead(lambda: self._session.link)
        self.head_start = HeadStart(
            tables=self._table_cuts,
            clock=clock,
            attachment=attachment,
            base=base,
            streams=self._ahead,
            counts=stats.head_starts,
            looks=self._tracking.audit_ahead,
            enabled=precopy and contents is None,
        )
        self._copied_ahead: list[tuple[TrackedTable, TableAhead]] = []
        """What the last cut took of rows that were copied ahead of it."""
        self._comparison = Comparison(
            self.head_start.later, found=lambda: self._session.post(self._note_snapshot)
        )
        self._inconsistent: list[Flight] = []
        """Snapshots that were found inconsistent, until a later commit names them."""
        self._flight: Flight | None = None
        self._here: list[Flight] = []
        """Cuts of the step that was cut last, whatever became of them; newest last."""
        self._asked = 0, 0
        """(step, how often `save()` was called there)."""
        self.committed_step: int | None = None
        """Step of the newest commit of this attempt; None before the first."""
        self._owed: int | None = None
        self._lost: int | None = None
        """The cut that went with its sidecar, which cannot have told the other ranks; None: there is none."""

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    # News.

    def ready(self) -> None:
        """An attempt is open: have the call of its first cut open before it is due."""
        self._watchdog.begin(restored=self._attempt.resumed_step is not None)
        self._ahead.open()
        self._pin(self._attachment.link)

    def adopt(self, link: Link) -> None:
        """A new attachment, and what it knows of the save in flight."""
        self.head_start.drop("sidecar away")
        restarted = self._attachment.adopt(link)
        self._ahead.open()
        self._pin(link)
        if link.reply.HasField("last_commit"):
            self.committed(Commit.of(link.reply.last_commit))
        flight = self._flight
        if flight is not None and restarted:
            self.failed(flight.cut, CutFailed("gone", "the sidecar was restarted during the save"))
        lost, self._lost = self._lost, None
        if restarted and lost is not None and lost != link.reply.last_commit.cut:
            self.owe(lost)

    def _pin(self, link: Link | None) -> None:
        """So that the first cut need not wait for it."""
        if link is not None and self._tracking.on_cuda:
            pin(link.arena)

    def committed(self, commit: Commit) -> None:
        """A checkpoint is durable; repeated and late news is harmless."""
        if commit.attempt != self._attempt.number or not self._base.is_news(commit.seq):
            return
        self._tracking.committed(commit.cut, baseline=commit.baseline)
        self._base.committed(commit.seq, baseline=commit.baseline)
        self.committed_step = commit.step
        self._watchdog.committed(commit.step)
        self._inconsistent = [each for each in self._inconsistent if each.cut >= commit.cut]
        self._stats.count_commit(commit)
        self._setbacks.committed()
        if self._flight is not None and self._flight.cut == commit.cut:
            flight, self._flight = self._flight, None
            flight.committed(commit)
        self._listener.emit("committed", commit=commit)

    def failed(self, cut: int, failure: CutFailed) -> None:
        self._tracking.failed(cut)
        flight = self._flight
        if flight is None or flight.cut != cut:
            return
        self._flight = None
        if failure.cause == "gone":
            self._lost = cut
        flight.failed(failure)
        self._setbacks.failed(failure.cause, failure)

    def give_up(self, error: Exception) -> None:
        """What is in flight will not be heard of: this trainer is fenced."""
        if self._flight is not None:
            self._flight.failed(error)
            self._flight = None

    def close(self, *, until_s: float) -> None:
        """Let go of what is in flight, and of the hooks; report, by `until_s`, what is wrong with the last snapshot."""
        self.head_start.close()
        if self._flight is not None:
            self._flight.failed(SaveFailed("not durable when the checkpointer was closed", where="save"))
        self._order.close()
        self._report_inconsistent(until_s, last=True)

    # The cut.

    def veto(self) -> SaveFailed | None:
        """Why `validate()` lets no cut be taken now, counted; None: it may be."""
        if self._validate is None:
            return None
        try:
            if self._validate():
                return None
        except BaseException as error:
            if leaves(error):
                raise
            log.debug("validate() failed", exc_info=error)
            failure = SaveFailed(
                f"validate() raised {type(error).__name__}: {error}",
                where="validate=",
                remedy="it must return a bool; nothing is saved while it raises",
            )
            self._setbacks.failed("validate", failure)
            return failure
        step = self._clock.step
        failure = SaveFailed(
            f"validate() vetoed the save at step {step}", where="validate=", remedy="see validate="
        )
        self._setbacks.vetoed(failure)
        return failure

    def take(
        self,
        link: Link,
        reason: str,
        *,
        urgent: bool = False,
        latest_s: float = math.inf,
        cut: int | None = None,
    ) -> None:
        """One cut, over by `latest_s` (monotonic), whatever happens to it; `cut`: its number, by the group's order.

        Raises `FencedError`, and what the user's own signal handler raises.
        """
        try:
            self._cut_now(link, reason, urgent=urgent, latest_s=latest_s, cut=cut)
        except CutFailed as failure:
            if failure.cause in (Cause.FENCED, Cause.TAKEN_OVER):
                kind = TakenOver if failure.cause == Cause.TAKEN_OVER else FencedError
                self._session.fence(kind(str(failure), remedy="end this process; the newer one trains on"))
                assert self._session.fenced is not None
                raise self._session.fenced from None
            if failure.cause == "silent" and (silent := self._session.link) is not None:
                self._session.doubt(silent, str(failure))
            self._setbacks.failed(failure.cause, failure)
        except FencedError:
            raise
        except DeltashardError as error:
            away = isinstance(error, SidecarUnavailable)
            self._setbacks.failed(
                "gone" if away else "state" if isinstance(error, UserError) else "error", error
            )
        except BaseException as error:
            # The user's get(), an out-of-memory copy, a closed channel: never training's problem.
            if leaves(error):
                raise
            log.debug("save failed", exc_info=error)
            self._setbacks.failed("error", error)

    def _cut_now(self, link: Link, reason: str, *, urgent: bool, latest_s: float, cut: int | None) -> None:
        began_s = time.perf_counter() - self.head_start.began_s
        handles = self._requests.take()
        number = cut or self._attempt.next_cut
        flight = self._taken(Flight(cut=number, step=self._clock.step, reason=reason, handles=handles))
        try:
            self.head_start.stop()
            counts = self._look()
            holds = save_stream.URGENT_HOLDS if urgent or latest_s < math.inf else 1
            hold_s = min(time.monotonic() + save_stream.HOLD_S * holds, latest_s)
            if self._program.schemas != link.tables:
                self.head_start.drop("schema")
                link = self._described_anew(hold_s)
            self._attempt.cut_begins(flight.cut)
            with self._session.copying(link):
                mode, full = self._send(
                    link, flight, counts, began_s, urgent=urgent, hold_s=hold_s, latest_s=latest_s
                )
        except BaseException as error:
            self.head_start.drop("no cut")
            if self._contents is not None:
                self._contents.dropped()
            # A cut of all ranks has failed for all of them: asked for again here, it would wait for the others.
            if isinstance(error, CutFailed) and error.cause == Cause.BUSY and cut is None:
                self._requests.put_back(handles)
            else:
                flight.failed(
                    error if isinstance(error, Exception) else SaveFailed("interrupted", where="save")
                )
            raise
        self._requests.urgent = None
        self._flight = flight
        self._watchdog.taken()
        self._tracking.cut_taken(flight.cut, mode, full=full)
        if self.head_start.enabled:
            self._tracking.audit_sample(self.head_start.look_later)
            self._comparison.begin(flight, self._copied_ahead)
            self._copied_ahead = []
        self._order.arm()
        self._base.cut_taken()
        stall_s = time.perf_counter() - began_s
        self._clock.stalled(stall_s)
        self._stats.count_cut(stall_s)
        self._listener.emit(
            "cut", step=flight.step, cut=flight.cut, mode=mode, stall_s=stall_s, reason=reason
        )

    def _look(self) -> DirtyCounts:
        self._tracking.settle()
        self._report_inconsistent()
        self._count(len(self._tracking.audit_before_commit(ahead=self.head_start.looked)))
        counts = self._tracking.refresh()
        if self._tracking.regrown:
            self._base.ask_full()
        return counts

    def _count(self, faults: int) -> None:
        self._stats.count_faults(faults)
        if faults:
            self._base.ask_full(faults=faults)

    def check_snapshot(self, until_s: float = math.inf) -> bool:
        """Whether the last snapshot was found inconsistent, by `until_s` (monotonic): then a full save is requested."""
        found = self._report_inconsistent(until_s)
        if found:
            self._requests.add(SaveHandle(reason="inconsistent", pin=None, metadata={}))
            self._clock.notice()
        return found

    def _note_snapshot(self) -> None:
        self.check_snapshot()

    def _report_inconsistent(self, until_s: float = math.inf, *, last: bool = False) -> bool:
        """Report what is wrong with the last snapshot: the next one takes all rows; `last`: none follows."""
        found = self._comparison.result(until_s)
        if found is None:
            return False
        step = found.snapshot.step
        self._inconsistent.append(found.snapshot)
        self._count(found.count)
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

    @property
    def coarse(self) -> Flight | None:
        """The save of this step, if it is durable and bits were chosen for it: for some table fewer than 8."""
        last = self._here[-1] if self._here else None
        if last is None or last.commit is None or last.step != self._clock.step or last.reason == "close":
            return None
        return last if self._chosen_coarse(last) else None

    # What other ranks wait for.

    def join(self, handle: SaveHandle) -> bool:
        """Have `handle` be the cut that all ranks took at the step where this one stands; False: it is to be asked for.

        A rank may take that cut within its `step()`, and call `save()` as the others did only then. A cut of its own
        would wait for ranks that train on. Nor may it matter on which ranks a cut that failed came before the call:
        each answers one call of every rank.
        """
        step = self._clock.step
        self._asked = step, 1 + (self._asked[1] if self._asked[0] == step else 0)
        here = [flight for flight in self._here if flight.step == step]
        failed = sum(flight.error is not None for flight in here)
        if not here or (here[-1].error is not None and self._asked[1] > failed):
            return False
        here[-1].join(handle)
        return True

    def owe(self, cut: int) -> None:
        """This rank has no part in cut `cut`, which all were to take: the others are to hear of it."""
        self._owed = cut
        if all(flight.cut != cut for flight in self._here):
            self._taken(Flight(cut=cut, step=self._clock.step, reason="none")).failed(
                SaveFailed("this rank could not take part in it", where="save")
            )

    def _taken(self, flight: Flight) -> Flight:
        self._here = [each for each in self._here if each.step == flight.step] + [flight]
        return flight

    def pay(self) -> None:
        """Tell the sidecar of a cut that this rank has no part in, so that no other rank waits for it."""
        link, cut = self._attachment.link, self._owed
        if cut is None or link is None or self._flight is not None:
            return
        self._owed = None
        self._attempt.cut_begins(cut)
        try:
            stream = self._ahead.take(link)
            begin = pb.SaveRequest.Begin(session=link.session, step=self._clock.step, cut=cut, reason="none")
            stream.begin(begin, lambda _failure: None)
            stream.abort("no part")
        except Exception as error:
            if leaves(error):
                raise
            log.debug("cut %d could not be declined: %s", cut, error)

    def _described_anew(self, until_s: float) -> Link:
        """An attachment with the tables as they are now: optimizer state appeared."""
        link = self._session.reattach(until_s=until_s)
        if link is None:
            raise CutFailed("gone", "the sidecar went away while tables were described anew")
        self.adopt(link)
        return link

    def _send(
        self,
        link: Link,
        flight: Flight,
        counts: DirtyCounts,
        began_s: float,
        *,
        urgent: bool,
        hold_s: float,
        latest_s: float,
    ) -> tuple[Mode, bool]:
        """Returns which rows were sent, and whether they are all rows of all tables."""
        cut = flight.cut

        def ended(failure: CutFailed | None) -> None:
            if failure is not None:
                self._session.post(lambda: self.failed(cut, failure))

        ahead = self.head_start.take(link)
        stream = self._ahead.take(link) if ahead is None else ahead.stream
        writer: BlockWriter | None = None
        try:
            stream.begin(self._begin(link, flight, counts, urgent=urgent), ended)
            if not self.head_start.enabled:
                # While the answer is on its way: nothing changes the rows any more, and the last sample was checked.
                self._tracking.audit_sample()
            cuts = self._table_cuts()
            renewed = {} if ahead is None or ahead.mode is None else self._renewed(ahead, ahead.mode, cuts)
            begun = stream.begun(hold_s)
            crash_point("cut.begun")
            flight.begun = begun
            mode = self._base.mode(begun)
            if self._base.asks_rebase(begun):
                self._tracking.rebase()
                self._base.rebased()
            until_s = min(time.monotonic() + (begun.stall_budget_s or LONGEST_S), latest_s)
            writer = self._writer(link, stream, until_s, ahead, begun)
            if ahead is not None and ahead.mode != mode:
                renewed = {}
            copied = self._write_tables(writer, mode, cuts, ahead, renewed)
            self._copied_ahead = [(table, mine) for table, (mine, _) in renewed.items()]
            content = None if self._contents is None else self._content(self._contents, writer)
            for name, tree in self._capture.blobs(flight.step, content):
                writer.blob(name, tree)
            writer.flush()
            crash_point("cut.before_seal")
            self.head_start.cut_taken(
                ahead,
                ahead=copied.ahead,
                again=copied.again,
                rows=writer.copied.rows,
                raw_bytes=writer.copied.raw_bytes,
            )
            stall_s = time.perf_counter() - began_s
            self._seal(stream, flight, writer, content, copied, stall_s=stall_s)
            crash_point("cut.after_seal")
        except BaseException as error:
            if writer is not None:
                writer.stop()
            stalled = isinstance(error, CutFailed) and error.cause == Cause.DEADLINE and writer is not None
            stream.abort(Cause.STALL_BUDGET if stalled else type(error).__name__)
            raise
        flight.left()
        return mode, copied.full

    def _chosen_coarse(self, flight: Flight) -> bool:
        """Whether bits were chosen for it, and for some table that is not the user's own fewer than 8."""
        policy, begun = self._attachment.policy, flight.begun
        if begun is None or policy.bits_goal not in BITS_RULES:
            return False
        tables = [table.fqn for table in self._program.schemas]
        own, _ = by_table(encodings_of(policy.tables, where="tables"), tables)
        chosen = (begun.encodings.get(table, begun.encoding) for table in tables if table not in own)
        return any((bits_of(encoding) or 0) < SAFE for encoding in chosen)

    def _begin(
        self, link: Link, flight: Flight, counts: DirtyCounts, *, urgent: bool
    ) -> pb.SaveRequest.Begin:
        begin = pb.SaveRequest.Begin(
            session=link.session,
            step=flight.step,
            cut=flight.cut,
            reason=flight.reason,
            urgent=urgent,
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
            ahead.writer.goes_on(block=block, send=stream.send)
            return ahead.writer
        observe = None if self._contents is None else self._observe(self._contents, link, begun)
        return BlockWriter(
            link.arena, block=block, send=stream.send, observe=observe, pin=partial(pin, link.arena)
        )

    def _table_cuts(self) -> list[tuple[TrackedTable, TableCut]]:
        """Where the rows of every table lie; which of them a cut takes is found out later."""
        positions = {schema.fqn: position for position, schema in enumerate(self._program.schemas)}
        return [
            (
                table,
                TableCut(
                    position=positions[table.fqn],
                    fqn=table.fqn,
                    key=table.key,
                    box=table.box,
                    weights=table.param,
                    fields=tuple(table.state_tensors().values()),
                    selection=_NOT_CHOSEN,
                ),
            )
            for table in self._tracking.saved
        ]

    def _renewed(
        self, ahead: Precopy, mode: Mode, cuts: _Cuts
    ) -> dict[TrackedTable, tuple[TableAhead, Renewed]]:
        """What was copied ahead for a cut of `mode`, brought up to this step; without what is of no use."""
        known = {each.table: each for each in ahead.tables}
        found = {}
        for table, cut in cuts:
            mine = known.get(table)
            if mine is not None and (renewed := mine.renewed(cut, mode)) is not None:
                found[table] = mine, renewed
            elif mine is not None and mine.strayed:
                self._stats.count_faults(1)
                table.fall_back_to_hashing(
                    "rows copied ahead of a cut were not what is there at it: it is written for a while, without a "
                    "trace (through .data), and put back"
                )
        return found

    def _write_tables(
        self,
        writer: BlockWriter,
        mode: Mode,
        cuts: _Cuts,
        ahead: Precopy | None,
        renewed: Mapping[TrackedTable, tuple[TableAhead, Renewed]],
    ) -> _Copied:
        """Copy the rows of every table, or what was not copied ahead of them."""
        copied = _Copied()
        if ahead is not None:
            copied.ahead = ahead.hand_over(mine for mine, _ in renewed.values())
        for table, cut in cuts:
            if table in renewed:
                mine, now = renewed[table]
                copied.full &= mine.whole
                copied.again += now.again
                writer.table(now.rest, start=now.start)
            else:
                selection = table.prepare_cut(mode)
                copied.full &= selection.all
                writer.table(replace(cut, selection=selection))
        return copied

    def _seal(
        self,
        stream: SaveStream,
        flight: Flight,
        writer: BlockWriter,
        content: Mapping[str, str] | None,
        copied: _Copied,
        *,
        stall_s: float,
    ) -> None:
        metadata = flight.metadata | dict(self._said())
        if named := [f"seq:{each.commit.seq}" for each in self._inconsistent if each.commit is not None]:
            metadata[INCONSISTENT_KEY] = ",".join(named)
        if content is not None:
            metadata |= {f"content/{fqn}": value for fqn, value in content.items()}
        seal = pb.SaveRequest.Seal(
            rows=writer.copied.rows,
            raw_bytes=writer.copied.raw_bytes,
            stall_s=stall_s,
            metadata=metadata,
            pins=flight.pins,
            full=copied.full,
            precopied_rows=copied.ahead,
            recopied_rows=copied.again,
            slowdown_s=self.head_start.slower_s if copied.ahead else 0.0,
        )
        stream.seal(seal)

    def _content(self, contents: Contents, writer: BlockWriter) -> dict[str, str]:
        writer.flush()
        saved = {table.key for table in self._tracking.saved}
        return {key: value for key, value in contents.sealed().items() if key in saved}

    def _observe(
        self, contents: Contents, link: Link, begun: pb.SaveReply.Begun
    ) -> Callable[[TableCut, Any, list[torch.Tensor]], None]:
        state_encoding = (
            begun.state_encoding or self._attachment.policy.state_encoding or DEFAULT_STATE_ENCODING
        )

        def observe(cut: TableCut, ids: Any, parts: list[torch.Tensor]) -> None:
            contents.batch(
                link.tables[cut.position],
                cut.box,
                ids if isinstance(ids, range) else ids.numpy(),
                [array_of(part) for part in parts],
                encoding=begun.encodings.get(link.tables[cut.position].fqn, begun.encoding),
                state_encoding=state_encoding,
            )

        return observe
