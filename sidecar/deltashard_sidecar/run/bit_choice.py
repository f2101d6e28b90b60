"""Encodings by table: the user's, the policy's, or chosen by what restores do to each table (`deciding.precision`).

A choice needs errors of a sample of rows, which the first baseline of a process brings; before that everything is
stored with 8 bit. It is made anew at every cut. Where it asks for more bits than rows are stored with, the cut becomes
a baseline (`write.precision`); fewer bits begin at the next baseline. Of several ranks the first one at a cut has the
choice made, of all their tables. In several pods each sidecar sees only its own rows: there bits are shown, and
`encoding` and `tables` hold.
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
"""Restores are expected over so long where the trainer does not say how much is left."""


class VisibleRanks(NamedTuple):
    """Those of a run that this sidecar sees."""

    tables: Sequence[TableSchema]
    """Of all of them, each once."""
    is_complete: bool
    """Whether that is every rank."""


class BitChoice:
    """The choice of one run, and what it rests on. Thread-safe."""

    def __init__(self, *, log: Logger) -> None:
        self.errors = RowErrors()
        self.decision: fleet.Decision | None = None
        """The newest; None: nothing is chosen."""
        self._attempt: int | None = None
        """Whose harm is known; None: no log was read yet, and nothing is chosen or said."""
        self._error_ledger = ErrorLedger()
        self._tables: Sequence[TableSchema] = ()
        """Of all ranks, as of the newest choice."""
        self._snapshot_encodings: tuple[tuple[int, int, bool], Mapping[str, str]] | None = None
        """What was chosen last, and for which attempt, cut, and whether the rank ends with it; None: nothing yet."""
        self._reported_tables = ""
        """The setting of whose names some are no table's, and it was said."""
        self._lock = threading.Lock()
        self._log = log

    def opened(self, attempt: int, source: Checkpoint | None, state: RunState) -> None:
        """An attempt was opened that resumes from `source`, a checkpoint of that log, or from none."""
        found = (
            ErrorLedger()
            if source is None
            else self._parse_ledger(state.inherited_metadata(error_ledger.KEY, source)).after_restore()
        )
        with self._lock:
            self._attempt, self._error_ledger = attempt, found

    def continue_attempt(self, state: RunState, attempt: int) -> None:
        """An attempt is under way: what the process before knew of it stands in the log."""
        if self._attempt == attempt:
            return  # this one's own, which knows more
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
        cut = attempt, begin.cut, begin.reason == "close"
        snapshot_encodings = self._snapshot_encodings
        if not chooses_bits(policy):
            self.decision = None
        elif snapshot_encodings is not None and snapshot_encodings[0] == cut:
            encodings = snapshot_encodings[1]  # what another rank stores this cut by
        else:
            found = self._choose(policy, ranks, begin, expected, own)
            if ranks.is_complete:
                encodings = found.encodings
            self._record_decision(policy, found, encodings, expected=expected, is_complete=ranks.is_complete)
            self._tables = ranks.tables
            if begin.cut:  # 0: one that may come
                self._snapshot_encodings = cut, encodings
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
            least_bits=SAFE_BITS if unknown else max(policy.least_bits, BITS[0]),
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
            would=summary(found.encodings),
            why=found.why,
            bound=f"not below {policy.least_bits} bit" if policy.least_bits > BITS[0] else "",
            evidence=f"{self._error_ledger.restores} restores so far, one expected in {between_s / 3600:.3g} h",
            unreachable="" if is_complete else "bits are chosen where all ranks are in one pod: shown here",
        )
        if before is None or (before.value, before.would) != (now.value, now.would):
            self._log.info("bits.decided", value=now.value, would=now.would, why=found.why)

    def metadata(self, held: Stored | None) -> dict[str, str]:
        """What a commit says of the harm so far, and of what a restore of it would add; None: nobody chooses its bits.

        What restores did before is carried on then, too: bits may be chosen again.
        """
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
    """Encodings of tables for people: `q8`, or `q4: 3 tables, q8: 23`."""
    counts = Counter(encodings.values())
    if len(counts) <= 1:
        return next(iter(counts), "")
    ordered = sorted(counts.items(), key=lambda each: ENCODINGS[each[0]].bits)
    first, *rest = (f"{name}: {count}" for name, count in ordered)
    return ", ".join([f"{first} table{'s' * (ordered[0][1] != 1)}", *rest])
