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
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch
from deltashard_checkpoint.deciding.shutdown_reason import user_reason

from deltashard.attach.launcher import ChildLauncher
from deltashard.attach.retry import DEADLINE_S
from deltashard.config import CheckpointConfig, check_pin, stored_metadata
from deltashard.doctor import Diagnosis, diagnose
from deltashard.errors import UserError
from deltashard.loader.loader_access import Skip
from deltashard.loader.registry import OnChange
from deltashard.restore.request import Restored, RestoreRequest
from deltashard.save.handle import SaveHandle, Stats
from deltashard.tracking.tracking import TrackingSettings
from deltashard.wiring import RELEASE_S, Wiring, guarded

log = logging.getLogger("deltashard")

CLOSE_DEADLINE_S = 300.0
DRAIN_DEADLINE_S = 30.0


class Checkpointer:
    """Crash-consistent checkpoints of a training loop; see the module and the README's example."""

    def __init__(  # noqa: PLR0913
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
        grace_s: float | Literal["auto"] | None = "auto",
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
            sidecar: further settings of a sidecar started here, by name; those above are refused.
            fresh: begin anew although the run has checkpoints; without it that is refused at the first step.
            validate: called before every cut; False vetoes it (a NaN guard).
            content_hash: record what a restore must bring back, see `content_hash`; default: the variable
                DELTASHARD_CONTENT_HASH.
            precopy: copy rows ahead of a cut, on a thread of its own while training goes on, where that is worth it and
                exact (`snapshot.precopy`). Default: yes, unless the variable DELTASHARD_PRECOPY is 0. `stats.precopy`
                says what came of it.
            grace_s: after SIGTERM an urgent save may take so many seconds. "auto" is the pod's grace period less 5 s
                (in which its processes end), and 20 s without a pod. None leaves SIGTERM alone.
            recovery: "full" (all ranks go back to the newest checkpoint, bit for bit), or "partial": when some ranks
                die, the others keep their rows, which is not exact (docs/distributed.md says what it costs, and where).
            pls_target: with "partial": the portion of lost samples (PLS) that the run may come to; beyond it: full.
            planned_steps: steps of the whole run: PLS is counted by them, restores to come are expected until then, and
                in their last tenth nothing is stored with chosen bits below 8.
            tracking: how tables are found and tracked.
            on_event: called on the training thread with (name, facts) for snapshot, committed, save_failed, skipped,
                sidecar_lost, attached, restored, fell_back, log_damaged, optimizer_state_reset, nothing_saved,
                snapshot_inconsistent, save_blocked.

        Raises:
            StateError: something in `state=` or an optimizer cannot be saved; found out now, not at the first save.
            UserError, SidecarUnavailable, AnotherTrainer: the run or the sidecar cannot be used; this process is one of
                several ranks, and there is no process group.
        """
        config = CheckpointConfig(
            model=model, optimizer=optimizer, state=state, url=url, run=run, every_s=every_s, every_steps=every_steps,
            goal=goal, encoding=encoding, differential=differential, state_encoding=state_encoding,
            keep_last=keep_last, arena_bytes=arena_bytes, metrics_port=metrics_port, sidecar=sidecar, fresh=fresh,
            validate=validate, bits=bits, tables=tables, content_hash=content_hash, precopy=precopy, grace_s=grace_s,
            recovery=recovery, pls_target=pls_target, planned_steps=planned_steps, tracking=tracking,
            on_event=on_event,
        )  # fmt: skip
        self.stats = Stats()
        """Counts of what happened to saves, for people and tests."""
        self._wiring = wiring = Wiring(config, self.stats)
        self._program, self._loaders, self._clock = wiring.program, wiring.loaders, wiring.clock
        self._attempt, self._listener, self._launcher = wiring.attempt, wiring.listener, wiring.launcher
        self._session, self._attachment = wiring.session, wiring.attachment
        self._outcomes, self._loop = wiring.outcomes, wiring.save_loop
        self._restorer = wiring.restorer
        self.url = self._attachment.url
        """Where the run is stored (without credentials)."""
        self.run = self._attachment.run
        """The run's name."""
        try:
            diagnosis = self.doctor()
            log.info("run %r: %s", self.run, diagnosis.line)
            if diagnosis.kernels:
                log.warning("run %r: %s", self.run, diagnosis.kernels)
        except Exception:
            log.debug("doctor() failed", exc_info=True)

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
        if self._clock.begin_step():
            self._loop.boundary(at_step=True)
        self._clock.end_step()
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
        self._attempt.check_open("save()")
        if self._wiring.forked:
            raise UserError(
                "a forked child trains nothing of this run",
                where="save()",
                remedy="save in the process that built the Checkpointer; step() and close() do nothing here",
            )
        check_pin(pin)
        handle = SaveHandle(
            reason=user_reason(reason), pin=pin, metadata=stored_metadata(metadata), waiter=self._loop.wait
        )
        self._loop.submit(handle)
        return handle

    def restore(  # noqa: PLR0913
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
        self._attempt.check_open("restore()")
        request = RestoreRequest(
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
            return self._restorer.restore(request)
        finally:
            if self._attempt.opened:
                self._outcomes.opened()

    def doctor(self) -> Diagnosis:
        """How each table is tracked and why, what is in the checkpoint, what is not and what that means: print it.

        And how often the sidecar saves, as it last said, and why a save that is due did not happen yet.
        """
        return diagnose(
            self._program,
            self._loaders.loaders,
            self._attachment.policy,
            blocked=self._wiring.records.watchdog.blocked,
        )

    def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Cut at the last step boundary if that step is not saved yet, wait until it is durable, detach.

        Raises:
            SaveFailed: it is not durable after `deadline_s`; everything is released all the same.
            FencedError: a newer attempt runs.
        """
        if self._attempt.closed or self._wiring.forked:
            return
        until_s = time.monotonic() + deadline_s
        try:
            if self._session.fenced is not None:
                raise self._session.fenced
            if self._attempt.opened:
                self._wiring.last_snapshot.finish(until_s)
            self._warn_if_unsaved()
        finally:
            guarded(self._wiring.plan.leave)
            self._wiring.close(until_s)

    def _warn_if_unsaved(self) -> None:
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
        elif not self._attempt.closed and not self._wiring.forked:
            # A step torn by an exception must not become the newest checkpoint: only let what is in flight end. What
            # waits for a dead rank's part will not, and what does not the sidecar ends alone.
            plan = self._wiring.plan
            dead = (error is not None and guarded(plan.handle_error, error)) or plan.dead
            try:
                self._outcomes.drain(time.monotonic() + (0.0 if dead else DRAIN_DEADLINE_S))
            finally:
                self._wiring.close(time.monotonic() + RELEASE_S)
