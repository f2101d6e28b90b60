"""The run as this sidecar sees it: store, log, cache, attempts, and what of them trainers are told.

Nothing here is needed to start: the store is first asked when a trainer opens an attempt (or by the background look at
the log that makes Attach's reply and the prefetch better informed). Decisions at a cut are made from what is known
already; the commit judges again, at its slot.

Every session commits through a handle of its own on the log, so that a commit which waits for a store that is down
never keeps another trainer from opening its attempt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from deltashard_checkpoint import policies
from deltashard_checkpoint.attempts import CLOSING_WAIT_S, mark_closing, open_attempt, select, unmark_closing
from deltashard_checkpoint.caches import PackCache
from deltashard_checkpoint.entries import Checkpoint
from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.fetches import warm_cache
from deltashard_checkpoint.folds import RunState
from deltashard_checkpoint.indexes import table_message
from deltashard_checkpoint.keys import new_token
from deltashard_checkpoint.lineages import chain, in_lineage
from deltashard_checkpoint.logs import RunLog, stopped
from deltashard_checkpoint.snapshots import load_indexes
from deltashard_checkpoint.stores.abc import Store, StoreUnavailable
from deltashard_checkpoint.stores.deadlines import deadline
from deltashard_checkpoint.stores.urls import open_store
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.logs import Logger, explain
from deltashard_sidecar.metrics import Metrics
from deltashard_sidecar.searches import Searches
from deltashard_sidecar.sessions import Session
from deltashard_sidecar.settings import Settings

REATTACH_DEADLINE_S = 5.0
"""A trainer that re-attaches in the middle of its run waits no longer for news of its last commit."""
CLOSING_DEADLINE_S = 3.0


class _Retries:
    """Counts attempts on the store that failed in a way a retry may mend."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def attempted(self, operation: str, seconds: float, error: Exception | None) -> None:  # noqa: ARG002 - protocol
        if isinstance(error, StoreUnavailable):  # every other error is an answer
            self._metrics.retries.inc()

    def finished(self, operation: str, seconds: float, size_bytes: int, error: Exception | None) -> None:
        pass


def commit_message(entry: Checkpoint, *, durable_s: float = 0.0) -> pb.Commit:
    """What trainers are told of a checkpoint."""
    return pb.Commit(
        seq=entry.seq,
        attempt=entry.attempt,
        cut=entry.cut,
        step=entry.step,
        baseline=entry.baseline,
        durable_s=durable_s,
        stored_bytes=entry.stored_bytes,
        raw_bytes=entry.raw_bytes,
        rows=entry.rows,
    )


