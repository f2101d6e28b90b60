"""The session with the sidecar: attaches, watches, and attaches again after a loss, without blocking training.

    CONNECTED --(Watch stream ends)--> AWAY --(background: find or start a sidecar, Attach)--> CONNECTED
        |                                |
        +---- fenced (by any answer) ----+---> FENCED: permanent; the training thread raises

A `Link` is one attachment: channel, session id, mapped arena, control line. The training thread reads the attribute
`link` and takes snapshots only while there is one. One daemon thread watches. It appends events (commit, failure,
policy,
fenced, link lost or attached) to `events` and calls `wake`. The training thread applies them at its next boundary; the
daemon never changes marks or handles.

Every call has a deadline, except Watch, whose end signals the loss of the sidecar. A sidecar that exists but does not
answer (stopped, swapped out) is detected by a snapshot of the training thread: `suspect` drops the link, and only the
session thread waits until the sidecar answers again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from deltashard_proto.arena_layout import Arena, ArenaShape
from deltashard_proto.message_limit import MAX_LAYOUT_BYTES, MESSAGE_OPTIONS
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.trainer_pb2_grpc import TrainerStub

from deltashard.attach.launcher import Launcher
from deltashard.attach.lock import lock_line, open_arena, release_arena
from deltashard.attach.pinned import unpin
from deltashard.attach.retry import BACKOFF, Retry
from deltashard.attach.rpc_error import UNANSWERED, details, translate
from deltashard.errors import (
    FencedError,
    RestoreFailed,
    SidecarGone,
    SidecarUnavailable,
    TakenOver,
    UserError,
)

log = logging.getLogger("deltashard")

ATTACH_DEADLINE_S = 90.0
OPEN_DEADLINE_S = 330.0
MIN_DETACH_S = 1.0
"""Minimum time for Detach, even after the deadline of `close()`."""
_ALIVE = "/deltashard.v1.Trainer/Alive"
"""A method that does not exist: its rejection proves that the process runs."""

_OPTIONS = (
    *MESSAGE_OPTIONS,
    # A restarted sidecar serves on the same path: the next channel must not share a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Link:
    """One attachment."""

    path: Path
    """Socket of the sidecar."""
    channel: grpc.Channel
    stub: TrainerStub
    reply: pb.AttachReply
    arena: Arena
    line: memoryview
    """The control line: 8 words."""
    tables: tuple[Any, ...]
    """Schemas of this attachment; batches refer to them by position."""
    attempt: int | None
    """Attempt of this attachment."""

    @property
    def session(self) -> str:
        return str(self.reply.session)

    def open(self, request: pb.OpenRequest, *, deadline_s: float = OPEN_DEADLINE_S) -> pb.OpenReply:
        """Request an attempt; raises `SidecarGone`, `FencedError`, `UserError` or `RestoreFailed`."""
        if (size := len(request.layout)) > MAX_LAYOUT_BYTES:
            raise UserError(
                f"the layout of all ranks has {size} bytes, more than {MAX_LAYOUT_BYTES}",
                where="open attempt",
                remedy="shard tables over fewer ranks: each box takes 32 bytes",
            )
        try:
            reply: pb.OpenReply = self.stub.Open(request, timeout=deadline_s)
        except ValueError as error:  # the session thread has closed the channel of a lost sidecar
            raise SidecarGone(str(error), where="open attempt") from None
        except grpc.RpcError as error:
            # The message is complete; gRPC's traceback would only hide it.
            raise translate(error, where="open attempt", fallback=RestoreFailed) from None
        return reply

    def is_alive(self, timeout_s: float) -> bool:
        """Whether the process at the other end answers within `timeout_s`."""
        try:
            self.channel.unary_unary(_ALIVE, None, None)(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            return details(error)[0] not in UNANSWERED
        except ValueError:  # the channel is closed
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attached:
    """Event: a new link exists."""

    link: Link


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lost:
    """Event: the sidecar is gone, or this session was replaced."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FencedOff:
    """Event: a newer attempt runs, and this one has ended."""

    error: FencedError


Event = pb.Notice | Attached | Lost | FencedOff | Callable[[], None]


