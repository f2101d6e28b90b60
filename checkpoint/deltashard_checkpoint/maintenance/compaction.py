"""Compaction: turn a chain of checkpoints into one synthetic baseline at an existing step.

The chain's rows are *moved* in their encoding, newest of each row first, without decoding or quantizing them again. So
a later restore is bit-identical to an earlier one. A frame whose rows all survive is copied; the surviving encoded rows
of any other frame are gathered into a new one. Blobs of the newest checkpoint are copied. A `compact` entry commits the
result: from its slot on, chains through the checkpoint end there, and objects that only they needed may be retired.

A compaction may run on any host and loses every conflict: if the checkpoint was retired in the meantime, or the prefix
of the compaction was retired as orphaned, the log rejects the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deltashard_checkpoint.errors import EnvironmentFault, UserError
from deltashard_checkpoint.format.object_key import compaction_token
from deltashard_checkpoint.log.chain import ChainLink, chain, closure
from deltashard_checkpoint.log.commit_log import DEFAULT_DEADLINE_S, RunLog
from deltashard_checkpoint.log.entry import Compacted, Entry, Part
from deltashard_checkpoint.log.log_error import stopped
from deltashard_checkpoint.log.replay import EntryRefused
from deltashard_checkpoint.log.run_state import RunState


class CompactionAbandoned(EnvironmentFault):
    """The checkpoint or the compaction's objects were retired in the meantime; the run is unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRows:
    """Durable objects of a mover under `data/compact-{token}/`."""

    parts: tuple[Part, ...]
    encodings: Mapping[str, tuple[str, ...]]
    """Encodings of the rows, by table."""
    rows: int
    stored_bytes: int


Mover = Callable[[RunLog, RunState, int, tuple[ChainLink, ...], str], MovedRows]
"""(log, state, seq, links newest first, token) -> packs and index put; see `row_mover.move_rows`."""


def compactable(state: RunState, seq: int) -> bool:
    """Return whether restoring `seq` reads more than one checkpoint, all of them of one rank."""
    return not _of_several_ranks(state, seq) and any(link.seq != seq for link in chain(state, seq))


def compact(
    log: RunLog, seq: int, move: Mover, *, deadline_s: float = DEFAULT_DEADLINE_S
) -> Compacted | None:
    """Compact checkpoint `seq`; None if it is a baseline already.

    Raises `LogStopped`, `CheckpointNotFound`, `CompactionAbandoned`, `UserError` for a checkpoint of several ranks, and
    the errors of the log and of `move`.
    """
    state = log.refresh(deadline_s=deadline_s)
    if state.stopped is not None:
        raise stopped(state)
    if _of_several_ranks(state, seq):
        raise UserError(
            f"checkpoint {seq} is of several ranks, which compaction does not support",
            where=f"run {log.run}",
            remedy="the next baseline ends its chain",
        )
    links = chain(state, seq)
    if all(link.seq == seq for link in links):
        return None
    moved = move(log, state, seq, links, compaction_token(state.tip))

    # IMPORTANT: this entry changes the chains. Before it is in the log, the moved rows are garbage that may be retired
    # as orphaned, and the log then rejects the entry.
    def build(_state: RunState, slot: int, writer: str) -> Entry:
        return Compacted(
            seq=slot,
            previous="",
            writer=writer,
            at_s=0.0,
            replaces=seq,
            parts=moved.parts,
            encodings=moved.encodings,
            rows=moved.rows,
            stored_bytes=moved.stored_bytes,
        )

    try:
        sealed = log.append(
            build, before="compact.before_log_put", after="compact.after_log_put", deadline_s=deadline_s
        )
    except EntryRefused as error:
        raise CompactionAbandoned(f"the log rejects it: {error.what}", where=f"run {log.run}") from error
    assert sealed is not None
    assert isinstance(sealed.entry, Compacted)
    return sealed.entry


def _of_several_ranks(state: RunState, seq: int) -> bool:
    return any(state.checkpoints[at].listed is not None for at in closure(state, (seq,)))
