"""`Checkpointer`: the one object a training script talks to.

Everything here runs on the training thread, at step boundaries:

    step()      counts, writes two words of the control line, compares two words: nothing is due -> return
    boundary    apply what the session thread heard (commits, failures, the sidecar gone or back); take a cut that is
                due and possible; otherwise remember or skip it. Whatever goes wrong with a save is counted and logged
                once per cause, the marks stay, and training goes on.
    cut         audits -> Begin -> covers says which rows -> copy -> seal -> marks move to pending

Only these raise into training: `FencedError` (another process trains this run now), `NotRestored` (a run with
checkpoints was about to be continued from initial values), and what the user's own signal handler raises.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, get_args

import torch
from deltashard_checkpoint.deciding.ending import reason_of
from deltashard_proto.block_reason import BlockReason
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard import arguments
from deltashard.attach import exit_code
from deltashard.attach.attachment import Attachment
from deltashard.attach.launcher import (
    ChildLauncher,
    Launcher,
    PodLauncher,
    SidecarOptions,
    normal_url,
    staged_in_pod,
)
from deltashard.attach.lifecycle import Attempt, Event
from deltashard.attach.listener import Listener
from deltashard.attach.rank import Rank, rank_of_this_process
from deltashard.attach.retry import DEADLINE_S
from deltashard.attach.session import Link, Session
from deltashard.doctor import Diagnosis, diagnose
from deltashard.errors import AnotherTrainer, UserError
from deltashard.group.conductor import Conductor
from deltashard.loader.loader_access import Skip
from deltashard.loader.registry import LoaderRegistry, OnChange
from deltashard.partial.ground import Ground
from deltashard.partial.peer import Peers
from deltashard.partial.recovery import Recovery
from deltashard.partial.sentinel import Sentinel
from deltashard.partial.stager import Stager
from deltashard.program import Program
from deltashard.restore.content_hash import Contents
from deltashard.restore.open_attempt import AttemptOpener, attach_request
from deltashard.restore.restore import Restored, Restorer, Wish
from deltashard.save.capture import Capture
from deltashard.save.handle import SaveHandle, Stats
from deltashard.save.news import News
from deltashard.save.order_book import OrderBook
from deltashard.save.request import Requests
from deltashard.save.save_loop import SaveLoop
from deltashard.save.saver import Saver
from deltashard.save.setback import Setbacks
from deltashard.save.wait import MESSAGE
from deltashard.save.watchdog import Watchdog
from deltashard.tracking.cut_base import CutBase
from deltashard.tracking.stance import Stance
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking, TrackingSettings

log = logging.getLogger("deltashard")

CLOSE_DEADLINE_S = 300.0
DRAIN_DEADLINE_S = 30.0
LEAVE_S = 10.0
"""Detaching from the sidecar may take so long, within the deadline of `close()`."""


class Checkpointer:
    """Crash-consistent checkpoints of a training loop; see the module and the README's example."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = (),
        *,
        state: Mapping[str, Any] | None = None,
        url: str | os.PathLike[str] | None = None,
        run: str | None = None,
        every_s: float | None = None,
        every_steps: int | None = None,
        goal: str | None = None,
        encoding: str | None = None,
        differential: str | None = None,
        state_encoding: str | None = None,
        keep_last: int | None = None,
        arena_bytes: int | None = None,
        metrics_port: int | None = None,
        sidecar: Mapping[str, object] | None = None,
        fresh: bool = False,
        validate: Callable[[], bool] | None = None,
        bits: str | None = None,
        tables: Mapping[str, str] | None = None,
        content_hash: bool | None = None,
        precopy: bool | None = None,
        grace_s: float | None = 20.0,
        recovery: str = "full",
        pls_target: float | None = None,
        planned_steps: int | None = None,
        tracking: TrackingSettings | None = None,
        on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Attach to the pod's sidecar, or start one for this run on this machine.

        Args:
            model: the module that trains; wrappers (torch.compile, DataParallel, AveragedModel) are looked through.
            optimizer: one optimizer, or a list of them.
            state: everything else that must come back, by name: objects with `state_dict`/`load_state_dict`
                (schedulers, GradScaler, EMA, stateful loaders), generators, `(get, set)` pairs, tensors, arrays, dicts
                and lists that are changed in place.
            url: store of the run, `s3://bucket/prefix` (or `gs://`, `az://`), `file:///dir` or a path. In a pod it
                comes from the sidecar.
            run: name of the logical training job.
            every_s: save every so many seconds.
            every_steps: save every so many steps.
            goal: what the interval is chosen for, from what saves are measured to cost and how often the run fails:
                "auto", "overhead=1%", "lost-work=5m", "pls=0.02", or "fixed" (as every_s and every_steps
                say, as without a goal); docs/deciding.md says which to take. `doctor()` shows the interval in force.
            encoding: of embedding weights: fp32 fp16 bf16 q8 q4 q3 q2 (the sidecar's default is q8).
            differential: full, one-shot, consecutive or intermittent (default).
            state_encoding: of point-wise optimizer state: fp32 (default) or bf16.
            bits: choose the encoding of each table by the restores to come: "budget" (what they may do to its rows
                stays within a budget; small tables keep 8 bit) or "check-n-run" (the paper's). Default: `encoding`.
            tables: encodings of single tables, before all else: {"emb.user": "q8"}.
            keep_last: how many checkpoints are retained.
            arena_bytes: shared memory between trainer and sidecar.
            metrics_port: Prometheus endpoint of a sidecar started here; 0 picks a free port.
            sidecar: further settings of a sidecar started here, by name.
            fresh: begin anew although the run has checkpoints; without it that is refused at the first step.
            validate: called before every cut; False vetoes it (a NaN guard).
            content_hash: record what a restore must bring back, see `content_hash`; default: the variable
                DELTASHARD_CONTENT_HASH.
            precopy: copy rows ahead of a cut, on a thread of its own while training goes on, where that is worth it and
                exact (`cut.precopy`). Default: yes, unless the variable DELTASHARD_PRECOPY is 0. `stats.head_starts`
                says what came of it.
            grace_s: after SIGTERM: an urgent save may take so long; None leaves SIGTERM alone.
            recovery: "full" (all ranks go back to the newest checkpoint, bit for bit), or "partial": when some ranks
                die, the others keep their rows, which is not exact (docs/distributed.md says what it costs, and where).
            pls_target: with "partial": the portion of lost samples (PLS) that the run may come to; beyond it: full.
            planned_steps: steps of the whole run: PLS is counted by them, restores to come are expected until then, and
                in their last tenth nothing is stored with chosen bits below 8.
            tracking: how tables are found and tracked.
            on_event: called on the training thread with (name, facts) for cut, committed, save_failed, skipped,
                sidecar_lost, attached, restored, fell_back, log_damaged, state_thrown_away, nothing_saved,
                snapshot_inconsistent, save_blocked.

        Raises:
            StateError: something in `state=` or an optimizer cannot be saved; found out now, not at the first save.
            UserError, SidecarUnavailable, AnotherTrainer: the run or the sidecar cannot be used; this process is one of
                several ranks, and there is no process group.
        """
        self._rank = rank_of_this_process("Checkpointer()")
        arguments.check_model(model)
        arguments.check_state(state)
        arguments.check_place(url, run)
        arguments.check_sidecar(sidecar)
        arguments.check_seconds(
            "every_s", every_s, off="leave every_s= out to save by steps or on demand only"
        )
        arguments.check_seconds("grace_s", grace_s, off="grace_s=None leaves SIGTERM alone")
        arguments.check_count(
            "every_steps",
            every_steps,
            least=0,
            remedy="leave every_steps= out to save by time or on demand only",
        )
        arguments.check_goal(goal)
        arguments.check_count("keep_last", keep_last, least=1, remedy="keep at least one checkpoint")
        for name, flag in (("fresh", fresh), ("content_hash", content_hash), ("precopy", precopy)):
            arguments.check_flag(name, flag)
        terms = arguments.terms_of(recovery, pls_target, planned_steps, grace_s)
        self._planned_steps = 0 if planned_steps is None else int(planned_steps)
        arguments.check_callable("validate", validate, takes="a function that returns a bool")
        arguments.check_callable("on_event", on_event, takes="a function of (name, facts)")
        self.stats = Stats()
        """Counts of what happened to saves, for people and tests."""
        self._listener = Listener(on_event, self.stats.count_event_error)
        handed = arguments.optimizers_of(optimizer, model)
        self._program = Program(
            Tracking(
                model,
                optimizer if isinstance(optimizer, list | Mapping) else handed,
                settings=tracking,
                report=self._tracked,
                rank=self._rank.number,
                world_size=self._rank.world_size,
            ),
            state or {},
        )
        if self._rank.alone:  # of several, each may have tables that the others have not
            arguments.check_tables(tables, [schema.fqn for schema in self._program.schemas])
        self._clock = StepClock(self._program.tracking)
        self._stance = Stance(self._program.tracking, self._clock)
        self._loaders = LoaderRegistry(
            lambda: self._clock.step, state=self._program.state, sources=self._program.sources
        )
        self._attempt = Attempt()
        exit_code.install()
        self._launcher = _launcher(
            url,
            run,
            {
                "every_s": every_s,
                "every_steps": every_steps,
                "goal": goal,
                "encoding": encoding,
                "differential": differential,
                "state_encoding": state_encoding,
                **arguments.bits_settings(bits, tables),
                "keep_last": keep_last,
                "arena_bytes": arena_bytes,
                "metrics_port": metrics_port,
                "linger_s": 30.0,
                **(sidecar or {}),
            },
            self._rank,
        )
        self._session, link = self._connect()
        self._attempt.happen(Event.ATTACH)
        self._attachment = Attachment(self._session, link, self._clock)
        self.url = self._attachment.url
        """Where the run is stored (without credentials)."""
        self.run = self._attachment.run
        """The run's name."""
        child = self._launcher if isinstance(self._launcher, ChildLauncher) else None
        home = staged_in_pod(self.url, self.run) if child is None else child.staged
        self._ground = Ground(terms, self._rank, run=f"{self.url} {self.run}", home=home)
        # In a pod there is nobody else to ask, and what a rank would stage for partial recovery alone.
        heard = not self._rank.alone and (child is not None or self._ground.pls_target > 0)
        self._peers = Peers(None if child is None else child.runtime, self._rank.local) if heard else None
        self._assemble(
            fresh=fresh, validate=validate, content_hash=content_hash, precopy=precopy, grace_s=grace_s
        )
        _live.add(self)
        _watch_uncaught()
        if self._ground.off:
            log.warning('recovery="partial" is full here: %s', self._ground.off)
        try:
            log.info("run %r: %s", self.run, self.doctor().line)
        except Exception:
            log.debug("doctor() failed", exc_info=True)

    def _tracked(self, name: str, facts: Mapping[str, Any]) -> None:
        self._news.tracked(name, facts)

    def _connect(self) -> tuple[Session, Link]:
        """Attach; whatever goes wrong, nothing of ours is left in the program."""
        try:
            self._refuse_rival()
            session = Session(
                self._launcher,
                request=lambda: attach_request(self._program, self._rank, *self._attempt.granted),
                schemas=lambda: self._program.schemas,
                alert=self._clock.alert,
                local_rank=self._rank.local,
            )
            return session, session.connect()
        except BaseException:
            self._launcher.close()
            self._stance.close()
            self._program.tracking.close()
            raise

    def _assemble(
        self,
        *,
        fresh: bool,
        validate: Callable[[], bool] | None,
        content_hash: bool | None,
        precopy: bool | None,
        grace_s: float | None,
    ) -> None:
        """The parts that save and restore, once there is a sidecar; each writes fields of its own only."""
        if content_hash is None:
            content_hash = os.environ.get("DELTASHARD_CONTENT_HASH", "0") == "1"
        if precopy is None:
            precopy = os.environ.get("DELTASHARD_PRECOPY", "1") != "0"
        contents = Contents() if content_hash else None
        base = CutBase(self._planned_steps, self._ground.pls_target)
        setbacks = Setbacks(self._clock, self.stats, self._listener)
        self._watchdog = Watchdog(
            self._clock,
            self._listener,
            timer=lambda: (self._attachment.policy.every_s, self._attachment.policy.every_steps),
        )
        requests = Requests(setbacks)
        recovery = Recovery(self._ground, self._program)
        capture = Capture(self._program, self._loaders, rank=self._rank)
        self._saver = Saver(
            capture,
            clock=self._clock,
            attachment=self._attachment,
            attempt=self._attempt,
            base=base,
            requests=requests,
            setbacks=setbacks,
            stats=self.stats,
            listener=self._listener,
            watchdog=self._watchdog,
            contents=contents,
            validate=validate,
            precopy=precopy,
            said=lambda: self._ground.metadata,
        )
        self._news = News(
            self._attachment,
            self._attempt,
            clock=self._clock,
            saver=self._saver,
            requests=requests,
            stats=self.stats,
            listener=self._listener,
        )
        self._conductor = (
            None
            if self._rank.alone
            else Conductor(
                self._rank.number,
                self._rank.world_size,
                clock=self._clock,
                why_not=self._why_no_cut(setbacks),
            )
        )
        opener = AttemptOpener(
            self._attachment,
            self._attempt,
            clock=self._clock,
            stance=self._stance,
            listener=self._listener,
            hear=self._news.apply,
            fresh=fresh,
            rank=self._rank,
            program=self._program,
            conductor=self._conductor,
            terms=str(self._ground.terms or "full"),
            begun=lambda reply, meeting: self._begun(recovery, reply, meeting),
            last_words=self._launcher.last_words,
        )
        self._restorer = Restorer(
            self._program,
            self._loaders,
            clock=self._clock,
            attachment=self._attachment,
            attempt=self._attempt,
            opener=opener,
            base=base,
            contents=contents,
            listener=self._listener,
            rank=self._rank,
            recovery=recovery,
            ground=self._ground,
        )
        orders = (
            None
            if self._conductor is None
            else OrderBook(
                self._conductor,
                self._program,
                clock=self._clock,
                requests=requests,
                setbacks=setbacks,
                listener=self._listener,
            )
        )
        self._forked = False
        """In a child of the process that trains: everything of it is that process's."""
        self._loop = SaveLoop(
            self._program,
            self._loaders,
            clock=self._clock,
            stance=self._stance,
            attachment=self._attachment,
            attempt=self._attempt,
            opener=opener,
            news=self._news,
            saver=self._saver,
            requests=requests,
            setbacks=setbacks,
            watchdog=self._watchdog,
            grace_s=grace_s,
            orders=orders,
        )
        self._stager: Stager | None = None
        self._sentinel: Sentinel | None = None
        if self._peers is not None:
            self._stager = Stager(
                self._ground,
                self._program,
                base,
                clock=self._clock,
                peers=self._peers,
                blobs=lambda step: capture.blobs(step, None, all_here=True),
            )
            if self._loop.term is not None:
                self._sentinel = Sentinel(
                    self._loop.term,
                    dead=lambda: self._peers is not None and self._peers.dead,
                    stage=self._stager.stage,
                )

    def _begun(self, recovery: Recovery, reply: pb.OpenReply, meeting: str) -> None:
        """Training begins under an attempt, on all ranks."""
        recovery.begun(reply, meeting)
        if self._peers is not None:
            self._peers.meet()
            if self._ground.pls_target:
                self._peers.hear(f"deltashard/{meeting}/", self._rank.number, self._rank.world_size)

    def _why_no_cut(self, setbacks: Setbacks) -> Callable[[bool], str]:
        """For the other ranks, and asked on another thread: why this one cannot cut now."""

        def why(urgent: bool) -> str:
            if self._conductor is not None and self._conductor.sums:
                return "what every rank holds whole is not the same on all"
            if self._saver.in_flight:
                return MESSAGE[BlockReason.FLIGHT]
            if self._attachment.link is None:
                return MESSAGE[BlockReason.AWAY]
            return MESSAGE[BlockReason.BACK_OFF] if setbacks.backing_off and not urgent else ""

        return why

    # The loop's side

    @property
    def steps(self) -> int:
        """How many `step()` calls this run has seen, those before the restore included."""
        return self._clock.step

    @property
    def attempt(self) -> int | None:
        """The attempt this process trains under; None before `restore()` or the first `step()`."""
        return self._attempt.number

    @property
    def sidecar_pid(self) -> int | None:
        """Process id of the sidecar started for this run on this machine; None in a pod."""
        return self._launcher.pid if isinstance(self._launcher, ChildLauncher) else None

    @property
    def arena_path(self) -> str | None:
        """The shared-memory file, None while the sidecar is away."""
        link = self._session.link
        return None if link is None else str(link.reply.arena_path)

    def step(self) -> None:
        """One step is done: the last statement of the loop body, after optimizer and scheduler.

        Raises:
            FencedError: a newer attempt has taken this run over; end this process. `TakenOver`: another workload's.
            NotRestored: the run has checkpoints, and neither `restore()` nor `fresh=True` was said.
            UserError: this Checkpointer is closed, or a CUDA graph is being captured.
        """
        if self._program.tracking.on_cuda and torch.cuda.is_current_stream_capturing():
            raise UserError(
                "step() was called while a CUDA graph is captured: no replay would call it again",
                where="step()",
                remedy="capture the computation alone, and call step() after each replay",
            )
        if self._clock.tick():
            self._loop.boundary(at_step=True)
        self._clock.tock()
        self._loaders.stepped()

    def wrap(
        self,
        loader: Any,
        *,
        name: str = "loader",
        skip: Skip = "auto",
        pipelined: bool = False,
        shared: bool = False,
        strict: bool = False,
    ) -> Any:
        """`loader` with its position and randomness saved and resumed; see `wrapped_loader`.

        After a restart the last batch is drawn again, compared with the one that was trained on, and dropped. One that
        differs is a warning, and training continues. A loader that is made again for each epoch is wrapped again, under
        the same name, when the last one was iterated.

        Args:
            loader: a DataLoader, any re-iterable, a stateful loader, or a callable factory(epoch, start).
            name: tells several wrapped loaders apart.
            skip: how a resumed map-style DataLoader passes over what was delivered: "auto" (in the index sampler; all
                batches of the epoch are read again where the last one differs, or workers draw random numbers),
                "sampler" (never read again: right for datasets that draw from the sample's index) or "replay" (always).
            pipelined: the loop's batches come from a pipeline that fetches ahead; every `step()` consumes one.
            shared: all ranks of a group iterate the same batches, and each takes its share of every one: then another
                number of ranks resumes in the middle of an epoch, as it does with torch's DistributedSampler.
            strict: raise where a resumed loader is another one or gives other batches, instead of a warning.

        Raises:
            StateError: the loader cannot be iterated, or only once.
            UserError: it is wrapped already, or an option does not fit it.
            CheckpointMismatch: after `restore(loaders="refuse")`, or with `strict`: it is another loader.
        """
        return self._loaders.wrap(
            loader, name=name, skip=skip, pipelined=pipelined, shared=shared, strict=strict
        )

    def save(
        self, reason: str = "user", *, pin: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> SaveHandle:
        """Ask for a save. Right after `step()` it is cut at once, anywhere else by the next `step()`.

        A pin and metadata belong to that very step: where it cannot be cut (the save before is not durable yet, the
        sidecar is away) and training goes on, the handle fails and says so, and no other step gets them. Without them
        the save stays asked for, until a cut is possible.

        Args:
            reason: a word for logs and the log entry; one that means an end (close, sigterm) is said as the user's.
            pin: keep this checkpoint under this name whatever retention says, `restore(which="pin:NAME")`.
            metadata: metrics and the like, stored with it as text; names beginning with "deltashard/" are ours.

        Raises:
            UserError: a pin or metadata that cannot be stored (length, characters).
        """
        self._attempt.refuse_closed("save()")
        if self._forked:
            raise UserError(
                "a forked child trains nothing of this run",
                where="save()",
                remedy="save in the process that built the Checkpointer; step() and close() do nothing here",
            )
        arguments.check_pin(pin)
        handle = SaveHandle(
            reason=reason_of(reason), pin=pin, metadata=arguments.texts_of(metadata), waiter=self._loop.wait
        )
        self._loop.ask(handle)
        return handle

    def restore(
        self,
        *,
        which: str | int = "latest",
        from_run: str | None = None,
        strict: bool = True,
        weights_only: bool = False,
        renames: Mapping[str, str] | None = None,
        takeover: bool = False,
        deadline_s: float = DEADLINE_S,
        hyperparameters: str = "checkpoint",
        loaders: OnChange = "restart",
    ) -> Restored | None:
        """Open the attempt and bring the newest whole checkpoint back, in place. Call it before the first `step()`.

        A sidecar that dies meanwhile is started again (in a pod: waited for), and all of this begins again.

        Args:
            which: "latest", "none", a seq number, "seq:N", "step:N" or "pin:NAME".
            from_run: read another run of the same store (warm start, evaluation); commits still go to ours.
            strict: refuse any difference between checkpoint and program; False takes what fits and says the rest.
            weights_only: tables, parameters and buffers only: no optimizer, loader, generators or state.
            renames: stored table name by the model's name for it.
            takeover: go on although the run belongs to another owner.
            deadline_s: from the first time that the sidecar is gone, in seconds: when it is gone after that, restore()
                raises RestoreFailed with the reasons so far.
            hyperparameters: whose learning rates, weight decay, schedule lengths, `requires_grad` and the like are in
                force where this script gives others than the script that saved: "checkpoint" or "script". Both values
                are in `Restored.notes` and in the log. What training itself changed comes from the checkpoint.
            loaders: what becomes of an epoch whose wrapped loader is another one now (batch size, length, order, number
                of ranks): "restart" (its epoch begins again: some samples twice, none left out), "continue" (as many
                batches are left out) or "refuse" (an error).

        Returns:
            None only if nothing was ever committed.

        Raises:
            CheckpointMismatch, RestoreFailed, FencedError, UserError: see `errors`; after RestoreFailed it may be
                called again.
        """
        self._attempt.refuse_closed("restore()")
        arguments.check_seconds("deadline_s", deadline_s, off="leave deadline_s= out for five minutes")
        arguments.check_hyperparameters(hyperparameters)
        if loaders not in get_args(OnChange):
            raise UserError(
                f"loaders={loaders!r} is unknown",
                where="restore()",
                remedy='choose "restart", "continue" or "refuse"',
            )
        wish = Wish(
            which=f"seq:{which}" if isinstance(which, int) else which,
            from_run=from_run,
            strict=strict,
            weights_only=weights_only,
            renames=renames or {},
            takeover=takeover,
            deadline_s=deadline_s,
            hyperparameters=hyperparameters,
            loaders=loaders,
        )
        try:
            return self._restorer.restore(wish)
        finally:
            if self._attempt.opened:
                self._saver.ready()

    def doctor(self) -> Diagnosis:
        """How each table is tracked and why, what is in the checkpoint, what is not and what that means: print it.

        And how often the sidecar saves, as it last said, and why a save that is due did not happen yet.
        """
        return diagnose(
            self._program, self._loaders.loaders, self._attachment.policy, blocked=self._watchdog.blocked
        )

    def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Cut at the last step boundary if that step is not saved yet, wait until it is durable, detach.

        Raises:
            SaveFailed: it is not durable after `deadline_s`; everything is released all the same.
            FencedError: a newer attempt runs.
        """
        if self._attempt.closed or self._forked:
            return
        until_s = time.monotonic() + deadline_s
        try:
            if self._session.fenced is not None:
                raise self._session.fenced
            if self._attempt.opened:
                self._loop.finish(until_s)
            self._say_if_unsaved()
        finally:
            if self._peers is not None:
                self._peers.leave()
            self._release(until_s)

    def _say_if_unsaved(self) -> None:
        """A program that trained and never called `step()` has no checkpoint, and would not know."""
        if self._clock.step != (self._attempt.resumed_step or 0) or not self._program.tracking.steps.stepped:
            return
        log.warning(
            "run %r: the optimizer stepped, and step() was never called: nothing of it is saved. "
            "ckpt.step() must be the last statement of the loop body",
            self.run,
        )
        self._listener.emit("nothing_saved", step=self._clock.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._attempt.closed and not self._forked:
            # A step torn by an exception must not become the newest checkpoint: only let what is in flight end. What
            # waits for a dead rank's part will not, and what does not the sidecar ends alone.
            dead = error is not None and self._stager is not None and self._stager.raised(error)
            dead = dead or (self._peers is not None and self._peers.dead)
            try:
                self._loop.drain(time.monotonic() + (0.0 if dead else DRAIN_DEADLINE_S))
            finally:
                self._release(time.monotonic() + LEAVE_S)

    def _refuse_rival(self) -> None:
        """Two of one run would take the sidecar's session from each other for ever; the lock only tells processes."""
        for other in list(_live):
            if other._launcher.place == self._launcher.place and other._session.fenced is None:  # noqa: SLF001
                raise AnotherTrainer(
                    "another Checkpointer of this process already trains this run",
                    where=str(self._launcher.place),
                    remedy="close() it first; only what trains another model is another run",
                )

    def _release(self, until_s: float) -> None:
        self._attempt.happen(Event.CLOSE)
        # The line of the arena is given back; without it every step has a boundary, which refuses it.
        self._clock.detach()
        if self._sentinel is not None:
            self._sentinel.close()
        if self._peers is not None:
            self._peers.close()
        self._loop.close()
        if self._conductor is not None:
            self._conductor.close()
        try:
            self._saver.close(until_s=min(until_s, time.monotonic() + LEAVE_S / 2))
        finally:
            self._session.close(until_s=min(until_s, time.monotonic() + LEAVE_S))
            self._launcher.close()
            self._stance.close()
            self._loaders.close()
            self._program.tracking.close()
            _live.discard(self)


def _launcher(
    url: str | os.PathLike[str] | None, run: str | None, flags: Mapping[str, object], rank: Rank
) -> Launcher:
    socket_path = os.environ.get("DELTASHARD_SOCKET")
    if socket_path:
        from pathlib import Path

        return PodLauncher(Path(socket_path))
    url = url or os.environ.get("DELTASHARD_URL")
    run = run or os.environ.get("DELTASHARD_RUN")
    if not url or not run:
        raise UserError(
            f"no {'url' if not url else 'run'} was given, and there is no sidecar in this pod",
            where="Checkpointer()",
            remedy='give url="file:///some/dir" and run="name" (or DELTASHARD_URL and DELTASHARD_RUN)',
        )
    return ChildLauncher(SidecarOptions(url=normal_url(url), run=run, flags=flags), rank)


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


_watched = False


def _watch_uncaught() -> None:
    """An error that ends the program may be of a collective; once a process, before whatever hook is there."""
    global _watched  # noqa: PLW0603 - as global as the hook itself
    if _watched:
        return
    _watched = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for checkpointer in list(_live):
            if checkpointer._stager is not None:  # noqa: SLF001 - same module
                checkpointer._stager.raised(error)  # noqa: SLF001
        before(kind, error, trace)

    sys.excepthook = hook


def _in_child() -> None:
    for checkpointer in list(_live):
        checkpointer._forked = True  # noqa: SLF001 - same module
        checkpointer._clock.forget()  # noqa: SLF001
        checkpointer._stance.close()  # noqa: SLF001


os.register_at_fork(after_in_child=_in_child)
