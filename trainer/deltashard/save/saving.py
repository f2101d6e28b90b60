"""A cut: what is sent, and how it ends; `ask` says when one is taken.

Whatever goes wrong with a save is counted and logged once per cause, the marks stay, and training goes on: only
`FencedError` leaves this module. All waiting for the sidecar within one cut has one budget, `save_stream.HOLD_S`;
copying has the sidecar's stall budget, and ends sooner when the sidecar does not answer any more.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.format.typed_tree import EncodedTree
from deltashard_checkpoint.vocabulary import DEFAULT_STATE_ENCODING
from deltashard_proto.arena_layout import STALL_NS
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.interruption import leaves
from deltashard.attach.session import Link
from deltashard.doctor import forgotten_scheduler
from deltashard.errors import (
    DeltashardError,
    FencedError,
    SaveFailed,
    SidecarUnavailable,
    TakenOver,
    UserError,
)
from deltashard.restore import restore
from deltashard.restore.resuming import Resuming
from deltashard.save import save_stream
from deltashard.save.capture import blobs_of
from deltashard.save.cut import BlockWriter, TableCut
from deltashard.save.handle import Flight, together
from deltashard.save.save_stream import LONGEST_S, CutFailed
from deltashard.state.fingerprint import library_version
from deltashard.tracking.marks import DirtyCounts, Mode

log = logging.getLogger("deltashard")


class Saving(Resuming):
    """One cut, until it is on its way."""

    def _take_cut(self, link: Link, reason: str, *, urgent: bool = False, latest_s: float = math.inf) -> None:
        """One cut, over by `latest_s` (monotonic), whatever happens to it.

        Raises `FencedError`, and what the user's own signal handler raises.
        """
        try:
            self._cut_now(link, reason, urgent=urgent, latest_s=latest_s)
        except CutFailed as failure:
            if failure.cause in (Cause.FENCED, Cause.TAKEN_OVER):
                kind = TakenOver if failure.cause == Cause.TAKEN_OVER else FencedError
                self._session.fence(kind(str(failure), remedy="end this process; the newer one trains on"))
                self._apply_events()
            if failure.cause == "silent" and (silent := self._session.link) is not None:
                self._session.doubt(silent, str(failure))
            self._save_failed(failure.cause, failure)
        except FencedError:
            raise
        except DeltashardError as error:
            away = isinstance(error, SidecarUnavailable)
            self._save_failed("gone" if away else "state" if isinstance(error, UserError) else "error", error)
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
        return SaveFailed(
            f"validate() vetoed the save at step {self._step}", where="validate=", remedy="see validate="
        )

    def _cut_now(self, link: Link, reason: str, *, urgent: bool, latest_s: float) -> None:
        began_s = time.perf_counter()
        handles, self._requests = together(self._requests, several_pins=link.reply.several_pins)
        flight = Flight(
            cut=self._cut + 1, step=self._step, mode="all", full=False, reason=reason, handles=handles
        )
        try:
            faults = self._tracking.audit_before_commit()
            self.stats.audit_faults += len(faults)
            if faults:
                self._force_full = True
                self._faults += len(faults)
            counts = self._tracking.refresh()
            self._force_full |= self._tracking.regrown
            holds = save_stream.URGENT_HOLDS if urgent or latest_s < math.inf else 1
            hold_s = min(time.monotonic() + save_stream.HOLD_S * holds, latest_s)
            if tuple(table.schema for table in self._tracking.tables) != link.tables:
                link = self._described_anew(hold_s)
            self._cut = flight.cut
            with self._session.copying(link):
                self._send_cut(link, flight, counts, began_s, urgent=urgent, hold_s=hold_s, latest_s=latest_s)
        except BaseException as error:
            if self._contents is not None:
                self._contents.dropped()
            if isinstance(error, CutFailed) and error.cause == Cause.BUSY:
                self._requests = handles + self._requests
            else:
                flight.failed(
                    error if isinstance(error, Exception) else SaveFailed("interrupted", where="save")
                )
            raise
        self._urgent = None
        self._flight = flight
        self._tracking.cut_taken(flight.cut, flight.mode, full=flight.full)
        self._order.arm()
        self._force_full, self._faults = False, 0
        stall_s = time.perf_counter() - began_s
        self._line[STALL_NS] = int(stall_s * 1e9)
        self.stats.cuts += 1
        self.stats.stalls_s.append(stall_s)
        self._emit("cut", step=flight.step, cut=flight.cut, mode=flight.mode, stall_s=stall_s, reason=reason)

    def _described_anew(self, until_s: float) -> Link:
        """An attachment with the tables as they are now: optimizer state appeared."""
        link = self._session.reattach(until_s=until_s)
        if link is None:
            raise CutFailed("gone", "the sidecar went away while tables were described anew")
        self._adopt(link)
        return link

    def _send_cut(
        self,
        link: Link,
        flight: Flight,
        counts: DirtyCounts,
        began_s: float,
        *,
        urgent: bool,
        hold_s: float,
        latest_s: float,
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
            begun = stream.begun(hold_s)
            crash_point("cut.begun")
            flight.mode = self._mode(begun)
            budget_s = begun.stall_budget_s or LONGEST_S
            writer = BlockWriter(
                stream,
                link.arena,
                until_s=min(time.monotonic() + budget_s, latest_s),
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
            metadata = flight.metadata
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
            stalled = isinstance(error, CutFailed) and error.cause == Cause.DEADLINE and writer is not None
            stream.abort(Cause.STALL_BUDGET if stalled else type(error).__name__)
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
        state_encoding = begun.state_encoding or self._policy.state_encoding or DEFAULT_STATE_ENCODING

        def observe(position: int, ids: Any, parts: list[torch.Tensor]) -> None:
            contents.batch(
                link.tables[position],
                ids if isinstance(ids, range) else ids.numpy(),
                [restore.array_of(part) for part in parts],
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
