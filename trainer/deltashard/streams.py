"""One Save call: messages out through a queue, replies in through a thread, deadlines on everything that waits.

training thread   begin() -> block() / send() ... -> seal() or abort(); waits only for Begun and for granted blocks
gRPC's threads    take the outgoing messages
reader thread     replies; after the seal it reports how the call ended (`on_end`), while training goes on
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import grpc
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.errors import EnvironmentFault
from deltashard.sessions import Link, details

BEGIN_DEADLINE_S = 5.0
STAGED_DEADLINE_S = 60.0
ABORT_DEADLINE_S = 1.0
LONGEST_S = 6 * 3600.0


class CutFailed(EnvironmentFault):
    """This cut will not become a checkpoint; `cause` is a word for counting (busy, deadline, gone, fenced, ...)."""

    def __init__(self, cause: str, message: str) -> None:
        self.cause = cause
        super().__init__(f"{cause}: {message}", where="save")


class SaveStream:
    """See the module. `on_end(failure)` is called once, from the reader thread, after `seal()`: None means staged."""

    def __init__(self, link: Link, on_end: Callable[[CutFailed | None], None]) -> None:
        self._out: queue.SimpleQueue[pb.SaveRequest | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[pb.SaveReply | CutFailed] = queue.SimpleQueue()
        self._granted: deque[int] = deque()
        self._on_end = on_end
        self._sealed = threading.Event()
        self._timer: threading.Timer | None = None
        self._call = link.stub.Save(iter(self._out.get, None), timeout=LONGEST_S)
        self._reader = threading.Thread(target=self._read, name="deltashard-save", daemon=True)
        self._reader.start()

    def begin(self, begin: pb.SaveRequest.Begin) -> pb.SaveReply.Begun:
        """Ask for the save; raises `CutFailed` when it is refused or nobody answers in time."""
        self._out.put(pb.SaveRequest(begin=begin))
        reply = self._next(time.monotonic() + BEGIN_DEADLINE_S, what="no answer to begin")
        while reply.WhichOneof("kind") == "blocks":
            self._granted.extend(reply.blocks.granted)
            reply = self._next(time.monotonic() + BEGIN_DEADLINE_S, what="no answer to begin")
        if reply.WhichOneof("kind") != "begun":
            raise CutFailed("error", f"the sidecar answered begin with {reply.WhichOneof('kind')}")
        return reply.begun

    def block(self, until_s: float) -> int:
        """A block that may be written now; waits until `until_s` (monotonic)."""
        while not self._granted:
            reply = self._next(
                until_s, what="the arena is full and nothing was encoded within the stall budget"
            )
            if reply.WhichOneof("kind") == "blocks":
                self._granted.extend(reply.blocks.granted)
        return self._granted.popleft()

    def send(self, message: pb.SaveRequest) -> None:
        """Hand a descriptor over."""
        self._out.put(message)

    def seal(self, seal: pb.SaveRequest.Seal) -> None:
        """All is copied. The trainer may go on; `on_end` tells the rest."""
        self._sealed.set()
        self._out.put(pb.SaveRequest(seal=seal))
        self._out.put(None)
        self._timer = threading.Timer(STAGED_DEADLINE_S, self._call.cancel)
        self._timer.daemon = True
        self._timer.start()

    def abort(self, cause: str) -> None:
        """Give up; no copy may be running any more. Waits a moment, so that the next begin does not find this save."""
        self._out.put(pb.SaveRequest(abort=pb.SaveRequest.Abort(cause=cause)))
        self._out.put(None)
        self._reader.join(ABORT_DEADLINE_S)

    def _next(self, until_s: float, *, what: str) -> pb.SaveReply:
        try:
            reply = self._in.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise CutFailed("deadline", what) from None
        if isinstance(reply, CutFailed):
            raise reply
        return reply

    def _read(self) -> None:
        # Read to the very end: only then has the sidecar let go of this save, and takes the next one.
        end: CutFailed | None = CutFailed("gone", "the sidecar ended the save without a word")
        settled = False
        try:
            for reply in self._call:
                kind = reply.WhichOneof("kind")
                if kind == "staged":
                    end, settled = None, True
                elif kind == "failed":
                    end, settled = CutFailed(reply.failed.cause or "error", reply.failed.message), True
                    self._in.put(end)
                elif not self._sealed.is_set():
                    self._in.put(reply)
        except grpc.RpcError as error:
            if not settled:
                code, message = details(error)
                gone = code == grpc.StatusCode.UNAVAILABLE
                end = CutFailed("gone" if gone else "error", f"{code.name}: {message}")
        finally:
            if end is not None:
                self._in.put(end)
            self._out.put(None)
            if self._timer is not None:
                self._timer.cancel()
            if self._sealed.is_set():
                self._on_end(end)
