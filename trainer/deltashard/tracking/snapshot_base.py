"""What the next cut may lean on: the newest commit and the newest baseline that this process's marks count from.

Marks say which rows changed since the last commit, and since the last baseline. These are the two numbers in the commit
log that those words mean; the sidecar answers a Begin with one of them, or with none, which asks for all rows.
"""

from __future__ import annotations

from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.tracking.marks import Mode


class SnapshotBase:
    """Commit and baseline by their seq, and what makes the next cut full whatever they are."""

    def __init__(self, planned_steps: int = 0, pls_target: float = 0.0) -> None:
        """`planned_steps`: of the whole run; 0: nobody says. `pls_target`: under partial recovery; 0: it is full."""
        self._planned_steps = planned_steps
        self._pls_target = pls_target
        self.commit: int | None = None
        """The commit that marks count from; None: there is none to lean on."""
        self._baseline: int | None = None
        self.full = False
        """Whether the next cut has to take every row."""
        self._faults = 0

    def set_base(self, commit: int, baseline: int | None) -> None:
        """A checkpoint was taken over whole, and marks were re-seeded from it."""
        self.commit, self._baseline, self.full = commit, baseline, False

    def clear_base(self) -> None:
        """What was restored is not what the next cut would follow."""
        # IMPORTANT: a cut may only lean on what was taken over whole. That must outlast a first save that fails, so it
        # is said by having nothing to lean on, not by asking once for a full cut.
        self.commit, self._baseline, self.full = None, None, True

    def ask_full(self, *, faults: int = 0) -> None:
        """Rows may have been missed (so many audit faults), or tables came or went: take everything once."""
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
        """Marks since the baseline were made to count from the newest commit."""
        self._baseline = self.commit

    def declare(self, begin: pb.SaveRequest.Begin) -> None:
        """Say in a Begin what the cut could be a delta over, or that it is full."""
        begin.full = self.full
        begin.planned_steps = self._planned_steps
        begin.pls_target = self._pls_target
        begin.tracking_faults = self._faults
        if self.commit is not None:
            begin.since_commit_seq = self.commit
        if self._baseline is not None:
            begin.since_baseline_seq = self._baseline

    def needs_rebase(self, begun: pb.SaveReply.Begun) -> bool:
        """Whether marks since the baseline are to count from the commit that this cut covers: our newest."""
        return begun.rebased and self.mode(begun) == "since_commit"

    def mode(self, begun: pb.SaveReply.Begun | pb.SaveReply.Prepared) -> Mode:
        """Which rows the sidecar asks for; a seq that we do not know means all of them."""
        if not begun.HasField("covers") or self.full:
            return "all"
        if begun.covers == self.commit:
            return "since_commit"
        return "since_baseline" if begun.covers == self._baseline else "all"