class Run:
    """The run of this sidecar. Thread-safe."""

    def __init__(self, settings: Settings, *, metrics: Metrics, log: Logger) -> None:
        self.settings = settings
        self.store: Store = open_store(settings.url, observer=_Retries(metrics))
        self.cache = PackCache(Path(settings.cache_dir), budget_bytes=settings.cache_bytes)
        self.log = RunLog(self.store, settings.run)
        self.token = new_token()
        self.metrics = metrics
        self.searches = Searches(settings.search)
        self._logger = log
        self._lock = threading.Lock()
        self._logs: dict[str, RunLog] = {}

    def close(self) -> None:
        """Release the cache directory and the store's connections."""
        self.cache.close()
        self.store.close()

    # What is known.

    def learn(self, *, deadline_s: float) -> RunState:
        """The log at its tip, or as last seen when the store does not answer in time."""
        try:
            return self.log.refresh(deadline_s=deadline_s)
        except DeltashardError as error:
            self._logger.warning("log.unseen", **explain(error))
            return self.log.state

    def has_checkpoint(self) -> bool:
        """Whether any is known; False also while the store has not answered yet."""
        return bool(self.log.state.checkpoints)

    def log_of(self, session: Session) -> RunLog:
        """The session's own handle on the log."""
        with self._lock:
            return self._logs.get(session.id, self.log)

    def forget_others(self, used: Callable[[], set[str]]) -> None:
        """Let the handles of sessions go that nobody uses any more; `used` gives the ids of those in use.

        What is held is looked at first: a session is attached before it gets a handle, so one that is held already and
        yet not in use is over.
        """
        with self._lock:
            held = set(self._logs)
        over = held - used() if held else held
        with self._lock:
            for session_id in over:
                self._logs.pop(session_id, None)

    def newest_attempt(self, session: Session) -> int:
        """The attempt that fences all others, as last seen."""
        return self.log_of(session).state.attempt or 0

    def last_commit(self, state: RunState, attempt: int) -> pb.Commit | None:
        """The newest commit of an attempt."""
        opened = state.attempts.get(attempt)
        seq = None if opened is None else opened.last_seq
        entry = None if seq is None else state.checkpoints.get(seq)
        return None if entry is None else commit_message(entry)

    # Attempts.

    def resume(self, session: Session) -> pb.Commit | None:
        """A trainer attached that trains under an attempt already: its last commit, as far as the store answers."""
        assert session.attempt is not None
        log = self.log.fork()
        try:
            log.refresh(deadline_s=REATTACH_DEADLINE_S)
        except DeltashardError as error:
            self._logger.warning("log.unseen", **explain(error))
        with self._lock:
            self._logs[session.id] = log
        return self.last_commit(log.state, session.attempt)

    def open(self, request: pb.OpenRequest, session: Session, *, step_seen: int) -> pb.OpenReply:
        """Open an attempt for `session`; raises what `open_attempt` raises, and what reading `from_run` does."""
        which = request.which or "latest"
        source: Checkpoint | None = None
        damage, lost = "", False
        log = self.log.fork()
        if request.from_run:
            other = RunLog(self.store, request.from_run)
            read = other.refresh(deadline_s=self.settings.open_deadline_s)
            if read.damage() is not None and not read.checkpoints:
                raise stopped(read)
            source = select(read, which, request.exclude_seqs)
            damage = read.damage() or ""
            lost = damage != "" and which == "latest"
            which = "none"
        opened = open_attempt(
            log,
            owner=self.settings.owner,
            world_size=session.world_size,
            which=which,
            exclude=() if request.from_run else request.exclude_seqs,
            takeover=request.takeover,
            closing_wait_s=min(CLOSING_WAIT_S, self.settings.open_deadline_s),
            deadline_s=self.settings.open_deadline_s,
        )
        with self._lock:
            self._logs[session.id] = log
        damage = "; ".join(filter(None, (damage, opened.damage)))
        if damage:
            self.metrics.log_damaged.inc()
            self._logger.error("log.damaged", what=damage, voided=opened.voided)
        resume = source if source is not None else opened.resume
        reply = pb.OpenReply(
            attempt=opened.attempt,
            waited_s=opened.waited_s,
            fell_back=opened.fell_back or lost,
            log_damage=damage,
        )
        if opened.voided is not None:
            reply.voided_first, reply.voided_stop = opened.voided
        if resume is not None:
            self.metrics.resumed(step=resume.step, at_s=resume.at_s)
            reply.resume_seq = resume.seq
            reply.step = resume.step
            reply.cut = resume.cut
            reply.resume_attempt = resume.attempt
            reply.fingerprint.update(resume.fingerprint)
            reply.tables.extend(table_message(table) for table in resume.tables)
            if step_seen > 0:
                reply.last_step_seen = step_seen
        return reply

    def closing(self, attempt: int, *, begun: bool) -> None:
        """Best effort: tell openers elsewhere that a save of this attempt still uploads, or that it ended."""
        try:
            with deadline(CLOSING_DEADLINE_S):
                (mark_closing if begun else unmark_closing)(self.log, attempt, self.token)
        except DeltashardError as error:
            self._logger.warning("closing.unmarked", **explain(error))

    # Cuts.

    def decide(self, session: Session, begin: pb.SaveRequest.Begin) -> tuple[int | None, str]:
        """(seq the cut must cover since, None for all rows; what to write of it into the log). No store is asked."""
        assert session.attempt is not None
        state = self.log_of(session).state
        history = policies.history(state, session.attempt)
        decision = policies.decide(self.settings.differential, history, force_full=begin.full)
        commit = begin.since_commit_seq if begin.HasField("since_commit_seq") else None
        base = begin.since_baseline_seq if begin.HasField("since_baseline_seq") else None
        covers: int | None = None
        # IMPORTANT: a cut may only lean on what the trainer vouches for *and* the log shows as live in this attempt's
        # lineage. Anything else is a whole baseline: more bytes, never a lost row.
        if decision != "full" and base is not None and in_lineage(state, session.attempt, base):
            covers = base
        if decision == "since_commit" and commit is not None and in_lineage(state, session.attempt, commit):
            covers = commit
        held = "baseline" if covers is None else f"since {covers}"
        return covers, (
            f"{begin.reason or 'user'}; {self.settings.differential}: {held}; {self.settings.encoding}, "
            f"state {self.settings.state_encoding}"
        )

    def cache_bytes(self) -> int:
        """Bytes in the cache directory."""
        return self.cache.used_bytes

    # Prefetch.

    def prefetch(self, seq: int, wanted: Callable[[], bool]) -> int:
        """Bring the packs of a checkpoint's chain into the local cache, newest first; returns the bytes fetched.

        Whole packs, as they were written: a later read checks every frame's hash. Stops when `wanted()` is false, or
        when the cache has no room that costs nothing.
        """
        state = self.log.state
        parts = [link.part for link in chain(state, seq)]
        indexes = load_indexes(self.store, state.run, parts, deadline_s=self.settings.restore_deadline_s)
        packs = [pack for index in indexes.values() for pack in index.packs]
        return warm_cache(
            self.store,
            state.run,
            packs,
            self.cache,
            deadline_s=self.settings.restore_deadline_s,
            stopped=lambda: not wanted(),
        )
