"""What a restore does with the frames it is sent."""

import numpy as np
import pytest
from deltashard.restore.frame_stream import Arrivals
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format.frame import parse_frame
from deltashard_checkpoint.format.frame_encoder import EncodeOptions, encode_rows
from deltashard_checkpoint.format.row_block import RowBlock
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.vocabulary import encoding_named


def test_rows_of_a_checkpoint_without_blobs_are_not_taken() -> None:
    """Nothing was judged, so nothing of the model may change: it is not whole, and an older one may be."""
    schema = TableSchema(fqn="t", rows=1, columns=4, dtype="float32", fields=())
    weights = np.zeros((1, 4), np.float32)
    rows = RowBlock(schema=schema, ids=range(1), weights=weights, fields={}, columns=range(4))
    frame = encode_rows(rows, EncodeOptions(encoding=encoding_named("fp32")), step=1)
    arrivals = Arrivals(targets=None, judge=None)
    with pytest.raises(InvalidCheckpoint, match="rng"):
        arrivals.take(parse_frame(frame.data), True)
