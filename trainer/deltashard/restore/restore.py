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
from typing import Any, get_args

import torch
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format.index import table_of
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.attachment import RunMember
from deltashard.attach.retry import Retry
from deltashard.attach.session import Link
from deltashard.config import check_seconds
from deltashard.errors import CheckpointMismatch, RestoreFailed, RunWentOn, SidecarGone, UserError
from deltashard.loader.registry import OnChange
from deltashard.loader.sharding import ResumePositions
from deltashard.program import TrainingLoop
from deltashard.restore.assembly import Assembly
from deltashard.restore.blob import Blobs
from deltashard.restore.content_hash import Contents, differing, resharded
from deltashard.restore.frame_stream import Received, read_checkpoint
from deltashard.restore.model_target import ModelTargets, delta_rows, newer_rows
from deltashard.restore.open_attempt import AttemptOpener
from deltashard.restore.recovery_plan import PartialRestore, RecoveryPlan
from deltashard.state.fingerprint import differences
from deltashard.state.rng import apply_globals, capture_globals, draw_apart
from deltashard.tracking.cut_base import CutBase

log = logging.getLogger("deltashard")

READ_TURNS = 3
"""How often another run is read anew when it retired what was being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `restore()` brought back."""

    step: int
    """Training goes on after this step."""
    seq: int
    """Number of the checkpoint in the commit log."""
    attempt: int | None
    """The attempt that this process trains under; None: the store takes no entry yet, so it is opened late."""
    source: str
    """"cache": every byte came from this machine; "store": at least one did not."""
    lost_steps: int | None
    """Steps the lost trainer had done beyond this one; None when nobody saw them (another machine)."""
    seconds: float
    """From the call to the model being whole."""
    stored_bytes: int
    """Bytes read, as stored."""
    chain: tuple[int, ...]
    """Checkpoints whose frames were used, newest first."""
    fell_back: bool
    """A newer checkpoint exists but is not whole, or may have been lost with a damaged log: see `notes`."""
    notes: tuple[str, ...] = ()
    """Entries lost with the log, what did not match and was let pass (`strict=False`), what differs of this process."""
    exact: bool = True
    """Whether all that was restored is bit for bit what the program had at the cut: nothing was rounded or converted,
    no recovery was partial, and `verified` is not False. What was left out is in `notes`."""
    verified: bool | None = None
    """Whether content hashes taken at the cut (`content_hash=True`), of rows as they are stored, equal those of the
    restored state; None: none were recorded, or none can be compared (another sharding, weights only)."""
    rounded: Mapping[str, str] = field(default_factory=dict)
    """Tables whose weights did not come back bit for bit, and the encoding with the fewest bits that they were stored
    with, such as "q8"; empty: all did."""
    rounded_state: Mapping[str, str] = field(default_factory=dict)
    """Tables of whose optimizer state some did not (`state_encoding="bf16"`), and the type that it was stored in."""
    mode: str = "full"
    """"partial": survivors of a lost rank kept their rows (`recovery="partial"`), which is not exact."""
    pls: float = 0.0
    """Portion of lost samples of the run so far; 0 unless a recovery was partial."""
    rank_steps: tuple[int, ...] = ()
    """By rank, after a partial recovery: the step that its rows are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What `restore()` was called with; raises `UserError` for what cannot be meant."""

    which: str
    from_run: str | None
    strict: bool
    weights_only: bool
    renames: Mapping[str, str]
    takeover: bool
    deadline_s: float
    hyperparameters: str
    """"checkpoint" or "script": whose are in force where both scripts gave different ones."""
    loaders: OnChange = "restart"

    def __post_init__(self) -> None:
        check_seconds("deadline_s", self.deadline_s, off="leave deadline_s= out for five minutes")
        if self.hyperparameters not in ("checkpoint", "script"):
            raise UserError(
                f'hyperparameters= takes "checkpoint" or "script", not {self.hyperparameters!r}',
                where="restore()",
                remedy='leave it out to take the checkpoint\'s; "script" keeps what this script gives',
            )
        if self.loaders not in get_args(OnChange):
            raise UserError(
                f"loaders={self.loaders!r} is unknown",
                where="restore()",
                remedy='choose "restart", "continue" or "refuse"',
            )


