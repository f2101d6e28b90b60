"""A whole checkpoint in memory, read only from its store."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from deltashard_checkpoint.format import typed_tree
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.restore.checkpoint_reader import TableArrays, read_consistent
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint, choose
from deltashard_checkpoint.stores.abc import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The content of a checkpoint."""

    entry: Checkpoint
    tables: Mapping[str, TableArrays]
    blobs: Mapping[str, memoryview]
    """Encoded trees by name."""

    def tree(self, name: str) -> Any:
        return typed_tree.decode(self.blobs[name])


def read_checkpoint(
    store: Store,
    run: str,
    which: str = "latest",
    *,
    blobs: Collection[str] | None = None,
    state: RunState | None = None,
) -> Snapshot:
    """Read whole tables, their fields, and blobs (those for all ranks, or these) of the checkpoint `which`.

    Without `state` the run may continue during the read.
    """

    def read(at: RunState) -> Snapshot:
        opened = OpenCheckpoint.of(store, at, choose(at, which))
        tables = {table.schema.fqn: table for table in opened.tables()}
        return Snapshot(entry=opened.entry, tables=tables, blobs=opened.blobs(blobs))

    return read_consistent(RunLog(store, run), read, deadline_s=3600.0) if state is None else read(state)


def arrays_of(snapshot: Snapshot) -> dict[str, np.ndarray]:
    found = {name: table.weights for name, table in snapshot.tables.items()}
    for name, table in snapshot.tables.items():
        found |= {f"{name}.{field}": values for field, values in table.fields.items()}
    return found


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    """Assert that two checkpoints restore to the same bits."""
    assert found.tables.keys() == wanted.tables.keys()
    for name, table in wanted.tables.items():
        assert found.tables[name].weights.tobytes() == table.weights.tobytes()
        for field, values in table.fields.items():
            assert found.tables[name].fields[field].tobytes() == values.tobytes()
    assert {n: bytes(b) for n, b in found.blobs.items()} == {n: bytes(b) for n, b in wanted.blobs.items()}
