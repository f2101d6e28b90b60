"""Content and encoding of a save: decided from the known log state, the trainer's request and the policy."""

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
    """Content of a save, and what its log entry records about it."""

    covers: int | None
    """Seq since which every changed row is included; None: all rows."""
    override: str
    """Why the content differs from what the differential alone requires; empty: it does not differ.

    A baseline is left to a compaction, or was already made by one; or more bits require a baseline.
    """
    directive: str
    """For the log entry: what determined the content of this save."""
    precision: StoredPrecision
    increments: str | None
    """Record of the previous increments for the commit; None: no record."""
    chain_precision: StoredPrecision
    """Coarsest precision that rows of its chain may have."""

    @property
    def rebased(self) -> bool:
        """Whether later saves cover this seq as well: the trainer's marks since the baseline restart from it."""
        return self.override != "" and self.covers is not None


class SnapshotContents:
    """Decides the content of one run's saves. Has no state."""

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
        """Decide content and encoding of a save, without a request to the store."""
        encodings = self._bits.encodings(policy, ranks, begin, expected, attempt=attempt)
        asked = StoredPrecision.of({OTHERS: policy.encoding, **encodings}, policy.state_encoding)
        history = differential.history(state, attempt, asked)
        decision = differential.decide(policy.differential, history, force_full=begin.full)
        commit = begin.since_commit_seq if begin.HasField("since_commit_seq") else None
        base = begin.since_baseline_seq if begin.HasField("since_baseline_seq") else None
        covers: int | None = None

        # IMPORTANT: a save may only build on a checkpoint that the trainer has marks for *and* that the log shows as
        # live in this attempt's lineage, with its objects present at the last check. Otherwise it is a baseline: more
        # bytes, but no lost row.
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
            # Fewer bits begin with a baseline of all ranks, not of a single rank that must send everything.
            alone = begin.full and differential.decide(policy.differential, history) != "full"
            newest = state.newest() if stored is None and alone and attachment.world_size > 1 else None
            finest = stored if newest is None else precision.stored_precision(state, newest.seq)
            asked = asked if finest is None else precision.finer(asked, finest)
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
        """Return why this save, and the next ones, cover the trainer's newest commit; empty: they do not."""
        if decision == "since_commit" or policy.differential == "full" or history.baseline is None:
            return ""
        if decision == "since_baseline":
            return "the newest checkpoint was compacted" if commit in state.compactions else ""
        verdict = self._synthetic.at_snapshot(state, commit, history, policy)
        return "" if verdict is None else f"synthetic baseline: {verdict.text}"