@dataclass(slots=True, kw_only=True, eq=False)
class _Tries:
    """What the tries before found, within one `restore()`."""

    began_s: float = field(default_factory=time.monotonic)
    excluded: list[int] = field(default_factory=list)
    """Checkpoints that are not whole."""
    earlier: list[ModelTargets] = field(default_factory=list)
    """Targets that a broken checkpoint may have overwritten."""
    damage: str = ""
    """What could not be read in the log."""
    turn: int = 1
    retry: Retry
    """How long this goes on without a sidecar."""
    assembly: Assembly | None = None
    """The other ranks, who do the same; None: there are none."""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What is done within, all ranks do, or none goes on; raises the final error of `retry` when it is time."""
        together = contextlib.nullcontext() if self.assembly is None else self.assembly.stage(name)
        with together, self.retry.noting():
            yield


class Restorer:
    """Runs `restore()`; on the training thread only."""

    def __init__(
        self,
        loop: TrainingLoop,
        member: RunMember,
        *,
        opener: AttemptOpener,
        base: CutBase,
        contents: Contents | None,
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
        self._called = False

    def restore(self, request: RestoreRequest) -> Restored | None:
        """See `Checkpointer.restore`."""
        self._refuse_trained()
        if not self._called:
            self._called = True
            self._program.look_at_given()
        assembly = self._opener.assemble(
            which=request.which,
            from_run=request.from_run,
            strict=request.strict,
            weights_only=request.weights_only,
            renames=sorted(request.renames.items()),
            takeover=request.takeover,
            hyperparameters=request.hyperparameters,
        )
        retry = self._opener.retry("restore()", request.deadline_s, RestoreFailed)
        tries = _Tries(assembly=assembly, retry=retry)
        while True:
            link, reply = self._opener.open(
                which=request.which,
                from_run=request.from_run,
                exclude=tries.excluded,
                takeover=request.takeover,
                retry=retry,
                assembly=assembly,
            )
            # Only the first attempt meets what cannot be read in the log: the ones after it find it left behind.
            tries.damage = tries.damage or reply.log_damage
            if not reply.HasField("resume_seq"):
                if assembly is not None:
                    assembly.agree("restored")
                self._opener.begin(reply, step=0, assembly=assembly)
                if tries.excluded:
                    raise RestoreFailed(
                        f"checkpoints {tries.excluded} are not whole and there is no older one",
                        where=self._attachment.run,
                        remedy="`deltashard verify` tells what is wrong with them; fresh=True begins anew",
                    )
                return None
            self._plan.resumed({} if request.from_run else reply.metadata)
            partial = (
                None
                if assembly is None
                else self._plan.agree(assembly, reply, unusual=_unusual(request, tries))
            )
            try:
                restored = self._read(link, reply, request, tries, partial)
            except SidecarGone as gone:
                # Whatever was written into the model is written again.
                log.info("restore() begins again: %s", gone)
                retry.pause()
                continue
            except RunWentOn as error:
                if tries.turn == READ_TURNS:
                    raise
                tries.turn += 1
                log.info(
                    "checkpoint %d%s is asked for anew: %s",
                    reply.resume_seq,
                    f" of {request.from_run}" if request.from_run else "",
                    error,
                )
                continue
            except InvalidCheckpoint as error:
                tries.excluded.append(reply.resume_seq)
                log.error(  # noqa: TRY400 - a traceback would say nothing more
                    "checkpoint %d is not whole (%s): falling back to an older one", reply.resume_seq, error
                )
                self._listener.emit("fell_back", seq=reply.resume_seq, step=reply.step, why=str(error))
                continue
            self._listener.emit("restored", restored=restored)
            return restored

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

    def _read(
        self,
        link: Link,
        reply: pb.OpenReply,
        request: RestoreRequest,
        tries: _Tries,
        partial: PartialRestore | None,
    ) -> Restored:
        """Bring one checkpoint back; the generators last of all, since everything else may draw."""
        seq, weights_only = reply.resume_seq, request.weights_only
        notes: list[str] = []
        # Not while other ranks are waited for: they may need a sidecar that this one has to start anew.
        with tries.stage("received"), self._attachment.session.busy:
            received, targets, turnover = self._receive(link, reply, request, tries, notes, partial)
        blobs = received.blobs
        if not weights_only:
            turnover.restart_epochs(self._restarted(turnover, tries.assembly), turnover.refused)
        notes += turnover.notes
        script = request.hyperparameters == "script"
        rng: dict[str, Any] | None = None
        reported: list[str] = []
        step = 0 if request.from_run and weights_only else reply.step
        if partial is not None:
            step = partial.step
        crash_point("restore.before_dense")
        notes += targets.notes
        with tries.stage("restored"):
            notes += blobs.apply_dense(
                self._program, strict=request.strict, weights_only=weights_only, script=script
            )
            for table, ids in delta_rows(targets.placed):
                self._tracking.reseed(table, ids)
            for table, ids in newer_rows(targets.placed):
                table.marks.mark(ids.to(table.marks.flags.device))
            if not weights_only:
                notes += blobs.apply_state(self._program, strict=request.strict, script=script)
                notes += blobs.borrowed(self._rank.number, self._rank.world_size, self._program.state.keys())
                rng, told = self._generators(blobs, reply.attempt, strict=request.strict)
                notes += told
                reported = self._loaders.resume(turnover.positions, rng, step=step, on_change=request.loaders)
                self._tracking.watch_first_step()
        if not request.from_run and not weights_only and targets.complete:
            self._base.lean_on(seq, received.baseline_seq)
        else:
            self._base.lean_on_nothing()
        if partial is not None:
            partial.applied()
        # After a partial recovery no checkpoint is what the model is now: close() saves it, without a step, too.
        self._opener.begin(reply, step=step, resumed=partial is None, assembly=tries.assembly)
        verified = self._compare_content(blobs, weights_only=weights_only, partial=partial is not None)
        changed = differences(blobs.meta.get("fingerprint", {}), self._program.fingerprint)
        if changed and not weights_only:
            log.warning("bits may differ from the lost process from here on: %s", "; ".join(changed))
        if rng is not None:
            apply_globals(rng)
        for note in notes:
            log.warning("restore: %s", note)
        if received.rounded:
            count = Counter(received.rounded.values())
            log.info(
                "restore: weights came back as they were stored, not bit for bit: %s",
                ", ".join(
                    f"{tables} table{'s' * (tables != 1)} with {name}" for name, tables in count.items()
                ),
            )
        if received.rounded_state:
            tables = len(received.rounded_state)
            log.info(
                "restore: optimizer state of %d table%s came back as it was stored, in %s",
                tables, "s" * (tables != 1), ", ".join(sorted(set(received.rounded_state.values()))),
            )  # fmt: skip
        at = reply.step if partial is None else step
        lost = reply.last_step_seen - at if reply.HasField("last_step_seen") else None
        damaged = bool(tries.damage) and request.which == "latest"
        return Restored(
            step=at,
            seq=seq,
            attempt=self._attempt.number,
            source="cache" if received.store_bytes == 0 else "store",
            lost_steps=max(0, lost) if lost is not None else None,
            seconds=time.monotonic() - tries.began_s,
            stored_bytes=received.cache_bytes + received.store_bytes,
            chain=received.chain,
            fell_back=bool(tries.excluded) or reply.fell_back or damaged,
            notes=tuple(([tries.damage] if tries.damage else []) + notes + changed + reported),
            exact=partial is None
            and verified is not False
            and not (received.rounded or received.rounded_state or targets.notes),
            verified=verified,
            rounded=received.rounded,
            rounded_state=received.rounded_state,
            mode="full" if partial is None else "partial",
            pls=self._plan.pls,
            rank_steps=() if partial is None else partial.rank_steps,
        )

    def _receive(
        self,
        link: Link,
        reply: pb.OpenReply,
        request: RestoreRequest,
        tries: _Tries,
        notes: list[str],
        partial: PartialRestore | None,
    ) -> tuple[Received, ModelTargets, ResumePositions]:
        """Rows into the tables, blobs decoded, where loaders go on.

        Everything is compared before a byte of the model changes.
        """
        seq = reply.resume_seq
        turnover = ResumePositions({})
        targets = ModelTargets(
            self._tracking,
            [table_of(table) for table in reply.tables],
            strict=request.strict,
            weights_only=request.weights_only,
            renames=request.renames,
        )

        def judge(raw: Mapping[str, memoryview]) -> Blobs:
            if partial is not None:
                raw = partial.overlay(raw)
                notes.extend(partial.notes)
            blobs = Blobs.decode(raw, rank=self._rank.number)
            notes.extend(blobs.check(self._program, strict=request.strict, weights_only=request.weights_only))
            nonlocal turnover
            if not request.weights_only:
                turnover = blobs.loaders_at(self._rank.number, self._rank.world_size)
                other = self._loaders.mismatches(turnover.positions)
                if request.loaders != "continue":
                    turnover.refused.update(other)
                if turnover.refused and request.loaders == "refuse":
                    name, why = next(iter(turnover.refused.items()))
                    raise CheckpointMismatch(
                        why,
                        where=f"loader {name!r}",
                        remedy="give the loader, or the number of ranks, as it was until the epoch ends; "
                        'restore(loaders="restart") begins its epoch again',
                    )
            for failed in tries.earlier:
                if torn := targets.covers(failed):
                    raise RestoreFailed(
                        f"an older checkpoint does not hold all of {', '.join(torn)}, which a broken newer one "
                        "overwrote",
                        where=self._attachment.run,
                        remedy=f"build the model anew and restore(which='seq:{seq}', strict=False)",
                    )
            tries.earlier.append(targets)
            targets.place(blobs.strangers(self._tracking))
            return blobs

        received = read_checkpoint(
            link,
            seq,
            request.from_run or "",
            targets,
            judge,
            rank=self._rank.number,
            newer=tuple if partial is None else partial.frames,
        )
        return received, targets, turnover

    def _restarted(self, turnover: ResumePositions, assembly: Assembly | None) -> list[str]:
        """Loaders that begin their epoch again: those that cannot resume on any rank, or ranks would go apart."""
        mine = sorted(turnover.refused)
        if assembly is None:
            return mine
        told = assembly.settle(
            "loaders",
            json.dumps(mine),
            lambda said: json.dumps(sorted({name for word in said for name in json.loads(word)})),
        )
        return list(json.loads(told))

    def _compare_content(self, blobs: Blobs, *, weights_only: bool, partial: bool) -> bool | None:
        recorded = blobs.own_content
        if self._contents is None and (recorded is None or partial):
            return None
        contents = self._contents or Contents()
        restored = contents.restored(self._tracking)
        if recorded is None or weights_only or partial:
            return None
        tables = self._tracking.inventory.elsewhere.keys() | {table.fqn for table in self._tracking.tables}
        elsewhere = resharded(recorded, restored, tables)
        if differ := differing({k: v for k, v in recorded.items() if k not in elsewhere}, restored):
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
        draw_apart(self._rank.number, attempt)
        note = (
            f"rank {self._rank.number} was not in the group of {blobs.world_size} that saved: its random numbers are "
            "drawn anew, from rank 0's state, its own number and the attempt"
        )
        return capture_globals(), [note]


def _unusual(request: RestoreRequest, tries: _Tries) -> str:
    """What makes this restore more than going on after a crash; empty: nothing."""
    if request.which != "latest" or request.from_run:
        return (
            f"restore(which={request.which!r}) was called" if not request.from_run else "another run is read"
        )
    if request.weights_only or not request.strict or request.renames or request.takeover:
        return "restore() was called with more than its defaults"
    return "a checkpoint was not whole" if tries.excluded else ""
