"""What a sidecar does unasked, on one thread of its own: a look at the log at start, then retention, gc and compaction.

A round begins after a commit of rank 0, or a save that found the store full, not more often than `maintenance_interval_s`:
compact a chain that grew too long, or that a cut was made to build on (`run.synthetic_baseline`; not on a full store),
name in one retire entry what may go, delete what was named long enough ago. Every step may be killed at any instant and
run again; one that fails is counted and logged. Nothing waits for a round, and a compaction lets saves and restores go
first. At start and in every round pack caches of other, ended runs make room, where a budget for all of them is set.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deltashard_checkpoint.backoff import Backoff
from deltashard_checkpoint.cache.cache_dir import sweep
from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.maintenance.compaction import compact
from deltashard_checkpoint.maintenance.garbage_collection import collect, orphaned_prefixes
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement
from deltashard_checkpoint.maintenance.row_mover import mover
from deltashard_checkpoint.stores.abc import StoreFull
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.run.run import Run
from deltashard_sidecar.telemetry.structured_logging import explain

ROUND_DEADLINE_S = 300.0
READ_DEADLINE_S = 30.0
BACKOFF = Backoff(first_s=1.0, longest_s=30.0)
"""Between looks for a store that does not answer at start."""
GIVE_WAY_S = 1.0
"""A compaction waits so long, before each frame, for a save or restore to end. Not longer: a save may itself wait for
room in the cache, of which the compaction holds a pack."""
_POLL_S = 0.02


class MaintenanceLoop:
    """The thread and its orders."""

    def __init__(self, run: Run, *, policy: Callable[[], pb.Policy], saving: Callable[[], bool]) -> None:
        """`policy` is the one in force; `saving`: whether a save is in flight."""
        self._run = run
        self._settings = run.settings
        self._log = run.logger
        self._policy = policy
        self._saving = saving
        self._restoring = 0
        self._wake = threading.Condition()
        self._due: tuple[RunLog, int, bool] | None = None
        """A handle on the log, the attempt that saves through it, and whether its store is full."""
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="maintenance", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def due(self, log: RunLog, attempt: int, *, full: bool = False) -> None:
        with self._wake:
            self._due = log, attempt, full
            self._wake.notify_all()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """A restore is served within: the store and the cache are its own."""
        with self._wake:
            self._restoring += 1
        try:
            yield
        finally:
            with self._wake:
                self._restoring -= 1

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify_all()

    def _work(self) -> None:
        self._step("sweep", self._sweep)
        self._read_log()
        last_s = -float("inf")
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._has_work)
                pause_s = last_s + self._settings.maintenance_interval_s - time.monotonic()
                if pause_s > 0 and not self._stopped:
                    self._wake.wait_for(lambda: self._stopped, pause_s)
                if self._stopped:
                    return
                due, self._due = self._due, None
            last_s = time.monotonic()
            if due is not None and self._settings.maintenance_interval_s >= 0:
                self._round(due[0].fork(), due[1], full=due[2])

    def _read_log(self) -> None:
        """Look at the log until the store answers: credentials that are missing are found before anybody needs them."""
        failures = 0
        while not (self._has_work or self._run.read_log(self._run.log, deadline_s=READ_DEADLINE_S)):
            failures += 1
            with self._wake:
                self._wake.wait_for(lambda: self._has_work, BACKOFF.delay_s(failures))

    @property
    def _has_work(self) -> bool:
        return self._stopped or self._due is not None

    def _round(self, log: RunLog, attempt: int, *, full: bool) -> None:
        """One round on its own handle of the log, as long as `attempt` is the newest; on a `full` store it only frees.

        IMPORTANT: who was followed keeps house no more. After a person's rewind that would retire what was set
        aside, and with it the way back.
        """
        if not full:
            self._step("compact", lambda: self._compact(log, attempt))
        self._step("chain_check", lambda: self._check_chain(log, attempt))
        self._step("retire", lambda: self._retire(log, attempt))
        self._step("gc", lambda: self._gc(log, attempt))
        self._step("sweep", self._sweep)

    def _retire(self, log: RunLog, attempt: int) -> str | None:
        state = log.refresh(deadline_s=ROUND_DEADLINE_S)
        if state.attempt != attempt:
            return None
        dead, retention = orphaned_prefixes(log, state), Retention(keep_last=self._settings.keep_last)
        append = functools.partial(
            append_retirement,
            log,
            retention,
            orphaned_prefixes=dead,
            attempt=attempt,
            deadline_s=ROUND_DEADLINE_S,
        )
        try:
            entry = append()
        except StoreFull:
            collect(log, grace_s=self._settings.gc_grace_s, unretired=dead, deadline_s=ROUND_DEADLINE_S)
            entry = append()
        return f"{len(entry.checkpoints)} checkpoints, {len(entry.prefixes)} prefixes" if entry else None

    def _gc(self, log: RunLog, attempt: int) -> str | None:
        if log.state.attempt != attempt:
            return None
        done = collect(log, grace_s=self._settings.gc_grace_s, deadline_s=ROUND_DEADLINE_S)
        return f"{done.objects} objects, {done.bytes} bytes" if done.objects else None

    def _check_chain(self, log: RunLog, attempt: int) -> None:
        """At the newest checkpoint's chain; each rank of many looks at its own before it commits."""
        newest, state = self._newest(log, attempt), log.state
        if newest is not None and newest.listed is None and not self._run.chains.is_broken(state, newest.seq):
            manifests = self._run.manifests_of(log.run)
            self._run.chains.check(state, newest.seq, manifests=manifests, deadline_s=ROUND_DEADLINE_S)

    def _compact(self, log: RunLog, attempt: int) -> str | None:
        newest = self._newest(log, attempt)
        if newest is None:
            return None
        found = self._run.synthetic.between_snapshots(log.state, newest.seq, self._policy())
        if found is None:
            return None
        seq, verdict = found
        move = mover(self._run.cache, throttle=self._give_way)
        entry = compact(log, seq, move, deadline_s=ROUND_DEADLINE_S)
        if entry is None:
            return None
        self._run.metrics.compactions.labels(verdict.why).inc()
        return f"checkpoint {entry.replaces}, {entry.stored_bytes} bytes, {verdict.why}: {verdict.text}"

    @staticmethod
    def _newest(log: RunLog, attempt: int) -> Checkpoint | None:
        """The newest checkpoint; None: there is none, or a newer attempt was opened."""
        state = log.refresh(deadline_s=ROUND_DEADLINE_S)
        return state.newest() if state.attempt == attempt else None

    def _sweep(self) -> str | None:
        if not (budget_bytes := self._settings.cache_total_bytes):
            return None
        swept = sweep(self._run.cache.directory, budget_bytes=budget_bytes)
        return f"caches of {swept.runs} runs, {swept.bytes} bytes" if swept.runs else None

    def _give_way(self) -> None:
        until_s = time.monotonic() + GIVE_WAY_S
        while (self._restoring or self._saving()) and not self._stopped and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def _step(self, task: str, work: Callable[[], str | None]) -> None:
        counter = self._run.metrics.maintenance
        try:
            done = work()
        except DeltashardError as error:
            counter.labels(task, "failed").inc()
            self._log.warning(f"{task}.failed", **explain(error))
        except Exception as error:  # noqa: BLE001 - housekeeping never harms the sidecar
            counter.labels(task, "failed").inc()
            self._log.error(f"{task}.unexpected", exc_info=error)
        else:
            counter.labels(task, "nothing" if done is None else "done").inc()
            if done is not None:
                self._log.info(f"{task}.done", what=done)
