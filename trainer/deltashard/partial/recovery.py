"""Partial recovery as a `restore.recovery_plan`: whether a restore is partial, and what each rank restores then.

    agree     each rank reports its staged part, rank 0 decides (`rule`), all ranks follow
    overlay   blobs: dense part and optimizers of the donor, each rank's own state if it was at the donor's step
    frames    rows: the rank's own part, and the donor's of tables on every rank, newer than the whole checkpoint

Ranks that cannot read the donor's part (in another pod or machine) receive what they need of it. If an agreed part
cannot be read after all, all ranks retry: the part is stale in the next attempt.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.format.blob_name import (
    blob_name,
    common_blobs,
    optimizer_name,
    optimizer_parts,
    own_blobs,
)
from deltashard_checkpoint.format.frame import FrameBytes
from deltashard_checkpoint.format.typed_tree import EncodedTree
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.launcher import ChildLauncher, staged_in_pod
from deltashard.attach.term_signal import TermHandler
from deltashard.errors import CheckpointRetired
from deltashard.partial import staged_part
from deltashard.partial.hang_watchdog import HangWatchdog
from deltashard.partial.peer import Peers
from deltashard.partial.recovery_context import RecoveryContext
from deltashard.partial.rule import (
    RecoveryDecision,
    RecoveryInputs,
    RecoveryReport,
    RecoveryTerms,
    StagedMetadata,
    advance_positions,
    decide,
)
from deltashard.partial.staged_part import PartFrames, StagedPart
from deltashard.partial.stager import Stager
from deltashard.program import Program
from deltashard.restore.collective import CollectiveRestore
from deltashard.restore.recovery_plan import PlanContext, RecoveryPlan
from deltashard.state.value import decode_value, encode_value
from deltashard.tracking.snapshot_base import SnapshotBase

log = logging.getLogger("deltashard")
_DONOR = "donor"


class PartialRecovery(RecoveryPlan):
    """Recovery plan of one Checkpointer among several ranks; full recovery only ends ranks in a dead collective."""

    def __init__(self, plan_context: PlanContext) -> None:
        config, url, run = (
            plan_context.config,
            plan_context.member.attachment.url,
            plan_context.member.attachment.run,
        )
        child = plan_context.launcher if isinstance(plan_context.launcher, ChildLauncher) else None
        self._loop = plan_context.loop
        self._program = plan_context.loop.program
        self._rank = plan_context.member.rank
        self._context = RecoveryContext(
            RecoveryTerms(
                pls_target=float(config.pls_target or 0), planned_steps=int(config.planned_steps or 0)
            )
            if config.partial
            else None,
            self._rank,
            run=f"{url} {run}",
            staging_dir=staged_in_pod(url, run) if child is None else child.staged,
        )
        self.terms = str(self._context.terms or "full")
        self.pls_target = self._context.pls_target
        # In a pod, other ranks are not visible locally, and staging serves partial recovery only.
        has_peers = not self._rank.alone and (child is not None or self.pls_target > 0)
        self._peers = Peers(None if child is None else child.runtime, self._rank.local) if has_peers else None
        self._misplaced_ranks: tuple[int, ...] = ()
        """Ranks that run elsewhere now but have staged parts here."""
        self._stager: Stager | None = None
        self._watchdog: HangWatchdog | None = None
        if self._context.disabled_reason:
            log.warning(
                'recovery="partial" is not available, recovery is full: %s', self._context.disabled_reason
            )

    @property
    def pls(self) -> float:
        return self._context.pls

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._context.metadata

    @property
    def dead(self) -> bool:
        return self._peers is not None and self._peers.dead

    def watch(
        self,
        base: SnapshotBase,
        blobs: Callable[[int], Iterable[tuple[str, EncodedTree]]],
        term: TermHandler | None,
    ) -> None:
        if self._peers is None:
            return
        self._stager = Stager(
            self._context, self._program, base, clock=self._loop.clock, peers=self._peers, blobs=blobs
        )
        if term is not None:
            self._watchdog = HangWatchdog(term, dead=lambda: self.dead, stage=self._stager.stage)

    def load_metadata(self, metadata: Mapping[str, str]) -> None:
        self._context.load_metadata(metadata)

    def agree(
        self, ranks: CollectiveRestore, reply: pb.OpenReply, *, unusual: str
    ) -> PartialRestorePlan | None:
        context = self._context
        if context.terms is None:
            return None
        mine, why = (
            (None, "")
            if context.disabled_reason
            else staged_part.read_part(context.staging_dir, context.rank)
        )
        if mine is not None and mine.boxes != tuple(t.box for t in self._program.tracking.tables):
            why = "its boxes are not those of this rank"
        report = RecoveryReport(
            staged=None if mine is None else mine.staged,
            unusable=why,
            disabled_reason=context.disabled_reason,
            location=context.location,
            shared_bytes=0 if mine is None else sum(map(len, mine.shared_frames(self._replicated))),
            misplaced_ranks=()
            if context.disabled_reason or mine is not None
            else staged_part.other_ranks(context.staging_dir, context.rank),
            rows=self._rows(),
        )
        terms = context.terms
        answer = ranks.resolve(
            "recovery",
            _to_json(report),
            lambda reports: _to_json(
                decide([_report_from_json(r) for r in reports], self._recovery_inputs(reply, unusual), terms)
            ),
        )
        decision = RecoveryDecision(**json.loads(answer))
        if not context.disabled_reason:
            self._misplaced_ranks = tuple(
                set(staged_part.other_ranks(context.staging_dir, context.rank))
                & set(decision.remote_ranks(context.rank))
            )
        return self._build_plan(decision, mine, ranks)

    @property
    def _replicated(self) -> frozenset[str]:
        return frozenset(t.fqn for t in self._program.tracking.tables if t.found.replicated)

    def _build_plan(
        self, decision: RecoveryDecision, mine: StagedPart | None, ranks: CollectiveRestore
    ) -> PartialRestorePlan | None:
        context = self._context
        if not decision.partial:
            if context.rank == 0:
                log.warning("recovery is full, all ranks return to the checkpoint: %s", decision.full_reason)
            return None
        if context.rank == 0:
            log.warning(
                "recovery is PARTIAL, which is not exact: training continues after step %d; rows are of steps %s, "
                "ranks %s were lost; PLS %.3g, whole run %.3g",
                decision.step,
                list(decision.steps),
                list(decision.lost),
                decision.added_pls,
                decision.pls,
            )
        donor: PartFrames | None = None
        try:
            donor = self._donor(decision, mine, ranks)
        except (DeltashardError, OSError, ValueError) as error:
            log.warning("rank %d's staged part cannot be read any more: %s", decision.donor, error)
        return PartialRestorePlan(decision, self._program, context, mine=mine, donor=donor)

    def _donor(
        self, decision: RecoveryDecision, mine: StagedPart | None, ranks: CollectiveRestore
    ) -> PartFrames | None:
        """Return the donor's part, or what this rank receives of it; None: the donor cannot send it."""
        rank = self._context.rank
        if decision.donor == rank:
            if decision.remote_ranks(rank):
                ranks.send(_DONOR, None if mine is None else b"".join(mine.shared_frames(self._replicated)))
            return mine
        if rank in decision.remote_ranks(decision.donor):
            data = ranks.receive(_DONOR)
            return None if data is None else PartFrames(memoryview(data))
        return StagedPart(staged_part.path_of(self._context.staging_dir, decision.donor))

    def _rows(self) -> float:
        found = 0.0
        for table in self._program.tracking.saved:
            box = table.box
            if not table.found.replicated:
                width = (box.col_stop - box.col_start) / table.schema.columns
                found += (box.row_stop - box.row_start) * width
        return found

    def _recovery_inputs(self, reply: pb.OpenReply, unusual: str) -> RecoveryInputs:
        context = self._context
        if not unusual and reply.log_damage:
            unusual = "the log is damaged"
        if not unusual and reply.fell_back:
            unusual = "a newer checkpoint is not whole"
        return RecoveryInputs(
            run=context.run,
            world_size=context.world_size,
            layout=reply.layout,
            lineage=context.lineage,
            previous_attempt=reply.previous_attempt if reply.HasField("previous_attempt") else None,
            seq=reply.resume_seq,
            step=reply.step,
            attempt=reply.resume_attempt,
            pls=context.pls,
            recoveries=context.recoveries,
            rows=float(sum(rows for rows, _ in self._program.shapes.values())),
            unusual=unusual,
        )

    def training_started(self, reply: pb.OpenReply, group_name: str) -> None:
        # The restore is complete, so parts staged before it are obsolete.
        context = self._context
        if context.terms is not None and not context.disabled_reason:
            staged_part.discard(context.staging_dir, context.rank)
            for rank in self._misplaced_ranks:
                staged_part.discard(context.staging_dir, rank)
        context.begin(reply.attempt, reply.layout, group_name)
        if self._peers is not None:
            self._peers.register_peers()
            if self.pls_target:
                self._peers.start_heartbeat(
                    f"deltashard/{group_name}/", self._rank.number, self._rank.world_size
                )

    def handle_error(self, error: BaseException) -> bool:
        return self._stager is not None and self._stager.handle_error(error)

    def leave(self) -> None:
        if self._peers is not None:
            self._peers.leave()

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        if self._peers is not None:
            self._peers.close()


