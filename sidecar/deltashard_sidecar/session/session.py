"""Sessions of attached trainers: one per attachment of a process. A rank that attaches again gets a new session.

A session outlives its streams but not its process. The process counts as alive while it holds the writer lock on its
control line or, before it took the lock, has open streams. Otherwise `reap` drops the session; a staged save continues.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from deltashard_checkpoint.errors import UserError
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.session.attachment import Attachment
from deltashard_sidecar.session.schedule import Schedule

GRACE_S = 20.0
"""Time after Attach within which a trainer must take its writer lock or open Watch to count as alive."""
STALL_ABORTS = 2
"""Number of consecutive saves aborted for their stall after which the next one has no stall budget."""


NOTICES = 256
"""Most unread notices of one trainer; older ones are dropped."""


class UnknownSession(UserError):
    """The session was replaced by a newer attachment of the rank, or belongs to a previous sidecar: attach again."""

    cause = Cause.LOST


class Presence:
    """Liveness of one trainer process, and its open streams. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached_s = time.monotonic()
        self._live_streams = 0
        self._locked = False
        """Whether its process has ever been seen to hold the writer lock."""
        self._cancels: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def keep_alive(self) -> Iterator[None]:
        with self._lock:
            self._live_streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._live_streams -= 1

    @contextlib.contextmanager
    def stream(self, cancel: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            self._cancels.append(cancel)
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._cancels.remove(cancel)

    def cancel_streams(self) -> None:
        with self._lock:
            cancels, self._cancels = self._cancels, []
        for cancel in cancels:
            cancel()

    def alive(self, *, lock_held: bool) -> bool:
        """Return whether the process shows a sign of life.

        Once it has held its writer lock, only the lock counts. Forked workers inherit its sockets, so streams may stay
        open long after it was killed, but they do not inherit the lock.
        """
        with self._lock:
            self._locked |= lock_held
            is_new = time.monotonic() - self._attached_s < GRACE_S
            return lock_held if self._locked else self._live_streams > 0 or is_new


class Notices:
    """Queue of notices to one trainer. Thread-safe.

    A trainer that does not read loses the oldest notices. The protocol tolerates that: AttachReply has the
    last commit, and a fenced attempt is refused again at its next save.
    """

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._queue: deque[pb.Notice] = deque(maxlen=NOTICES)
        self._closed = False

    def post(self, notice: pb.Notice) -> None:
        with self._ready:
            self._queue.append(notice)
            self._ready.notify_all()

    def close(self) -> None:
        """End all readers once the queue is empty."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def wake(self) -> None:
        with self._ready:
            self._ready.notify_all()

    def read(self, alive: Callable[[], bool]) -> Iterator[pb.Notice]:
        """Yield notices until closed or until `alive()` is false (call `wake` when it changes)."""
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._closed or not alive())
                if not self._queue or not alive():
                    return  # the next reader gets what is still queued
                notice = self._queue.popleft()
            yield notice


class Session:
    """One attached trainer process and its attempt, which a fall-back or a takeover replaces.

    Thread-safe, except for `schedule` and `urgent`, which `TrainerControl` writes under its lock, and `stall_aborts`,
    which the rank's saves write one at a time.
    """

    def __init__(self, attachment: Attachment, schedule: Schedule, *, attempt: int | None) -> None:
        self.attachment = attachment
        self.notices = Notices()
        self.presence = Presence()
        self.schedule = schedule
        self.urgent = ""
        """Reason of an urgent save that is requested; empty: none."""
        self.stall_aborts = 0
        self.closed = False
        """A closed session's saves continue without it; new calls fail with `UnknownSession`."""
        self.attempt = attempt
        self.layout = attachment.layout
        """Digest of its ranks' layout; empty: one rank, which has every table whole."""
        self.fence: tuple[Cause, str] | None = None
        """Why the attempt can never commit again; None: it can."""
        self.open_requested_s = 0.0
        self.resumed = False
        self.restored = False
        self.lost_steps = 0
        self.last_commit: pb.Commit | None = None
        self.durable_step: int | None = None
        """Newest step that survives a crash of the trainer."""
        self._lock = threading.Lock()

    @property
    def id(self) -> str:
        return self.attachment.id

    @property
    def may_commit(self) -> bool:
        return self.attempt is not None and self.fence is None

    @property
    def waits_for_stall(self) -> bool:
        return self.stall_aborts >= STALL_ABORTS

    def opened(self, reply: pb.OpenReply) -> None:
        lost = reply.last_step_seen - reply.step if reply.HasField("last_step_seen") else 0
        with self._lock:
            self.attempt, self.layout, self.fence = reply.attempt, reply.layout, None
            self.last_commit = None
            self.resumed, self.restored = reply.HasField("resume_seq"), False
            self.durable_step = reply.step if self.resumed else None
            self.lost_steps = max(0, lost)

    def committed(self, attempt: int, commit: pb.Commit) -> None:
        with self._lock:
            if attempt == self.attempt:
                self.last_commit, self.durable_step = commit, commit.step

    def mark_restored(self) -> bool:
        """Record that the checkpoint it resumes from was sent completely; returns True the first time."""
        with self._lock:
            first, self.restored = not self.restored, True
            return first

    def close(self) -> None:
        self.closed = True
        self.notices.close()


class Sessions:
    """All sessions, by id and by local rank. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rank: dict[int, Session] = {}

    def add(self, request: pb.AttachRequest, schedule: Schedule) -> Session:
        """Add a session for this process; the rank's previous one must be closed."""
        attempt = request.attempt if request.HasField("attempt") else None
        session = Session(Attachment.of(request), schedule, attempt=attempt)
        with self._lock:
            self._by_rank[session.attachment.local_rank] = session
        return session

    def get(self, session_id: str) -> Session:
        for session in self.all():
            if session.id == session_id and not session.closed:
                return session
        what = f"session {session_id!r} is not attached"
        raise UnknownSession(what, where="sidecar", remedy="attach again (the library does)")

    def of_rank(self, local_rank: int) -> Session | None:
        with self._lock:
            return self._by_rank.get(local_rank)

    def all(self) -> list[Session]:
        with self._lock:
            return list(self._by_rank.values())

    def close(self, session: Session) -> None:
        with self._lock:
            session.close()
            if self._by_rank.get(session.attachment.local_rank) is session:
                del self._by_rank[session.attachment.local_rank]

    def reap(self, lock_held: Callable[[int], bool]) -> list[Session]:
        dead = [s for s in self.all() if not s.presence.alive(lock_held=lock_held(s.attachment.local_rank))]
        for session in dead:
            self.close(session)
        return dead
