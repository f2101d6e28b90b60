"""Pure functions from the log's state (and indexes) to summary records of runs and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltashard_checkpoint.format.frame import FrameKind
from deltashard_checkpoint.format.index import Index
from deltashard_checkpoint.log.chain import ChainIncomplete, chain, closure, held_bytes, parts_of
from deltashard_checkpoint.log.entry import Checkpoint, Part
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.vocabulary import INCONSISTENT_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in one line."""

    run: str
    owner: str
    tip: int
    attempts: int
    checkpoints: int
    committed: int
    newest_seq: int | None
    newest_step: int | None
    newest_at_s: float | None
    live_stored_bytes: int
    stopped: str | None
    """Why the log cannot be read to its end; None for a healthy run."""
    state: str
    """ok, damaged, or the `IncompleteState` of an interrupted copy or removal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """A checkpoint in one line; `kind` is full, delta or mixed, and `covers` are the bases of its parts."""

    seq: int
    step: int
    at_s: float
    attempt: int
    snapshot_id: int
    kind: str
    covers: tuple[int, ...]
    chain: tuple[int, ...]
    """The checkpoints that a restore reads, newest first; empty if the chain is broken."""
    compacted: bool
    """It restores from its compaction, which `kind`, `covers`, rows and bytes describe."""
    ranks: int
    rows: int
    raw_bytes: int | None
    """None for a compaction whose index was not read: its log entry does not record them."""
    stored_bytes: int
    restore_bytes: int
    stall_s: float
    snapshot_at_s: float | None
    """Unix seconds by rank 0's clock when training stopped for the snapshot; None if unknown."""
    encodings: Mapping[str, tuple[str, ...]]
    """Encodings of the rows in its own parts (or its compaction's), by table."""
    pins: tuple[str, ...]
    detached: bool
    """A rewind has detached it: a restore neither selects it as the newest nor falls back to it."""
    directive: str


def summarize_run(state: RunState) -> RunSummary:
    newest = state.newest()
    return RunSummary(
        run=state.run,
        owner=state.owner,
        tip=state.tip,
        attempts=sum(1 for attempt in state.attempts.values() if attempt.world_size),
        checkpoints=len(state.checkpoints),
        committed=state.committed,
        newest_seq=None if newest is None else newest.seq,
        newest_step=None if newest is None else newest.step,
        newest_at_s=None if newest is None else newest.at_s,
        live_stored_bytes=sum(held_bytes(state, seq) for seq in state.checkpoints),
        stopped=None if state.stopped is None else f"entry {state.stopped.seq}: {state.stopped.error.what}",
        state="ok" if state.stopped is None else "damaged",
    )


def _restore_chain(state: RunState, seq: int) -> tuple[tuple[int, ...], int]:
    """Return (seqs of the checkpoints that a restore reads, newest first, bytes of them), without reading manifests."""
    seqs = closure(state, (seq,))
    if any(state.checkpoints[at].listed is not None for at in seqs):
        return tuple(sorted(seqs, reverse=True)), sum(held_bytes(state, at) for at in seqs)
    try:
        links = chain(state, seq)
    except ChainIncomplete:
        links = ()
    read: dict[str, Part] = {link.part.index_key: link.part for link in links}
    return tuple(sorted({link.seq for link in links}, reverse=True)), sum(
        p.stored_bytes for p in read.values()
    )


