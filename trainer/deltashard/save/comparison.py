"""Compares rows copied ahead of a snapshot with the live rows, while training continues.

A row that differs although it was not marked is wrong in that snapshot. The fault is reported, the metadata of the next
commit names the snapshot, and the next save takes all rows. The commit itself is not changed. A comparison that fails
or times out is reported in the same way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from deltashard.attach.interruption import must_propagate
from deltashard.save.handle import InFlightSave
from deltashard.snapshot.precopy import TablePrecopy
from deltashard.tracking.audit import AuditFault
from deltashard.tracking.tracking import TrackedTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Inconsistency:
    """A snapshot with wrong or unverified rows."""

    snapshot: InFlightSave
    faults: tuple[AuditFault, ...] = ()
    """Rows whose stored values were overwritten before the step of the snapshot."""
    failed: str = ""
    """Reason why the comparison failed; empty if it succeeded."""

    @property
    def count(self) -> int:
        """Number of faults, as the audit counts them."""
        return len(self.faults) + bool(self.failed)

    def __str__(self) -> str:
        if self.failed:
            return f"rows copied ahead of it could not be compared with the live rows ({self.failed})"
        return "; ".join(
            f"rows {list(fault.rows[:4])} of {fault.table} differ from their values at its step: they were written "
            "untracked (through .data) while they were copied, and changed back"
            for fault in self.faults
        )


class Comparison:
    """Compares the last snapshot of a Checkpointer; used on the training thread only."""

    def __init__(
        self, submit: Callable[[Callable[[], None]], Future[None]], *, on_found: Callable[[], None]
    ) -> None:
        """`submit` runs a job on the copying thread, which calls `on_found` if `result` has a finding."""
        self._submit, self._on_found = submit, on_found
        self._tables: Sequence[tuple[TrackedTable, TablePrecopy]] = ()
        self._snapshot: InFlightSave | None = None
        self.job: Future[None] | None = None
        """Running comparison; None if nothing was copied ahead of the last snapshot or the result was taken."""

    def begin(self, snapshot: InFlightSave, tables: Sequence[tuple[TrackedTable, TablePrecopy]]) -> None:
        self._snapshot, self._tables, self.job = snapshot, tables, None
        if tables:
            self.job = self._submit(lambda: _compare([ahead for _, ahead in tables]))
            self.job.add_done_callback(lambda job: self._collect(job, tables))

    def result(self, until_s: float = math.inf) -> Inconsistency | None:
        """Return the finding, once, or None if there is none; waits until `until_s` (monotonic)."""
        tables, self._tables = self._tables, ()
        job, self.job = self.job, None
        if job is None or self._snapshot is None:
            return None
        try:
            job.result(None if until_s == math.inf else max(0.0, until_s - time.monotonic()))
            found = [
                table.check_unmarked_rows(torch.from_numpy(ahead.unmarked_rows))
                for table, ahead in tables
                if len(ahead.unmarked_rows)
            ]
        except BaseException as error:
            if must_propagate(error):
                raise
            late = isinstance(error, TimeoutError) and not job.done()
            job.cancel()
            failed = "it did not finish in time" if late else f"{type(error).__name__}: {error}"
            return Inconsistency(snapshot=self._snapshot, failed=failed)
        faults = tuple(fault for fault in found if fault is not None)
        return Inconsistency(snapshot=self._snapshot, faults=faults) if faults else None

    def _collect(self, job: Future[None], tables: Sequence[tuple[TrackedTable, TablePrecopy]]) -> None:
        if not job.cancelled() and (
            job.exception() is not None or any(len(ahead.unmarked_rows) for _, ahead in tables)
        ):
            self._on_found()


def _compare(tables: Sequence[TablePrecopy]) -> None:
    for each in tables:
        each.compare()
