"""Compaction with real frames: restores are bit-identical before and after."""

import numpy as np
import pytest
from deltashard_checkpoint.format.index import decode_index
from deltashard_checkpoint.format.object_key import snapshot_prefix
from deltashard_checkpoint.log.chain import chain
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance import garbage_collection
from deltashard_checkpoint.maintenance.compaction import CompactionAbandoned, compact, compactable
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement
from deltashard_checkpoint.maintenance.row_mover import mover

from tests.support.checkpoint.sample import RUN, SampleModel, SampleRun, box, schema
from tests.support.checkpoint.snapshot import read_checkpoint

TABLE = schema("items", rows=300, columns=16)
HALVES = [[box(TABLE, 0, 150, 0, 16)], [box(TABLE, 150, 300, 0, 16)]]


class CompactedRun(SampleRun):
    """A trainer of two ranks, with a chain of a baseline and several deltas."""

    def __init__(self, directory, encoding="q8", deltas=3):
        super().__init__(directory, world_size=2)
        self.encoding, self.model, self.move = encoding, SampleModel(TABLE), mover(self.cache)
        self.seqs = [self.save_rows(range(300), None)]
        for _ in range(deltas):
            self.seqs.append(self.save_rows(self.changed(), self.seqs[-1]))

    def changed(self) -> np.ndarray:
        ids = self.model.train()
        self.model.weights[ids[0], 3] = np.nan
        return ids

    def save_rows(self, ids, covers: int | None) -> int:
        options = {"step": 10 * (self.snapshot_id + 1), "encoding": self.encoding, "per_frame": 50}
        ranks = [(held, self.model.frames(ids, held[0], **options)) for held in HALVES]
        step = options["step"]
        return self.save([TABLE], ranks, step=step, covers=covers, blobs={"meta": b"step %d" % step})

    def content(self, seq: int) -> tuple:
        snapshot = read_checkpoint(self.store, RUN, f"seq:{seq}")
        arrays = snapshot.tables["items"]
        fields = {name: values.tobytes() for name, values in arrays.fields.items()}
        return arrays.weights.tobytes(), fields, {name: bytes(data) for name, data in snapshot.blobs.items()}

    def index(self, key: str):
        return decode_index(self.store.get(f"{RUN}/{key}"), key=key, run=RUN)

    def retire_elsewhere(self) -> RunLog:
        """Retire the objects of the running compaction from another process, which considers them orphaned."""
        other = RunLog(self.store, RUN)
        orphaned = garbage_collection.orphaned_prefixes(other, other.refresh(), compaction_timeout_s=-1.0)
        append_retirement(other, Retention(), orphaned_prefixes=orphaned)
        return other

    def compact_while(self, act):
        """Compact the newest checkpoint, and call `act` after its rows were moved."""
        return compact(self.log, self.seqs[-1], lambda *args: (self.move(*args), act())[0])


@pytest.mark.parametrize("encoding", ["fp32", "q8", "q4", "q3", "q2"])
def test_compacted_chain_restores_bit_for_bit(tmp_path, encoding):
    job = CompactedRun(tmp_path, encoding)
    later = job.save_rows(job.changed(), job.seqs[-1])
    before = {seq: job.content(seq) for seq in (*job.seqs, later)}
    entry = compact(job.log, job.seqs[-1], job.move)
    assert entry.replaces == job.seqs[-1]
    assert {link.seq for link in chain(job.log.state, later)} == {later, job.seqs[-1]}
    assert {seq: job.content(seq) for seq in before} == before
    retired = append_retirement(job.log, Retention(keep_last=2))
    # Only the objects that the compaction replaced: the old chain is now the second, independent chain.
    assert (retired.checkpoints, retired.prefixes) == ((), (snapshot_prefix(job.attempt, len(job.seqs)),))
    again = job.save_rows(range(300), None)
    more = job.save_rows(job.changed(), again)
    assert set(job.seqs[:-1]) <= set(append_retirement(job.log, Retention(keep_last=2)).checkpoints)
    assert garbage_collection.collect(job.log, grace_s=-1.0).objects > 0
    for seq in job.log.state.checkpoints:
        assert job.content(seq) == before.get(seq, job.content(seq))
    assert more in job.log.state.checkpoints


def test_lossless_frames_are_copied_verbatim_and_baselines_kept(tmp_path):
    job = CompactedRun(tmp_path, deltas=1)
    first, last = job.seqs
    assert compactable(job.log.state, last)
    assert compact(job.log, first, job.move) is None
    entry = compact(job.log, last, job.move)
    (part,) = entry.parts
    index = job.index(part.index_key)
    parts = job.log.state.checkpoints[last].parts
    digests = {place.info.digest for written in parts for place in job.index(written.index_key).places}
    assert digests <= {place.info.digest for place in index.places}
    assert index.rows == entry.rows == 300
    assert compact(job.log, last, job.move) is None
    assert not compactable(job.log.state, last)


def test_retired_or_abandoned_compaction_changes_nothing(tmp_path):
    job = CompactedRun(tmp_path, deltas=1)
    with pytest.raises(CompactionAbandoned, match="retired and may be deleted"):
        job.compact_while(job.retire_elsewhere)
    for _ in range(2):
        job.save_rows(range(300), None)
    with pytest.raises(CompactionAbandoned, match="not live"):
        job.compact_while(lambda: append_retirement(RunLog(job.store, RUN), Retention(keep_last=1)))
    assert not job.log.refresh().compactions
