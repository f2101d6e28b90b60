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
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_proto.arena_layout import SAVE_AT_STEP

from deltashard import arguments
from deltashard.attach import exit_code
from deltashard.attach.launcher import ChildLauncher, Launcher, PodLauncher, SidecarOptions, normal_url
from deltashard.attach.rank import refuse_several
from deltashard.attach.session import Session
from deltashard.attach.term_signal import TermHandler
from deltashard.doctor import Diagnosis, diagnose
from deltashard.errors import (
    AnotherTrainer,
    RestoreFailed,
    RunWentOn,
    SaveFailed,
    UserError,
)
from deltashard.loader.wrapped_loader import WrappedLoader
from deltashard.restore import restore as restores
from deltashard.restore.restore import ModelTargets, Restored
from deltashard.save.ask import Asking
from deltashard.save.handle import SaveHandle
from deltashard.state.position import Skip
from deltashard.tracking.tracking import Tracking, TrackingSettings

log = logging.getLogger("deltashard")

CLOSE_DEADLINE_S = 300.0
READ_TURNS = 3
"""How often another run is read anew when it retired what was being read."""
DRAIN_DEADLINE_S = 30.0
LEAVE_S = 10.0
"""Detaching from the sidecar may take so long, within the deadline of `close()`."""

_time_ns = time.time_ns


