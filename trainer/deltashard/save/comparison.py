"""What was copied ahead of a cut against the live rows, beside training (`precopy.TableAhead.compare`), and who asks.

    the next cut   says and counts what was found, and takes all rows
    none follows   the step is cut once more, where the program is still what it was at the cut; where it is not, or
                   cannot be, it is said that the checkpoint stays as it is

A comparison that fails, or is not over in time, has found nothing, and nothing is known: that counts as a fault, too.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from deltashard.attach.interruption import leaves
from deltashard.cut.precopy import TableAhead
from deltashard.tracking.audit import AuditFault
from deltashard.tracking.glance import Signature
from deltashard.tracking.tracking import TrackedTable

log = logging.getLogger("deltashard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """What is wrong with the last cut, or may be."""

    faults: tuple[AuditFault, ...] = ()
    """Rows that it stored as they were for a while only."""
    failed: str = ""
    """Why that is not known; empty: it is."""
    moved: str = ""
    """Why the program is not what it was at the cut any more; empty: nothing tells that."""

    @property
    def count(self) -> int:
        """Faults in it, as the audit counts them."""
        return len(self.faults) + bool(self.failed)


class Comparison:
    """Of the last cut of one Checkpointer; on the training thread only."""

    def __init__(
        self,
        later: Callable[[Callable[[], None]], Future[None]],
        program: Callable[[bool], Sequence[Tensor]],
    ) -> None:
        """`later` has the copying thread do something; `program` gives what is saved, looked up anew if told so."""
        self._later, self._program = later, program
        self._tables: Sequence[tuple[TrackedTable, TableAhead]] = ()
        self._signature: Signature | None = None
        self._said = False
        self.job: Future[None] | None = None
        """Is at it, or was; None: nothing was copied ahead of the last cut, or somebody asked."""

    def begin(self, tables: Sequence[tuple[TrackedTable, TableAhead]]) -> None:
        """A cut was taken, with this of what was copied ahead of it."""
        self._tables, self.job = tables, None
        if tables:
            self._signature = self._signed(look=False)
            self.job = self._later(lambda: _compare([ahead for _, ahead in tables]))

    def ask(self, until_s: float = math.inf) -> Doubt | None:
        """What was found, by `until_s` (monotonic); None: nothing is wrong. Asked once."""
        tables, self._tables = self._tables, ()
        job, self.job = self.job, None
        if job is None:
            return None
        try:
            job.result(None if until_s == math.inf else max(0.0, until_s - time.monotonic()))
            found = [
                table.stray_check(torch.from_numpy(ahead.astray))
                for table, ahead in tables
                if len(ahead.astray)
            ]
        except BaseException as error:
            if leaves(error):
                raise
            late = isinstance(error, TimeoutError) and not job.done()
            job.cancel()
            failed = "it was not over in time" if late else f"{type(error).__name__}: {error}"
            return Doubt(failed=failed, moved=self._moved([]))
        faults = tuple(fault for fault in found if fault is not None)
        if not faults:
            return None
        return Doubt(faults=faults, moved=self._moved([ahead for _, ahead in tables]))

    def say(self, doubt: Doubt, mended: str, *, last: bool = False) -> None:
        """What is wrong with the checkpoint, and what becomes of that; `last`: nothing is said after this."""
        for fault in doubt.faults:
            log.error(
                "rows %s of %s are not in the last checkpoint as they were at its step: they were written without a "
                "trace (through .data) while they were copied, and put back. %s",
                list(fault.rows[:4]),
                fault.table,
                mended,
            )
        if doubt.failed and (last or not self._said):
            self._said = True
            log.warning(
                "whether rows are in the last checkpoint as they were at its step is not known: what was copied ahead "
                "of it could not be compared with them (%s). %s%s",
                doubt.failed,
                mended,
                "" if last else ". This is said once",
            )

    def _moved(self, tables: Sequence[TableAhead]) -> str:
        now, before = self._signed(look=True), self._signature
        if now is None or before is None:
            return "whether the model was written since is not known"
        if (now.addresses, now.versions) != (before.addresses, before.versions):
            return "the model was written since"
        return "a table was written since, without a trace" if any(each.overrun for each in tables) else ""

    def _signed(self, *, look: bool) -> Signature | None:
        try:
            return Signature(self._program(look))
        except Exception as error:  # a tensor without memory or versions of its own
            log.debug("the program cannot be signed", exc_info=error)
            return None


def _compare(tables: Sequence[TableAhead]) -> None:
    for each in tables:
        each.compare()
