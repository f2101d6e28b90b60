"""Compaction: a chain of checkpoints becomes one synthetic baseline at an existing step.

The rows of the chain are *moved*, in the encoding they were written in, newest of each row first: nothing is decoded
and nothing is quantized a second time, so what restores afterwards is, bit for bit, what restored before. A frame all
of whose rows survive is copied as it is; of any other frame the surviving encoded rows are gathered into a new one.
Blobs are the newest checkpoint's and are copied. The result is committed by a `compact` entry: from its slot on,
chains that pass through the checkpoint end there, and what only they needed may be retired.

A compaction may run anywhere, and lose to anything: if meanwhile the checkpoint was retired, or its own prefix was
given up as debris, the log refuses the entry.
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
    """The checkpoint or the compaction's own objects were retired meanwhile: nothing changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRows:
    """What a mover has made durable under `data/compact-{token}/`."""

    parts: tuple[Part, ...]
    encodings: Mapping[str, tuple[str, ...]]
    """Of these rows, by table."""
    rows: int
    stored_bytes: int


Mover = Callable[[RunLog, RunState, int, tuple[ChainLink, ...], str], MovedRows]
"""(log, state, seq, links newest first, token) -> packs and index put; see `row_mover.move_rows`."""


def compactable(state: RunState, seq: int) -> bool:
    """Whether restoring `seq` reads more than one checkpoint, and these are of one rank."""
    return not _of_several_ranks(state, seq) and any(link.seq != seq for link in chain(state, seq))


def compact(
    log: RunLog, seq: int, move: Mover, *, deadline_s: float = DEFAULT_DEADLINE_S
) -> Compacted | None:
    """Compact checkpoint `seq`; None when it already is a baseline (nothing to gain).

    Raises `LogStopped`, `CheckpointNotFound`, `CompactionAbandoned`, `UserError` for one of several ranks, and what the
    log and `move` raise.
    """
    state = log.refresh(deadline_s=deadline_s)
    if state.stopped is not None:
        raise stopped(state)
    if _of_several_ranks(state, seq):
        raise UserError(
            f"checkpoint {seq} is of several ranks, and such are not compacted yet",
            where=f"run {log.run}",
            remedy="the next baseline ends its chain",
        )
    links = chain(state, seq)
    if all(link.seq == seq for link in links):
        return None
    moved = move(log, state, seq, links, compaction_token(state.tip))

    # IMPORTANT: chains change with this entry and not before: until it is in the log, the moved rows are garbage that
    # debris may name (and then the log refuses the entry).
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
        raise CompactionAbandoned(f"the log refuses it: {error.what}", where=f"run {log.run}") from error
    assert sealed is not None
    assert isinstance(sealed.entry, Compacted)
    return sealed.entry


def _of_several_ranks(state: RunState, seq: int) -> bool:
    return any(state.checkpoints[at].listed is not None for at in closure(state, (seq,)))
