"""One Save call: a queue of outgoing messages, a thread for replies, and deadlines on every wait.

training thread   begin() .. begun() -> block() / send() ... -> seal() or abort(); waits only for Begun and blocks, and
                  only while the sidecar answers; prepare() may be called long before
copying thread    prepared(), spare_block(): see `precopy`; never concurrently with the training thread
gRPC threads      send the outgoing messages
reader thread     receives replies; after the seal it reports the end of the call (`on_end`), while training continues
watching thread   cancels the call when the sidecar does not report `staged` before its deadline

Setting this up costs more than copying ten megabytes, so it is not done while training waits: `PreopenedStream` opens
the next snapshot's call in advance, on the reader thread of the previous one. Descriptors of less than a megabyte are
held back and sent together, since every message wakes threads that compete with the copy for the interpreter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import grpc
from deltashard_proto.cause import Cause, parse_cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.rpc_error import details
from deltashard.attach.session import Link
from deltashard.errors import EnvironmentFault

log = logging.getLogger("deltashard")

HOLD_S = float(os.environ.get("DELTASHARD_HOLD_S", "2.5"))
"""Maximum time that a snapshot lets training wait for a silent sidecar; its copying time is not included."""
URGENT_HOLDS = 2
"""Multiple of HOLD_S for what may be the last snapshot: the sidecar lets an urgent one wait for the previous one."""
STAGED_DEADLINE_S = 60.0
ABORT_DEADLINE_S = 1.0
MAX_STALL_S = 6 * 3600.0
HELD_BYTES = 1 << 20
"""Descriptors of this many bytes in the arena are sent; fewer wait for more, for a block or for the seal."""


class SnapshotFailed(EnvironmentFault):
    """This snapshot will not become a checkpoint; `cause` is its metric label (busy, deadline, gone, silent, ...)."""

    def __init__(self, cause: str, message: str) -> None:
        self.cause = cause
        super().__init__(f"{cause}: {message}", where="save")


class SaveStream:
    """The Save call of one snapshot. `ended` is called once, from the reader thread, if a snapshot was begun."""

    def __init__(self, link: Link, *, ended: Callable[[], None] = lambda: None) -> None:
        self.link = link
        self.over = threading.Event()
        """Set when the call has ended, with or without success: no snapshot can begin."""
        self._out: queue.SimpleQueue[pb.SaveRequest | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[pb.SaveReply | SnapshotFailed] = queue.SimpleQueue()
        self._granted: deque[int] = deque()
        self._held: list[pb.SaveRequest] = []
        self._held_bytes = 0
        self._ended = ended
        self._on_end: Callable[[SnapshotFailed | None], None] | None = None
        self._sealed = False
        self._silent = False
        self._wake = threading.Event()
        # No deadline on the call itself, which can be open long before its snapshot. Every wait in a snapshot has one.
        self._call = link.stub.Save(iter(self._out.get, None))
        self._out.put(pb.SaveRequest(ready=pb.SaveRequest.Ready(session=link.session)))
        self._reader = threading.Thread(target=self._read, name="deltashard-save", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="deltashard-staged", daemon=True).start()

    def prepare(self, begin: pb.SaveRequest.Begin) -> None:
        """Request blocks ahead of the snapshot. `begin` or `cancel` follows."""
        self._out.put(pb.SaveRequest(prepare=pb.SaveRequest.Prepare(begin=begin)))

    def prepared(self, until_s: float, *, wanted: Callable[[], bool]) -> pb.SaveReply.Prepared | None:
        """Wait for the reply and its blocks; returns None once `wanted()` is False (see `wake`).

        Raises `SnapshotFailed` when there is no reply until `until_s` (monotonic).
        """
        answer: pb.SaveReply.Prepared | None = None
        while wanted():
            reply = self._next(until_s, "silent", "no answer to prepare")
            if (kind := reply.WhichOneof("kind")) == "blocks":
                self._granted.extend(reply.blocks.granted)
            elif kind == "prepared":
                answer = reply.prepared
            if answer is not None and (kind == "blocks" or answer.refused):
                return answer
        return None

    def wake(self) -> None:
        self._in.put(pb.SaveReply())

    @property
    def spare_blocks(self) -> int:
        return len(self._granted)

    def spare_block(self) -> int:
        """Take a granted block; raises `IndexError` when there is none."""
        return self._granted.popleft()

    def return_blocks(self, blocks: Iterable[int]) -> None:
        """Return blocks that were taken but hold nothing to hand over."""
        self._granted.extend(blocks)

    def cancel(self, cause: str) -> None:
        """End the call without a snapshot; no copy may be running. Does not wait."""
        self._out.put(pb.SaveRequest(abort=pb.SaveRequest.Abort(cause=cause)))
        self._out.put(None)

    def begin(self, begin: pb.SaveRequest.Begin, on_end: Callable[[SnapshotFailed | None], None]) -> None:
        """Request the save. `on_end(failure)` is called once, from the reader thread, after `seal()`; None: staged."""
        self._on_end = on_end
        self._out.put(pb.SaveRequest(begin=begin))

    def begun(self, until_s: float) -> pb.SaveReply.Begun:
        """Wait for the reply until `until_s` (monotonic); raises `SnapshotFailed` for a refused save or no reply."""
        while True:
            reply = self._next(until_s, "silent", "no answer to begin")
            kind = reply.WhichOneof("kind")
            if kind == "begun":
                return reply.begun
            self._granted.extend(reply.blocks.granted)
            if kind not in ("blocks", "prepared", None):  # blocks requested ahead, or a wake-up
                raise SnapshotFailed("error", f"the sidecar answered begin with {kind}")

    def block(self, until_s: float) -> int:
        """Return a writable block; waits until `until_s` (monotonic), and only while the sidecar answers."""
        if not self._granted:
            self._flush()
        while not self._granted:
            reply = self._next_while_alive(
                until_s, "the arena is full and nothing was encoded within the stall budget"
            )
            if reply.WhichOneof("kind") == "blocks":
                self._granted.extend(reply.blocks.granted)
        return self._granted.popleft()

    def send(self, message: pb.SaveRequest, size_bytes: int) -> None:
        """Hand over a descriptor of `size_bytes` in the arena, now or together with the next one."""
        self._held.append(message)
        self._held_bytes += size_bytes
        if self._held_bytes >= HELD_BYTES:
            self._flush()

    def seal(self, seal: pb.SaveRequest.Seal) -> None:
        """All rows are copied and training can continue; `on_end` reports the result."""
        self._sealed = True
        self._held.append(pb.SaveRequest(seal=seal))
        self._flush()
        self._out.put(None)
        self._wake.set()

    def abort(self, cause: str) -> None:
        """Give up; no copy may be running. Waits briefly, so the next begin does not conflict with this save."""
        self._held.clear()
        self._out.put(pb.SaveRequest(abort=pb.SaveRequest.Abort(cause=cause)))
        self._out.put(None)
        self._reader.join(0.0 if self._silent else ABORT_DEADLINE_S)
        if self._reader.is_alive():
            self._call.cancel()

    def _flush(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        if len(held) == 1:
            self._out.put(held[0])
        elif held:
            self._out.put(pb.SaveRequest(batch=pb.SaveRequest.Batch(requests=held)))

    def _next_while_alive(self, until_s: float, what: str) -> pb.SaveReply:
        while self._in.empty() and time.monotonic() + HOLD_S < until_s:
            with contextlib.suppress(queue.Empty):
                return self._record_grant(self._in.get(timeout=HOLD_S))
            if not self.link.is_alive(HOLD_S):
                self._silent = True
                raise SnapshotFailed("silent", "the sidecar does not answer")
        return self._next(until_s, "deadline", what)

    def _next(self, until_s: float, cause: str, what: str) -> pb.SaveReply:
        try:
            reply = self._in.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            self._silent = cause == "silent"
            raise SnapshotFailed(cause, what) from None
        return self._record_grant(reply)

    def _record_grant(self, reply: pb.SaveReply | SnapshotFailed) -> pb.SaveReply:
        if isinstance(reply, SnapshotFailed):
            raise reply
        return reply

    def _watch(self) -> None:
        self._wake.wait()
        if not self.over.wait(STAGED_DEADLINE_S):
            self._call.cancel()

    def _read(self) -> None:
        # Read to the very end: only then has the sidecar released this save and accepts the next one.
        end: SnapshotFailed | None = SnapshotFailed("gone", "the sidecar ended the save without a result")
        has_result = False
        try:
            for reply in self._call:
                kind = reply.WhichOneof("kind")
                if kind == "staged":
                    end, has_result = None, True
                elif kind == "failed":
                    end, has_result = (
                        SnapshotFailed(parse_cause(reply.failed.cause) or Cause.ERROR, reply.failed.message),
                        True,
                    )
                    self._in.put(end)
                elif not self._sealed:
                    self._in.put(reply)
        except grpc.RpcError as error:
            if not has_result:
                code, message = details(error)
                gone = code == grpc.StatusCode.UNAVAILABLE
                end = SnapshotFailed("gone" if gone else "error", f"{code.name}: {message}")
        finally:
            self.over.set()
            self._wake.set()
            if end is not None:
                self._in.put(end)
            self._out.put(None)
            if self._sealed and self._on_end is not None:
                self._on_end(end)
            if self._on_end is not None:
                self._ended()


class PreopenedStream:
    """Opens the next snapshot's call in advance. `current` returns the current attachment."""

    def __init__(self, current: Callable[[], Link | None]) -> None:
        self._current = current
        self._lock = threading.Lock()
        self._preopened: SaveStream | None = None

    def open(self) -> None:
        """Open a call for the current attachment; from any thread. After a failure `take` tries again."""
        link = self._current()
        if link is None:
            return
        with self._lock:
            held = self._preopened
            if held is not None and held.link is link and not held.over.is_set():
                return
            try:
                self._preopened = SaveStream(link, ended=self.open)
            except (grpc.RpcError, ValueError, RuntimeError) as error:
                # The channel is being closed, or the interpreter ends.
                log.debug("save stream not opened in advance: %s", error)
                self._preopened = None

    def take(self, link: Link) -> SaveStream:
        """Return the call for a snapshot over `link`, opened in advance if possible."""
        with self._lock:
            held, self._preopened = self._preopened, None
        if held is not None and held.link is link and not held.over.is_set():
            return held
        return SaveStream(link, ended=self.open)