class PartialRestorePlan:
    """What one rank restores from which source in a partial recovery."""

    def __init__(
        self,
        decision: RecoveryDecision,
        program: Program,
        context: RecoveryContext,
        *,
        mine: StagedPart | None,
        donor: PartFrames | None,
    ) -> None:
        """`donor` None: it cannot be read after all, so `overlay` raises on this rank."""
        self._decision = decision
        self._program = program
        self._context = context
        self._rank = context.rank
        self.step = decision.step
        self.rank_steps = tuple(decision.steps)
        self._mine = mine
        self._donor = donor
        summary = (
            f"PLS {decision.added_pls:.3g}, whole run {decision.pls:.3g}; lost ranks: {list(decision.lost)}"
        )
        self.notes = [f"recovery was partial, which is not exact: {summary}"]

    def overlay(self, raw: Mapping[str, memoryview]) -> dict[str, memoryview]:
        """Return the checkpoint's blobs `raw` with those of survivors; raises `CheckpointRetired` if unreadable."""
        try:
            return self._overlay(raw)
        except (DeltashardError, OSError, ValueError, KeyError) as error:
            raise self._unreadable(error) from error

    def frames(self) -> Iterator[FrameBytes]:
        replicated = frozenset(t.fqn for t in self._program.tracking.tables if t.found.replicated)
        if self._mine is not None:
            sharded = frozenset(t.fqn for t in self._program.tracking.tables) - replicated
            yield from self._mine.frames(sharded)
        if self._donor is not None:
            yield from self._donor.frames(replicated)

    def on_applied(self) -> None:
        self._context.record_recovery(self._decision.pls, self._decision.recoveries)

    def _unreadable(self, error: Exception) -> CheckpointRetired:
        return CheckpointRetired(
            f"a staged part cannot be used after all: {error}",
            where=f"rank {self._rank}",
            remedy="all ranks recover in full",
        )

    def _overlay(self, raw: Mapping[str, memoryview]) -> dict[str, memoryview]:
        if self._donor is None:
            raise OSError("the donor's part is gone")
        donor = self._donor.blobs()
        mine = donor if self._mine is self._donor else None if self._mine is None else self._mine.blobs()
        found = {name: data for name, data in raw.items() if not name.startswith("optim/")}
        found |= {name: data for name, data in donor.items() if name.startswith("dense/")}
        then = optimizer_parts(common_blobs(raw))
        for view in self._program.tracking.optimizers:
            name = optimizer_name(view.index, 0)
            if not view.is_partitioned:
                found[name] = donor[name]
                continue
            staged = decode_value((mine or donor)[name])
            tree = view.adopt_remote(view.merged(decode_value(data) for data in then[view.index]), staged)
            found[name] = memoryview(encode_value(tree).to_bytes())
        own = self._decision.own[self._rank]
        held = own_blobs(self._rank, raw)
        source = mine if own and mine is not None else donor
        for name, data in source.items():
            if name.startswith("state/"):
                found[blob_name(self._rank, name)] = data
        if not own:
            self._note_lost(any(name.startswith("state/") for name in source))
        # A rank without staged generators continues with its generators in the checkpoint.
        if mine is not None:
            found[blob_name(self._rank, "rng")] = mine["rng"]
        here = mine if mine is not None else held
        positions = decode_value(here["loader"]) if "loader" in here else {}
        if not own:
            positions, notes = advance_positions(positions, decode_value(donor["loader"]))
            self.notes += [f"rank {self._rank}: {note}" for note in notes]
        found[blob_name(self._rank, "loader")] = memoryview(encode_value(positions).to_bytes())
        return found

    def _note_lost(self, states: bool) -> None:
        rank, decision = self._rank, self._decision
        if states:
            self.notes.append(
                f"rank {rank} has the state= of rank {decision.donor}, because it was at another step"
            )
        if self._mine is None:
            self.notes.append(
                f"rank {rank} was lost: its rows and its random numbers are those of step {decision.steps[rank]}"
            )


def _to_json(message: RecoveryReport | RecoveryDecision) -> str:
    return json.dumps(dataclasses.asdict(message))


def _report_from_json(text: str) -> RecoveryReport:
    fields = json.loads(text)
    staged = fields.pop("staged")
    return RecoveryReport(staged=None if staged is None else StagedMetadata(**staged), **fields)
