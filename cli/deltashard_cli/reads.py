"""Checkpoints read table by table, so that memory is bounded by the largest table and progress can be told."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from deltashard_checkpoint import dtypes
from deltashard_checkpoint.attempts import select
from deltashard_checkpoint.entries import Checkpoint, Retired, Sealed
from deltashard_checkpoint.errors import FormatError
from deltashard_checkpoint.fetches import Fetcher
from deltashard_checkpoint.indexes import Index
from deltashard_checkpoint.lineages import CheckpointNotFound, chain, parts_of
from deltashard_checkpoint.logs import RunLog, stopped
from deltashard_checkpoint.plans import Plan, Want
from deltashard_checkpoint.readers import FrameApplier, TableTarget
from deltashard_checkpoint.runstates import RunState
from deltashard_checkpoint.snapshots import TableArrays, load_indexes, plan_restore, whole_tables
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.tables import TableSchema

from deltashard_cli.outputs import Advance, warn, when
from deltashard_cli.targets import POLICY, Target

_READERS = 8


def choose(state: RunState, which: str) -> Checkpoint:
    """The live checkpoint that `which` names: latest, seq:N (or N alone), step:N or pin:NAME.

    Raises `CheckpointNotFound`, `LogStopped` when it may stand in the part of the log that cannot be read, and
    `UserError` for a word that means nothing.
    """
    try:
        found = None if which == "none" else select(state, f"seq:{which}" if which.isdecimal() else which)
    except CheckpointNotFound:
        if state.stopped is None:
            raise
        raise stopped(state) from None
    if found is None and state.stopped is not None and which != "none":
        raise stopped(state)
    if found is None:
        raise CheckpointNotFound("nothing has been committed yet", where=f"run {state.run}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheckpoint:
    """A chosen checkpoint with the indexes of its chain."""

    store: Store
    state: RunState
    entry: Checkpoint
    indexes: Mapping[str, Index]

    @property
    def where(self) -> str:
        """For messages."""
        return f"run {self.state.run}, checkpoint {self.entry.seq} (step {self.entry.step})"

    def plan(self, tables: Collection[TableSchema], *, blobs: bool, fields: bool = True) -> Plan:
        """What a restore of these whole tables (and all blobs) reads."""
        return plan_restore(
            self.store,
            self.state,
            self.entry.seq,
            whole_tables(tables),
            blobs=blobs,
            weights_only=not fields,
            indexes=self.indexes,
        )

    def tables(
        self, schemas: Collection[TableSchema] | None = None, *, fields: bool = True, advance: Advance
    ) -> Iterator[TableArrays]:
        """Whole tables, one after the other."""
        for schema in self.entry.tables if schemas is None else schemas:
            (want,) = whole_tables((schema,))
            target = _target(want, fields=fields)
            self._apply(FrameApplier([target]), self.plan((schema,), blobs=False, fields=fields), advance)
            yield TableArrays(schema=schema, weights=target.weights, fields=target.fields)

    def blobs(self, *, advance: Advance) -> Mapping[str, memoryview]:
        """All blobs, by name."""
        applier = FrameApplier([])
        self._apply(applier, self.plan((), blobs=True), advance)
        return applier.blobs

    def _apply(self, applier: FrameApplier, plan: Plan, advance: Advance) -> None:
        for fetched in Fetcher(self.store, self.state.run).fetch(plan):
            applier.apply(fetched.data)
            advance(len(fetched.data))
        applier.finish(blobs=plan.blobs)


def read_state(target: Target) -> RunState:
    """The run at the tip of its log. Raises `LogGap`, `StoreUnavailable` and other store errors."""
    return RunLog(target.store, target.run).refresh(deadline_s=POLICY.deadline_s)


def open_checkpoint(target: Target, which: str, *, state: RunState | None = None) -> OpenCheckpoint:
    """The checkpoint `which` of the run, with the indexes its restore needs.

    Raises `CheckpointNotFound`, `InvalidCheckpoint`, `StoreUnavailable` and what the log raises.
    """
    if state is None:
        state = read_state(target)
        if (damage := state.damage()) is not None:
            warn(damage)
    try:
        entry = choose(state, which)
    except CheckpointNotFound as error:
        raise _retired(target, state, which) or error from None
    links = chain(state, entry.seq)
    parts = [*(link.part for link in links), *parts_of(state, entry.seq)]
    indexes = load_indexes(target.store, target.run, parts)
    return OpenCheckpoint(store=target.store, state=state, entry=entry, indexes=indexes)


def _retired(target: Target, state: RunState, which: str) -> CheckpointNotFound | None:
    """What became of a checkpoint that is not live: the newest one of that name that was retired, and when."""
    log = RunLog(target.store, target.run)
    with ThreadPoolExecutor(_READERS) as pool:
        slots = pool.map(log.read_slot, range(state.tip + 1))
        entries = [slot.entry for slot in slots if isinstance(slot, Sealed)]
    kind, _, value = f"seq:{which}".partition(":") if which.isdecimal() else which.partition(":")
    named = {
        entry.seq: entry
        for entry in entries
        if isinstance(entry, Checkpoint)
        and (
            value in entry.pins
            if kind == "pin"
            else value == str({"seq": entry.seq, "step": entry.step}.get(kind))
        )
    }
    gone = [(seq, entry) for entry in entries if isinstance(entry, Retired) for seq in entry.checkpoints]
    live = ", ".join(f"{one.seq} (step {one.step})" for one in state.checkpoints.values())
    for seq, retired in sorted(gone, key=lambda pair: pair[0], reverse=True):
        if seq in named:
            return CheckpointNotFound(
                f"checkpoint {seq} (step {named[seq].step}, saved {when(named[seq].at_s)}) was retired by log entry "
                f"{retired.seq}, {when(retired.at_s)}",
                where=f"run {state.run}",
                remedy=f"live are {live or 'none'}",
            )
    return None


def compaction_indexes(store: Store, state: RunState) -> Mapping[str, Index]:
    """The indexes of all live compactions that can be read, by index key."""
    found: dict[str, Index] = {}
    for compaction in state.compactions.values():
        with suppress(FormatError):  # `verify` says what is wrong with it
            found |= load_indexes(store, state.run, compaction.parts)
    return found


def _target(want: Want, *, fields: bool) -> TableTarget:
    schema = want.schema
    held = {}
    for spec in schema.fields if fields else ():
        shape = (schema.rows, schema.columns) if spec.kind == "pointwise" else (schema.rows,)
        held[spec.name] = np.zeros(shape, dtypes.by_name(spec.dtype).carrier)
    weights = np.zeros((schema.rows, schema.columns), dtypes.by_name(schema.dtype).carrier)
    return TableTarget(schema=schema, box=want.boxes[0], weights=weights, fields=held)
