"""Serving a restore: plan, fetch, and pass frames to the trainer through arena blocks unchanged, newest first.

    chain of the log -> indexes -> plan (pure) -> Fetcher: cache first, ranges coalesced, every frame hash-checked
                                                     -> into an arena block -> `filled` -> trainer applies -> `freed`

The plan assigns each request (a byte range of whole frames) to a block (`pack_blocks`, pure). The message with the last
frame or tail of a block marks it as such, and the trainer returns the block after applying it. A restore cannot
deadlock with its trainer: two blocks are reserved for it, no request spans two blocks, and all frames that wait for
their tails belong to one request.

A checkpoint is *invalid* only on proof (a hash that is wrong in two reads from the store, or a confirmed 404). Any
other failure is *unavailable*.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import DeltashardError, EnvironmentFault, FormatError
from deltashard_checkpoint.format.frame import FrameKind
from deltashard_checkpoint.format.index import box_message, box_of
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.restore.checkpoint_reader import has_advanced, plan_restore
from deltashard_checkpoint.restore.fetcher import Fetcher
from deltashard_checkpoint.restore.plan import IncompletePlan, Plan, RangeRequest, Want
from deltashard_proto.arena_layout import ALIGN
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.arena.block import Use
from deltashard_sidecar.run.run import Run
from deltashard_sidecar.session.attachment import Attachment
from deltashard_sidecar.telemetry.structured_logging import explain

PREFETCH_BYTES = 32 << 20
FETCH_THREADS = 4
BATCH_FRAMES = 64
"""Most frames in one message: a message costs both processes about 0.2 ms, whatever its size."""


class RestoreStopped(EnvironmentFault):
    """The trainer went away or sent nothing for too long while frames waited for blocks."""


def pack_blocks(lengths: Sequence[int], block_bytes: int) -> list[tuple[int, int]]:
    """Return (block number within this restore, aligned offset) per request; none is split. Pure."""
    places: list[tuple[int, int]] = []
    block, at = 0, 0
    for length in lengths:
        if at and at + length > block_bytes:
            block, at = block + 1, 0
        places.append((block, at))
        at += -(-length // ALIGN) * ALIGN
    return places


def baseline_under(plan: Plan) -> int:
    """Return the seq since which the non-baseline frames contain every changed row; 0 when no rows are restored.

    Parts may have different baselines. The rows changed since an older one include those changed since the newest.
    """
    rows = (frame for request in plan.requests for frame in request.frames if frame.table is not None)
    return max((frame.seq for frame in rows if frame.baseline), default=0)


def cause_of(error: BaseException) -> Cause:
    if isinstance(error, DeltashardError) and error.cause in {Cause.NOT_FOUND, Cause.MISMATCH}:
        return Cause(error.cause)
    if isinstance(error, FormatError):  # other causes: a newer version wrote it, which is no damage
        return Cause.INVALID if error.cause == Cause.CORRUPT else Cause.ERROR
    return Cause.UNAVAILABLE if isinstance(error, EnvironmentFault) else Cause.ERROR


class Restore:
    """One Restore call."""

    def __init__(
        self, *, run: Run, attachment: Attachment, want: pb.RestoreRequest.Want, keeper: ArenaKeeper
    ) -> None:
        self._run = run
        self._attachment = attachment
        self._want = want
        self._keeper = keeper
        self._log = run.logger.bind(seq=want.seq, rank=attachment.rank)
        self._blocks: dict[int, int] = {}
        self._places: list[tuple[int, int]] = []
        self._next = 0
        self._stream_ended = threading.Event()
        self._clean = False
        self._last_message_s = time.monotonic()
        self._source_run: tuple[RunLog, RunState] | None = None
        """Log of another run that is read, and its state when the plan was made; that run may continue meanwhile."""
        self.step = 0
        self.source = ""
        """Where most bytes came from, cache or store; empty until everything was sent."""

    def plan(self) -> tuple[RunState, Plan]:
        want, deadline_s = self._want, self._run.settings.restore_deadline_s
        other = want.from_run if want.from_run != self._run.name else ""
        log = RunLog(self._run.store, other) if other else self._run.log_of(self._attachment)
        state = log.state
        if want.seq not in state.checkpoints:
            state = log.refresh(deadline_s=deadline_s)
        if other:
            self._source_run = log, state
        wanted: dict[str, list[Box]] = {}
        for message in want.boxes:
            wanted.setdefault(message.table, []).append(box_of(message))
        schemas = {table.fqn: table for table in self._attachment.tables}
        if unknown := wanted.keys() - schemas.keys():
            raise IncompletePlan(f"table {min(unknown)} was not listed at Attach", where="restore")
        plan = plan_restore(
            self._run.store,
            state,
            want.seq,
            [Want(schema=schemas[fqn], boxes=tuple(boxes)) for fqn, boxes in wanted.items()],
            blobs=want.blobs,
            rank=want.rank,
            world_size=self._attachment.world_size,
            strict=not want.lenient,
            mapping=dict(want.mapping),
            weights_only=want.weights_only,
            manifests=self._run.manifests_of(state.run),
            shared=self._run.shared(self._attachment),
            deadline_s=deadline_s,
        )
        return state, plan

    def serve(
        self, requests: Iterator[pb.RestoreRequest], alive: Callable[[], bool]
    ) -> Iterator[pb.RestoreReply]:
        """Yield the replies of the whole call. A failed restore yields `failed` instead of raising."""
        began_s = time.monotonic()
        metrics = self._run.metrics
        threading.Thread(target=self._read, args=(requests,), name="restore", daemon=True).start()
        try:
            state, plan = self.plan()
            chained = pb.RestoreReply.Plan(
                step=state.checkpoints[self._want.seq].step,
                stored_bytes=plan.bytes,
                frames=plan.frames,
                chain=plan.chain,
                initial=[box_message(box) for box in plan.initial],
                notes=plan.notes,
            )
            crash_point("restore.planned")
            yield pb.RestoreReply(plan=chained)
            fetcher = Fetcher(
                self._run.store,
                state.run,
                cache=self._run.cache,
                shared=self._run.shared(self._attachment),
                prefetch_bytes=PREFETCH_BYTES,
                workers=FETCH_THREADS,
                deadline_s=self._run.settings.restore_deadline_s,
            )
            yield from self._frames(fetcher, plan, alive)
            stats, seconds = fetcher.stats, time.monotonic() - began_s
            done = pb.RestoreReply.Done(
                cache_bytes=stats.cache_bytes,
                store_bytes=stats.store_bytes,
                seconds=seconds,
                baseline_seq=baseline_under(plan),
            )
            source = "cache" if stats.cache_bytes >= stats.store_bytes else "store"
            metrics.restores.labels("done").inc()
            metrics.restore_seconds.labels(source).observe(seconds)
            self._log.info("restore.served", frames=plan.frames, source=source, seconds=round(seconds, 3))
            self.step, self.source = chained.step, source
            yield pb.RestoreReply(done=done)
        except DeltashardError as error:
            cause = cause_of(error)
            lacks = cause is Cause.NOT_FOUND and self._source_run is not None
            if lacks or (cause is Cause.INVALID and self._source_changed()):
                cause = Cause.MOVED
            metrics.restores.labels(cause).inc()
            self._log.warning("restore.failed", cause=cause, **explain(error))
            yield _failed(cause, str(error))
        except Exception as error:  # noqa: BLE001 - a bug, which the trainer must be notified of
            metrics.restores.labels(Cause.ERROR).inc()
            self._log.error("restore.unexpected", exc_info=error)
            yield _failed(Cause.ERROR, repr(error))
        finally:
            self._wait_for_reader(alive)

    def _source_changed(self) -> bool:
        """Return whether the other run changed while it was read: missing objects may just have been retired."""
        if self._source_run is None:
            return False
        log, state = self._source_run
        try:
            return has_advanced(log, state, deadline_s=self._run.settings.restore_deadline_s)
        except DeltashardError as error:
            self._log.info("restore.recheck_failed", **explain(error))
            return False

    def _frames(self, fetcher: Fetcher, plan: Plan, alive: Callable[[], bool]) -> Iterator[pb.RestoreReply]:
        metrics = self._run.metrics
        self._places = pack_blocks([request.length for request in plan.requests], self._keeper.block_bytes)
        self._alive = alive
        fetched = fetcher.fetch(plan, self._destination)
        left = Counter[int]()
        for request, (number, _) in zip(plan.requests, self._places, strict=True):
            left[number] += len(request.frames) + len(request.tails)
        batch: list[pb.RestoreReply.Filled] = []
        try:
            for frame in fetched:
                info, planned = frame.planned.info, frame.planned
                number, offset = self._places[frame.request]
                left[number] -= 1
                filled = pb.RestoreReply.Filled(
                    block=self._blocks[number],
                    offset=offset + planned.offset,
                    length=info.length,
                    baseline=planned.baseline,
                    last=not left[number],
                )
                if frame.tail is not None:
                    number, offset = self._places[frame.tail_request]
                    left[number] -= 1
                    filled.tail_block, filled.tail_offset = self._blocks[number], offset + frame.tail_offset
                    filled.tail_length = len(frame.tail)
                    filled.tail_last = not left[number]
                batch.append(filled)
                # Available frames are sent at once, because the next one may take long.
                if frame.last or len(batch) == BATCH_FRAMES:
                    yield pb.RestoreReply(batch=pb.RestoreReply.Batch(frames=batch))
                    crash_point("restore.first_filled")
                    batch.clear()
                encoding = info.encoding or ("blob" if info.kind is FrameKind.BLOB else "tombstone")
                metrics.rows.labels("out", encoding).inc(info.rows)
                metrics.frame_bytes.labels("out", encoding).inc(len(frame.data) + len(frame.tail or b""))
        finally:
            fetched.close()  # type: ignore[attr-defined]  # a generator: waits for reads into arena blocks

    def _destination(self, request: RangeRequest, *, wait: bool) -> memoryview | None:
        if self._stream_ended.is_set():
            raise RestoreStopped("the trainer ended the stream", where="restore")
        number, offset = self._places[self._next]
        if number not in self._blocks:
            stops = iter((False,))  # without `wait`, try once
            should_stop_now = self._should_stop if wait else lambda: next(stops, True)
            block = self._keeper.take_serving(self._attachment.local_rank, should_stop=should_stop_now)
            if block is None:
                if wait:
                    raise RestoreStopped("no block became free: the trainer stopped reading", where="restore")
                return None
            self._blocks[number] = block
        self._next += 1
        return self._keeper.arena.block(self._blocks[number])[offset : offset + request.length]

    def _should_stop(self) -> bool:
        idle_s = time.monotonic() - self._last_message_s
        return self._stream_ended.is_set() or not self._alive() or idle_s > self._run.settings.stream_idle_s

    def _read(self, requests: Iterator[pb.RestoreRequest]) -> None:
        try:
            for request in requests:
                self._last_message_s = time.monotonic()
                for block in request.freed.blocks:
                    self._keeper.served(self._attachment.local_rank, block)
            self._clean = True
        except Exception as error:  # noqa: BLE001 - gRPC raises its own bare kinds for a stream that broke
            self._log.debug("restore.stream_broke", **explain(error))
        finally:
            self._stream_ended.set()

    def _wait_for_reader(self, alive: Callable[[], bool]) -> None:
        """Wait for the trainer's end of the stream, then release its blocks, or quarantine them if it did not end."""
        until = time.monotonic() + self._run.settings.stream_idle_s
        while alive() and not self._stream_ended.wait(0.2) and time.monotonic() < until:
            pass
        if self._stream_ended.is_set() and self._clean:
            self._keeper.release_serving(self._attachment.local_rank)
        else:
            self._keeper.quarantine(self._attachment.local_rank, Use.SERVING)


def _failed(cause: Cause, message: str) -> pb.RestoreReply:
    return pb.RestoreReply(failed=pb.RestoreReply.Failed(cause=cause, message=message))
