"""Who is attached: signs of life, refusals, and sessions that replace one another."""

import time

import pytest
from deltashard_checkpoint.format.index import box_message, table_message
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar.session.attachment import BadAttach, check_attach
from deltashard_sidecar.session.capacity import encoded_bytes
from deltashard_sidecar.session.schedule import Schedule
from deltashard_sidecar.session.session import GRACE_S, Session, Sessions, UnknownSession

TABLE = TableSchema(fqn="t", rows=100, columns=8, dtype="float32")
BOX = Box(table="t", row_start=0, row_stop=100, col_start=0, col_stop=8)


def request(**more: object) -> pb.AttachRequest:
    """A good request, changed."""
    base = {
        "protocol_min": 1,
        "protocol_max": 1,
        "world_size": 1,
        "tables": [table_message(TABLE)],
        "boxes": [box_message(BOX)],
    }
    return pb.AttachRequest(**{**base, **more})  # type: ignore[arg-type]


def session(sessions: Sessions, **more: object) -> Session:
    """One attachment."""
    return sessions.add(request(**more), Schedule(every_s=0, every_steps=0, anchor_s=0))


def test_a_session_is_found_until_it_is_replaced_or_closed() -> None:
    """By id; an older id is answered with the remedy."""
    sessions = Sessions()
    first = session(sessions)
    assert sessions.get(first.id) is first
    sessions.close(first)
    second = session(sessions)
    assert sessions.of_rank(0) is second
    with pytest.raises(UnknownSession, match="attach again"):
        sessions.get(first.id)


def test_a_young_session_lives_without_a_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has yet to take its lock and to watch; later silence is death."""
    one = session(Sessions()).presence
    assert one.alive(lock_held=False)
    monkeypatch.setattr(one, "_attached_s", time.monotonic() - GRACE_S - 1)
    assert not one.alive(lock_held=False)
    with one.sign():
        assert one.alive(lock_held=False)
    assert not one.alive(lock_held=False)


def test_once_locked_only_the_lock_counts() -> None:
    """Forked workers keep the sockets of a killed trainer open, but not its lock."""
    one = session(Sessions()).presence
    with one.sign():
        assert one.alive(lock_held=True)
        assert not one.alive(lock_held=False)


def test_the_streams_of_a_trainer_that_is_gone_are_ended() -> None:
    """Those that are open, each once; one that ended by itself is left alone."""
    one = session(Sessions()).presence
    ended: list[str] = []
    with one.stream(lambda: ended.append("first")):
        pass
    with one.stream(lambda: ended.append("second")):
        one.cancel_streams()
        one.cancel_streams()
    assert ended == ["second"]


def test_a_fence_holds_until_a_new_attempt_is_open() -> None:
    """A fenced session may not commit; what it had resumed and lost is forgotten with its attempt."""
    sessions = Sessions()
    one = session(sessions)
    assert not one.may_commit
    one.opened(pb.OpenReply(attempt=3, resume_seq=9, step=7, last_step_seen=12))
    assert (one.may_commit, one.attempt.lost_steps) == (True, 5)
    one.attempt.committed(2, pb.Commit(step=8))
    assert (one.attempt.durable_step, one.attempt.last_commit) == (7, None)
    one.attempt.committed(3, pb.Commit(step=9))
    assert one.attempt.durable_step == 9
    one.fenced(Cause.TAKEN_OVER, "another workload")
    assert not one.may_commit
    one.opened(pb.OpenReply(attempt=4))
    assert (one.may_commit, one.fence, one.attempt.durable_step) == (True, None, None)
    sessions.close(one)
    one.fenced(Cause.FENCED, "too late to matter")
    assert one.closed
    assert session(sessions, attempt=4).may_commit


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"protocol_min": 2, "protocol_max": 4}, "speaks 2-4"),
        ({"local_rank": 64}, "local rank 64"),
        ({"rank": 1}, "rank 1 of world size 1"),
        ({"tables": [table_message(TABLE)] * 2}, "two tables"),
        ({"tables": []}, "is in no table"),
        (
            {"boxes": [box_message(Box(table="t", row_start=0, row_stop=101, col_start=0, col_stop=8))]},
            "is in no table",
        ),
    ],
)
def test_bad_requests_are_refused(more: dict[str, object], says: str) -> None:
    """With what is wrong."""
    assert check_attach(request(), 64) == 1
    with pytest.raises(BadAttach, match=says):
        check_attach(request(**more), 64)


def test_the_size_of_a_full_cut() -> None:
    """q8 keeps 8 codes and 8 bytes of scale and bias a row; blobs count as they are."""
    assert encoded_bytes(request(blob_bytes=5), encoding="q8", state_encoding="fp32") == 100 * (8 + 8) + 5
    assert encoded_bytes(request(), encoding="fp32", state_encoding="fp32") == 100 * 32
