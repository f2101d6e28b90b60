"""Who is attached. One `Session` per attachment of a trainer process; a rank that attaches again replaces its session.

A session outlives its streams, not its process: the writer lock on the control line and the Watch stream tell whether
the process lives. When both are gone the session is dropped by `reap`, and whatever it had staged goes on alone.
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
"""A trainer has so long after Attach to take its writer lock or to watch before it counts as dead."""
STALL_ABORTS = 2
"""After so many saves in a row aborted for their stall, the next one waits it out."""


NOTICES = 256
"""Those that one trainer has not read are at most so many."""


class UnknownSession(UserError):
    """The session was replaced by a newer attachment of the rank, or belongs to an earlier sidecar: attach again."""

    cause = Cause.LOST


class Presence:
    """Signs of life of one trainer process, and its open streams. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached_s = time.monotonic()
        self._live_streams = 0
        """Watch and Restore streams that are read."""
        self._locked = False
        """Whether its process was ever seen to hold the writer lock."""
        self._cancels: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def keep_alive(self) -> Iterator[None]:
        """A stream that shows, as long as it lasts, that the process lives."""
        with self._lock:
            self._live_streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._live_streams -= 1

    @contextlib.contextmanager
    def stream(self, cancel: Callable[[], None]) -> Iterator[None]:
        """A stream that `cancel` ends when the trainer is gone."""
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
        """Whether its process still shows a sign of life.

        Once it held its writer lock, that alone counts: forked workers inherit its sockets, so its streams may look
        alive long after it was killed, but never its lock.
        """
        with self._lock:
            self._locked |= lock_held
            is_new = time.monotonic() - self._attached_s < GRACE_S
            return lock_held if self._locked else self._live_streams > 0 or is_new


class Notices:
    """Notices on their way to one trainer, unasked. Thread-safe.

    A trainer that does not read loses the oldest. That is safe because nothing depends on a single notice: AttachReply
    carries the last commit, and a fenced attempt is refused again at its next save.
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
        """End every reader once the queue is empty."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def wake(self) -> None:
        with self._ready:
            self._ready.notify_all()

    def read(self, alive: Callable[[], bool]) -> Iterator[pb.Notice]:
        """Notices as they come, until closed or until `alive()` is false (call `wake` when it changes)."""
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._closed or not alive())
                if not self._queue or not alive():
                    return  # what is queued is left to the next reader
                notice = self._queue.popleft()
            yield notice


class Session:
    """One attached trainer process, and the attempt that it trains under. A fall-back or a takeover replaces that.

    Thread-safe, but `schedule` and `urgent`, which `TrainerControl` writes under its lock, and `stall_aborts`, which
    the rank's saves write one at a time.
    """

    def __init__(self, attachment: Attachment, schedule: Schedule, *, attempt: int | None) -> None:
        self.attachment = attachment
        self.notices = Notices()
        self.presence = Presence()
        self.schedule = schedule
        self.urgent = ""
        """Why a save is wanted now; empty: none is."""
        self.stall_aborts = 0
        """Saves in a row that the trainer aborted for their stall budget."""
        self.closed = False
        """What had begun before goes on alone; calls are answered with `UnknownSession`."""
        self.attempt = attempt
        """Its number in the log; None before one is open."""
        self.layout = attachment.layout
        """Digest of the layout of its ranks; empty: one rank, which holds every table whole."""
        self.fence: tuple[Cause, str] | None = None
        """Why the attempt can never commit again; None while it can."""
        self.open_requested_s = 0.0
        """When it was asked for, Unix seconds."""
        self.resumed = False
        """Whether it resumes from a checkpoint."""
        self.restored = False
        """Whether every row of that was handed over."""
        self.lost_steps = 0
        """Steps lost by the restart that this attempt is, as far as this arena saw."""
        self.last_commit: pb.Commit | None = None
        self.durable_step: int | None = None
        """Newest step that a crash of the trainer cannot take back."""
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
        """An attempt was opened, in place of any before."""
        lost = reply.last_step_seen - reply.step if reply.HasField("last_step_seen") else 0
        with self._lock:
            self.attempt, self.layout, self.fence = reply.attempt, reply.layout, None
            self.last_commit = None
            self.resumed, self.restored = reply.HasField("resume_seq"), False
            self.durable_step = reply.step if self.resumed else None
            self.lost_steps = max(0, lost)

    def committed(self, attempt: int, commit: pb.Commit) -> None:
        """A save of this attempt is durable; of another attempt than the session's it is no news."""
        with self._lock:
            if attempt == self.attempt:
                self.last_commit, self.durable_step = commit, commit.step

    def mark_restored(self) -> bool:
        """Every row of what it resumes from was handed over; True the first time."""
        with self._lock:
            first, self.restored = not self.restored, True
            return first

    def close(self) -> None:
        """It is over; Watch streams end once they have read what is queued."""
        self.closed = True
        self.notices.close()


class Sessions:
    """All attachments, by session id and by local rank. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rank: dict[int, Session] = {}

    def add(self, request: pb.AttachRequest, schedule: Schedule) -> Session:
        """A session for this process; the rank's older one must have been closed."""
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
