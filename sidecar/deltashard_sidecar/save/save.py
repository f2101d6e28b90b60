"""One save, from the trainer's `begin` to the log entry or a failure with a cause. Transitions: `save/lifecycle.py`.

    stream thread    reads the trainer's messages: batches for the encode pool, then seal or abort
    reply thread     (gRPC's) sends the messages in `outbox`: begun, blocks, staged or failed
    encode pool      batch -> frame -> spooled pack; an encoded batch may free its block, which is granted again;
                     starts when the trainer has stopped copying, or will soon need blocks
    finisher thread  after the seal: waits for the last batch, uploads, commits, notifies the trainer

A failure affects only this save: its blocks are released and spooled data is dropped. The trainer keeps its marks, so
the next save covers the rows. After a seal or an abort the trainer copies no more. After any other end of the stream
its blocks are quarantined until the rank's writer lock is free, the rank attaches again, or its next save begins.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import DeltashardError, EnvironmentFault
from deltashard_checkpoint.transition import after
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.arena.batch import BadBatch, check_blob, rows_of
from deltashard_sidecar.arena.block import NotGranted, Use
from deltashard_sidecar.save.lifecycle import ENDED, TABLE, SaveEvent, SaveState
from deltashard_sidecar.save.sink import PartSink, SaveDecisions
from deltashard_sidecar.session.session import Session
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger, explain

DEFER_SHARE = 7 / 8
"""Nothing is encoded before the seal while less than this share of the granted blocks is used."""


class Cancelled(EnvironmentFault):
    """The sidecar cancelled a save: its deadline passed, or the sidecar stops."""

    cause = Cause.DEADLINE


_ENDED_BY = (Cause.TAKEN_OVER, Cause.FENCED, Cause.ABANDONED, Cause.LOG_LOST, Cause.REMOVED)
CAUSES = frozenset([*_ENDED_BY, Cause.UNAVAILABLE, Cause.FULL, Cause.DEADLINE, Cause.INVALID])
"""Causes of errors that become the save's cause unchanged."""


def cause_of(error: BaseException) -> Cause:
    """Return the cause of a save that `error` ended: the error's cause if it is in `CAUSES`, else `ERROR`."""
    if isinstance(error, DeltashardError) and error.cause in CAUSES:
        return Cause(error.cause)
    return Cause.ERROR


