"""What a cut holds, and how it is encoded: decided from the log as it is known, the trainer's words and the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deltashard_checkpoint.deciding.evidence import Expected
from deltashard_checkpoint.log.chain import may_cover
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.write import differential, precision
from deltashard_checkpoint.write.differential import Decision, History
from deltashard_checkpoint.write.precision import OTHERS, StoredPrecision
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.run.bit_choice import BitChoice, Ranks
from deltashard_sidecar.run.chain_watch import ChainWatch
from deltashard_sidecar.run.synthetic_baseline import SyntheticBaselines
from deltashard_sidecar.session.attachment import Attachment


class DifferentialOverride(NamedTuple):
    """Why a cut does not hold what its differential alone would have it hold."""

    kind: str
    """A baseline is left to a compaction, which costs training less (cheaper) or restores in time (goal), or was made
    already (compacted); or the cut is a baseline for more bits (raised)."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutContent:
    """What a cut holds, and what to say of it."""

    covers: int | None
    """Seq since which every changed row is held; None: all rows."""
    override: DifferentialOverride | None
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
        return self.override is not None and self.covers is not None


class CutContents:
    """Decides what the cuts of one run hold. Holds parts only."""

    def __init__(self, bits: BitChoice, chains: ChainWatch, synthetic: SyntheticBaselines) -> None:
        self._bits = bits
        self._chains = chains
        self._synthetic = synthetic

    def decide(
        self,
        state: RunState,
        who: Attachment,
        attempt: int,
        begin: pb.SaveRequest.Begin,
        policy: pb.Policy,
        expected: Expected,
        ranks: Ranks,
    ) -> CutContent:
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
        def leans(seq: int) -> bool:
            return may_cover(state, attempt, seq) and not self._chains.broken(state, seq)

        if decision != "full" and base is not None and leans(base):
            covers = base
        if decision == "since_commit" and commit is not None and leans(commit):
            covers = commit
        override: DifferentialOverride | None = None
        if who.world_size == 1 and not begin.full and commit is not None and commit != base and leans(commit):
            override = self._rebases(state, commit, history, policy, decision)
            covers = covers if override is None else commit
        stored = None if covers is None else precision.held(state, covers)
        if raised := precision.raised(asked, stored):
            covers, override, stored = None, DifferentialOverride("raised", raised), None
        elif self._bits.decides(policy, ranks):
            # Fewer bits begin with a baseline: of all ranks, not of one that must send everything where others do not.
            alone = begin.full and differential.decide(policy.differential, history) != "full"
            newest = state.newest() if stored is None and alone and who.world_size > 1 else None
            beside = stored if newest is None else precision.held(state, newest.seq)
            asked = asked if beside is None else precision.finer(asked, beside)
        held = "baseline" if covers is None else f"since {covers}"
        why = "" if override is None else f" ({override.text})"
        return CutContent(
            covers=covers,
            override=override,
            directive=(
                f"{begin.reason or 'user'}; {policy.differential}: {held}{why}; "
                f"{policy.encoding}, state {policy.state_encoding}"
            ),
            precision=asked,
            increments=(
                None
                if covers is None or policy.differential == "consecutive"
                else differential.increments_text(history, covers)
            ),
            chain_precision=asked if stored is None else precision.coarser(asked, stored),
        )

    def _rebases(
        self, state: RunState, commit: int, history: History, policy: pb.Policy, decision: Decision
    ) -> DifferentialOverride | None:
        """Why the cut, and the next ones, cover the trainer's newest commit; None: they do not."""
        if decision == "since_commit" or policy.differential == "full" or history.baseline is None:
            return None
        if decision == "since_baseline" and commit in state.compactions:
            return DifferentialOverride("compacted", "the newest checkpoint was compacted")
        verdict = self._synthetic.at_cut(state, commit, history, policy, pays=decision == "full")
        return (
            None
            if verdict is None
            else DifferentialOverride(verdict.why, f"synthetic baseline: {verdict.text}")
        )
