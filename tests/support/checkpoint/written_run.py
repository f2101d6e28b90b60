"""Runs with known content, for tests of readers: two tables, dense tensors, states; a chain of checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from deltashard_checkpoint.format import typed_tree
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from deltashard_checkpoint.stores.abc import Store

from tests.support.checkpoint.sample import SampleModel, SampleRun, whole

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


class WrittenRun(SampleRun):
    """A run of one rank; `saved` holds what each checkpoint must restore."""

    def __init__(
        self, store: Store, run: str, directory: Path, *, seed: int = 0, owner: str = "tests", workload: str = ""
    ) -> None:  # fmt: skip
        super().__init__(directory, store=store, run=run, owner=owner, workload=workload)
        self.items, self.half = SampleModel(ITEMS, seed), SampleModel(HALF, seed)
        self.half.weights = self.half.rng.integers(0, 0x4000, (HALF.rows, HALF.columns)).astype(np.uint16)
        self.dense = self.items.rng.standard_normal((16, 4)).astype(np.float32)
        self.more_blobs: dict[str, bytes] = {}
        """Blobs that each save has in addition to its own."""
        self.saved: dict[int, tuple[SampleModel, SampleModel, np.ndarray]] = {}

    def close(self) -> None:
        self.cache.close()

    def train(self, share: float = 0.1) -> np.ndarray:
        """Change some rows of `items` and the dense tensor; return their ids."""
        ids = np.flatnonzero(self.items.rng.random(ITEMS.rows) < share).astype(np.int64)
        self.items.weights[ids] += 1
        self.items.fields["sum"][ids] += 1
        self.items.fields["exp_avg"][ids] *= 0.5
        self.dense += 0.25
        return ids

    def save(  # type: ignore[override]
        self, ids: np.ndarray | None = None, *, step: int, covers: int | None = None, encoding: str = "fp32",
        pins: tuple[str, ...] = (), metadata: Mapping[str, str] | None = None, directive: str = "",
    ) -> int:  # fmt: skip
        """Commit these rows of `items` (None: all rows of both tables); return the seq."""
        rows = range(ITEMS.rows) if ids is None else ids
        frames = self.items.frames(rows, step=step, encoding=encoding, per_frame=700)
        if ids is None:
            frames += self.half.frames(range(HALF.rows), step=step, encoding="bf16")
        seq = super().save(
            (ITEMS, HALF), [((whole(ITEMS), whole(HALF)), frames)], step=step, covers=covers, blobs=self.blobs(step),
            pack_bytes=128 << 10,
            extra={
                "stall_s": 0.012, "snapshot_at_s": 1_700_000_000.25, "pins": pins, "metadata": metadata or {},
                "directive": directive,
            },
        )  # fmt: skip
        self.saved[seq] = copy.deepcopy((self.items, self.half, self.dense))
        return seq

    def blobs(self, step: int) -> dict[str, bytes]:
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
