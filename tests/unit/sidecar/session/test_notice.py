"""Notices: in order, bounded, ended by close or by a reader that is gone."""

import threading

from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar.session.notice import LIMIT, Notices, save_failed


def test_notices_come_in_order_and_end_with_close() -> None:
    """What was queued before the close is still read."""
    queue = Notices()
    queue.post(pb.Notice(committed=pb.Commit(seq=1)))
    queue.post(save_failed(2, Cause.BUSY, "why"))
    queue.close()
    kinds = [notice.WhichOneof("kind") for notice in queue.read(lambda: True)]
    assert kinds == ["committed", "save_failed"]


def test_a_trainer_that_does_not_read_loses_the_oldest() -> None:
    """Memory is bounded; nothing depends on one notice."""
    queue = Notices()
    for seq in range(LIMIT + 10):
        queue.post(pb.Notice(committed=pb.Commit(seq=seq)))
    queue.close()
    seqs = [notice.committed.seq for notice in queue.read(lambda: True)]
    assert seqs == list(range(10, LIMIT + 10))


def test_a_reader_that_is_gone_takes_nothing_with_it() -> None:
    """The next one reads what the dead one left."""
    queue = Notices()
    alive = [True]
    read: list[pb.Notice] = []
    thread = threading.Thread(target=lambda: read.extend(queue.read(lambda: alive[0])))
    thread.start()
    alive[0] = False
    queue.poke()
    thread.join(60)
    assert not thread.is_alive()
    queue.post(pb.Notice(committed=pb.Commit(seq=5)))
    queue.close()
    assert not read
    assert [n.committed.seq for n in queue.read(lambda: True)] == [5]
