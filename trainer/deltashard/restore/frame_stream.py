"""The one stream of a restore: blobs first, which are judged before a byte of the model changes, then frames of rows.

Frames lie in granted blocks of the arena; each is decoded and applied during its call, and its block given back.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format.frame import Frame, FrameBytes, parse_frame
from deltashard_checkpoint.format.index import box_message, box_of
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.restore.frame_applier import FrameApplier
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_proto.cause import Cause, parse_cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.rpc_error import translate
from deltashard.attach.session import Link
from deltashard.errors import CheckpointMismatch, CheckpointRetired, RestoreFailed, SidecarGone
from deltashard.restore.blob import Blobs
from deltashard.restore.model_target import ModelTargets

RESTORE_DEADLINE_S = 6 * 3600.0
DRAIN_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedCheckpoint:
    """What one restore read, and from where."""

    blobs: Blobs
    chain: tuple[int, ...]
    baseline_seq: int | None
    cache_bytes: int
    store_bytes: int
    rounded: Mapping[str, str]
    """Tables of whose rows some were stored with fewer bits than they have, and the encoding of the fewest."""
    rounded_state: Mapping[str, str]
    """The like of optimizer state, and the type that it was stored in."""


def read_frames(
    link: Link,
    want: pb.RestoreRequest.Want,
    take: Callable[[Frame, bool], None],
) -> tuple[pb.RestoreReply.Plan, pb.RestoreReply.Done]:
    """Run one Restore call; `take` gets every frame with its tail, and whether it is of a baseline, in order.

    A frame lies in the arena, and is valid only during the call.

    Raises:
        InvalidCheckpoint: the checkpoint's bytes are wrong or gone for sure: fall back.
        RestoreFailed: the store failed, or the sidecar says what did.
        SidecarGone: the sidecar is gone, whatever was applied so far.
        FencedError: a newer attempt runs.
    """
    out: queue.SimpleQueue[pb.RestoreRequest | None] = queue.SimpleQueue()
    out.put(pb.RestoreRequest(want=want))
    try:
        call = link.stub.Restore(iter(out.get, None), timeout=RESTORE_DEADLINE_S)
    except (
        ValueError
    ) as error:  # the channel was closed: the session thread has seen that the sidecar is gone
        raise SidecarGone(str(error), where="restore") from None
    plan = pb.RestoreReply.Plan()
    try:
        for reply in call:
            kind = reply.WhichOneof("kind")
            if kind == "plan":
                plan = reply.plan
            elif kind == "batch":
                for filled in reply.batch.frames:
                    data = _bytes(link, filled.block, filled.offset, filled.length)
                    tail = (
                        _bytes(link, filled.tail_block, filled.tail_offset, filled.tail_length)
                        if filled.HasField("tail_block")
                        else None
                    )
                    take(parse_frame(data, tail, verify=False), filled.baseline)
                    freed = [filled.block] * filled.last + [filled.tail_block] * filled.tail_last
                    if freed:
                        out.put(pb.RestoreRequest(freed=pb.RestoreRequest.Freed(blocks=freed)))
            elif kind == "done":
                return plan, reply.done
            elif kind == "failed":
                cause = parse_cause(reply.failed.cause)
                if cause == Cause.INVALID:
                    raise InvalidCheckpoint(reply.failed.message, where=f"checkpoint {want.seq}")
                if cause == Cause.MISMATCH:
                    raise CheckpointMismatch(reply.failed.message, where=f"checkpoint {want.seq}")
                raised = CheckpointRetired if cause == Cause.MOVED else RestoreFailed
                raise raised(
                    f"{cause}: {reply.failed.message}",
                    where=f"checkpoint {want.seq}",
                    remedy="the checkpoint is not lost: call restore() again once the store can be reached",
                )
    except grpc.RpcError as error:
        raise translate(error, where="restore", fallback=RestoreFailed) from None
    finally:
        # Half-close, then read to the end: that is our word that no block is looked at any more.
        out.put(None)
        _drain(call)
    raise SidecarGone("the sidecar ended the restore without a result", where=f"checkpoint {want.seq}")


def _bytes(link: Link, block: int, offset: int, length: int) -> memoryview:
    return link.arena.block(block)[offset : offset + length]


def _drain(call: Any) -> None:
    timer = threading.Timer(DRAIN_DEADLINE_S, call.cancel)
    timer.daemon = True
    timer.start()
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass  # whoever called has its result, or its error, already
    finally:
        timer.cancel()


def read_checkpoint(
    link: Link,
    seq: int,
    from_run: str,
    targets: ModelTargets,
    check_blobs: Callable[[Mapping[str, memoryview]], Blobs],
    *,
    rank: int = 0,
    newer: Callable[[], Iterable[FrameBytes]] = tuple,
) -> ReceivedCheckpoint:
    """Read a checkpoint in one stream: blobs, then rows, which are scattered into the targets.

    `check_blobs` gets the blobs, whole, while rows are on their way already, and before a byte of the model changes: it
    places the targets, or raises. `newer` gives frames of rows, with their tails, that are newer than all of the
    checkpoint.
    Raises as `read_frames` does, or for rows and blobs that never came.
    """
    want = pb.RestoreRequest.Want(
        session=link.session,
        seq=seq,
        boxes=[box_message(box) for box in targets.boxes],
        blobs=True,
        from_run=from_run,
        mapping=targets.renames,
        # What fits is judged here, where lazily created optimizer state is known; `finish` insists on every row.
        lenient=True,
        weights_only=targets.weights_only,
        rank=rank,
    )
    arrivals = FrameReceiver(targets, check_blobs, newer)
    plan, done = read_frames(link, want, arrivals.take)
    blobs = arrivals.finish(plan)
    rows = bool(targets.placed)
    return ReceivedCheckpoint(
        blobs=blobs,
        chain=tuple(plan.chain) if rows else (seq,),
        baseline_seq=(done.baseline_seq or None) if rows else seq,
        cache_bytes=done.cache_bytes,
        store_bytes=done.store_bytes,
        rounded=arrivals.rounded,
        rounded_state=arrivals.rounded_state,
    )


class FrameReceiver:
    """The frames of one restore: blobs until they are judged, then rows."""

    def __init__(
        self,
        targets: ModelTargets,
        check_blobs: Callable[[Mapping[str, memoryview]], Blobs],
        newer: Callable[[], Iterable[FrameBytes]] = tuple,
    ) -> None:
        self._targets = targets
        self._newer = newer
        self._check_blobs = check_blobs
        self._dense = FrameApplier([])
        self._blobs: Blobs | None = None
        self.rounded: dict[str, str] = {}

    def take(self, frame: Frame, baseline: bool) -> None:
        if frame.table is None:
            self._dense.apply(frame)
            return
        if self._blobs is None:
            self._begin_rows()
        self._record_rounding(frame.table, frame.info.encoding)
        self._rows(frame, baseline)

    def _record_rounding(self, table: TableSchema, encoding: str) -> None:
        stored = ENCODINGS.get(encoding)  # empty: rows that are gone
        if stored is None or stored.dtype == table.dtype:
            return
        before = self.rounded.get(table.fqn)
        if before is None or stored.bits < ENCODINGS[before].bits:
            self.rounded[table.fqn] = encoding

    @property
    def rounded_state(self) -> Mapping[str, str]:
        return self._applier.narrowed

    def finish(self, plan: pb.RestoreReply.Plan) -> Blobs:
        blobs = self._begin_rows() if self._blobs is None else self._blobs
        targets = self._targets
        self._applier.finish(initial=[] if targets.strict else [box_of(box) for box in plan.initial])
        targets.notes += [note for note in self._applier.notes if note not in targets.notes]
        targets.finish()
        return blobs

    def _begin_rows(self) -> Blobs:
        self._dense.finish(blobs=("rng", "meta"))
        self._blobs = self._check_blobs(self._dense.blobs)
        targets = self._targets
        self._applier = FrameApplier(
            [placed.target for placed in targets.placed], mapping=targets.renames, strict=targets.strict
        )
        self._rows = targets.frame_consumer(self._applier)
        for frame, tail in self._newer():
            targets.take_newer(self._applier, frame, tail)
        return self._blobs
