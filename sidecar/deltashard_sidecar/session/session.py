"""Who is attached. One `Session` per attachment of a trainer process; a rank that attaches again replaces its session.

A session outlives its streams, not its process: the writer lock on the control line and the Watch stream tell whether
the process lives. When both are gone the session is dropped by `reap`, and whatever it had staged goes on alone.

Its parts, each written by one class: `who` (frozen), `presence`, `attempt`, `stalls` (their own methods), `schedule`
and `urgent` (`TrainerControl`, under its lock), `fence` and `closed` (`Session`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from deltashard_checkpoint.errors import UserError
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.session.attachment import Attachment
from deltashard_sidecar.session.attempt import Fence, SessionAttempt
from deltashard_sidecar.session.notice import Notices
from deltashard_sidecar.session.schedule import Schedule

GRACE_S = 20.0
"""A trainer has so long after Attach to take its writer lock or to watch before it counts as dead."""
STALL_ABORTS = 2
"""After so many saves in a row aborted for their stall, the next one waits it out."""


class UnknownSession(UserError):
    """The session was replaced by a newer attachment of the rank, or belongs to an earlier sidecar: attach again."""

    cause = Cause.LOST


class Presence:
    """Signs of life of one trainer process, and its open streams. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached_s = time.monotonic()
        self._signs = 0
        """Watch and Restore streams that are read."""
        self._locked = False
        """Whether its process was ever seen to hold the writer lock."""
        self._cancels: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def sign(self) -> Iterator[None]:
        """A stream that shows, as long as it lasts, that the process lives."""
        with self._lock:
            self._signs += 1
        try:
            yield
        finally:
            with self._lock:
                self._signs -= 1

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
            young = time.monotonic() - self._attached_s < GRACE_S
            return lock_held if self._locked else self._signs > 0 or young


class Stalls:
    """Saves in a row that the trainer aborted for their stall budget; written by the rank's saves, one at a time."""

    def __init__(self) -> None:
        self.aborted = 0

    def sealed(self) -> None:
        self.aborted = 0

    def gave_up(self, *, stalled: bool) -> None:
        """The trainer aborted a cut, for its stall or for another reason."""
        self.aborted = self.aborted + 1 if stalled else 0

    @property
    def wait_out(self) -> bool:
        """Whether the next save has no stall budget."""
        return self.aborted >= STALL_ABORTS


class Session:
    """One attached trainer process. Thread-safe, `schedule` and `urgent` excepted."""

    def __init__(self, who: Attachment, schedule: Schedule, *, attempt: int | None) -> None:
        self.who = who
        self.notices = Notices()
        self.presence = Presence()
        self.attempt = SessionAttempt(attempt, who.layout)
        self.stalls = Stalls()
        self.schedule = schedule
        self.urgent = ""
        """Why a save is wanted now; empty: none is."""
        self.fence: Fence | None = None
        """Why its attempt can never commit again; None while it can."""
        self.closed = False
        """What had begun before goes on alone; calls are answered with `UnknownSession`."""
        self._lock = threading.Lock()

    @property
    def id(self) -> str:
        return self.who.id

    @property
    def may_commit(self) -> bool:
        return self.attempt.number is not None and self.fence is None

    def opened(self, reply: pb.OpenReply) -> None:
        with self._lock:
            self.attempt.opened(reply)
            self.fence = None

    def fenced(self, cause: Cause, why: str) -> None:
        with self._lock:
            self.fence = Fence(cause=cause, why=why)

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
            self._by_rank[session.who.local_rank] = session
        return session

    def get(self, session_id: str) -> Session:
        """Live session of that id; raises `UnknownSession`."""
        with self._lock:
            for session in self._by_rank.values():
                if session.id == session_id and not session.closed:
                    return session
        raise UnknownSession(
            f"session {session_id!r} is not attached",
            where="sidecar",
            remedy="attach again (the library does)",
        )

    def of_rank(self, local_rank: int) -> Session | None:
        with self._lock:
            return self._by_rank.get(local_rank)

    def all(self) -> list[Session]:
        with self._lock:
            return list(self._by_rank.values())

    def ranks(self) -> list[int]:
        with self._lock:
            return list(self._by_rank)

    def close(self, session: Session) -> None:
        with self._lock:
            session.close()
            if self._by_rank.get(session.who.local_rank) is session:
                del self._by_rank[session.who.local_rank]

    def reap(self, lock_held: Callable[[int], bool]) -> list[Session]:
        """Close the sessions whose process is gone; returns them."""
        dead = [s for s in self.all() if not s.presence.alive(lock_held=lock_held(s.who.local_rank))]
        for session in dead:
            self.close(session)
        return dead
