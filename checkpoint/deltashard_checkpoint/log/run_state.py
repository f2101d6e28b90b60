"""What the log says of a run: the state that `replay` makes of its entries, slot by slot, and that all others read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.log import pin
from deltashard_checkpoint.log.entry import Checkpoint, Compacted, Sealed
from deltashard_checkpoint.log.part_list import PartList


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What is remembered of an attempt."""

    world_size: int
    """0: no trainer's, but a rewind's."""
    resumes_from: int | None
    resumes_attempt: int | None
    """Attempt of the checkpoint it resumed from."""
    last_snapshot: int | None = None
    """Highest cut committed under it; lower ones are abandoned."""
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
    """A slot whose entry could not be read, or breaks a rule."""

    seq: int
    error: DeltashardError
    voidable: bool
    """The bytes themselves are bad for everyone; false: perhaps only this library is too old."""
    hash: str = ""
    """Hash of the entry when it is well-formed and merely breaks a rule, else SHA-256 of the bytes."""


Slot = Sealed | Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run after the entries 0..tip. Mappings are read-only by convention: a new state shares what did not change."""

    run: str
    """As asked for; genesis must agree."""
    owner: str = ""
    tip: int = -1
    """The last slot folded in (or, with `stopped`, known to exist); -1: the log is empty."""
    tip_hash: str = ""
    attempt: int | None = None
    """The newest attempt: every lower one is fenced."""
    attempts: Mapping[int, Attempt] = field(default_factory=dict)
    checkpoints: Mapping[int, Checkpoint] = field(default_factory=dict)
    """Live checkpoints by seq, oldest first."""
    compactions: Mapping[int, Compacted] = field(default_factory=dict)
    """The live compaction of a live checkpoint, by the checkpoint's seq."""
    superseded: Mapping[str, int] = field(default_factory=dict)
    """Prefix -> checkpoint that no longer reads it because of its compaction: retire may name it."""
    retired: Mapping[str, int] = field(default_factory=dict)
    """Prefix -> seq of the retire entry that named it, until it is forgotten."""
    compactions_from: int = 0
    """A compaction must have begun at this slot or later: prefixes of older ones may have been forgotten."""
    committed: int = 0
    """Checkpoints ever committed."""
    user_entries: Mapping[str, pin.UserEntry] = field(default_factory=dict)
    """What people said of pinned names, as far as it still counts."""
    detached: frozenset[int] = frozenset()
    """Live checkpoints that a rewind has set aside: none of them is the newest, or what a restore falls back to."""
    abandoned_at: int | None = None
    """Slot of the attempt or repair that gave entries up, until another attempt is opened behind its first commit.

    Until then nothing older that may be of those entries is named by a retire entry (`replay.is_protected`)."""
    listings: Mapping[int, PartList] = field(default_factory=dict, compare=False)
    """Parts of live checkpoints that a manifest lists, by seq, as far as they were read (`log.manifest`).

    No rule looks at them: what the law asks of parts stands in the entry."""
    stopped: Unreadable | None = None
    """Where the fold had to stop; None in a healthy log."""

    def inherited_metadata(self, key: str, checkpoint: Checkpoint) -> str | None:
        """Metadata of a checkpoint; where it says nothing under `key`, of the newest before it that does.

        Looked at are its attempt's, and those of the attempt that this one resumed.
        """
        attempt = self.attempts.get(checkpoint.attempt)
        near = {checkpoint.attempt, None if attempt is None else attempt.resumes_attempt}
        saying = [
            each
            for each in self.checkpoints.values()
            if each.seq <= checkpoint.seq and each.attempt in near and key in each.metadata
        ]
        return max(saying, key=lambda each: each.seq).metadata[key] if saying else None

    def newest(self) -> Checkpoint | None:
        """The newest live checkpoint that no rewind has set aside."""
        seq = max((seq for seq in self.checkpoints if seq not in self.detached), default=None)
        return None if seq is None else self.checkpoints[seq]

    def pinned_as(self, name: str) -> tuple[int, ...]:
        """The live checkpoints that bear a pinned name; the last one is kept under it."""
        return pin.pinned_as(self.checkpoints, self.user_entries, name)

    @property
    def pinned(self) -> Mapping[str, int]:
        every = {
            name: self.pinned_as(name)
            for name in sorted(pin.names(self.checkpoints.values(), self.user_entries))
        }
        return {name: seqs[-1] for name, seqs in every.items() if seqs}

    def pins_of(self, seq: int) -> tuple[str, ...]:
        said = {
            *self.checkpoints[seq].pins,
            *(name for name, word in self.user_entries.items() if word.checkpoint == seq),
        }
        return tuple(sorted(name for name in said if seq in self.pinned_as(name)))

    def damage(self) -> str | None:
        """What to tell whoever reads this run, when its log cannot be followed to its end; None in a healthy one."""
        if self.stopped is None:
            return None
        seq, newest = self.stopped.seq, self.newest()
        lost = f"entry {seq} counts" if seq == self.tip else f"entries {seq} to {self.tip} count"
        before = (
            "there is no checkpoint before it"
            if newest is None
            else f"the newest checkpoint before it is {newest.seq} (step {newest.step})"
        )
        return (
            f"the log cannot be followed past entry {seq}: {self.stopped.error.what}; {lost} for nothing, newer "
            f"checkpoints may be lost, {before}"
        )

    def resuming_from(self) -> int | None:
        """Seq of the checkpoint that the newest attempt resumed from, while it has not committed anything itself."""
        if self.attempt is None or self.attempts[self.attempt].last_seq is not None:
            return None
        return self.attempts[self.attempt].resumes_from

    def commit_of(self, attempt: int, cut: int) -> Checkpoint | None:
        opened = self.attempts.get(attempt)
        if opened is None or opened.last_snapshot is None or cut > opened.last_snapshot:
            return None
        if cut == opened.last_snapshot and opened.last_seq is not None:
            return self.checkpoints.get(opened.last_seq)
        return next((c for c in self.checkpoints.values() if c.attempt == attempt and c.cut == cut), None)
