"""Tables of numpy for tests: float32 weights with one row-wise and one point-wise field, trained by adding noise."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from deltashard_checkpoint.format import typed_tree
from deltashard_checkpoint.format.blob_name import blob_name, own_blobs
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.restore.frame_applier import TableTarget

from tests.support.checkpoint.snapshot import Snapshot


@dataclass
class FakeTable:
    """float32 weights [rows, columns] with a row-wise `sum` and a point-wise `exp_avg`."""

    fqn: str
    weights: np.ndarray
    sums: np.ndarray
    averages: np.ndarray
    dirty: set[int] = field(default_factory=set)
    """Rows changed since the last baseline."""
    at_risk: set[int] = field(default_factory=set)
    """Rows of a baseline whose commit is not reported yet."""
    fresh: set[int] = field(default_factory=set)
    """Rows changed since the newest known commit."""
    sent: set[int] = field(default_factory=set)
    """Rows of a snapshot whose commit is not reported yet."""

    @classmethod
    def make(cls, fqn: str, rows: int, columns: int, rng: np.random.Generator) -> FakeTable:
        return cls(
            fqn,
            rng.standard_normal((rows, columns)).astype(np.float32),
            rng.random(rows).astype(np.float32),
            rng.standard_normal((rows, columns)).astype(np.float32),
        )

    @property
    def schema(self) -> TableSchema:
        rows, columns = self.weights.shape
        return TableSchema(
            fqn=self.fqn, rows=rows, columns=columns, dtype="float32",
            fields=(
                FieldSpec(name="sum", kind="rowwise", dtype="float32"),
                FieldSpec(name="exp_avg", kind="pointwise", dtype="float32"),
            ),
        )  # fmt: skip

    @property
    def box(self) -> Box:
        rows, columns = self.weights.shape
        return Box(table=self.fqn, row_start=0, row_stop=rows, col_start=0, col_stop=columns)

    def target(self) -> TableTarget:
        return TableTarget(
            schema=self.schema,
            box=self.box,
            weights=self.weights,
            fields={"sum": self.sums, "exp_avg": self.averages},
        )


class FakeModel:
    """Two tables and some blobs; `train` changes some rows and everything dense; equality is by content."""

    def __init__(
        self, *, rows: int = 300, columns: int = 8, seed: int = 0, of_rank: int | None = None
    ) -> None:
        """Create the model; `of_rank` gives it tables and a dense tensor that no other rank has, under that rank's name."""
        self.rng = np.random.default_rng(seed)
        self.rank = of_rank or 0
        self.prefix = "" if of_rank is None else f"rank{of_rank}."
        self.tables = [
            FakeTable.make(f"{self.prefix}big.weight", rows, columns, self.rng),
            FakeTable.make(f"{self.prefix}small.weight", 40, 4, self.rng),
        ]
        self.dense = self.rng.standard_normal(100).astype(np.float32)
        self.step = 0

    def train(self, fraction: float = 0.1) -> None:
        self.step += 1
        for table in self.tables:
            rows = self.rng.choice(
                len(table.weights), max(1, int(fraction * len(table.weights))), replace=False
            )
            table.weights[rows] += self.rng.standard_normal((len(rows), table.weights.shape[1])).astype(
                np.float32
            )
            table.sums[rows] += 1
            table.averages[rows] *= np.float32(0.9)
            table.dirty.update(int(row) for row in rows)
            table.fresh.update(int(row) for row in rows)
        self.dense += np.float32(self.step)

    def state(self) -> list[np.ndarray]:
        found = [self.dense.copy(), np.array([self.step])]
        for table in self.tables:
            found += [table.weights.copy(), table.sums.copy(), table.averages.copy()]
        return found

    def wipe(self) -> None:
        self.dense[:] = np.nan
        self.step = -1
        for table in self.tables:
            table.weights[:] = np.nan
            table.sums[:] = np.nan
            table.averages[:] = np.nan

    def blobs(self) -> dict[str, bytes]:
        meta = {"step": self.step, "rank": self.rank}
        return {
            f"dense/{self.prefix}w": bytes(typed_tree.encode(self.dense).to_bytes()),
            blob_name(self.rank, "meta"): bytes(typed_tree.encode(meta).to_bytes()),
        }

    def load_blobs(self, blobs: dict[str, memoryview]) -> None:
        self.dense[:] = typed_tree.decode(blobs[f"dense/{self.prefix}w"])
        meta = typed_tree.decode(own_blobs(self.rank, blobs)["meta"])
        assert meta["rank"] == self.rank
        self.step = meta["step"]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def assert_stored(snapshot: Snapshot, state: list[np.ndarray]) -> None:
    """The checkpoint holds the dense weights, tables and row state of this `FakeModel.state()`, bit for bit."""
    assert np.array_equal(snapshot.tree("dense/w"), state[0])
    for i, name in enumerate(("big.weight", "small.weight")):
        table = snapshot.tables[name]
        got = [table.weights, table.fields["sum"], table.fields["exp_avg"]]
        assert same(got, state[2 + 3 * i : 5 + 3 * i])
