"""Weights are read without their optimizer state: the test counts the bytes that leave the store."""

import numpy as np
import pytest
from deltashard_checkpoint.format.frame_encoder import encode_row_frames
from deltashard_checkpoint.format.object_key import parse_pack_key
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.vocabulary import ENCODINGS

from tests.support.checkpoint.sample import RUN, SampleRun, whole

ROWS, COLUMNS, BATCH = 300_000, 64, 15_872
"""The number of rows that a trainer sends at once."""
TABLE = TableSchema(
    fqn="items", rows=ROWS, columns=COLUMNS, dtype="float32",
    fields=(FieldSpec(name="sum", kind="pointwise", dtype="float32"),),
)  # fmt: skip
MAX_BYTES = 12_000_000


class PackByteCounter(MemoryStore):
    """Counts the bytes of packs that are read, with and without state."""

    def __init__(self) -> None:
        super().__init__()
        self.read = {False: 0, True: 0}

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        self.read[parse_pack_key(key[len(RUN) + 1 :]).state] += len(out)
        super().get_into(key, offset, out)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PackByteCounter:
    """Return a store with one checkpoint under torch's Adagrad, in q8."""
    made = PackByteCounter()
    run = SampleRun(tmp_path_factory.mktemp("run"), store=made)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((ROWS, COLUMNS), np.float32)
    state = {"sum": rng.random((ROWS, COLUMNS), np.float32)}
    block = RowBlock.of_whole_rows(TABLE, range(ROWS), weights, state)
    options = EncodeOptions(encoding=ENCODINGS["q8"])
    frames = [
        frame
        for at in range(0, ROWS, BATCH)
        for frame in encode_row_frames(block[at : at + BATCH], options, step=1)
    ]
    run.save([TABLE], [([whole(TABLE)], frames)], step=1, pack_bytes=16 << 20)
    run.cache.close()
    made.state, made.log = state["sum"], run.log
    return made


def test_reading_ten_rows_reads_no_state_bytes(store: PackByteCounter) -> None:
    state = store.log.refresh()
    opened = OpenCheckpoint.of(store, state, state.newest())
    ids = np.linspace(0, ROWS - 1, 10).astype(np.int64)
    store.read = {False: 0, True: 0}
    found = opened.rows(TABLE, ids, fields=False)
    assert found.weights.shape == (10, COLUMNS)
    assert store.read[True] == 0
    assert 0 < store.read[False] <= MAX_BYTES
    stored = sum(info.size_bytes for info in store.list(f"{RUN}/data/"))
    assert stored > 8 * MAX_BYTES, "the rest is state, and frames of other rows"
    store.read = {False: 0, True: 0}
    full = opened.rows(TABLE, ids)
    np.testing.assert_array_equal(full.weights, found.weights)
    np.testing.assert_array_equal(full.fields["sum"], store.state[ids])
    assert store.read[True] > 2 * store.read[False]
