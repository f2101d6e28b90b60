"""`restore()`: bring a checkpoint back into the living program; nothing half done is kept.

    blobs     come first in the one stream; decoded, and checked against the program before a byte of the model changes
    rows      every frame is decoded and scattered into the parameter and the optimizer's row state, newest first
    dense     parameters, buffers, optimizers, the user's state, loader, step, generators: only after all rows arrived

Afterwards marks are re-seeded from the delta frames that were used, so that the next cut may still be a delta over the
same baseline; whatever was not taken over whole (another run, weights only, other tables) makes the next cut a baseline
instead. A checkpoint that is not whole is passed over for an older one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format.index import table_of
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.attachment import RunMember
from deltashard.attach.retry import Retry
from deltashard.attach.session import Link
from deltashard.errors import CheckpointMismatch, CheckpointRetired, RestoreFailed, SidecarGone, UserError
from deltashard.loader.sharding import ResumePositions
from deltashard.program import TrainingLoop
from deltashard.restore.blob import Blobs
from deltashard.restore.collective import CollectiveRestore
from deltashard.restore.content_hash import ContentHashes, differing_shards, resharded
from deltashard.restore.frame_stream import ReceivedCheckpoint, read_checkpoint
from deltashard.restore.lifecycle import RestoreEvent, RestoreState
from deltashard.restore.model_target import ModelTargets
from deltashard.restore.open_attempt import AttemptOpener
from deltashard.restore.recovery_plan import PartialRestore, RecoveryPlan
from deltashard.restore.request import Restored, RestoreRequest
from deltashard.state.fingerprint import differences
from deltashard.state.rng import apply_globals, capture_globals, reseed_for_rank
from deltashard.tracking.snapshot_base import SnapshotBase

log = logging.getLogger("deltashard")

READ_ATTEMPTS = 3
"""How often another run is read anew when it retired what was being read."""


@dataclass(slots=True, kw_only=True, eq=False)
class _RestoreCall:
    """One `restore()`: what was asked for, and what its tries found."""

    request: RestoreRequest
    retry: Retry
    """How long it continues without a sidecar."""
    collective: CollectiveRestore | None
    """The other ranks, who do the same; None: there are none."""
    began_s: float = field(default_factory=time.monotonic)
    excluded: list[int] = field(default_factory=list)
    """Checkpoints that are not whole."""
    earlier: list[ModelTargets] = field(default_factory=list)
    """Targets that a broken checkpoint may have overwritten."""
    damage: str = ""
    """What could not be read in the log."""
    retired: int = 0
    """How often a checkpoint was retired while it was read."""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What is done within, all ranks do, or none continues; raises the final error of `retry` when it is time."""
        together = contextlib.nullcontext() if self.collective is None else self.collective.stage(name)
        with together, self.retry.try_once():
            yield

    @property
    def unusual(self) -> str:
        """What makes this restore more than resuming after a crash; empty: nothing."""
        request = self.request
        if request.from_run:
            return "another run is read"
        if request.which != "latest":
            return f"restore(which={request.which!r}) was called"
        if request.weights_only or not request.strict or request.renames or request.takeover:
            return "restore() was called with more than its defaults"
        return "a checkpoint was not whole" if self.excluded else ""


@dataclass(slots=True, kw_only=True, eq=False)
class _Candidate:
    """One checkpoint on its way into the program."""

    link: Link
    reply: pb.OpenReply
    partial: PartialRestore | None
    targets: ModelTargets = field(init=False)
    received: ReceivedCheckpoint = field(init=False)
    positions: ResumePositions = field(default_factory=lambda: ResumePositions({}))
    notes: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    """By the loaders, which have logged it."""
    rng: dict[str, Any] | None = None
    """The global generators as they are to be."""


