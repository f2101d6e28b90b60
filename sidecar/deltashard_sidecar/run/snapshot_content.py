"""What a cut holds, and how it is encoded: decided from the log as it is known, the trainer's words and the policy."""

from __future__ import annotations

from dataclasses import dataclass

from deltashard_checkpoint.deciding.evidence import RunEstimate
from deltashard_checkpoint.log.chain import may_cover
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.write import differential, precision
from deltashard_checkpoint.write.differential import Decision, History
from deltashard_checkpoint.write.precision import OTHERS, StoredPrecision
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.policy import chooses_bits
from deltashard_sidecar.run.bit_choice import BitChoice, VisibleRanks
from deltashard_sidecar.run.chain_watch import ChainWatch
from deltashard_sidecar.run.synthetic_baseline import SyntheticBaselines
from deltashard_sidecar.session.attachment import Attachment


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotContent:
    """What a cut holds, and what to say of it."""

    covers: int | None
    """Seq since which every changed row is held; None: all rows."""
    override: str
    """Why it does not hold what its differential alone would have it hold; empty: it does.

    A baseline is left to a compaction, or was made by one already; or the cut is a baseline for more bits.
    """
    directive: str
    """For the log entry: what made this cut what it is."""
    precision: StoredPrecision
    """Encodings of its rows."""
    increments: str | None
    """What its commit says of the increments before it; None: nothing."""
    chain_precision: StoredPrecision
    """The coarsest that rows of its chain may have."""

    @property
    def rebased(self) -> bool:
        """Whether later cuts cover this seq, too: the trainer's marks since the baseline count from it."""
        return self.override != "" and self.covers is not None


class SnapshotContents:
    """Decides what the cuts of one run hold. Holds parts only."""

    def __init__(self, bits: BitChoice, chains: ChainWatch, synthetic: SyntheticBaselines) -> None:
        self._bits = bits
        self._chains = chains
        self._synthetic = synthetic

    def decide(
        self,
        state: RunState,
        attachment: Attachment,
        attempt: int,
        begin: pb.SaveRequest.Begin,
        policy: pb.Policy,
        expected: RunEstimate,
        ranks: VisibleRanks,
    ) -> SnapshotContent:
        """What the cut must hold, and how it is encoded. No store is asked."""
        encodings = self._bits.encodings(policy, ranks, begin, expected, attempt=attempt)
        asked = StoredPrecision.of({OTHERS: policy.encoding, **encodings}, policy.state_encoding)
        history = differential.history(state, attempt, asked)
        decision = differential.decide(policy.differential, history, force_full=begin.full)
        commit = begin.since_commit_seq if begin.HasField("since_commit_seq") else None
        base = begin.since_baseline_seq if begin.HasField("since_baseline_seq") else None
        covers: int | None = None

        # IMPORTANT: a cut may only lean on what the trainer vouches for *and* the log shows as live in this attempt's
        # lineage, and whose objects were there at the last look. Anything else is a whole baseline: more bytes, never a
        # lost row.
        def can_build_on(seq: int) -> bool:
            return may_cover(state, attempt, seq) and not self._chains.is_broken(state, seq)

        if decision != "full" and base is not None and can_build_on(base):
            covers = base
        if decision == "since_commit" and commit is not None and can_build_on(commit):
            covers = commit
        override = ""
        if (
            attachment.world_size == 1
            and not begin.full
            and commit is not None
            and commit != base
            and can_build_on(commit)
        ):
            override = self._rebases(state, commit, history, policy, decision)
            covers = commit if override else covers
        stored = None if covers is None else precision.stored_precision(state, covers)
        if raised := precision.too_coarse_reason(asked, stored):
            covers, override, stored = None, raised, None
        elif chooses_bits(policy) and ranks.is_complete:
            # Fewer bits begin with a baseline: of all ranks, not of one that must send everything where others do not.
            alone = begin.full and differential.decide(policy.differential, history) != "full"
            newest = state.newest() if stored is None and alone and attachment.world_size > 1 else None
            beside = stored if newest is None else precision.stored_precision(state, newest.seq)
            asked = asked if beside is None else precision.finer(asked, beside)
        held = "baseline" if covers is None else f"since {covers}"
        why = f" ({override})" if override else ""
        increments = None
        if covers is not None and policy.differential != "consecutive":
            increments = differential.increments_text(history, covers)
        return SnapshotContent(
            covers=covers,
            override=override,
            directive=(
                f"{begin.reason or 'user'}; {policy.differential}: {held}{why}; "
                f"{policy.encoding}, state {policy.state_encoding}"
            ),
            precision=asked,
            increments=increments,
            chain_precision=asked if stored is None else precision.coarser(asked, stored),
        )

    def _rebases(
        self, state: RunState, commit: int, history: History, policy: pb.Policy, decision: Decision
    ) -> str:
        """Why the cut, and the next ones, cover the trainer's newest commit; empty: they do not."""
        if decision == "since_commit" or policy.differential == "full" or history.baseline is None:
            return ""
        if decision == "since_baseline":
            return "the newest checkpoint was compacted" if commit in state.compactions else ""
        verdict = self._synthetic.at_snapshot(state, commit, history, policy)
        return "" if verdict is None else f"synthetic baseline: {verdict.text}"