def summarize_checkpoint(
    state: RunState, entry: Checkpoint, indexes: Mapping[str, Index] | None = None
) -> CheckpointSummary:
    """Summarize one live checkpoint; `indexes`, by index key, supply the raw bytes of a compaction."""
    compaction = state.compactions.get(entry.seq)
    covers = () if compaction is not None else tuple(reversed(entry.covered))
    moved = [] if compaction is None else [(indexes or {}).get(part.index_key) for part in compaction.parts]
    known = [index for index in moved if index is not None]
    seqs, restore_bytes = _restore_chain(state, entry.seq)
    return CheckpointSummary(
        seq=entry.seq,
        step=entry.step,
        at_s=entry.at_s,
        attempt=entry.attempt,
        snapshot_id=entry.snapshot_id,
        kind="full" if not covers else "mixed" if None in entry.covers else "delta",
        covers=covers,
        chain=seqs,
        compacted=compaction is not None,
        ranks=entry.world_size,
        rows=entry.rows if compaction is None else compaction.rows,
        raw_bytes=entry.raw_bytes
        if compaction is None
        else sum(index.raw_bytes for index in known)
        if len(known) == len(moved)
        else None,
        stored_bytes=entry.stored_bytes if compaction is None else compaction.stored_bytes,
        restore_bytes=restore_bytes,
        stall_s=entry.stall_s,
        snapshot_at_s=entry.snapshot_at_s or None,
        encodings=entry.encodings if compaction is None else compaction.encodings,
        pins=state.pins_of(entry.seq),
        detached=entry.seq in state.detached,
        directive=entry.directive,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSummary:
    """Content of one table in a checkpoint's own parts."""

    table: str
    rows: int
    columns: int
    dtype: str
    fields: tuple[str, ...]
    held_rows: int
    frames: int
    stored_bytes: int
    encodings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """One part of a checkpoint."""

    rank: int
    covers: int | None
    index_key: str
    boxes: int
    packs: int
    frames: int
    rows: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint in detail."""

    run: str
    summary: CheckpointSummary
    compacted_at_s: float | None
    inconsistent_by: int | None
    """The later checkpoint that reports this one as inconsistent: some of its rows belong to another step."""
    fingerprint: Mapping[str, str]
    metadata: Mapping[str, str]
    parts: tuple[PartSummary, ...]
    tables: tuple[TableSummary, ...]
    blobs: Mapping[str, int]


def inspection_of(state: RunState, entry: Checkpoint, indexes: Mapping[str, Index]) -> Inspection:
    """Describe `entry` by the indexes of its parts, or of its compaction if it has one."""
    parts = parts_of(state, entry.seq)
    own = [indexes[part.index_key] for part in parts]
    tables = []
    for schema in entry.tables:
        places = [p for index in own for p in index.places if p.info.table == schema.fqn]
        tables.append(
            TableSummary(
                table=schema.fqn,
                rows=schema.rows,
                columns=schema.columns,
                dtype=schema.dtype,
                fields=tuple(f"{spec.name}: {spec.kind} {spec.dtype}" for spec in schema.fields),
                held_rows=sum(p.rows for p in places if p.info.kind is FrameKind.ROWS),
                frames=len(places),
                stored_bytes=sum(p.info.stored_bytes for p in places),
                encodings=tuple(sorted({p.info.encoding for p in places if p.info.encoding})),
            )
        )
    return Inspection(
        run=state.run,
        summary=summarize_checkpoint(state, entry, indexes),
        compacted_at_s=state.compactions[entry.seq].at_s if entry.seq in state.compactions else None,
        inconsistent_by=next(
            (
                seq
                for seq, each in sorted(state.checkpoints.items())
                if f"seq:{entry.seq}" in each.metadata.get(INCONSISTENT_KEY, "").split(",")
            ),
            None,
        ),
        fingerprint=entry.fingerprint,
        metadata=entry.metadata,
        parts=tuple(
            PartSummary(
                rank=part.rank,
                covers=part.covers,
                index_key=part.index_key,
                boxes=len(part.boxes),
                packs=len(index.packs),
                frames=len(index.places),
                rows=index.rows,
                raw_bytes=index.raw_bytes,
                stored_bytes=part.stored_bytes,
            )
            for part, index in zip(parts, own, strict=True)
        ),
        tables=tuple(tables),
        blobs=dict(sorted((name, count) for index in own for name, count in index.blobs.items())),
    )