class Save:
    """One save of one attachment. Public methods may be called from any thread."""

    def __init__(
        self,
        *,
        session: Session,
        decisions: SaveDecisions,
        sink: PartSink,
        keeper: ArenaKeeper,
        submit: Callable[[Callable[[], None]], object],
        metrics: Metrics,
        log: Logger,
        ended: Callable[[Save], None],
    ) -> None:
        self.attachment = session.attachment
        self.decisions = decisions
        self.state = SaveState.STAGING
        self.started_s = time.monotonic()
        self.last_message_s = self.started_s
        self.commit: pb.Commit | None = None
        self.failure: tuple[Cause, str] = (Cause.ERROR, "")
        self.sealed: pb.SaveRequest.Seal | None = None
        self.stream_finished = threading.Event()
        self.finished = threading.Event()
        self._session = session
        self._sink = sink
        self._keeper = keeper
        self._submit = submit
        self._metrics = metrics
        self.log = log.bind(
            attempt=decisions.attempt,
            snapshot_id=decisions.snapshot_id,
            step=decisions.step,
            rank=self.attachment.rank,
        )
        self._ended = ended
        self._outbox: queue.SimpleQueue[pb.SaveReply | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._drained = threading.Condition(self._lock)
        self._pending = 0
        self._stopped_copying = False
        self._open_block: int | None = None
        self._deferred: list[Callable[[], None]] | None = []
        """Batches not yet submitted to the pool; None: batches are submitted as they arrive."""
        self._blocks_granted = 0
        self._blocks_used = 0

    def start(self, *, prepared: int = 0) -> None:
        """Grant the first blocks, in addition to `prepared` ones. Call it before `read` and `replies`."""
        self._blocks_granted += prepared
        self._keeper.on_free(self.attachment.local_rank, self._grant)
        self._grant()

    def replies(self) -> Iterator[pb.SaveReply]:
        content = self.decisions.content
        begun = pb.SaveReply.Begun(
            covers=content.covers,
            encoding=content.precision.others,
            stall_budget_s=self.decisions.stall_budget_s,
            state_encoding=content.precision.state,
            encodings=content.precision.named,
            rebased=content.rebased,
            fresh_first=self.decisions.since is not None,
        )
        yield pb.SaveReply(begun=begun)
        while (reply := self._outbox.get()) is not None:
            yield reply

    def read(self, requests: Iterator[pb.SaveRequest]) -> None:
        """Process the trainer's messages until the stream ends or breaks; never raises."""
        try:
            for request in requests:
                self.last_message_s = time.monotonic()
                self._take(request)
        except Exception as error:  # noqa: BLE001 - gRPC raises its own bare kinds for a stream that broke
            self.log.debug("save.stream_broke", **explain(error))
        finally:
            self._stream_ended()

    def _take(self, request: pb.SaveRequest) -> None:
        kind = request.WhichOneof("kind")
        with self._lock:
            if self.state is not SaveState.STAGING:
                # Failed already: only whether the trainer stopped copying still matters.
                self._stopped_copying |= kind == "abort"
                return
        try:
            if kind == "rows":
                d = request.rows
                batch = rows_of(d, self.attachment.tables, self.attachment.boxes, self._keeper.block_bytes)
                data = self._received(d.block, d.offset, batch.length)
                self._encode(d.block, lambda: self._sink.rows(batch, data))
            elif kind == "blob":
                chunk = request.blob
                check_blob(chunk, self._keeper.block_bytes)
                data = self._received(chunk.block, chunk.offset, chunk.length)
                self._encode(chunk.block, lambda: self._sink.blob(chunk, data))
            elif kind == "seal":
                self._seal(request.seal)
            elif kind == "abort":
                self._abort(request.abort.cause)
            elif kind == "batch":
                for each in request.batch.requests:
                    if (inner := each.WhichOneof("kind")) not in ("rows", "blob", "seal"):
                        self.fail(BadBatch(f"{inner!r} among several descriptors", where="save stream"))
                    self._take(each)
            else:
                self.fail(BadBatch(f"unexpected message {kind!r} in a save", where="save stream"))
        except (BadBatch, NotGranted) as error:
            self.fail(error)

    def _received(self, block: int, offset: int, length: int) -> memoryview:
        # Only the stream thread calls this. No lock is held: freeing a block grants it to other saves.
        closes = self._open_block if self._open_block != block else None
        data = self._keeper.received(self.attachment.local_rank, block, offset, length, closes=closes)
        with self._lock:
            self._pending += 1
            self._blocks_used += self._open_block != block
        self._open_block = block
        crash_point("stage.batch_received")
        return data

    def _encode(self, block: int, work: Callable[[], None]) -> None:
        """Submit one batch for encoding, after the trainer's copy as long as the trainer has blocks left.

        Training is paused for the copy, and encoding competes for memory bandwidth and for shared cores.
        """
        encode = functools.partial(self._encode_now, block, work)
        with self._lock:
            if self._deferred is not None and self._blocks_used < self._blocks_granted * DEFER_SHARE:
                self._deferred.append(encode)
                return
        self._encode_deferred()
        self._submit(encode)

    def _encode_deferred(self) -> None:
        for encode in self._take_deferred():
            with contextlib.suppress(RuntimeError):  # raised after queueing if no thread can start
                self._submit(encode)

    def _take_deferred(self) -> list[Callable[[], None]]:
        with self._lock:
            held, self._deferred = self._deferred, None
        return held or []

    def _encode_now(self, block: int, work: Callable[[], None]) -> None:
        try:
            if not self.has_ended:
                crash_point("encode.first")
                work()
        except Exception as error:  # noqa: BLE001 - every failure ends this save only
            self.fail(error)
        finally:
            self._keeper.encoded(block)
            with self._drained:
                self._pending -= 1
                self._drained.notify_all()

    def _grant(self) -> None:
        with self._lock:
            if self.state is not SaveState.STAGING:
                return
            granted = self._keeper.grant(self.attachment.local_rank)
            self._blocks_granted += len(granted)
            if granted:
                self._outbox.put(pb.SaveReply(blocks=pb.SaveReply.Blocks(granted=granted)))
        if granted:
            crash_point("stage.granted")

    def _seal(self, seal: pb.SaveRequest.Seal) -> None:
        with self._lock:
            self._transition(SaveEvent.SEAL)
            self.sealed = seal
        # The trainer writes no more: its open and unused blocks can be released.
        self._keeper.on_free(self.attachment.local_rank, None)
        self._keeper.release_granted(self.attachment.local_rank)
        self._metrics.stall.observe(seal.stall_s)
        self._session.stall_aborts = 0
        self.log.info("save.staged", stall_s=round(seal.stall_s, 4), rows=seal.rows, raw_bytes=seal.raw_bytes)
        crash_point("stage.sealed")
        name = f"finish-{self.decisions.attempt}-{self.decisions.snapshot_id}"
        threading.Thread(target=self._finish, args=(seal,), name=name, daemon=True).start()
        # IMPORTANT: after this reply the trainer changes its tensors. All its batches are in blocks of the arena.
        self._outbox.put(pb.SaveReply(staged=pb.SaveReply.Staged(snapshot_id=self.decisions.snapshot_id)))
        self._outbox.put(None)
        self._encode_deferred()

    def _abort(self, cause: str) -> None:
        self._stopped_copying = True
        stalled = cause == Cause.STALL_BUDGET
        self._session.stall_aborts = self._session.stall_aborts + 1 if stalled else 0
        known = Cause.STALL_BUDGET if stalled else Cause.ABORTED
        self._end(SaveEvent.ABORT, known, cause or "the trainer aborted the save")

    def _stream_ended(self) -> None:
        with self._lock:
            staging = self.state is SaveState.STAGING
        if staging:
            self._end(SaveEvent.BREAK, Cause.BROKEN, "the stream ended before the seal")
        self._keeper.on_free(self.attachment.local_rank, None)
        if self.sealed is None and self._stopped_copying:
            self._keeper.release_granted(self.attachment.local_rank)
        elif self.sealed is None and (
            count := self._keeper.quarantine(self.attachment.local_rank, Use.GRANTED)
        ):
            self.log.warning("save.quarantined", blocks=count)
        self.stream_finished.set()
        self._outbox.put(None)

    def _finish(self, seal: pb.SaveRequest.Seal) -> None:
        deadline_s = self.started_s + self.decisions.deadline_s
        try:
            with self._drained:
                done = self._drained.wait_for(
                    lambda: self._pending == 0 or self.has_ended, deadline_s - time.monotonic()
                )
                if self.has_ended:
                    return
                if done:
                    self._transition(SaveEvent.ENCODED)
            if not done:
                self.fail(Cancelled(f"{self._pending} batches are not encoded yet", where="save deadline"))
                return
            commit = self._sink.commit(seal, deadline_s=max(0.0, deadline_s - time.monotonic()))
            commit.durable_s = time.monotonic() - self.started_s
            with self._lock:
                if self.has_ended:
                    self.log.warning("save.committed_late", seq=commit.seq)  # cancelled, but in the log
                else:
                    self._transition(SaveEvent.COMMIT)
            self.commit = commit
            self._notify_ended()
        except Exception as error:  # noqa: BLE001 - every failure ends this save only
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End this save with `error`; no-op when it has ended."""
        if not isinstance(error, DeltashardError):
            self.log.error("save.unexpected", exc_info=error)
        self._end(SaveEvent.FAIL, cause_of(error), str(error))

    def cancel(self, cause: Cause, message: str) -> None:
        """End this save on the sidecar's decision; no-op when it has ended."""
        self._end(SaveEvent.FAIL, cause, message)

    def _end(self, event: SaveEvent, cause: Cause, message: str) -> None:
        with self._lock:
            if self.has_ended:
                return
            was = self.state
            self._transition(event)
            self.failure = (cause, message)
            self._drained.notify_all()
        self.log.warning("save.failed", cause=cause, message=message, state=was.value)
        self._metrics.failures.labels(cause).inc()
        if was is SaveState.STAGING:
            failed = pb.SaveReply.Failed(snapshot_id=self.decisions.snapshot_id, cause=cause, message=message)
            self._outbox.put(pb.SaveReply(failed=failed))
            self._outbox.put(None)
        for encode in self._take_deferred():
            encode()  # it only releases the block: no need to queue behind other saves
        self._sink.abandon()
        self._notify_ended()

    def _notify_ended(self) -> None:
        """Call `ended` and set `finished`, also if the callback fails: the rank's next save waits for it."""
        try:
            self._ended(self)
        except Exception:
            self.log.exception("save.notify_failed")
        finally:
            self.finished.set()

    def _transition(self, event: SaveEvent) -> None:
        self.state = after(TABLE, self.state, event, where="save lifecycle")

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def staging(self) -> bool:
        return self.state is SaveState.STAGING


class InFlightSaves:
    """Newest save of each local rank. Thread-safe; reading takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rank: dict[int, Save] = {}

    def begin(self, rank: int, make: Callable[[], Save]) -> Save | None:
        """Return the save that `make` begins for the rank; None, without a call of `make`, if one is in flight."""
        with self._lock:
            running = self._by_rank.get(rank)
            if running is not None and not (running.finished.is_set() and running.stream_finished.is_set()):
                return None
            save = self._by_rank[rank] = make()
            return save

    def of_rank(self, rank: int) -> Save | None:
        return self._by_rank.get(rank)

    def newest(self) -> list[Save]:
        return list(self._by_rank.values())

    def in_flight(self) -> list[Save]:
        return [save for save in self.newest() if not save.finished.is_set()]
