"""Compaction with real frames: what restores afterwards is, bit for bit, what restored before."""

from dataclasses import dataclass

import numpy as np
import pytest
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.format import frame_encoder
from deltashard_checkpoint.format.index import decode_index
from deltashard_checkpoint.format.object_key import cut_prefix, new_token
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.chain import chain
from deltashard_checkpoint.maintenance import garbage_collection
from deltashard_checkpoint.maintenance.compaction import CompactionAbandoned, compact, compactable
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement
from deltashard_checkpoint.maintenance.row_mover import mover
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_checkpoint.write.commit import commit_parts
from deltashard_checkpoint.write.part_writer import PartTarget, PartWriter
from deltashard_checkpoint.write.report import PartReport

from tests.support.checkpoint.run_builder import Run
from tests.support.checkpoint.snapshot import read_checkpoint

ROWS, COLUMNS = 300, 16
TABLE = TableSchema(
    fqn="items",
    rows=ROWS,
    columns=COLUMNS,
    dtype="float32",
    fields=(
        FieldSpec(name="sum", kind="rowwise", dtype="float32"),
        FieldSpec(name="exp_avg", kind="pointwise", dtype="float32"),
    ),
)


@dataclass
class Job:
    """A trainer of some ranks, row-sharded, that saves what it says."""

    run: Run
    cache: PackCache
    attempt: int
    world_size: int = 2
    encoding: str = "q8"

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(7)
        self.cut = 0
        self.weights = self.random.normal(size=(ROWS, COLUMNS)).astype(np.float32)
        self.sums = self.random.random(ROWS).astype(np.float32)
        self.moments = self.random.normal(size=(ROWS, COLUMNS)).astype(np.float32)

    def train(self, rows: np.ndarray) -> None:
        self.weights[rows] = self.random.normal(size=(len(rows), COLUMNS)).astype(np.float32)
        self.weights[rows[0], 3] = np.nan
        self.sums[rows] += 1
        self.moments[rows] *= 0.5

    def save(self, rows: np.ndarray, covers: int | None) -> int:
        """Ranks cover the same; rank 0 writes the blob. Returns the seq."""
        self.cut += 1
        step = self.cut * 10
        reports = []
        for rank in range(self.world_size):
            low, high = (ROWS * r // self.world_size for r in (rank, rank + 1))
            box = Box(table="items", row_start=low, row_stop=high, col_start=0, col_stop=COLUMNS)
            token = new_token()
            target = PartTarget(
                run="job", attempt=self.attempt, cut=self.cut, step=step, rank=rank, token=token, tables=(TABLE,),
                boxes=(box,), covers=covers,
            )  # fmt: skip
            mine = rows[(rows >= low) & (rows < high)]
            with PartWriter(self.run.store, target, self.cache) as writer:
                for some in np.array_split(mine, 3):
                    if len(some):
                        writer.add(self.frame(some, step))
                if rank == 0:
                    for frame in frame_encoder.encode_blob_frames(
                        name="meta", data=b"step %d" % step, step=step
                    ):
                        writer.add(frame)
                part, index = writer.finish(), writer.index
            report = PartReport(
                part=part, tables=(TABLE,), encodings=index.encodings, rows=index.rows, raw_bytes=index.raw_bytes,
                stall_s=0.0,
            )  # fmt: skip
            reports.append(report)
        return commit_parts(
            self.run.log,
            attempt=self.attempt,
            cut=self.cut,
            step=step,
            world_size=self.world_size,
            reports=reports,
        ).seq

    def frame(self, rows: np.ndarray, step: int) -> frame_encoder.EncodedFrame:
        (frame,) = frame_encoder.encode_row_frames(
            RowBlock.of_whole_rows(
                TABLE, rows, self.weights[rows], {"sum": self.sums[rows], "exp_avg": self.moments[rows]}
            ),
            EncodeOptions(encoding=ENCODINGS[self.encoding]),
            step=step,
        )
        return frame


@pytest.fixture
def cache(tmp_path):
    with PackCache(tmp_path / "cache", budget_bytes=256 << 20) as found:
        yield found


def a_chain(
    run: Run, cache: PackCache, *, encoding: str = "q8", deltas: int = 3, world_size: int = 2
) -> tuple[Job, list]:
    job = Job(run, cache, run.open(world_size=world_size).attempt, world_size, encoding)
    seqs = [job.save(np.arange(ROWS), None)]
    for _ in range(deltas):
        rows = np.sort(job.random.choice(ROWS, 60, replace=False))
        job.train(rows)
        seqs.append(job.save(rows, seqs[-1]))
    return job, seqs


def content(run: Run, seq: int) -> tuple:
    snapshot = read_checkpoint(run.store, "job", f"seq:{seq}")
    arrays = snapshot.tables["items"]
    return (
        arrays.weights.tobytes(),
        {name: values.tobytes() for name, values in arrays.fields.items()},
        {name: bytes(data) for name, data in snapshot.blobs.items()},
    )


@pytest.mark.parametrize("encoding", ["fp32", "q8", "q4", "q3", "q2"])
def test_a_compacted_chain_restores_bit_for_bit_what_it_restored_before(cache, encoding):
    run = Run()
    job, seqs = a_chain(run, cache, encoding=encoding)
    before = {seq: content(run, seq) for seq in seqs}
    rows = np.arange(5, 40)
    job.train(rows)
    later = job.save(rows, seqs[-1])
    before[later] = content(run, later)
    entry = compact(run.log, seqs[-1], mover(cache))
    assert entry.replaces == seqs[-1]
    assert {link.seq for link in chain(run.log.state, later)} == {later, seqs[-1]}
    assert {seq: content(run, seq) for seq in before} == before
    retired = append_retirement(run.log, Retention(keep_last=2))
    # Only the objects that the compaction replaced: what it made unneeded is now the second, independent chain.
    assert (retired.checkpoints, retired.prefixes) == ((), (cut_prefix(job.attempt, len(seqs)),))
    again = job.save(np.arange(ROWS), None)
    more = job.save(rows, again)
    retired = append_retirement(run.log, Retention(keep_last=2))
    assert set(seqs[:-1]) <= set(retired.checkpoints)
    run.time.now_s += 1e4
    assert garbage_collection.collect(run.log).objects > 0
    for seq in run.log.state.checkpoints:
        assert content(run, seq) == before.get(seq, content(run, seq))
    assert more in run.log.state.checkpoints


def test_frames_that_lose_nothing_are_copied_verbatim_and_rows_occur_once(cache):
    run = Run()
    _, seqs = a_chain(run, cache, deltas=1)
    entry = compact(run.log, seqs[-1], mover(cache))
    (part,) = entry.parts
    index = decode_index(run.memory.get(f"job/{part.index_key}"), key=part.index_key, run="job")
    delta = run.log.state.checkpoints[seqs[-1]]
    digests = set()
    for written in delta.parts:
        held = decode_index(run.memory.get(f"job/{written.index_key}"), key=written.index_key, run="job")
        digests |= {place.info.digest for place in held.places}
    assert digests <= {place.info.digest for place in index.places}
    assert index.rows == entry.rows == ROWS


def test_what_is_a_baseline_already_is_left_alone(cache):
    run = Run()
    _, seqs = a_chain(run, cache)
    assert compactable(run.log.state, seqs[-1])
    assert compact(run.log, seqs[0], mover(cache)) is None
    assert compact(run.log, seqs[-1], mover(cache)) is not None
    assert compact(run.log, seqs[-1], mover(cache)) is None
    assert not compactable(run.log.state, seqs[-1])


def test_a_compaction_whose_checkpoint_was_retired_meanwhile_changes_nothing(cache):
    run = Run()
    job, seqs = a_chain(run, cache, deltas=1)
    for _ in range(2):
        job.save(np.arange(ROWS), None)
    move = mover(cache)

    def slow(*arguments):
        moved = move(*arguments)
        append_retirement(run.reader(), Retention(keep_last=1))
        return moved

    with pytest.raises(CompactionAbandoned, match="not live"):
        compact(run.log, seqs[-1], slow)
    assert not run.log.refresh().compactions


def given_up(run):
    """The log of another process, which takes what is being compacted for debris: it waited for days."""
    run.time.now_s += 48 * 3600
    other = run.reader()
    append_retirement(other, Retention(), debris=garbage_collection.debris(other, other.refresh()))
    return other


def test_a_compaction_given_up_as_debris_is_refused(cache):
    """Its prefix was retired while it was at work: the entry would name what gc may delete any moment."""
    run = Run()
    _, seqs = a_chain(run, cache, deltas=1)
    move = mover(cache)

    def slow(*arguments):
        moved = move(*arguments)
        given_up(run)
        return moved

    with pytest.raises(CompactionAbandoned, match="retired and may be deleted"):
        compact(run.log, seqs[-1], slow)


def test_a_compaction_that_was_given_up_deleted_and_forgotten_is_refused(cache):
    """Nobody remembers its prefix; its name says that it began before what is forgotten. A later one may commit."""
    run = Run()
    _, seqs = a_chain(run, cache, deltas=1)
    before = content(run, seqs[-1])
    move = mover(cache)

    def slow(*arguments):
        moved = move(*arguments)
        other = given_up(run)
        run.time.now_s += 3600
        assert garbage_collection.collect(other, forget_at=1).objects == 3  # two packs and an index
        assert not other.state.retired
        return moved

    with pytest.raises(CompactionAbandoned, match="may be deleted"):
        compact(run.log, seqs[-1], slow)
    assert content(run, seqs[-1]) == before
    assert compact(run.log, seqs[-1], move) is not None
    assert content(run, seqs[-1]) == before
