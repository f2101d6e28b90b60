"""What a restore does with the frames it is sent."""

import pytest
from deltashard.errors import RestoreFailed
from deltashard.restore.frame_stream import Arrivals
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_proto.v1 import index_pb2
from deltashard_proto.v1 import trainer_pb2 as pb


def _row(*, after_blobs: bool) -> pb.RestoreReply.Filled:
    return pb.RestoreReply.Filled(table=index_pb2.TableSchema(fqn="t"), after_blobs=after_blobs)


def test_rows_before_blobs_are_an_older_sidecars() -> None:
    """Nothing was judged yet, so nothing of the model may change; and the checkpoint is not to blame."""
    arrivals = Arrivals(targets=None, judge=None)
    with pytest.raises(RestoreFailed, match="older than this library"):
        arrivals.take(memoryview(b""), None, _row(after_blobs=False))


def test_rows_of_a_checkpoint_without_blobs_are_not_taken() -> None:
    """It is not whole: an older one may be."""
    arrivals = Arrivals(targets=None, judge=None)
    with pytest.raises(InvalidCheckpoint, match="rng"):
        arrivals.take(memoryview(b""), None, _row(after_blobs=True))
