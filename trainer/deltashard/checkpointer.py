"""`Checkpointer`: the API of a training script.

All calls run on the training thread:

    step()      advances the step clock and checks two words of shared memory; returns if no boundary is requested
    boundary    applies the events of the session thread (commits, failures, sidecar lost or attached), then takes,
                defers or skips a due snapshot. A failed save is counted and logged once per cause. Its marks stay set
                and training continues.
    snapshot    audits -> Begin -> select rows -> copy -> finish -> marks become pending

Only three kinds of errors reach the training loop: `FencedError` (another process trains this run), `NotRestored`
(training would start from initial values although the run has checkpoints), and errors of the user's signal handlers.
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
    """Saves and restores crash-consistent checkpoints of a training loop.

    Attributes:
        url: Store of the run, without credentials.
        run: Name of the run.
        stats: Counters of snapshots, commits, skips and failures of this process.

    Example:
        ```python
        ckpt = deltashard.Checkpointer(model, optimizer, url="file:///data/ckpt", run="dlrm", every_s=30)
        ckpt.restore()
        for batch in ckpt.wrap(loader):
            train(batch)
            ckpt.step()
        ckpt.close()
        ```
    """

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
        """Attach to the pod's sidecar, or start a sidecar for this run on this machine.

        Settings left at None keep the sidecar's default (or, in a pod, the value of its policy).

        Args:
            model: Module to train. Wrappers (`torch.compile`, `DataParallel`, `AveragedModel`) are unwrapped.
            optimizer: One optimizer or a list of them. Default: none.
            state: Further state to save, by name. Takes objects with `state_dict`/`load_state_dict` (schedulers,
                GradScaler, EMA, stateful loaders), generators, `(get, set)` pairs, tensors, arrays, and dicts and lists
                that the script changes in place.
            url: Store of the run: `s3://bucket/prefix`, `gs://...`, `az://...`, `file:///dir` or a path. Default: the
                variable DELTASHARD_URL. Unused in a pod, where the sidecar knows the store.
            run: Name of the logical training job. Default: the variable DELTASHARD_RUN.
            every_s: Save interval in seconds. Sidecar default: off.
            every_steps: Save interval in steps. Sidecar default: off.
            goal: Objective from which the interval is chosen, given the measured cost of saves and the failure rate of
                the run: "auto", "overhead=1%", "lost-work=5m" or "pls=0.02"; "fixed" or None use `every_s` and
                `every_steps`. See docs/deciding.md. `doctor()` reports the interval in force.
            encoding: Encoding of embedding weights: fp32, fp16, bf16, q8, q4, q3 or q2. The sidecar's default is q8.
            differential: Rows of a save: full, one-shot, consecutive or intermittent (sidecar default).
            state_encoding: Encoding of point-wise optimizer state: fp32 or bf16. Sidecar default: fp32.
            keep_last: Number of retained checkpoints. Sidecar default: 3.
            arena_bytes: Size in bytes of the memory shared by trainer and sidecar. Sidecar default: 256 MiB.
            metrics_port: Prometheus port of a sidecar started here; 0 picks a free port. Sidecar default: off.
            sidecar: Further settings of a sidecar started here, by name. Settings that are arguments here are rejected.
            fresh: Start from initial values although the run has checkpoints. With False (default) the first `step()`
                raises `NotRestored` in that case.
            validate: Called before every snapshot; False vetoes the snapshot, for example on NaN weights.
            bits: Choose the encoding per table from the number of expected restores: "budget" (bounds the error that
                restores add to the rows; small tables keep 8 bits) or "check-n-run" (the rule of the Check-N-Run
                paper). Default: `encoding` for all tables.
            tables: Encodings of single tables, for example `{"emb.user": "q8"}`. Takes precedence over `encoding` and
                `bits`.
            content_hash: Record content hashes that a restore verifies. Default: True if the variable
                DELTASHARD_CONTENT_HASH is 1.
            precopy: Copy rows ahead of a snapshot on a background thread, where that is exact and saves time. Default:
                True unless the variable DELTASHARD_PRECOPY is 0. `stats.precopy` reports the effect.
            grace_s: Seconds that an urgent save may take after SIGTERM. "auto" (default) is the pod's grace period
                minus 5 s, or 20 s outside of a pod. None installs no SIGTERM handler.
            recovery: "full" (default): all ranks restore the newest checkpoint, bit for bit. "partial": surviving ranks
                keep their rows, which is not exact; see docs/distributed.md.
            pls_target: Upper bound of the portion of lost samples (PLS) in (0, 1]. Required with `recovery="partial"`;
                a recovery that would exceed it is full.
            planned_steps: Number of steps of the whole run. Required with `recovery="partial"`, where it is the
                denominator of PLS. With `bits`, restores are expected until then, and the last tenth is stored with at
                least 8 bits.
            tracking: Settings that select the tables and their trackers.
            on_event: Called as `on_event(name, facts)` on the training thread for each event of
                docs/reference/events.md, for example `snapshot`, `committed` and `save_failed`.

        Raises:
            StateError: An entry of `state` or an optimizer cannot be saved.
            UserError: An argument is invalid, or this process is one of several ranks without a process group.
            SidecarUnavailable: The sidecar cannot be started or reached.
            AnotherTrainer: A live process or another Checkpointer already trains this run on this machine.
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
        self._wiring = wiring = Wiring(config, self.stats)
        self._program, self._loaders, self._clock = wiring.program, wiring.loaders, wiring.clock
        self._attempt, self._listener, self._launcher = wiring.attempt, wiring.listener, wiring.launcher
        self._session, self._attachment = wiring.session, wiring.attachment
        self._outcomes, self._loop = wiring.outcomes, wiring.save_loop
        self._restorer = wiring.restorer
        self.url = self._attachment.url
        self.run = self._attachment.run
        try:
            diagnosis = self.doctor()
            log.info("run %r: %s", self.run, diagnosis.line)
            if diagnosis.kernels:
                log.warning("run %r: %s", self.run, diagnosis.kernels)
        except Exception:
            log.debug("doctor() failed", exc_info=True)

    @property
    def steps(self) -> int:
        """Number of `step()` calls of this run, including those before the restore."""
        return self._clock.step

    @property
    def attempt(self) -> int | None:
        """Number of the attempt that this process trains under; None before `restore()` or the first `step()`."""
        return self._attempt.number

    @property
    def sidecar_pid(self) -> int | None:
        """Process id of the sidecar started by this machine for the run; None in a pod."""
        return self._launcher.pid if isinstance(self._launcher, ChildLauncher) else None

    @property
    def arena_path(self) -> str | None:
        """Path of the shared-memory file; None while the sidecar is disconnected."""
        link = self._session.link
        return None if link is None else str(link.reply.arena_path)

    def step(self) -> None:
        """Mark the end of a training step; the last statement of the loop body, after optimizer and scheduler.

        Takes a snapshot if one is due and possible.

        Raises:
            FencedError: A newer attempt trains this run; end this process. `TakenOver` if it belongs to another
                workload.
            NotRestored: The run has checkpoints, and neither `restore()` was called nor `fresh=True` given.
            SidecarUnavailable: No sidecar is available at the first step without `restore()`.
            RanksDiffer: At that step, the ranks differ, or a rank is missing.
            GroupLost: At that step, the process group does not answer.
            UserError: This Checkpointer is closed, or a CUDA graph is being captured.
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
        """Return `loader` wrapped so that its position and randomness are saved and resumed.

        After a restart the wrapper draws the last trained batch again, compares it with the recorded one and drops it.
        A difference causes a warning, and training continues. A script that builds a new loader per epoch wraps each
        one under the same name, after the previous loader was exhausted.

        Args:
            loader: A DataLoader, a re-iterable, a stateful loader, or a factory `f(epoch, start)`.
            name: Key of the loader in the checkpoint; must be unique if a script wraps several.
            skip: How a resumed map-style DataLoader skips delivered batches. "auto" (default) skips in the index
                sampler, and reads the epoch's batches again if the last batch differs or if workers draw random
                numbers. "sampler" never reads again: right for datasets whose randomness depends on the sample index
                only. "replay" always reads again.
            pipelined: Whether the batches pass through a pipeline that fetches ahead. Every `step()` then consumes one
                batch. Default: False.
            shared: Whether all ranks iterate the same batches and each takes its share of every batch. The run can then
                resume in the middle of an epoch with a different number of ranks, as with torch's DistributedSampler.
                Default: False.
            strict: Raise instead of warning if the resumed loader or its batches differ. Default: False.

        Raises:
            StateError: The loader cannot be iterated, or only once.
            UserError: The loader is already wrapped, or an option does not apply to it.
            CheckpointMismatch: The loader differs from the saved one, with `strict` or after
                `restore(loaders="refuse")`.
        """
        return self._loaders.wrap(
            loader, name=name, skip=skip, pipelined=pipelined, shared=shared, strict=strict
        )

    def save(
        self, reason: str = "user", *, pin: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> SaveHandle:
        """Request a save. Directly after `step()` the snapshot is taken at once, otherwise by the next `step()`.

        A save with a pin or metadata is bound to its step. If that step cannot be captured (the previous save is not
        durable yet, or the sidecar is disconnected) and training continues, the handle fails. Other requests stay
        pending until a snapshot is possible.

        Args:
            reason: Reason shown in logs and in the log entry. The reserved reasons "close" and "sigterm" are recorded
                as "user".
            pin: Retain this checkpoint under this name; restore it with `restore(which="pin:NAME")`. 1 to 200 printable
                characters.
            metadata: Values stored with the checkpoint as text, such as metrics; at most 60,000 characters in total.
                Names must not begin with "deltashard/".

        Returns:
            A handle to wait for the commit.

        Raises:
            UserError: The pin or metadata cannot be stored, or this Checkpointer is closed.
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
        """Open the attempt and restore the newest complete checkpoint in place. Call it before the first `step()`.

        If the sidecar dies meanwhile, it is started again (in a pod: waited for) and the restore begins again.

        Args:
            which: Checkpoint to restore: "latest" (default), "none", a sequence number, "seq:N", "step:N" or
                "pin:NAME".
            from_run: Read another run of the same store, for a warm start or evaluation. Commits still go to this run.
            strict: Reject every difference between checkpoint and program. False restores what matches and reports the
                rest.
            weights_only: Restore tables, parameters and buffers only; skip optimizers, loaders, generators and `state`.
            renames: Stored table names by the model's table names.
            takeover: Take over a run that belongs to another owner.
            deadline_s: Seconds, from the first loss of the sidecar, after which another loss raises `RestoreFailed`.
                Default: 300.
            hyperparameters: Which values to use where the script and the checkpoint differ in learning rates, weight
                decay, schedule lengths, `requires_grad` and similar: "checkpoint" (default) or "script".
                `Restored.notes` and the log list both values. Values that training changed always come from the
                checkpoint.
            loaders: Policy for an unfinished epoch whose loader has changed (batch size, length, order, number of
                ranks): "restart" (default) begins the epoch again, so that some samples repeat; "continue" skips the
                same number of batches; "refuse" raises.

        Returns:
            A summary of the restore, or None if the run has no commit.

        Raises:
            CheckpointMismatch: The checkpoint and the program differ.
            RestoreFailed: The checkpoint could not be read. `restore()` may be called again.
            RanksDiffer: The ranks differ in the run, the model or this call, or a rank is missing.
            GroupLost: The process group does not answer.
            FencedError: A newer attempt trains this run.
            UserError: An argument is invalid, or this Checkpointer is closed.
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
        """Return a printable report: how each table is tracked and why, and what is and is not in the checkpoint.

        The report includes the sidecar's current save interval and the reason why a due save is blocked.
        """
        return diagnose(
            self._program,
            self._loaders.loaders,
            self._attachment.policy,
            blocked=self._wiring.records.watchdog.blocked,
        )

    def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Save the last step boundary if it is not saved yet, wait until it is durable, and detach from the sidecar.

        Args:
            deadline_s: Seconds to wait for the commit. Default: 300.

        Raises:
            SaveFailed: The last step is not durable after `deadline_s`. All resources are released nevertheless.
            FencedError: A newer attempt trains this run.
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
        """Warn about a program that trained but never called `step()`, and therefore has no checkpoint."""
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
            # The exception may have interrupted a step, which must not become a checkpoint: only the save in flight may
            # finish. A save that needs a dead rank's part cannot finish, and the sidecar completes any other alone.
            plan = self._wiring.plan
            dead = (error is not None and guarded(plan.handle_error, error)) or plan.dead
            try:
                self._outcomes.drain(time.monotonic() + (0.0 if dead else DRAIN_DEADLINE_S))
            finally:
                self._wiring.close(time.monotonic() + RELEASE_S)
