"""Encodings per table: the user's, the policy's, or chosen by the effect of restores on each table.

The rule is in `deciding.precision`. It needs errors of sampled rows, measured at the first baseline of a process; until
then everything is stored with 8 bits. Bits are chosen at every save. More bits than rows are stored with make it a
baseline (`write.precision`); fewer bits begin at the next baseline. The first rank that saves chooses for the tables of
all ranks. With several pods, each sidecar sees only its own rows: the choice is then only shown, and `encoding` and
`tables` apply.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from deltashard_checkpoint.deciding import error_ledger
from deltashard_checkpoint.deciding.error_ledger import ErrorLedger
from deltashard_checkpoint.deciding.evidence import RunEstimate
from deltashard_checkpoint.deciding.precision import (
    BITS,
    LAST_SHARE,
    SAFE_BITS,
    ChosenBits,
    RestoreForecast,
    TableStats,
    choose_bits,
    large_tables,
    match_tables,
    parse_encodings,
)
from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.format.row_block import weight_row_bytes
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_checkpoint.write.precision import StoredPrecision as Stored
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.policy import chooses_bits
from deltashard_sidecar.run.row_error import RowErrors
from deltashard_sidecar.telemetry.structured_logging import Logger, explain

HORIZON_S = 86400.0
"""Period for which restores are expected if the trainer does not report how much training is left."""


class VisibleRanks(NamedTuple):
    """Ranks of a run that attach to this sidecar."""

    tables: Sequence[TableSchema]
    is_complete: bool


class BitChoice:
    """Choice of bits for one run, and its inputs. Thread-safe."""

    def __init__(self, *, log: Logger) -> None:
        self.errors = RowErrors()
        self.decision: fleet.Decision | None = None
        """Newest decision; None: bits are not chosen."""
        self._attempt: int | None = None
        """Attempt of the error ledger; None: no log has been read, so nothing is chosen or recorded."""
        self._error_ledger = ErrorLedger()
        self._tables: Sequence[TableSchema] = ()
        self._snapshot_encodings: tuple[tuple[int, int, bool], Mapping[str, str]] | None = None
        """Encodings chosen last, with (attempt, snapshot_id, whether it is the closing one); None: not chosen yet."""
        self._reported_tables = ""
        """Value of the `tables` setting whose unknown names have been logged."""
        self._lock = threading.Lock()
        self._log = log

    def opened(self, attempt: int, source: Checkpoint | None, state: RunState) -> None:
        found = (
            ErrorLedger()
            if source is None
            else self._parse_ledger(state.inherited_metadata(error_ledger.KEY, source)).after_restore()
        )
        with self._lock:
            self._attempt, self._error_ledger = attempt, found

    def continue_attempt(self, state: RunState, attempt: int) -> None:
        """Continue an attempt under way, with what the previous process recorded in the log."""
        if self._attempt == attempt:
            return  # this process opened it and has newer data
        resumed = state.attempts[attempt].resumes_from
        self.opened(attempt, None if resumed is None else state.checkpoints.get(resumed), state)
        mine = [
            c for c in state.checkpoints.values() if c.attempt == attempt and error_ledger.KEY in c.metadata
        ]
        if mine:
            found = self._parse_ledger(
                max(mine, key=lambda checkpoint: checkpoint.seq).metadata[error_ledger.KEY]
            )
            with self._lock:
                self._error_ledger = found

    def _parse_ledger(self, text: str | None) -> ErrorLedger:
        try:
            return ErrorLedger() if text is None else error_ledger.parse_metadata(text)
        except DeltashardError as error:
            self._log.warning("error_ledger.unreadable", **explain(error))
            return ErrorLedger()

    def encodings(
        self,
        policy: pb.Policy,
        ranks: VisibleRanks,
        begin: pb.SaveRequest.Begin,
        expected: RunEstimate,
        *,
        attempt: int,
    ) -> dict[str, str]:
        names = [table.fqn for table in ranks.tables]
        own, unknown = match_tables(parse_encodings(policy.tables, where="tables"), names)
        if unknown and ranks.is_complete and policy.tables != self._reported_tables:
            self._reported_tables = policy.tables
            self._log.warning("tables.unknown", names=unknown, tables=sorted(names)[:8])
        encodings: Mapping[str, str] = {name: own.get(name, policy.encoding) for name in names}
        snapshot_id = attempt, begin.snapshot_id, begin.reason == "close"
        snapshot_encodings = self._snapshot_encodings
        if not chooses_bits(policy):
            self.decision = None
        elif snapshot_encodings is not None and snapshot_encodings[0] == snapshot_id:
            encodings = snapshot_encodings[1]  # chosen by another rank of this snapshot
        else:
            found = self._choose(policy, ranks, begin, expected, own)
            if ranks.is_complete:
                encodings = found.encodings
            self._record_decision(policy, found, encodings, expected=expected, is_complete=ranks.is_complete)
            self._tables = ranks.tables
            if begin.snapshot_id:  # 0: a prepared save without a snapshot number yet
                self._snapshot_encodings = snapshot_id, encodings
        return {table: encoding for table, encoding in encodings.items() if encoding != policy.encoding}

    def _choose(
        self,
        policy: pb.Policy,
        ranks: VisibleRanks,
        begin: pb.SaveRequest.Begin,
        expected: RunEstimate,
        own: Mapping[str, str],
    ) -> ChosenBits:
        with self._lock:
            run, unknown = self._error_ledger, self._attempt is None and ranks.is_complete
        facts = {
            table.fqn: TableStats(
                raw_bytes=_weight_bytes(table),
                errors=self.errors.of(table.fqn),
                spent=run.spent.get(table.fqn, 0.0),
            )
            for table in ranks.tables
        }
        left_s = HORIZON_S
        if begin.planned_steps and expected.step_s:
            left_s = max(begin.planned_steps - begin.step, 0) * expected.step_s
        near_end = bool(begin.planned_steps) and begin.step >= (1 - LAST_SHARE) * begin.planned_steps
        forecast = RestoreForecast(
            restores=expected.rates.restores.quantile(left_s),
            expected=(expected.trained_s + left_s) / expected.rates.restores.mean_between_s,
            restores_so_far=run.restores,
            near_end=near_end or begin.reason == "close",
            min_bits=SAFE_BITS if unknown else max(policy.min_bits, BITS[0]),
        )
        return choose_bits(policy.bits_goal, facts, forecast, own)

    def _record_decision(
        self,
        policy: pb.Policy,
        found: ChosenBits,
        encodings: Mapping[str, str],
        *,
        expected: RunEstimate,
        is_complete: bool,
    ) -> None:
        before, between_s = self.decision, expected.rates.restores.mean_between_s
        self.decision = now = fleet.Decision(
            subject="bits",
            goal=policy.bits_goal,
            value=summary(encodings),
            proposed=summary(found.encodings),
            why=found.why,
            bound=f"not below {policy.min_bits} bit" if policy.min_bits > BITS[0] else "",
            evidence=f"{self._error_ledger.restores} restores so far, one expected in {between_s / 3600:.3g} h",
            unreachable="" if is_complete else "bits are chosen where all ranks are in one pod: shown here",
        )
        if before is None or (before.value, before.proposed) != (now.value, now.proposed):
            self._log.info("bits.decided", value=now.value, proposed=now.proposed, why=found.why)

    def metadata(self, held: Stored | None) -> dict[str, str]:
        """Return the ledger for a commit stored as `held`; None: bits are not chosen, and only the past is recorded."""
        with self._lock:
            tables, known, so_far = self._tables, self._attempt is not None, self._error_ledger
        errors = {}
        if held is not None:
            for name in large_tables(
                {each.fqn: TableStats(raw_bytes=_weight_bytes(each)) for each in tables}
            ):
                if (error := self.errors.of(name).get(ENCODINGS[held.of_table(name)].bits)) is not None:
                    errors[name] = error
        ledger = replace(so_far, error=errors)
        return {error_ledger.KEY: ledger.text()} if known and (ledger.error or ledger.spent) else {}


def _weight_bytes(table: TableSchema) -> int:
    return table.rows * weight_row_bytes(table, table.columns)


def summary(encodings: Mapping[str, str]) -> str:
    """Return a summary of tables' encodings for people: `q8`, or `q4: 3 tables, q8: 23`."""
    counts = Counter(encodings.values())
    if len(counts) <= 1:
        return next(iter(counts), "")
    ordered = sorted(counts.items(), key=lambda each: ENCODINGS[each[0]].bits)
    first, *rest = (f"{name}: {count}" for name, count in ordered)
    return ", ".join([f"{first} table{'s' * (ordered[0][1] != 1)}", *rest])
