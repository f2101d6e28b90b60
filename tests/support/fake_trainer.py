"""A minimal trainer for tests: the numpy tables of a `fake_model`, and every message of the contract."""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
from deltashard_checkpoint.format.frame import parse_frame
from deltashard_checkpoint.format.index import box_message, table_message
from deltashard_checkpoint.restore.frame_applier import FrameApplier
from deltashard_proto.arena_layout import STEP, Arena, ArenaShape, aligned, sections
from deltashard_proto.message_limit import MESSAGE_OPTIONS
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.trainer_pb2_grpc import TrainerStub

from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel, same

DEADLINE_S = 180.0
"""Time limit of a call and of a stream's messages: long enough for a busy machine, so only a hang fails."""


class SaveStreamFailed(Exception):
    """The sidecar answered Failed."""

    def __init__(self, cause: str, message: str) -> None:
        self.cause = cause
        super().__init__(f"{cause}: {message}")


class Trainer:
    """One process's side of the contract: attach, open, save, restore."""

    def __init__(
        self,
        socket: Path,
        model: FakeModel,
        *,
        rank: int = 0,
        world_size: int = 1,
        lock: bool = True,
        consecutive: bool = False,
        rebases: bool = False,
        attempt: int | None = None,
        layout: str = "",
        local_rank: int | None = None,
    ) -> None:
        """Create a trainer. `attempt`, `layout`: the attempt it already trains in. `rebases`: each Begin has `since_commit_seq`."""
        self.rebases = rebases
        self.model = model
        self.rank = rank
        self.local_rank = rank if local_rank is None else local_rank
        self.layout = layout
        self.world_size = world_size
        self.channel = grpc.insecure_channel(
            f"unix:{socket}", options=(*MESSAGE_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        )
        self.stub = TrainerStub(self.channel)
        self.lock = lock
        self.consecutive = consecutive
        self.commit_seq: int | None = None
        self.attempt = attempt
        self.snapshot_id = 0
        self.last: SnapshotInProgress | None = None
        """The newest snapshot that began."""
        self.commits: dict[int, pb.Commit] = {}
        self.failures: dict[int, pb.Notice.SaveFailed] = {}
        self.urgent: list[pb.Notice.SaveNow] = []
        self.fenced: list[pb.Notice.Fenced] = []
        self.policies: list[pb.Policy] = []
        self.base_seq: int | None = None
        self.blobs_read: frozenset[str] = frozenset()
        """Names from the last restore."""
        self._arenas: list[Arena] = []
        self.reply = self.attach()

    def attach(self) -> pb.AttachReply:
        request = pb.AttachRequest(
            protocol_min=1, protocol_max=1, rank=self.rank, local_rank=self.local_rank, world_size=self.world_size,
            attempt=self.attempt, layout=self.layout, pid=os.getpid(),
            tables=[table_message(t.schema) for t in self.model.tables],
            boxes=[box_message(t.box) for t in self.model.tables],
            fingerprint={"test": "1"},
        )  # fmt: skip
        self._watch = None  # the end of an older stream no longer counts
        self.reply = self.stub.Attach(request, timeout=DEADLINE_S)
        shape = ArenaShape.within(self.reply.arena_bytes, block_bytes=self.reply.block_bytes)
        fd = os.open(self.reply.arena_path, os.O_RDWR | os.O_CLOEXEC)
        self.arena = Arena.mapped(Path(self.reply.arena_path), fd, shape)
        # Closing a descriptor of the file would drop every lock of this process on the file.
        self._arenas.append(self.arena)
        if self.lock:
            start, length = self.arena.line_lock_range(self.local_rank)
            fcntl.lockf(self.arena.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        self.gone = False
        self._watch = self.stub.Watch(pb.WatchRequest(session=self.reply.session))
        threading.Thread(target=self._notices, args=(self._watch,), daemon=True).start()
        return self.reply

    def _notices(self, watch: Iterator[pb.Notice]) -> None:
        lists = {"save_now": self.urgent, "fenced": self.fenced, "policy": self.policies}
        with suppress(grpc.RpcError):
            for notice in watch:
                kind = notice.WhichOneof("kind")
                content = getattr(notice, kind)
                if kind in lists:
                    lists[kind].append(content)
                else:
                    {"committed": self.commits, "save_failed": self.failures}[kind][content.snapshot_id] = (
                        content
                    )
        if watch is self._watch:
            self.gone = True

    def open(self, which: str = "latest", **more: object) -> pb.OpenReply:
        request = pb.OpenRequest(session=self.reply.session, which=which, **more)
        reply = self.stub.Open(request, timeout=DEADLINE_S)
        self.attempt, self.snapshot_id = reply.attempt, 0
        self.commits.clear()
        self.failures.clear()
        return reply

    # A snapshot in steps, so that tests can stop anywhere.

    def begin(
        self,
        *,
        reason: str = "user",
        urgent: bool = False,
        full: bool = False,
        defer_descriptors: bool = False,
    ) -> SnapshotInProgress:
        self.snapshot_id += 1
        for table in self.model.tables:
            table.dirty |= table.at_risk
            table.fresh |= table.sent
        begin = pb.SaveRequest.Begin(
            session=self.reply.session, step=self.model.step, snapshot_id=self.snapshot_id, reason=reason, urgent=urgent, full=full
        )  # fmt: skip
        if self.base_seq is not None and not full:
            begin.since_baseline_seq = self.base_seq
        if self.commit_seq is not None and (self.consecutive or self.rebases) and not full:
            begin.since_commit_seq = self.commit_seq
        before = self.last
        snapshot_id = eventually(
            lambda: self._open_snapshot(begin, before, defer_descriptors=defer_descriptors),
            what=f"snapshot {self.snapshot_id} begins",
        )
        self.last = snapshot_id
        return snapshot_id

    def _open_snapshot(
        self, begin: pb.SaveRequest.Begin, before: SnapshotInProgress | None, *, defer_descriptors: bool
    ) -> SnapshotInProgress | None:
        """Open the snapshot; return None if the sidecar is still finishing the previous one, so the caller retries.

        With several ranks raise instead: the peers receive a refused snapshot too.
        """
        try:
            return SnapshotInProgress(self, begin, defer_descriptors=defer_descriptors)
        except SaveStreamFailed as refused:
            if refused.cause != "busy" or self.world_size > 1 or before is None or not before.ended:
                raise
            return None

    def save(self, **options: object) -> int:
        """Write a whole snapshot until it is staged; return its number."""
        snapshot = self.begin(**options)  # type: ignore[arg-type]
        snapshot.write_all()
        snapshot.seal()
        return snapshot.number

    def committed(self, number: int) -> pb.Commit:
        """Wait for the commit of a snapshot and return it; clear the marks that it covers."""
        ended = lambda: number in self.commits or number in self.failures or self.gone  # noqa: E731
        eventually(ended, what=f"snapshot {number} ends")
        if number in self.failures:
            raise SaveStreamFailed(self.failures[number].cause, self.failures[number].message)
        if number not in self.commits:
            raise SaveStreamFailed("gone", "the sidecar is gone")
        commit = self.commits[number]
        self.commit_seq = commit.seq
        for table in self.model.tables:
            table.sent = set()
        if commit.baseline:
            self.base_seq = commit.seq
            for table in self.model.tables:
                table.at_risk = set()
        return commit

    def save_and_commit(self, **options: object) -> pb.Commit:
        return self.committed(self.save(**options))

    def restore(self, seq: int, *, hold: Callable[[int], None] | None = None) -> pb.RestoreReply.Done:
        """Fill the model from a checkpoint; `hold(n)` is called before the n-th frame is applied."""
        outbox: queue.SimpleQueue[pb.RestoreRequest | None] = queue.SimpleQueue()
        want = pb.RestoreRequest.Want(
            session=self.reply.session, seq=seq, blobs=True, rank=self.rank,
            boxes=[box_message(t.box) for t in self.model.tables],
        )  # fmt: skip
        self.batches_read: list[list[str]] = []
        outbox.put(pb.RestoreRequest(want=want))
        applier = FrameApplier([table.target() for table in self.model.tables])
        tables = {table.fqn: table for table in self.model.tables}
        names: set[str] = set()
        done: pb.RestoreReply.Done | None = None
        count = 0
        try:
            for reply in self.stub.Restore(iter(outbox.get, None), timeout=DEADLINE_S):
                kind = reply.WhichOneof("kind")
                if kind == "failed":
                    raise SaveStreamFailed(reply.failed.cause, reply.failed.message)
                if kind == "done":
                    done = reply.done
                    break
                if kind == "batch":
                    self.batches_read.append([])
                for filled in reply.batch.frames:
                    count += 1
                    if hold is not None:
                        hold(count)
                    frame = bytes(self.arena.block(filled.block)[filled.offset :][: filled.length])
                    tail = None
                    if filled.HasField("tail_block"):
                        held = self.arena.block(filled.tail_block)
                        tail = bytes(held[filled.tail_offset :][: filled.tail_length])
                    parsed = parse_frame(frame, tail)
                    self.batches_read[-1].append(parsed.info.digest.hex())
                    for applied in applier.apply(parsed):
                        if not filled.baseline:
                            tables[applied.target.schema.fqn].dirty.update(map(int, applied.rows))
                    if parsed.info.name:
                        names.add(parsed.info.name)
                    if freed := [filled.block] * filled.last + [filled.tail_block] * filled.tail_last:
                        outbox.put(pb.RestoreRequest(freed=pb.RestoreRequest.Freed(blocks=freed)))
        finally:
            outbox.put(None)
        applier.finish(blobs=names)
        self.blobs_read = frozenset(names)
        self.model.load_blobs(applier.blobs)
        self.base_seq, self.commit_seq = done.baseline_seq, seq
        for table in self.model.tables:
            table.fresh, table.sent = set(), set()
        return done

    def assert_restores(self, seq: int, state: list[np.ndarray]) -> pb.RestoreReply.Done:
        self.model.wipe()
        done = self.restore(seq)
        assert same(self.model.state(), state)
        return done

    def report_step(self) -> None:
        """Report the step on the control line, as `Checkpointer.step()` does."""
        self.arena.line(self.local_rank)[STEP] = self.model.step

    def detach(self) -> pb.DetachReply:
        request = pb.DetachRequest(session=self.reply.session, deadline_s=DEADLINE_S)
        return self.stub.Detach(request, timeout=2 * DEADLINE_S)

    def close(self) -> None:
        self._watch.cancel()
        self.channel.close()
        for arena in self._arenas:
            arena.close()


class SnapshotInProgress:
    """One Save stream; with `defer_descriptors` every descriptor is sent together with the seal."""

    def __init__(
        self, trainer: Trainer, begin: pb.SaveRequest.Begin, *, defer_descriptors: bool = False
    ) -> None:
        self.trainer = trainer
        self.held: list[pb.SaveRequest] | None = [] if defer_descriptors else None
        self.number = begin.snapshot_id
        self.outbox: queue.SimpleQueue[pb.SaveRequest | None] = queue.SimpleQueue()
        self.granted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.end: pb.SaveReply | None = None
        self.over = threading.Event()
        self.began = threading.Event()
        self.begun: pb.SaveReply.Begun | None = None
        self.rows = 0
        self.raw_bytes = 0
        self.blocks_used = 0
        self._block = -1
        self._at = 0
        self.call = trainer.stub.Save(iter(self.outbox.get, None), timeout=3 * DEADLINE_S)
        threading.Thread(target=self._read, daemon=True).start()
        self.outbox.put(pb.SaveRequest(ready=pb.SaveRequest.Ready(session=begin.session)))
        self.outbox.put(pb.SaveRequest(begin=begin))
        assert self.began.wait(DEADLINE_S)
        if self.begun is None:
            self.outbox.put(None)
            assert self.over.wait(DEADLINE_S)
            raise self._failure()

    def _failure(self) -> SaveStreamFailed:
        if self.end is None:
            return SaveStreamFailed("gone", "")
        return SaveStreamFailed(self.end.failed.cause, self.end.failed.message)

    @property
    def ended(self) -> bool:
        if not self.over.is_set():
            return False
        staged = self.end is not None and self.end.WhichOneof("kind") == "staged"
        return not staged or self.number in self.trainer.commits or self.number in self.trainer.failures

    def _read(self) -> None:
        with suppress(grpc.RpcError):
            for reply in self.call:
                match reply.WhichOneof("kind"):
                    case "begun":
                        self.begun = reply.begun
                        self.began.set()
                    case "blocks":
                        for block in reply.blocks.granted:
                            self.granted.put(block)
                    case _:
                        self.end = reply
        self.over.set()
        self.began.set()

    def send(self, message: pb.SaveRequest) -> None:
        if self.held is not None:
            self.held.append(message)
        else:
            self.outbox.put(message)

    def _reserve(self, length: int) -> int:
        if self._block < 0 or self._at + length > self.trainer.reply.block_bytes:
            ended = lambda: self.over.is_set() or self.end is not None  # noqa: E731
            eventually(lambda: ended() or not self.granted.empty(), timeout_s=DEADLINE_S, what="a block")
            if self.granted.empty():
                raise self._failure()
            self._block, self._at = self.granted.get(), 0
            self.blocks_used += 1
        at = self._at
        self._at += aligned(length)
        return at

    def rows_of(self, position: int, rows: np.ndarray | None) -> None:
        """Write all rows (None) or the given rows of one table."""
        table = self.trainer.model.tables[position]
        ids = None if rows is None else np.sort(np.asarray(rows, np.int64))
        count = len(table.weights) if ids is None else len(ids)
        columns = table.weights.shape[1]
        widths = [4 * columns, 4, 4 * columns]
        limit = max(1, (self.trainer.reply.block_bytes // 2) // (sum(widths) + 8))
        for start in range(0, count, limit):
            n = min(limit, count - start)
            chosen = slice(start, start + n) if ids is None else ids[start : start + n]
            offsets, length = sections(n, contiguous=ids is None, row_bytes=widths)
            at = self._reserve(length)
            view = self.trainer.arena.block(self._block)[at : at + length]
            if ids is not None:
                np.frombuffer(view, np.int64, n, offsets[0])[:] = chosen
            np.frombuffer(view, np.float32, n * columns, offsets[1])[:] = table.weights[chosen].reshape(-1)
            np.frombuffer(view, np.float32, n, offsets[2])[:] = table.sums[chosen]
            np.frombuffer(view, np.float32, n * columns, offsets[3])[:] = table.averages[chosen].reshape(-1)
            del view
            message = pb.RowBatch(
                block=self._block, offset=at, table=position, rows=n, contiguous=ids is None,
                row_start=start if ids is None else 0, col_start=0, col_stop=columns,
            )  # fmt: skip
            self.send(pb.SaveRequest(rows=message))
            self.rows += n
            self.raw_bytes += n * sum(widths)

    def blob(self, name: str, data: bytes) -> None:
        chunk = 1 << 20
        for start in range(0, len(data), chunk):
            piece = data[start : start + chunk]
            at = self._reserve(len(piece))
            self.trainer.arena.block(self._block)[at : at + len(piece)] = piece
            message = pb.BlobChunk(
                block=self._block, offset=at, length=len(piece), name=name, blob_offset=start, blob_bytes=len(data)
            )  # fmt: skip
            self.send(pb.SaveRequest(blob=message))
        self.raw_bytes += len(data)

    def write_all(self) -> None:
        whole = not self.begun.HasField("covers")
        if self.begun.rebased:
            assert self.trainer.rebases
            assert self.begun.covers == self.trainer.commit_seq
            self.trainer.base_seq = self.trainer.commit_seq
            for table in self.trainer.model.tables:
                table.dirty, table.at_risk = set(table.fresh), set()
        for position, table in enumerate(self.trainer.model.tables):
            if whole:
                self.rows_of(position, None)
            elif table.dirty:
                self.rows_of(position, np.array(sorted(table.dirty)))
        for name, data in self.trainer.model.blobs().items():
            self.blob(name, data)

    def seal(self, *, full: bool = False) -> None:
        seal = pb.SaveRequest.Seal(rows=self.rows, raw_bytes=self.raw_bytes, stall_s=0.01, full=full)
        self.send(pb.SaveRequest(seal=seal))
        if self.held is not None:
            self.outbox.put(pb.SaveRequest(batch=pb.SaveRequest.Batch(requests=self.held)))
        self.outbox.put(None)
        assert self.over.wait(DEADLINE_S)
        if self.end is None or self.end.WhichOneof("kind") != "staged":
            raise self._failure()
        for table in self.trainer.model.tables:
            table.sent |= table.fresh
            table.fresh = set()
        if full or not self.begun.HasField("covers"):
            for table in self.trainer.model.tables:
                table.at_risk |= table.dirty
                table.dirty = set()

    def abort(self, cause: str = "") -> None:
        self.outbox.put(pb.SaveRequest(abort=pb.SaveRequest.Abort(cause=cause)))
        self.outbox.put(None)
        assert self.over.wait(DEADLINE_S)

    def disconnect(self) -> None:
        """Break the stream as a killed process would."""
        self.call.cancel()
        assert self.over.wait(DEADLINE_S)


def lock_is_free(path: Path, rank: int) -> bool:
    """Return whether no other process holds the rank's writer lock."""
    with path.open("r+b") as file:
        ask = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 4096 + 64 * rank, 64, 0)
        return struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, ask))[0] == fcntl.F_UNLCK
