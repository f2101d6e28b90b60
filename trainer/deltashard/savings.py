"""Cuts: when one is taken, what is sent, how it ends; and waiting for it to be durable.

A cut that is due waits for an optimizer step (gradient accumulation), for the save in flight, for the sidecar to be
there, and for the back-off after a failure; a cut that was asked for stays asked for. Whatever goes wrong with a save
is counted and logged once per cause, the marks stay, and training goes on: only `FencedError` leaves this module.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from deltashard_checkpoint.crashpoints import crash_point
from deltashard_checkpoint.trees import EncodedTree
from deltashard_proto.arenas import SAVE_AT_STEP, STALL_NS, URGENT
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard import restores
from deltashard.captures import blobs_of
from deltashard.cuts import BlockWriter, TableCut
from deltashard.doctor import forgotten_scheduler
from deltashard.errors import (
    DeltashardError,
    FencedError,
    SaveFailed,
    TakenOver,
    UserError,
    WaitError,
)
from deltashard.fingerprints import library_version
from deltashard.interruptions import leaves
from deltashard.marks import DirtyCounts, Mode
from deltashard.resumings import Resuming
from deltashard.saves import Flight, SaveHandle
from deltashard.sessions import Link
from deltashard.signals import TermHandler
from deltashard.streams import LONGEST_S, CutFailed

log = logging.getLogger("deltashard")

TERM_TRIES = 3
"""How often the cut that SIGTERM asks for is tried, within the grace."""


class Saving(Resuming):
    """Cuts, from the decision to durable."""

    def _at_boundary(self) -> bool:
        """Whether the program stands where a `step()` left it."""
        return (
            self._step_is_boundary
            and not (self._tracking.stepped and self._tracking.optimizers)
            and not any(loader.moved for loader in self._loaders.values())
        )

    def _boundary(self, *, explicit: bool = False) -> None:
        self._refuse_closed("step()")
        self._thread = threading.get_ident()
        self._attention = False
        self._apply_events()
        if not self._opened:
            self._open_unrestored()
        line = self._line
        steps_due = self._step >= line[SAVE_AT_STEP]
        term = self._term is not None and self._term.until_s is not None
        if line[URGENT] and self._urgent is None:
            self._urgent = "urgent"
        if steps_due or self._requests or self._urgent or term:
            self._try_cut(explicit=explicit, due=steps_due)
        if self._requests or self._urgent:
            self._attention = True
        if term and self._term is not None:
            self._finish_term(self._term)

    def _try_cut(self, *, explicit: bool, due: bool) -> None:
        urgent = self._urgent is not None
        if not explicit and not self._step_is_boundary:
            return  # gradient accumulation: no optimizer step yet, the next one takes it
        if self._flight is not None:
            # It is sealed and uploads: the sidecar would refuse an urgent cut too, after a wait. It stays asked for.
            self._skip("in flight", quiet=(urgent or bool(self._requests)) and not due)
            return
        link = self._session.link
        if link is None:
            self._skip("sidecar away")
            return
        if time.monotonic() < self._not_before_s and not urgent and not self._requests:
            self._skip("backing off")
            return
        if self._veto() is not None:
            return
        reason = self._urgent or (self._requests[0].reason if self._requests else "timer")
        self._take_cut(link, reason, urgent=urgent)

    def _take_cut(self, link: Link, reason: str, *, urgent: bool) -> None:
        """One cut, whatever happens to it; raises `FencedError`, and what the user's own signal handler raises."""
        try:
            self._cut_now(link, reason, urgent=urgent)
        except CutFailed as failure:
            if failure.cause in ("fenced", "taken_over"):
                kind = TakenOver if failure.cause == "taken_over" else FencedError
                self._session.fence(kind(str(failure), remedy="end this process; the newer one trains on"))
                self._apply_events()
            self._save_failed(failure.cause, failure)
        except FencedError:
            raise
        except DeltashardError as error:
            self._save_failed("state" if isinstance(error, UserError) else "error", error)
        except BaseException as error:
            # The user's get(), an out-of-memory copy, a closed channel: never training's problem.
            if leaves(error):
                raise
            log.debug("save failed", exc_info=error)
            self._save_failed("error", error)

    def _veto(self) -> SaveFailed | None:
        """Why `validate()` lets no cut be taken now, counted and said; None: it may be."""
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
            self._save_failed("validate", failure)
            return failure
        self._skip("vetoed")
        log.warning("validate() vetoed the save at step %d", self._step)
        return SaveFailed("validate() vetoed the last cut", where="close()", remedy="see validate=")

    def _cut_now(self, link: Link, reason: str, *, urgent: bool) -> None:
        began_s = time.perf_counter()
        faults = self._tracking.audit_before_commit()
        self.stats.audit_faults += len(faults)
        if faults:
            self._force_full = True
            self._faults += len(faults)
        counts = self._tracking.refresh()
        self._force_full |= self._tracking.regrown
        if tuple(table.schema for table in self._tracking.tables) != link.tables:
            again = self._session.reattach()
            if again is None:
                raise CutFailed("gone", "the sidecar went away while tables were described anew")
            link = again
            self._adopt(link)
        handles, self._requests = self._requests, []
        flight = Flight(
            cut=self._cut + 1, step=self._step, mode="all", full=False, reason=reason, handles=handles
        )
        self._cut = flight.cut
        try:
            with self._session.busy:
                self._send_cut(link, flight, counts, began_s, urgent=urgent)
        except BaseException as error:
            if self._contents is not None:
                self._contents.dropped()
            if isinstance(error, CutFailed) and error.cause == "busy":
                self._requests = handles + self._requests
            else:
                flight.failed(
                    error if isinstance(error, Exception) else SaveFailed("interrupted", where="save")
                )
            raise
        self._urgent = None
        if self._flight is not None:  # the last cut of close(): it ended there, which is not known here yet
            self._flight.handles, handles = [], self._flight.handles
            flight.handles += handles
        self._flight = flight
        self._tracking.cut_taken(flight.cut, flight.mode, full=flight.full)
        self._order.arm()
        self._force_full, self._faults = False, 0
        stall_s = time.perf_counter() - began_s
        self._line[STALL_NS] = int(stall_s * 1e9)
        self.stats.cuts += 1
        self.stats.stalls_s.append(stall_s)
        self._emit("cut", step=flight.step, cut=flight.cut, mode=flight.mode, stall_s=stall_s, reason=reason)

    def _send_cut(
        self, link: Link, flight: Flight, counts: DirtyCounts, began_s: float, *, urgent: bool
    ) -> None:
        cut = flight.cut

        def ended(failure: CutFailed | None) -> None:
            if failure is not None:
                self._session.post(lambda: self._flight_failed(cut, failure.cause, failure))

        stream = self._ahead.take(link)
        writer: BlockWriter | None = None
        try:
            begin = pb.SaveRequest.Begin(
                session=link.session,
                step=flight.step,
                cut=cut,
                reason=flight.reason,
                urgent=urgent,
                full=self._force_full,
                dirty_rows_commit=counts.commit,
                dirty_rows_baseline=counts.baseline,
                total_rows=counts.total,
                tracking_faults=self._faults,
            )
            if self._since_commit is not None:
                begin.since_commit_seq = self._since_commit
            if self._since_baseline is not None:
                begin.since_baseline_seq = self._since_baseline
            stream.begin(begin, ended)
            # While the answer is on its way: nothing changes the rows any more, and the last sample was checked.
            self._tracking.audit_sample()
            begun = stream.begun()
            crash_point("cut.begun")
            flight.mode = self._mode(begun)
            budget_s = begun.stall_budget_s or LONGEST_S
            writer = BlockWriter(
                stream,
                link.arena,
                until_s=time.monotonic() + budget_s,
                observe=None if self._contents is None else self._observe(link, begun),
            )
            whole = True
            for position, table in enumerate(self._tracking.tables):
                selection = table.prepare_cut(flight.mode)
                whole &= selection.all
                writer.table(
                    TableCut(
                        position=position,
                        fqn=table.fqn,
                        weights=table.param,
                        fields=tuple(table.state_tensors().values()),
                        selection=selection,
                    )
                )
            flight.full = whole
            metadata = {key: value for handle in flight.handles for key, value in handle.metadata.items()}
            content = None if self._contents is None else self._sealed_content(writer)
            if content is not None:
                metadata |= {f"content/{fqn}": value for fqn, value in content.items()}
            for name, tree in self._everything_else(content):
                writer.blob(name, tree)
            writer.flush()
            crash_point("cut.before_seal")
            stall_s = time.perf_counter() - began_s
            seal = pb.SaveRequest.Seal(
                rows=writer.copied.rows,
                raw_bytes=writer.copied.raw_bytes,
                stall_s=stall_s,
                metadata=metadata,
                full=whole,
            )
            pins = [handle.pin for handle in flight.handles if handle.pin is not None]
            if pins:
                seal.pin = pins[-1]  # a sidecar that knows of one only
                seal.pins.extend(pins)
            stream.seal(seal)
            crash_point("cut.after_seal")
        except BaseException as error:
            if writer is not None:
                writer.stop()
            stalled = isinstance(error, CutFailed) and error.cause == "deadline" and writer is not None
            stream.abort("stall_budget" if stalled else type(error).__name__)
            raise
        for handle in flight.handles:
            handle.step, handle.cut = flight.step, flight.cut

    def _sealed_content(self, writer: BlockWriter) -> dict[str, str]:
        writer.flush()
        assert self._contents is not None
        return self._contents.sealed()

    def _observe(
        self, link: Link, begun: pb.SaveReply.Begun
    ) -> Callable[[int, Any, list[torch.Tensor]], None]:
        contents = self._contents
        assert contents is not None
        state_encoding = begun.state_encoding or self._policy.state_encoding or "fp32"

        def observe(position: int, ids: Any, parts: list[torch.Tensor]) -> None:
            contents.batch(
                link.tables[position],
                ids if isinstance(ids, range) else ids.numpy(),
                [restores.array_of(part) for part in parts],
                encoding=begun.encoding,
                state_encoding=state_encoding,
            )

        return observe

    def _mode(self, begun: pb.SaveReply.Begun) -> Mode:
        """Which rows the sidecar asks for; a seq that we do not know means all of them."""
        if not begun.HasField("covers") or self._force_full:
            return "all"
        if begun.covers == self._since_commit:
            return "since_commit"
        return "since_baseline" if begun.covers == self._since_baseline else "all"

    def _say_forgotten(self) -> None:
        """At the first cut: what every resumed run would miss, and nobody would see."""
        if self._looked_for_forgotten:
            return
        self._looked_for_forgotten = True
        if (owner := forgotten_scheduler(self._tracking.optimizers, self._state)) is not None:
            log.warning(
                "a learning-rate scheduler was built for %s and is not in state=: after a restore it begins anew. "
                'Give state={"scheduler": scheduler}; ckpt.doctor() says what else is not saved',
                owner,
            )

    def _everything_else(self, content: Mapping[str, str] | None) -> Iterator[tuple[str, EncodedTree]]:
        dense = self._tracking.dense(look=False)
        self._say_forgotten()
        self._origin.say(dense | {table.fqn: table.param for table in self._tracking.tables})
        meta = {
            "library": library_version(),
            "step": self._step,
            "fingerprint": self._fingerprint,
            "content": dict(content) if content is not None else None,
            "grown": self._origin.grown(dense),
            "modules": [contract.path for contract in self._contracts],
        }
        return blobs_of(self._tracking, dense, self._sources, self._loaders, self._pending_loaders, meta)

    def _wait(self, handle: SaveHandle, timeout_s: float | None) -> None:
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if threading.get_ident() != self._thread:
            handle.settled.wait(timeout_s)
            return
        while True:
            self._awake.clear()
            self._apply_events()
            if handle.done:
                return
            if handle.cut is None and self._at_boundary():
                # Still where the last step() left the program: the cut can be taken here, after the one in flight.
                if self._flight is None and self._session.link is not None:
                    self._boundary(explicit=True)
                    if handle.done or handle.cut is not None:
                        continue
            elif handle.cut is None:
                raise WaitError(
                    "the cut has not happened yet, and this thread is the one that has to take it",
                    where=f"wait() for {handle.reason!r}",
                    remedy="call save() right after step(), or wait() after the next step()",
                )
            left_s = 1.0 if until_s is None else until_s - time.monotonic()
            if left_s <= 0:
                return
            self._awake.wait(min(left_s, 0.2))

    def _drain(self, until_s: float) -> bool:
        """Let the save in flight end; False when it has not by `until_s`."""
        while self._flight is not None:
            self._awake.clear()
            self._apply_events()
            left_s = until_s - time.monotonic()
            if self._flight is None:
                break
            if left_s <= 0:
                return False
            self._awake.wait(min(left_s, 0.2))
        return True

    def _finish(self, until_s: float) -> None:
        """Make the last step boundary durable, or raise."""
        last: Exception | None = None
        self._drain(until_s)
        self._apply_events()
        while self._needs_cut():
            if self._tracking.stepped and self._tracking.optimizers:
                raise SaveFailed(
                    "the optimizer has stepped since the last step(): that boundary is gone",
                    where="close()",
                    remedy="step() must be the last statement of the loop body",
                )
            if time.monotonic() >= until_s:
                why = last or "; ".join(f"{cause}: {n}" for cause, n in self.stats.failures.items())
                raise SaveFailed(
                    f"step {self._step} is not durable: {why or 'the sidecar is away'}",
                    where=self.url,
                    remedy="the newest committed checkpoint is whole; look at the sidecar's log for the store's errors",
                )
            if self._session.link is not None:
                last = self._last_cut(self._session.link) or last
            if self._flight is None:
                self._awake.clear()
                self._awake.wait(min(0.2, max(0.0, until_s - time.monotonic())))
            elif not self._drain(until_s):
                last = SaveFailed("the save is still uploading", where="close()")
            self._apply_events()

    def _last_cut(self, link: Link) -> Exception | None:
        """Take the cut of close(); returns why it failed."""
        if (veto := self._veto()) is not None:
            raise veto
        handle = SaveHandle(reason="close", pin=None, metadata={}, waiter=self._wait)
        self._requests.append(handle)
        self._take_cut(link, "close", urgent=False)
        return handle.error

    def _needs_cut(self) -> bool:
        if any(not handle.done for handle in self._requests):
            return self._step > 0
        return self._step > 0 and self._step not in {self._committed_step, self._resumed_step}

    def _on_sigterm(self) -> None:
        self._urgent = "sigterm"
        self._attention = True

    def _finish_term(self, term: TermHandler) -> None:
        """SIGTERM came: the urgent cut was taken, if one was possible; now make it durable and let the signal act."""
        unsaved = self._flight is None and self._committed_step != self._step
        if unsaved and term.left_s > 0 and self._session.link is not None and not self._step_is_boundary:
            return  # in the middle of gradient accumulation: the next step() comes here again
        for _ in range(TERM_TRIES):
            # An older save may be uploading, or the sidecar busy with its end: then there is room a moment later.
            self._drain(time.monotonic() + term.left_s)
            if self._committed_step == self._step or term.left_s <= 0 or self._session.link is None:
                break
            if not self._step_is_boundary:
                return
            self._urgent = self._urgent or "sigterm"
            self._try_cut(explicit=False, due=False)
        self._drain(time.monotonic() + term.left_s)
        term.chain()
