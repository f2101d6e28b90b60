"""The state of a run, as folded from its log by `replay`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.log import pin
from deltashard_checkpoint.log.entry import Checkpoint, Compacted, Sealed
from deltashard_checkpoint.log.part_list import PartList


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The state of one attempt."""

    world_size: int
    """0: a rewind, not a trainer's attempt."""
    resumes_from: int | None
    resumes_attempt: int | None
    """Attempt of the checkpoint that it resumed from."""
    last_snapshot: int | None = None
    """Highest snapshot number committed by it; lower ones are abandoned."""
    last_seq: int | None = None
    """Seq of that commit."""
    last_step: int | None = None
    """Step of that commit, or of the checkpoint it resumed from."""
    workload: str = ""
    """UID of the workload that opened it; empty outside of a cluster."""
    pod: str = ""
    """UID of the pod that opened it; empty outside of a cluster."""
    layout: str = ""
    """Digest of its ranks' layout; empty: one rank, which holds every table whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A slot whose entry cannot be read or breaks a rule."""

    seq: int
    error: DeltashardError
    voidable: bool
    """True: the bytes are bad for every version. False: this library may be too old."""
    hash: str = ""
    """Hash of a well-formed entry that breaks a rule, else SHA-256 of the bytes."""


Slot = Sealed | Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state after entries 0..tip. Mappings are read-only by convention: states share unchanged ones."""

    run: str
    """The requested name; genesis must match."""
    owner: str = ""
    tip: int = -1
    """The last folded slot (or, with `stopped`, the last known slot); -1: the log is empty."""
    tip_hash: str = ""
    attempt: int | None = None
    """The newest attempt; every lower one is fenced."""
    attempts: Mapping[int, Attempt] = field(default_factory=dict)
    checkpoints: Mapping[int, Checkpoint] = field(default_factory=dict)
    """Live checkpoints by seq, oldest first."""
    compactions: Mapping[int, Compacted] = field(default_factory=dict)
    """The live compaction of a live checkpoint, by the checkpoint's seq."""
    superseded: Mapping[str, int] = field(default_factory=dict)
    """Prefix -> the checkpoint that no longer reads it because of its compaction; may be retired."""
    retired: Mapping[str, int] = field(default_factory=dict)
    """Prefix -> seq of the retire entry that named it, until reclaimed."""
    compactions_from: int = 0
    """First slot at which a compaction may have begun: prefixes of older ones may have been forgotten."""
    committed: int = 0
    """Number of checkpoints ever committed."""
    user_entries: Mapping[str, pin.UserEntry] = field(default_factory=dict)
    """The latest user entry per pinned name, while it has an effect."""
    detached: frozenset[int] = frozenset()
    """Live checkpoints that a rewind detached: never the newest, and never a restore's fallback."""
    abandoned_at: int | None = None
    """Slot of the attempt or repair that abandoned entries, until a later attempt is opened after its first commit.

    Until then retire entries must not name older prefixes that may belong to those entries (`replay.is_protected`)."""
    listings: Mapping[int, PartList] = field(default_factory=dict, compare=False)
    """Loaded parts of live checkpoints that a manifest lists, by seq (`log.manifest`).

    No rule uses them: validation uses the entry's `listed` only."""
    stopped: Unreadable | None = None
    """The entry at which the fold stopped; None in a healthy log."""

    def inherited_metadata(self, key: str, checkpoint: Checkpoint) -> str | None:
        """Return metadata `key` of a checkpoint, or of the newest earlier checkpoint that has it.

        Earlier checkpoints are those of its attempt, and of the attempt that this one resumed.
        """
        attempt = self.attempts.get(checkpoint.attempt)
        near = {checkpoint.attempt, None if attempt is None else attempt.resumes_attempt}
        candidates = [
            each
            for each in self.checkpoints.values()
            if each.seq <= checkpoint.seq and each.attempt in near and key in each.metadata
        ]
        return max(candidates, key=lambda each: each.seq).metadata[key] if candidates else None

    def newest(self) -> Checkpoint | None:
        """Return the newest live checkpoint that is not detached."""
        seq = max((seq for seq in self.checkpoints if seq not in self.detached), default=None)
        return None if seq is None else self.checkpoints[seq]

    def pinned_as(self, name: str) -> tuple[int, ...]:
        """Return the live checkpoints that have a pinned name; the last one is kept under it."""
        return pin.pinned_as(self.checkpoints, self.user_entries, name)

    @property
    def pinned(self) -> Mapping[str, int]:
        every = {
            name: self.pinned_as(name)
            for name in sorted(pin.names(self.checkpoints.values(), self.user_entries))
        }
        return {name: seqs[-1] for name, seqs in every.items() if seqs}

    def pins_of(self, seq: int) -> tuple[str, ...]:
        names = {
            *self.checkpoints[seq].pins,
            *(name for name, entry in self.user_entries.items() if entry.checkpoint == seq),
        }
        return tuple(sorted(name for name in names if seq in self.pinned_as(name)))

    def damage(self) -> str | None:
        """Describe the damage of a log that cannot be followed to its end; None for a healthy log."""
        if self.stopped is None:
            return None
        seq, newest = self.stopped.seq, self.newest()
        lost = f"entry {seq} is ignored" if seq == self.tip else f"entries {seq} to {self.tip} are ignored"
        before = (
            "there is no checkpoint before it"
            if newest is None
            else f"the newest checkpoint before it is {newest.seq} (step {newest.step})"
        )
        return (
            f"the log cannot be followed past entry {seq}: {self.stopped.error.what}; {lost}, newer "
            f"checkpoints may be lost, {before}"
        )

    def resuming_from(self) -> int | None:
        """Return the checkpoint that the newest attempt resumed from; None once that attempt has committed."""
        if self.attempt is None or self.attempts[self.attempt].last_seq is not None:
            return None
        return self.attempts[self.attempt].resumes_from

    def commit_of(self, attempt: int, snapshot_id: int) -> Checkpoint | None:
        opened = self.attempts.get(attempt)
        if opened is None or opened.last_snapshot is None or snapshot_id > opened.last_snapshot:
            return None
        if snapshot_id == opened.last_snapshot and opened.last_seq is not None:
            return self.checkpoints.get(opened.last_seq)
        return next(
            (c for c in self.checkpoints.values() if c.attempt == attempt and c.snapshot_id == snapshot_id),
            None,
        )
