"""Attached sessions: liveness, refusals, notices and replacement."""

import threading
import time

import pytest
from deltashard_checkpoint.format.index import box_message, table_message
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar.session.attachment import BadAttach, check_attach, encoded_bytes
from deltashard_sidecar.session.schedule import Schedule
from deltashard_sidecar.session.session import GRACE_S, NOTICES, Notices, Session, Sessions

TABLE = TableSchema(fqn="t", rows=100, columns=8, dtype="float32")


def box(rows: int = 100):
    return box_message(Box(table="t", row_start=0, row_stop=rows, col_start=0, col_stop=8))


def request(**more: object) -> pb.AttachRequest:
    base = {
        "protocol_min": 1,
        "protocol_max": 1,
        "world_size": 1,
        "tables": [table_message(TABLE)],
        "boxes": [box()],
    }
    return pb.AttachRequest(**{**base, **more})  # type: ignore[arg-type]


def session(sessions: Sessions, **more: object) -> Session:
    return sessions.add(request(**more), Schedule(every_s=0, every_steps=0, anchor_s=0))


def test_session_is_alive_before_its_first_lock_and_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new session takes its lock within a grace period. Later only the lock counts, because forks inherit sockets."""
    one = session(Sessions()).presence
    assert one.alive(lock_held=False)
    monkeypatch.setattr(one, "_attached_s", time.monotonic() - GRACE_S - 1)
    assert not one.alive(lock_held=False)
    with one.keep_alive():
        assert one.alive(lock_held=False)
        assert one.alive(lock_held=True)
        assert not one.alive(lock_held=False)


def test_session_is_fenced_until_a_new_attempt_is_open() -> None:
    """A fenced session must not commit. Its resumed and lost steps are dropped with its attempt."""
    one = session(Sessions())
    assert not one.may_commit
    one.opened(pb.OpenReply(attempt=3, resume_seq=9, step=7, last_step_seen=12))
    assert (one.may_commit, one.lost_steps) == (True, 5)
    one.committed(2, pb.Commit(step=8))
    assert (one.durable_step, one.last_commit) == (7, None)
    one.committed(3, pb.Commit(step=9))
    assert one.durable_step == 9
    one.fence = Cause.TAKEN_OVER, "another workload"
    assert not one.may_commit
    one.opened(pb.OpenReply(attempt=4))
    assert (one.may_commit, one.fence, one.durable_step) == (True, None, None)
    assert session(Sessions(), attempt=4).may_commit


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"protocol_min": 2, "protocol_max": 4}, "speaks 2-4"),
        ({"local_rank": 64}, "local rank 64"),
        ({"rank": 1}, "rank 1 of world size 1"),
        ({"layout": "no digest"}, "not the digest of a layout"),
        ({"tables": [table_message(TABLE)] * 2}, "two tables"),
        ({"tables": []}, "is not within a listed table"),
        ({"boxes": [box(101)]}, "is not within a listed table"),
    ],
)
def test_bad_requests_are_refused(more: dict[str, object], message: str) -> None:
    assert check_attach(request(), 64) == 1
    with pytest.raises(BadAttach, match=message):
        check_attach(request(**more), 64)


def test_size_of_a_full_snapshot_counts_codes_state_and_blobs() -> None:
    """In q8 a row has 8 codes and 8 bytes of scale and bias. Blobs count unchanged."""
    assert encoded_bytes(request(blob_bytes=5), encoding="q8", state_encoding="fp32") == 100 * (8 + 8) + 5
    assert encoded_bytes(request(), encoding="fp32", state_encoding="fp32") == 100 * 32


def test_notices_are_bounded_and_survive_a_lost_reader() -> None:
    """A trainer that does not read loses the oldest notices. Notices queued before the close can still be read."""
    queue, alive, read = Notices(), [True], []
    thread = threading.Thread(target=lambda: read.extend(queue.read(lambda: alive[0])))
    thread.start()
    alive[0] = False
    queue.wake()
    thread.join(60)
    assert not thread.is_alive()
    for seq in range(NOTICES + 10):
        queue.post(pb.Notice(committed=pb.Commit(seq=seq)))
    queue.close()
    assert not read
    assert [notice.committed.seq for notice in queue.read(lambda: True)] == list(range(10, NOTICES + 10))
