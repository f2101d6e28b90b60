"""The commit and baseline that this process's marks refer to, as the possible bases of the next snapshot.

Marks record rows changed since the last commit and since the last baseline. This module holds the sequence numbers of
these two. The sidecar answers a Begin with one of them, or with none to request all rows.
"""

from __future__ import annotations

from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.tracking.marks import Mode


class SnapshotBase:
    """Sequence numbers of commit and baseline, and whether the next snapshot must be full."""

    def __init__(self, planned_steps: int = 0, pls_target: float = 0.0) -> None:
        """`planned_steps`: of the whole run, 0 if unknown. `pls_target`: of partial recovery, 0 for full recovery."""
        self._planned_steps = planned_steps
        self._pls_target = pls_target
        self.commit: int | None = None
        """Commit that the marks refer to; None if there is no base."""
        self._baseline: int | None = None
        self.full = False
        """Whether the next snapshot must take every row."""
        self._faults = 0

    def set_base(self, commit: int, baseline: int | None) -> None:
        """Set the base after a complete restore, from which the marks were seeded."""
        self.commit, self._baseline, self.full = commit, baseline, False

    def clear_base(self) -> None:
        """Clear the base, because the restored state is not the state that the next snapshot would follow."""
        # IMPORTANT: a snapshot may only be based on a completely restored checkpoint. This must outlast a failed first
        # save, so the base is cleared in addition to requesting one full snapshot.
        self.commit, self._baseline, self.full = None, None, True

    def ask_full(self, *, faults: int = 0) -> None:
        """Make the next snapshot full, because rows may have been missed (`faults`) or tables were added or removed."""
        self.full = True
        self._faults += faults

    def snapshot_taken(self) -> None:
        self.full, self._faults = False, 0

    def is_new_commit(self, seq: int) -> bool:
        return self.commit is None or seq > self.commit

    def committed(self, seq: int, *, baseline: bool) -> None:
        self.commit = seq
        if baseline:
            self._baseline = seq

    def rebased(self) -> None:
        """Record that the marks of the baseline now refer to the newest commit."""
        self._baseline = self.commit

    def declare(self, begin: pb.SaveRequest.Begin) -> None:
        """Fill in a Begin the possible bases of the snapshot, or that it is full."""
        begin.full = self.full
        begin.planned_steps = self._planned_steps
        begin.pls_target = self._pls_target
        begin.tracking_faults = self._faults
        if self.commit is not None:
            begin.since_commit_seq = self.commit
        if self._baseline is not None:
            begin.since_baseline_seq = self._baseline

    def needs_rebase(self, begun: pb.SaveReply.Begun) -> bool:
        """Whether the marks of the baseline must be rebased to the newest commit, which this snapshot covers."""
        return begun.rebased and self.mode(begun) == "since_commit"

    def mode(self, begun: pb.SaveReply.Begun | pb.SaveReply.Prepared) -> Mode:
        """Return the rows that the sidecar requests; an unknown sequence number means all rows."""
        if not begun.HasField("covers") or self.full:
            return "all"
        if begun.covers == self.commit:
            return "since_commit"
        return "since_baseline" if begun.covers == self._baseline else "all"
