"""Who is attached. One `Session` per attachment of a trainer process; a rank that attaches again replaces its session.

A session outlives its streams, not its process: the writer lock on the control line and the Watch stream tell whether
the process lives. When both are gone the session is dropped by `reap`, and whatever it had staged goes on alone.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.index import box_of, table_of
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.vocabulary import TRAINER_PROTOCOL
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.run.read_ahead import IndexesAhead
from deltashard_sidecar.session.notice import Notices
from deltashard_sidecar.session.schedule import Schedule

GRACE_S = 20.0
"""A trainer has so long after Attach to take its writer lock or to watch before it counts as dead."""


class UnknownSession(UserError):
    """The session was replaced by a newer attachment of the rank, or belongs to an earlier sidecar: attach again."""


class BadAttach(UserError):
    """An Attach that cannot be served: protocol, ranks or tables."""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One attached trainer process."""

    id: str
    rank: int
    local_rank: int
    world_size: int
    pid: int
    tables: tuple[TableSchema, ...]
    boxes: tuple[Box, ...]
    fingerprint: dict[str, str]
    schedule: Schedule
    attempt: int | None = None
    notices: Notices = field(default_factory=Notices)
    attached_s: float = field(default_factory=time.monotonic)
    watchers: int = 0
    streams: int = 0
    closed: bool = False
    locked: bool = False
    """Whether its process was ever seen to hold the writer lock."""
    fenced: str = ""
    """Why this attempt can never commit again; empty while it can."""
    fenced_cause: Cause = Cause.FENCED
    """With `fenced`: fenced, or taken_over by another workload."""
    stall_aborts: int = 0
    """Saves in a row that the trainer aborted for their stall budget."""
    last_commit: pb.Commit | None = None
    urgent_reason: str = ""
    opened_s: float = 0.0
    """When its attempt was opened, monotonic."""
    opened_at_s: float = 0.0
    """The same, Unix seconds."""
    ahead: IndexesAhead | None = None
    """Indexes that the restore which follows will want; it takes them."""
    resumed: bool = False
    """Whether its attempt resumes from a checkpoint."""
    restored: bool = False
    """Whether every row of that was handed over."""
    durable_step: int | None = None
    """The newest step that a crash of the trainer cannot take back."""
    lost_steps: int = 0
    """By the restart that this attempt is, as far as this arena saw."""

    def alive(self, *, lock_held: bool) -> bool:
        """Whether its process still shows a sign of life.

        Once it held its writer lock, that alone counts: forked workers inherit its sockets, so its streams may look
        alive long after it was killed, but never its lock.
        """
        self.locked |= lock_held
        if self.closed or self.locked:
            return lock_held and not self.closed
        young = time.monotonic() - self.attached_s < GRACE_S
        return self.watchers > 0 or self.streams > 0 or young


def check_attach(request: pb.AttachRequest, lines: int) -> int:
    """The protocol version both sides speak; raises `BadAttach` for what cannot be served."""
    protocol = TRAINER_PROTOCOL.common(request.protocol_min, request.protocol_max)
    if protocol is None:
        raise BadAttach(
            f"no protocol in common: the trainer speaks {request.protocol_min}-{request.protocol_max}, "
            f"this sidecar {TRAINER_PROTOCOL.least}-{TRAINER_PROTOCOL.most}",
            where="attach",
            remedy="use trainer library and sidecar image of neighbouring versions",
        )
    if request.local_rank >= lines:
        raise BadAttach(f"local rank {request.local_rank}: at most {lines} trainers a pod", where="attach")
    if request.rank >= max(1, request.world_size):
        raise BadAttach(f"rank {request.rank} of world size {request.world_size}", where="attach")
    named = {table.fqn: table for table in request.tables}
    if len(named) != len(request.tables):
        raise BadAttach("two tables have one name", where="attach")
    for box in request.boxes:
        table = named.get(box.table)
        if (
            table is None
            or not box.row_start < box.row_stop <= table.rows
            or not box.col_start < box.col_stop <= table.columns
        ):
            raise BadAttach(f"box {box.table}[{box.row_start}:{box.row_stop}] is in no table", where="attach")
    return protocol


class Sessions:
    """All attachments, by session id and by local rank. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rank: dict[int, Session] = {}

    def add(self, request: pb.AttachRequest, schedule: Schedule) -> Session:
        """A session for this process; the rank's older one must have been closed."""
        session = Session(
            id=secrets.token_hex(8),
            rank=request.rank,
            local_rank=request.local_rank,
            world_size=max(1, request.world_size),
            pid=request.pid,
            tables=tuple(table_of(t) for t in request.tables),
            boxes=tuple(box_of(b) for b in request.boxes),
            fingerprint=dict(request.fingerprint),
            schedule=schedule,
            attempt=request.attempt if request.HasField("attempt") else None,
        )
        with self._lock:
            self._by_rank[session.local_rank] = session
        return session

    def get(self, session_id: str) -> Session:
        """The live session of that id; raises `UnknownSession`."""
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
        """The rank's session, if any."""
        with self._lock:
            return self._by_rank.get(local_rank)

    def all(self) -> list[Session]:
        """Every session."""
        with self._lock:
            return list(self._by_rank.values())

    def close(self, session: Session) -> None:
        """Forget a session; its Watch streams end."""
        with self._lock:
            session.closed = True
            if self._by_rank.get(session.local_rank) is session:
                del self._by_rank[session.local_rank]
        session.notices.close()

    def reap(self, lock_held: Callable[[int], bool]) -> list[Session]:
        """Close the sessions whose process is gone; returns them."""
        dead = [s for s in self.all() if not s.alive(lock_held=lock_held(s.local_rank))]
        for session in dead:
            self.close(session)
        return dead
