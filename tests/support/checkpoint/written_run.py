"""Runs with known content, for tests of what reads them: two tables, dense tensors, states; a chain of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.format import frame_encoder, typed_tree
from deltashard_checkpoint.format.object_key import new_token
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.commit import commit_parts
from deltashard_checkpoint.write.part_writer import PartTarget

from tests.support.checkpoint.sample import write_part

ITEMS = TableSchema(
    fqn="embeddings.items.weight",
    rows=3000,
    columns=16,
    dtype="float32",
    fields=(
        FieldSpec(name="sum", kind="rowwise", dtype="float32"),
        FieldSpec(name="exp_avg", kind="pointwise", dtype="float32"),
    ),
)
HALF = TableSchema(fqn="embeddings.users.weight", rows=500, columns=8, dtype="bfloat16")


@dataclass
class LiveTable:
    """What a trainer has in memory."""

    schema: TableSchema
    weights: np.ndarray
    fields: dict[str, np.ndarray] = field(default_factory=dict)

    def frame(self, ids: np.ndarray | range, encoding: str, step: int) -> frame_encoder.EncodedFrame:
        fields = {name: values[ids] for name, values in self.fields.items()}
        block = RowBlock.of_whole_rows(self.schema, ids, self.weights[ids], fields)
        return frame_encoder.encode_rows(block, EncodeOptions(encoding=ENCODINGS[encoding]), step=step)

    def copy(self) -> LiveTable:
        return LiveTable(self.schema, self.weights.copy(), {k: v.copy() for k, v in self.fields.items()})


class WrittenRun:
    """A run written through the real writers, one rank; `cuts` has what each checkpoint must restore to."""

    def __init__(
        self, store: Store, run: str, directory: Path, *, seed: int = 0, owner: str = "tests", workload: str = ""
    ) -> None:  # fmt: skip
        self.store, self.run = store, run
        self.rng = np.random.default_rng(seed)
        self.log = RunLog(store, run)
        self.cache = PackCache(directory / "cache", budget_bytes=64 << 20)
        self.attempt = open_attempt(self.log, owner=owner, workload=workload).attempt
        self.cut = 0
        self.items = LiveTable(
            ITEMS,
            self.rng.standard_normal((ITEMS.rows, ITEMS.columns)).astype(np.float32),
            {
                "sum": self.rng.random(ITEMS.rows).astype(np.float32),
                "exp_avg": self.rng.random((ITEMS.rows, ITEMS.columns)).astype(np.float32),
            },
        )
        self.half = LiveTable(HALF, self.rng.integers(0, 0x4000, (HALF.rows, HALF.columns)).astype(np.uint16))
        self.dense = self.rng.standard_normal((16, 4)).astype(np.float32)
        self.more_blobs: dict[str, bytes] = {}
        """Those that each save has beside its own."""
        self.saved: dict[int, tuple[LiveTable, LiveTable, np.ndarray]] = {}

    def close(self) -> None:
        self.cache.close()

    def train(self, share: float = 0.1) -> np.ndarray:
        """Change some rows of `items` and the dense tensor; their ids."""
        ids = np.flatnonzero(self.rng.random(ITEMS.rows) < share).astype(np.int64)
        self.items.weights[ids] += 1
        self.items.fields["sum"][ids] += 1
        self.items.fields["exp_avg"][ids] *= 0.5
        self.dense += 0.25
        return ids

    def save(
        self, ids: np.ndarray | None = None, *, step: int, covers: int | None = None, encoding: str = "fp32",
        pins: tuple[str, ...] = (), metadata: Mapping[str, str] | None = None, directive: str = "",
    ) -> int:  # fmt: skip
        """Commit these rows of `items` (None: all rows of both tables). The seq."""
        self.cut += 1
        boxes = tuple(
            Box(table=t.fqn, row_start=0, row_stop=t.rows, col_start=0, col_stop=t.columns)
            for t in (ITEMS, HALF)
        )
        target = PartTarget(
            run=self.run, attempt=self.attempt, cut=self.cut, step=step, rank=0, token=new_token(), tables=(ITEMS, HALF),
            boxes=boxes, covers=covers,
        )  # fmt: skip
        rows = np.arange(ITEMS.rows) if ids is None else ids
        frames = [self.items.frame(rows[at : at + 700], encoding, step) for at in range(0, len(rows), 700)]
        if ids is None:
            frames.append(self.half.frame(range(HALF.rows), "bf16", step))
        for name, tree in self.blobs(step).items():
            frames += frame_encoder.encode_blob_frames(name=name, data=tree, step=step)
        said = {
            "stall_s": 0.012, "cut_at_s": 1_700_000_000.25, "pins": pins, "metadata": metadata or {}, "directive": directive,
        }  # fmt: skip
        report = write_part(self.store, self.cache, target, frames, said=said, pack_bytes=128 << 10)
        seq = commit_parts(
            self.log, attempt=self.attempt, cut=self.cut, step=step, world_size=1, reports=[report]
        ).seq
        self.saved[seq] = self.items.copy(), self.half.copy(), self.dense.copy()
        return seq

    def blobs(self, step: int) -> dict[str, bytes]:
        """The blobs of a cut now."""
        shape = self.dense.shape
        dense = typed_tree.Tensor(
            dtype="float32", shape=shape, data=self.dense.reshape(-1).view(np.uint8).data
        )
        return {
            "dense/mlp.0.weight": typed_tree.encode(dense).to_bytes(),
            "dense/odd": typed_tree.encode(
                typed_tree.Tagged(tag="torch.sparse_coo", value={"shape": (3,)})
            ).to_bytes(),
            "meta": typed_tree.encode({"step": step}).to_bytes(),
            "optim/0": typed_tree.encode({"param_groups": [{"lr": 0.1}], "state": {}}).to_bytes(),
            **self.more_blobs,
        }