class Restorer:
    """Runs `restore()`, as `lifecycle` has it; on the training thread only."""

    def __init__(
        self,
        loop: TrainingLoop,
        member: RunMember,
        *,
        opener: AttemptOpener,
        base: SnapshotBase,
        contents: ContentHashes | None,
        plan: RecoveryPlan,
    ) -> None:
        self._rank = member.rank
        self._plan = plan
        self._program = loop.program
        self._tracking = loop.program.tracking
        self._loaders = loop.loaders
        self._clock = loop.clock
        self._attachment = member.attachment
        self._attempt = member.attempt
        self._opener = opener
        self._base = base
        self._contents = contents
        self._listener = member.listener
        self._state = RestoreState()
        self._called = False

    def restore(self, request: RestoreRequest) -> Restored | None:
        self._refuse_trained()
        self._state.transition(RestoreEvent.CALL)
        try:
            restored = self._restore(request)
        except BaseException:
            self._state.transition(RestoreEvent.FAIL)
            raise
        self._state.transition(RestoreEvent.ARMED)
        self._opener.partially_restored = False
        if restored is not None:
            self._listener.emit("restored", restored=restored)
        return restored

    def _restore(self, request: RestoreRequest) -> Restored | None:
        if not self._called:
            self._called = True
            self._program.record_given()
        collective = self._opener.join_ranks(
            which=request.which,
            from_run=request.from_run,
            strict=request.strict,
            weights_only=request.weights_only,
            renames=sorted(request.renames.items()),
            takeover=request.takeover,
            hyperparameters=request.hyperparameters,
        )
        retry = self._opener.retry("restore()", request.deadline_s, RestoreFailed)
        call = _RestoreCall(request=request, collective=collective, retry=retry)
        while True:
            chosen = self._open(call)
            if chosen is None:
                return None
            try:
                self._receive(call, chosen)
                self._state.transition(RestoreEvent.RECEIVED)
                self._apply(call, chosen)
            except (SidecarGone, CheckpointRetired, InvalidCheckpoint) as error:
                self._prepare_retry(call, chosen.reply, error)
                self._state.transition(RestoreEvent.RETRY)
                continue
            self._state.transition(RestoreEvent.APPLIED)
            return self._arm(call, chosen)

    def _open(self, call: _RestoreCall) -> _Candidate | None:
        """OPENING: the checkpoint that an attempt resumes; None: there is none, and training may begin."""
        request, collective = call.request, call.collective
        wanted = pb.OpenRequest(
            which=request.which,
            from_run=request.from_run or "",
            exclude_seqs=call.excluded,
            takeover=request.takeover,
        )
        link, reply = self._opener.open(wanted, call.retry, collective)
        # Only the first attempt meets what cannot be read in the log: the ones after it find it left behind.
        call.damage = call.damage or reply.log_damage
        if not reply.HasField("resume_seq"):
            if collective is not None:
                collective.agree("restored")
            self._state.transition(RestoreEvent.EMPTY)
            if call.excluded:
                raise RestoreFailed(
                    f"checkpoints {call.excluded} are not whole and there is no older one",
                    where=self._attachment.run,
                    remedy="`deltashard verify` tells what is wrong with them; fresh=True begins anew",
                )
            self._opener.begin(reply, step=0, collective=collective)
            return None
        self._plan.load_metadata({} if request.from_run else reply.metadata)
        partial = None if collective is None else self._plan.agree(collective, reply, unusual=call.unusual)
        self._state.transition(RestoreEvent.CHOSEN)
        return _Candidate(link=link, reply=reply, partial=partial)

    def _prepare_retry(
        self,
        call: _RestoreCall,
        reply: pb.OpenReply,
        error: SidecarGone | CheckpointRetired | InvalidCheckpoint,
    ) -> None:
        """What is done before the next attempt; raises `error` when there is none."""
        if isinstance(error, SidecarGone):
            # Whatever was written into the model is written again.
            log.info("restore() begins again: %s", error)
            call.retry.pause()
        elif isinstance(error, CheckpointRetired):
            call.retired += 1
            if call.retired == READ_ATTEMPTS:
                raise error
            whose = f" of {call.request.from_run}" if call.request.from_run else ""
            log.info("checkpoint %d%s is asked for anew: %s", reply.resume_seq, whose, error)
        else:
            call.excluded.append(reply.resume_seq)
            log.error(
                "checkpoint %d is not whole (%s): falling back to an older one", reply.resume_seq, error
            )
            self._listener.emit("fell_back", seq=reply.resume_seq, step=reply.step, why=str(error))

    def _refuse_trained(self) -> None:
        step = self._clock.step
        if self._attempt.opened and step != 0:
            raise UserError(
                f"the model is restored already, to step {step}"
                if step == self._attempt.resumed_step
                else "restore() after training began",
                where="restore()",
                remedy="call it once, before the loop; for another checkpoint close() and make a new Checkpointer",
            )

    def _receive(self, call: _RestoreCall, chosen: _Candidate) -> None:
        """RECEIVING: rows into the tables, blobs decoded, where loaders continue.

        Everything is compared before a byte of the model changes.
        """
        request, reply, partial = call.request, chosen.reply, chosen.partial

        def check_blobs(raw: Mapping[str, memoryview]) -> Blobs:
            if partial is not None:
                raw = partial.overlay(raw)
                chosen.notes.extend(partial.notes)
            blobs = Blobs.decode(raw, rank=self._rank.number)
            chosen.notes.extend(
                blobs.check(self._program, strict=request.strict, weights_only=request.weights_only)
            )
            if not request.weights_only:
                chosen.positions = self._positions(blobs, request)
            for failed in call.earlier:
                if uncovered := targets.uncovered_shards(failed):
                    raise RestoreFailed(
                        f"an older checkpoint does not hold all of {', '.join(uncovered)}, which a broken newer one "
                        "overwrote",
                        where=self._attachment.run,
                        remedy=f"build the model anew and restore(which='seq:{reply.resume_seq}', strict=False)",
                    )
            call.earlier.append(targets)
            self._opener.partially_restored = True
            targets.allocate(blobs.mismatched_optimizers(self._tracking))
            return blobs

        # Not while other ranks are waited for: they may need a sidecar that this one has to start anew.
        with call.stage("received"), self._attachment.session.busy:
            chosen.targets = targets = ModelTargets(
                self._tracking,
                [table_of(table) for table in reply.tables],
                strict=request.strict,
                weights_only=request.weights_only,
                renames=request.renames,
            )
            chosen.received = read_checkpoint(
                chosen.link,
                reply.resume_seq,
                request.from_run or "",
                targets,
                check_blobs,
                rank=self._rank.number,
                newer=tuple if partial is None else partial.frames,
            )

    def _positions(self, blobs: Blobs, request: RestoreRequest) -> ResumePositions:
        """Where loaders continue; raises `CheckpointMismatch` when one is another now, and `loaders="refuse"`."""
        positions = blobs.loader_positions(self._rank.number, self._rank.world_size)
        other = self._loaders.mismatches(positions.positions)
        if request.loaders != "continue":
            positions.refused.update(other)
        if positions.refused and request.loaders == "refuse":
            name, why = next(iter(positions.refused.items()))
            raise CheckpointMismatch(
                why,
                where=f"loader {name!r}",
                remedy="give the loader, or the number of ranks, as it was until the epoch ends; "
                'restore(loaders="restart") begins its epoch again',
            )
        return positions

    def _apply(self, call: _RestoreCall, chosen: _Candidate) -> None:
        """APPLYING: everything but rows and the global generators, which the rest may draw from."""
        request, blobs, targets, notes = call.request, chosen.received.blobs, chosen.targets, chosen.notes
        if not request.weights_only:
            chosen.positions.restart_epochs(
                self._epochs_to_restart(chosen.positions, call.collective), chosen.positions.refused
            )
        notes += chosen.positions.notes
        script = request.hyperparameters == "script"
        crash_point("restore.before_dense")
        notes += targets.notes
        with call.stage("restored"):
            notes += blobs.apply_dense(
                self._program, strict=request.strict, weights_only=request.weights_only, script=script
            )
            targets.mark()
            if not request.weights_only:
                notes += blobs.apply_state(self._program, strict=request.strict, script=script)
                notes += blobs.copied_from_peer(
                    self._rank.number, self._rank.world_size, self._program.state.keys()
                )
                chosen.rng, drawn = self._generators(blobs, chosen.reply.attempt, strict=request.strict)
                notes += drawn
                chosen.reported = self._loaders.resume(
                    chosen.positions.positions,
                    chosen.rng,
                    step=self._resume_step(call, chosen),
                    on_change=request.loaders,
                )
                self._tracking.watch_first_step()

    @staticmethod
    def _resume_step(call: _RestoreCall, chosen: _Candidate) -> int:
        if chosen.partial is not None:
            return chosen.partial.step
        return 0 if call.request.from_run and call.request.weights_only else int(chosen.reply.step)

    def _arm(self, call: _RestoreCall, chosen: _Candidate) -> Restored:
        """ARMING: training may begin; the generators last of all, since everything else may draw."""
        request, reply, partial = call.request, chosen.reply, chosen.partial
        received, weights_only = chosen.received, request.weights_only
        step = self._resume_step(call, chosen)
        if not request.from_run and not weights_only and chosen.targets.is_complete:
            self._base.set_base(reply.resume_seq, received.baseline_seq)
        else:
            self._base.clear_base()
        if partial is not None:
            partial.on_applied()
        # After a partial recovery no checkpoint is what the model is now: close() saves it, without a step, too.
        self._opener.begin(reply, step=step, resumed=partial is None, collective=call.collective)
        verified = self._compare_content(
            received.blobs, weights_only=weights_only, partial=partial is not None
        )
        changed = differences(received.blobs.meta.get("fingerprint", {}), self._program.fingerprint)
        if changed and not weights_only:
            log.warning("bits may differ from the lost process from here on: %s", "; ".join(changed))
        if chosen.rng is not None:
            apply_globals(chosen.rng)
        for note in chosen.notes:
            log.warning("restore: %s", note)
        _log_rounded(received)
        at = reply.step if partial is None else step
        lost = reply.last_step_seen - at if reply.HasField("last_step_seen") else None
        damaged = bool(call.damage) and request.which == "latest"
        return Restored(
            step=at,
            seq=reply.resume_seq,
            attempt=self._attempt.number,
            source="cache" if received.store_bytes == 0 else "store",
            lost_steps=max(0, lost) if lost is not None else None,
            seconds=time.monotonic() - call.began_s,
            stored_bytes=received.cache_bytes + received.store_bytes,
            chain=received.chain,
            fell_back=bool(call.excluded) or reply.fell_back or damaged,
            notes=tuple(([call.damage] if call.damage else []) + chosen.notes + changed + chosen.reported),
            exact=partial is None
            and verified is not False
            and not (received.rounded or received.rounded_state or chosen.targets.notes),
            verified=verified,
            rounded=received.rounded,
            rounded_state=received.rounded_state,
            mode="full" if partial is None else "partial",
            pls=self._plan.pls,
            rank_steps=() if partial is None else partial.rank_steps,
        )

    def _epochs_to_restart(
        self, positions: ResumePositions, collective: CollectiveRestore | None
    ) -> list[str]:
        """Loaders that begin their epoch again: those that cannot resume on any rank, or ranks would go apart."""
        mine = sorted(positions.refused)
        if collective is None:
            return mine
        told = collective.resolve(
            "loaders",
            json.dumps(mine),
            lambda said: json.dumps(sorted({name for word in said for name in json.loads(word)})),
        )
        return list(json.loads(told))

    def _compare_content(self, blobs: Blobs, *, weights_only: bool, partial: bool) -> bool | None:
        recorded = blobs.own_content
        if self._contents is None and (recorded is None or partial):
            return None
        contents = self._contents or ContentHashes()
        restored = contents.reset_from_model(self._tracking)
        if recorded is None or weights_only or partial:
            return None
        tables = self._tracking.inventory.elsewhere.keys() | {table.fqn for table in self._tracking.tables}
        elsewhere = resharded(recorded, restored, tables)
        if differ := differing_shards({k: v for k, v in recorded.items() if k not in elsewhere}, restored):
            log.error(
                "restored content differs from what was cut, in %s: please report this", ", ".join(differ)
            )
            return False
        return None if elsewhere else True

    def _generators(
        self, blobs: Blobs, attempt: int, *, strict: bool
    ) -> tuple[dict[str, Any] | None, list[str]]:
        """The global generators as they are to be, and a note when this rank had none of its own; they are changed."""
        if blobs.rng is None:
            return None, []
        rng = dict(blobs.rng)
        if not strict and (
            not torch.cuda.is_available() or torch.cuda.device_count() < len(rng.get("cuda", ()))
        ):
            rng.pop("cuda", None)
        if blobs.own_rng:
            return rng, []
        apply_globals(rng)
        reseed_for_rank(self._rank.number, attempt)
        note = (
            f"rank {self._rank.number} was not in the group of {blobs.world_size} that saved: its random numbers are "
            "drawn anew, from rank 0's state, its own number and the attempt"
        )
        return capture_globals(), [note]


def _log_rounded(received: ReceivedCheckpoint) -> None:
    if received.rounded:
        count = Counter(received.rounded.values())
        log.info(
            "restore: weights came back as they were stored, not bit for bit: %s",
            ", ".join(f"{tables} table{'s' * (tables != 1)} with {name}" for name, tables in count.items()),
        )
    if received.rounded_state:
        tables = len(received.rounded_state)
        log.info(
            "restore: optimizer state of %d table%s came back as it was stored, in %s",
            tables, "s" * (tables != 1), ", ".join(sorted(set(received.rounded_state.values()))),
        )  # fmt: skip