class SidecarSession:
    """Keeps this process attached. The training thread may call all methods except those of the daemon."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        request: Callable[[], pb.AttachRequest],
        schemas: Callable[[], tuple[Any, ...]],
        wake: Callable[[], None],
        local_rank: int = 0,
    ) -> None:
        """`request` builds the message of each Attach; `wake` is called after an event was queued."""
        self._launcher = launcher
        self.last_log_error = launcher.last_log_error
        self._request = request
        self._schemas = schemas
        self._wake_trainer = wake
        self._local_rank = local_rank
        self._lock = threading.RLock()
        self.busy = threading.Lock()
        """Held by the training thread while it accesses granted blocks, which an Attach would free."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._watch: Any = None
        self._attaching: grpc.Channel | None = None
        self._suspected = ""
        self._last_request: int | None = None
        self._disconnected_since_s = time.monotonic()
        self.disconnect_reason = "it was not found yet"
        """Reason why there is, or last was, no link."""
        self.refused: tuple[int | None, Exception] | None = None
        """Attempt and error of the last failed Attach, unless the sidecar was gone."""
        self.link: Link | None = None
        self.events: deque[Event] = deque()
        self.fenced: FencedError | None = None
        _live.add(self)

    def connect(self) -> Link:
        """Find or start the sidecar, attach, and start to watch; retries if the sidecar dies meanwhile.

        Raises:
            SidecarUnavailable, UserError, FencedError: The sidecar cannot be reached, or rejects this trainer.
        """
        retry = Retry("attach", pause=self._stop.wait, last_log_error=self.last_log_error)
        with self._lock:
            while True:
                try:
                    with retry.try_once():
                        link = self.link = self._attach()
                    break
                except SidecarGone:
                    retry.pause()
        self._suspected = ""
        self._thread = threading.Thread(target=self._run, name="deltashard-session", daemon=True)
        self._thread.start()
        return link

    def reattach(self, *, until_s: float) -> Link | None:
        """Attach again to the running sidecar because table schemas changed, by `until_s` (monotonic).

        Returns None if the sidecar is disconnected or does not answer in time; the session thread then continues to
        try.
        """
        if not self._lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            return None
        try:
            old = self.link
            if old is None:
                return None
            try:
                link = self._attach_at(old.path, until_s=until_s)
            except (SidecarUnavailable, OSError) as error:
                self.suspect(old, f"attaching again failed: {error}")
                return None
            self.link = link
        finally:
            self._lock.release()
        self._drop(old)
        return link

    @contextlib.contextmanager
    def hold_link(self, link: Link) -> Iterator[None]:
        """Hold `link` during a snapshot. Does not wait: any other holder has found that the link is lost.

        Raises:
            SidecarUnavailable: The link is lost or replaced.
        """
        taken = self.busy.acquire(blocking=False)
        try:
            if not taken or self.link is not link:
                raise SidecarUnavailable("the sidecar has just disconnected", where="save")
            if (
                not link.arena.whole
            ):  # a copy beyond the end of a truncated arena would end this process with SIGBUS
                raise SidecarUnavailable("the arena was truncated", where=str(link.arena.path))
            yield
        finally:
            if taken:
                self.busy.release()

    def suspect(self, link: Link, why: str) -> None:
        """Treat `link`, over which the sidecar did not answer, as lost until an Attach is answered. Thread-safe."""
        if self.link is link:
            self._suspected = why
        link.channel.close()  # ends the Watch

    @property
    def disconnected_s(self) -> float:
        """Seconds since the link was lost; 0 while there is one."""
        return 0.0 if self.link is not None else time.monotonic() - self._disconnected_since_s

    def post(self, event: Event) -> None:
        self.events.append(event)
        self._wake_trainer()

    def next_event(self) -> Event | None:
        """Return the oldest event that is not applied yet, if any; for the training thread."""
        return self.events.popleft() if self.events else None

    def fence(self, error: FencedError) -> None:
        if self.fenced is None:
            self.fenced = error
            self.post(FencedOff(error=error))

    def close(self, *, until_s: float) -> None:
        """Detach, so that the sidecar finishes its saves, stop watching and unlock, by about `until_s` (monotonic)."""
        until_s = max(until_s, time.monotonic() + MIN_DETACH_S)
        self._stop.set()
        self._launcher.cancel()
        attaching = self._attaching
        if attaching is not None:
            attaching.close()
        link: Link | None = None
        if self._lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            link, self.link = self.link, None
            self._lock.release()
        if link is not None:
            with contextlib.suppress(grpc.RpcError, ValueError):
                link.stub.Detach(
                    pb.DetachRequest(session=link.session), timeout=max(0.0, until_s - time.monotonic())
                )
            self._drop(link)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=max(0.0, until_s - time.monotonic()))
        _live.discard(self)

    def abandon(self) -> None:
        """At interpreter exit, stop the thread and the streams without saving or waiting."""
        self._stop.set()
        watch, link = self._watch, self.link
        if watch is not None:
            watch.cancel()
        if link is not None:
            link.channel.close()

    def reset_after_fork(self) -> None:
        """Disable the session in a forked child, where the arena is not mapped."""
        self._stop.set()
        self.link = None

    def _attach(self) -> Link:
        return self._attach_at(self._launcher.ensure(), until_s=time.monotonic() + ATTACH_DEADLINE_S)

    def _attach_at(self, path: Path, *, until_s: float) -> Link:
        channel = grpc.insecure_channel(f"unix:{path}", options=_OPTIONS)
        self._attaching = channel  # so that close() can end it
        try:
            stub = TrainerStub(channel)  # type: ignore[no-untyped-call]  # generated code
            schemas = self._schemas()
            request = self._request()
            self._last_request = request.attempt if request.HasField("attempt") else None
            try:
                with self._free_blocks(until_s):
                    reply = stub.Attach(
                        request, timeout=max(0.0, until_s - time.monotonic()), wait_for_ready=False
                    )
            except ValueError as error:  # closed concurrently
                raise SidecarGone(str(error), where=f"attach to {path}") from None
            except grpc.RpcError as error:
                raise translate(error, where=f"attach to {path}") from None
            shape = ArenaShape.within(reply.arena_bytes, block_bytes=reply.block_bytes)
            arena = open_arena(Path(reply.arena_path), shape)
            try:
                lock_line(arena, self._local_rank)
            except BaseException:
                release_arena(arena)
                raise
        except BaseException:
            channel.close()
            raise
        finally:
            self._attaching = None
        return Link(
            path=path,
            channel=channel,
            stub=stub,
            reply=reply,
            arena=arena,
            line=arena.line(reply.control_line),
            tables=schemas,
            attempt=self._last_request,
        )

    @contextlib.contextmanager
    def _free_blocks(self, until_s: float) -> Iterator[None]:
        """Context in which no snapshot, restore or close is running."""
        if not self.busy.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise SidecarGone("a snapshot or a restore is still running", where="attach")
        try:
            if self._stop.is_set():
                raise SidecarUnavailable("the trainer is closing", where="attach")
            yield
        finally:
            self.busy.release()

    def _drop(self, link: Link) -> None:
        link.channel.close()
        unpin(link.arena)
        release_arena(link.arena)

    def _run(self) -> None:
        failures, reported = 0, ""
        while not self._stop.is_set() and self.fenced is None:
            link = self.link
            if link is None:
                try:
                    with self._lock:
                        if self._stop.is_set():
                            return
                        link = self.link or self._attach()
                        if self._stop.is_set():
                            self._drop(link)
                            return
                        self.link = link
                except FencedError as error:
                    self.fence(error)
                    return
                except Exception as error:  # noqa: BLE001 - training continues despite any error of the sidecar
                    if not isinstance(error, SidecarGone):
                        self.refused = self._last_request, error
                    self.disconnect_reason = str(error)
                    if self.disconnect_reason != reported:
                        reported = self.disconnect_reason
                        log.warning("the sidecar cannot be reached, saves are skipped: %s", error)
                    failures += 1
                    self._stop.wait(BACKOFF.delay_s(failures))
                    continue
                failures, reported, self._suspected, self.refused = 0, "", "", None
                log.info("attached to the sidecar again (session %s)", link.session)
                self.post(Attached(link=link))
            why = self._watch_until_end(link)
            with self._lock:
                lost = self.link is link
                if lost:
                    self.link, self._disconnected_since_s = None, time.monotonic()
                    self.disconnect_reason = why = self._suspected or why
            if lost and not self._stop.is_set():
                with self.busy:
                    self._drop(link)
                log.warning(
                    "the sidecar is gone (%s): training continues, saves are skipped until it is attached again",
                    why,
                )
                self.post(Lost(why=why))

    def _watch_until_end(self, link: Link) -> str:
        try:
            self._watch = link.stub.Watch(pb.WatchRequest(session=link.session))
            for notice in self._watch:
                if notice.WhichOneof("kind") == "fenced":
                    kind = TakenOver if notice.fenced.taken_over else FencedError
                    self.fence(
                        kind(
                            f"attempt {notice.fenced.attempt} was taken over by {notice.fenced.by}: "
                            f"{notice.fenced.message}",
                            where="sidecar",
                            remedy="end this process; the newer one continues training",
                        )
                    )
                else:
                    self.post(notice)
        except grpc.RpcError as error:
            code, message = details(error)
            return f"{code.name}: {message}"
        except ValueError as error:  # the channel was closed by close() or reattach()
            return str(error)
        finally:
            self._watch = None
        return "the session ended"


_live: weakref.WeakSet[SidecarSession] = weakref.WeakSet()


def _abandon_all() -> None:
    for session in list(_live):
        session.abandon()


def _forget_all() -> None:
    for session in list(_live):
        session.reset_after_fork()


atexit.register(_abandon_all)
os.register_at_fork(after_in_child=_forget_all)