class Checkpointer(Asking):
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
        encoding: str | None = None,
        differential: str | None = None,
        state_encoding: str | None = None,
        keep_last: int | None = None,
        arena_bytes: int | None = None,
        metrics_port: int | None = None,
        sidecar: Mapping[str, object] | None = None,
        fresh: bool = False,
        validate: Callable[[], bool] | None = None,
        content_hash: bool | None = None,
        grace_s: float | None = 20.0,
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
            url: store of the run, `s3://bucket/prefix` or `file:///dir` or a path. In a pod it comes from the sidecar.
            run: name of the logical training job.
            every_s: save every so many seconds.
            every_steps: save every so many steps.
            encoding: of embedding weights: fp32 fp16 bf16 q8 q4 q3 q2 (the sidecar's default is q8).
            differential: full, one-shot, consecutive or intermittent (default).
            state_encoding: of point-wise optimizer state: fp32 (default) or bf16.
            keep_last: how many checkpoints are retained.
            arena_bytes: shared memory between trainer and sidecar.
            metrics_port: Prometheus endpoint of a sidecar started here; 0 picks a free port.
            sidecar: further settings of a sidecar started here, by name.
            fresh: begin anew although the run has checkpoints; without it that is refused at the first step.
            validate: called before every cut; False vetoes it (a NaN guard).
            content_hash: record what a restore must bring back, see `content_hash`; default: the variable
                DELTASHARD_CONTENT_HASH.
            grace_s: after SIGTERM: an urgent save may take so long; None leaves SIGTERM alone.
            tracking: how tables are found and tracked.
            on_event: called on the training thread with (name, facts) for cut, committed, save_failed, skipped,
                sidecar_lost, attached, restored, fell_back, log_damaged, state_thrown_away, nothing_saved.

        Raises:
            StateError: something in `state=` or an optimizer cannot be saved; found out now, not at the first save.
            UserError, SidecarUnavailable, AnotherTrainer: the run or the sidecar cannot be used; this process is one of
                several ranks.
        """
        refuse_several("Checkpointer()")
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
        arguments.check_count("keep_last", keep_last, least=1, remedy="keep at least one checkpoint")
        arguments.check_callable("validate", validate, takes="a function that returns a bool")
        arguments.check_callable("on_event", on_event, takes="a function of (name, facts)")
        super().__init__(
            Tracking(model, arguments.optimizers_of(optimizer, model), settings=tracking),
            dict(state or {}),
            fresh=fresh,
            validate=validate,
            content_hash=content_hash,
            on_event=on_event,
        )
        flags: dict[str, object] = {
            "every_s": every_s,
            "every_steps": every_steps,
            "encoding": encoding,
            "differential": differential,
            "state_encoding": state_encoding,
            "keep_last": keep_last,
            "arena_bytes": arena_bytes,
            "metrics_port": metrics_port,
            "linger_s": 30.0,
            **(sidecar or {}),
        }
        exit_code.install()
        self._launcher = _launcher(url, run, flags)
        try:
            self._refuse_rival()
            self._session = Session(
                self._launcher,
                request=self._attach_request,
                schemas=lambda: tuple(table.schema for table in self._tracking.tables),
                alert=self._alert,
            )
            link = self._session.connect()
        except BaseException:
            self._launcher.close()
            self._stance.close()
            self._tracking.close()
            raise
        self._line: Any = link.line
        self._epoch = link.reply.epoch
        self._policy = link.reply.policy
        self.url = link.reply.url
        """Where the run is stored (without credentials)."""
        self.run = link.reply.run
        """The run's name."""
        self._term = TermHandler(grace_s=grace_s, notice=self._on_sigterm) if grace_s is not None else None
        if self._term is not None and not self._term.install():
            self._term = None
        _live.add(self)
        try:
            log.info("run %r: %s", self.run, self.doctor().line)
        except Exception:
            log.debug("doctor() failed", exc_info=True)

    # The loop's side

    @property
    def steps(self) -> int:
        """How many `step()` calls this run has seen, those before the restore included."""
        return self._step

    @property
    def attempt(self) -> int | None:
        """The attempt this process trains under; None before `restore()` or the first `step()`."""
        return self._attempt

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
            UserError: this Checkpointer is closed.
        """
        step = self._step = self._step + 1
        line = self._line
        line[0] = step
        line[1] = _time_ns()
        tracking = self._tracking
        self._step_is_boundary = tracking.stepped
        self._stance.moved = False
        if step >= line[3] or self._attention:
            self._boundary(at_step=True)
        tracking.step_done()

    def wrap(
        self, loader: Any, *, name: str = "loader", skip: Skip = "sampler", pipelined: bool = False
    ) -> Any:
        """`loader` with its position and randomness saved and resumed; see `wrapped_loader`.

        A loader that is made anew for each epoch is wrapped anew, under the same name, when the last one was iterated.

        Args:
            loader: a DataLoader, any re-iterable, a stateful loader, or a callable factory(epoch, start).
            name: tells several wrapped loaders apart.
            skip: how a resumed DataLoader passes over what was delivered: "sampler" (nothing is fetched) or "replay"
                (fetched and dropped: exact even if the dataset draws random numbers in workers).
            pipelined: the loop's batches come from a pipeline that fetches ahead; every `step()` consumes one.
        """
        old = self._loaders.get(name)
        if old is not None and not old.iterated:
            raise UserError(
                f"a loader {name!r} is wrapped already", where="wrap()", remedy="give it another name="
            )
        if isinstance(loader, WrappedLoader):
            raise UserError(
                "this loader is wrapped already: its position would be resumed twice",
                where="wrap()",
                remedy="wrap the loader itself, once",
            )
        wrapped = WrappedLoader(
            loader,
            clock=self._company.clock,
            skip=skip,
            pipelined=pipelined,
            name=name,
            company=self._company,
        )
        if old is not None:
            wrapped.take_over(old)
        self._loaders[name] = wrapped
        if name in self._pending_loaders:
            wrapped.resume(self._pending_loaders.pop(name), self._pending_rng)
        return wrapped

    def save(
        self, reason: str = "user", *, pin: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> SaveHandle:
        """Ask for a save. Right after `step()` it is cut at once, anywhere else by the next `step()`.

        A pin and metadata belong to that very step: where it cannot be cut (the save before is not durable yet, the
        sidecar is away) and training goes on, the handle fails and says so, and no other step gets them. Without them
        the save stays asked for, until a cut is possible.

        Args:
            reason: a word for logs and the log entry.
            pin: keep this checkpoint under this name whatever retention says, `restore(which="pin:NAME")`.
            metadata: metrics and the like, stored with it as text; names beginning with "deltashard/" are ours.

        Raises:
            UserError: a pin or metadata that cannot be stored (length, characters).
        """
        self._refuse_closed("save()")
        arguments.check_pin(pin)
        texts = arguments.texts_of(metadata)
        handle = SaveHandle(
            reason=reason,
            pin=pin,
            metadata=texts,
            waiter=self._wait,
        )
        self._ask(handle)
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
    ) -> Restored | None:
        """Open the attempt and bring the newest whole checkpoint back, in place. Call it before the first `step()`.

        Args:
            which: "latest", "none", a seq number, "seq:N", "step:N" or "pin:NAME".
            from_run: read another run of the same store (warm start, evaluation); commits still go to ours.
            strict: refuse any difference between checkpoint and program; False takes what fits and says the rest.
            weights_only: tables, parameters and buffers only: no optimizer, loader, generators or state.
            renames: stored table name by the model's name for it.
            takeover: go on although the run belongs to another owner.

        Returns:
            None only if nothing was ever committed.

        Raises:
            CheckpointMismatch, RestoreFailed, FencedError, UserError: see `errors`; after RestoreFailed it may be
                called again.
        """
        self._refuse_closed("restore()")
        if self._opened and self._step != 0:
            raise UserError(
                f"the model is restored already, to step {self._step}"
                if self._step == self._resumed_step
                else "restore() after training began",
                where="restore()",
                remedy="call it once, before the loop; for another checkpoint close() and make a new Checkpointer",
            )
        clock = restores.Clock()
        text = f"seq:{which}" if isinstance(which, int) else which
        excluded: list[int] = []
        earlier: list[ModelTargets] = []
        damage, turn = "", 1
        while True:
            link = self._link_or_raise()
            reply = self._open(link, which=text, from_run=from_run, exclude=excluded, takeover=takeover)
            # Only the first attempt meets what cannot be read in the log: the ones after it find it left behind.
            damage = damage or reply.log_damage
            if not reply.HasField("resume_seq"):
                self._begin_attempt(reply, step=0)
                if excluded:
                    raise RestoreFailed(
                        f"checkpoints {excluded} are not whole and there is no older one",
                        where=self.run,
                        remedy="`deltashard verify` tells what is wrong with them; fresh=True begins anew",
                    )
                return None
            try:
                with self._session.busy:
                    restored = self._read(
                        link,
                        reply,
                        clock,
                        from_run=from_run or "",
                        strict=strict,
                        weights_only=weights_only,
                        renames=renames or {},
                        earlier=earlier,
                        fell_back=bool(excluded) or reply.fell_back or (bool(damage) and text == "latest"),
                        damage=damage,
                    )
            except RunWentOn as error:
                if turn == READ_TURNS:
                    raise
                turn += 1
                log.info("checkpoint %d of %s went while it was read: %s", reply.resume_seq, from_run, error)
                continue
            except InvalidCheckpoint as error:
                excluded.append(reply.resume_seq)
                log.error(  # noqa: TRY400 - a traceback would say nothing more
                    "checkpoint %d is not whole (%s): falling back to an older one", reply.resume_seq, error
                )
                self._emit("fell_back", seq=reply.resume_seq, step=reply.step, why=str(error))
                continue
            self._emit("restored", restored=restored)
            return restored

    def doctor(self) -> Diagnosis:
        """How each table is tracked and why, what is in the checkpoint, what is not and what that means: print it."""
        return diagnose(self._tracking, self._state, self._sources, self._contracts, self._loaders)

    def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Cut at the last step boundary if that step is not saved yet, wait until it is durable, detach.

        Raises:
            SaveFailed: it is not durable after `deadline_s`; everything is released all the same.
            FencedError: a newer attempt runs.
        """
        if self._closed:
            return
        until_s = time.monotonic() + deadline_s
        try:
            if self._session.fenced is not None:
                raise self._session.fenced
            if self._opened:
                self._finish(until_s)
            self._say_if_unsaved()
        finally:
            self._release(until_s)

    def _say_if_unsaved(self) -> None:
        """A program that trained and never called `step()` has no checkpoint, and would not know."""
        if self._step != (self._resumed_step or 0) or not self._tracking.steps.stepped:
            return
        log.warning(
            "run %r: the optimizer stepped, and step() was never called: nothing of it is saved. "
            "ckpt.step() must be the last statement of the loop body",
            self.run,
        )
        self._emit("nothing_saved", step=self._step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            # A step torn by an exception must not become the newest checkpoint: only let what is in flight end.
            try:
                self._drain(time.monotonic() + DRAIN_DEADLINE_S)
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
        self._closed = True
        # The line of the arena is given back; on this one every step is due, so that `_boundary` refuses it.
        self._line = [0] * 8
        if self._term is not None:
            self._term.remove()
        self._fail_requests(SaveFailed("the checkpointer was closed", where="save"))
        if self._flight is not None:
            self._flight.failed(SaveFailed("not durable when the checkpointer was closed", where="save"))
        self._session.close(until_s=min(until_s, time.monotonic() + LEAVE_S))
        self._launcher.close()
        self._order.close()
        self._stance.close()
        self._tracking.close()
        _live.discard(self)


def _launcher(url: str | os.PathLike[str] | None, run: str | None, flags: Mapping[str, object]) -> Launcher:
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
    return ChildLauncher(SidecarOptions(url=normal_url(url), run=run, flags=flags))


_live: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _in_child() -> None:
    # The arena is not mapped in a forked worker: a stray step() there must not touch it.
    for checkpointer in list(_live):
        checkpointer._line = [0] * 8  # noqa: SLF001 - same module
        checkpointer._line[SAVE_AT_STEP] = 1 << 64  # noqa: SLF001
        checkpointer._stance.close()  # noqa: SLF001


os.register_at_fork(after_in_child=_in_child)
