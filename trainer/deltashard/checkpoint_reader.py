"""Read-only access to a checkpoint: `open_checkpoint(url, run)` opens no attempt, starts no sidecar and writes nothing.

```python
with deltashard.open_checkpoint("s3://bucket/prefix", "dlrm", which="pin:best") as checkpoint:
    checkpoint.step, checkpoint.metadata, list(checkpoint.tables)
    vectors = checkpoint.rows("items.weight", ids).weights
    head = checkpoint.dense["top.weight"]
```

Weights are decoded from the run's encoding into the table's dtype; q8 and fewer bits are approximations. Optimizer
state, dense tensors and all other state are exact.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format.blob_name import optimizer_parts
from deltashard_checkpoint.format.object_key import validate_run
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.log.chain import CheckpointNotFound
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.restore.checkpoint_reader import TableArrays, read_consistent
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint, choose
from deltashard_checkpoint.stores.retry import RetryPolicy
from deltashard_checkpoint.stores.url import open_store
from torch import Tensor

from deltashard.attach.launcher import normal_url
from deltashard.errors import UserError
from deltashard.state.value import decode_value

DEADLINE_S = 60.0
"""Seconds for which reads of the log from an unavailable store are retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Rows of a table as CPU tensors that own their memory."""

    weights: Tensor
    """Weights, [n, columns] in the table's dtype."""
    state: Mapping[str, Tensor]
    """Row-wise optimizer state by key, [n] or [n, columns]."""


class Decoded(Mapping[str, Any]):
    """Stored values by name; every access decodes the value again."""

    def __init__(self, encoded: Mapping[str, memoryview]) -> None:
        self._encoded = encoded

    def __getitem__(self, name: str) -> Any:
        return decode_value(self._encoded[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._encoded)

    def __len__(self) -> int:
        return len(self._encoded)


class CheckpointReader:
    """One checkpoint. Tables are read from the store on every access; dense state is read once and cached."""

    def __init__(self, opened: OpenCheckpoint) -> None:
        self._opened = opened
        entry = opened.entry
        self.run = opened.state.run
        """Name of the run."""
        self.seq = entry.seq
        """Sequence number in the run's commit log."""
        self.step = entry.step
        """Training step of the checkpoint."""
        self.metadata: Mapping[str, str] = dict(entry.metadata)
        """Metadata given to `save(metadata=)`, as text, and entries that deltashard adds."""
        self.pins = opened.state.pins_of(entry.seq)
        """Pins that retain the checkpoint."""
        self.tables: Mapping[str, TableSchema] = {schema.fqn: schema for schema in entry.tables}
        """Table schemas by name: rows, columns, dtype and fields."""

    def table(self, name: str) -> StoredRows:
        """Return all rows of a table with their optimizer state.

        Raises:
            UserError: The table does not exist.
            InvalidCheckpoint: The stored bytes are damaged or missing.
            CheckpointNotFound: Retention removed the checkpoint meanwhile.
            StoreUnavailable: The store cannot be read.
        """
        schema = self._schema(name)
        with self._translate_errors():
            return _stored(next(self._opened.tables([schema])))

    def rows(self, name: str, ids: Any) -> StoredRows:
        """Return the rows `ids` of a table, in the order of `ids`.

        Args:
            name: Name of the table.
            ids: Row numbers, integers [n] as a list, array or tensor, in any order; repeats are allowed.

        Raises:
            UserError: The table does not exist, or an id is out of range. Other errors as for `table`.
        """
        schema = self._schema(name)
        wanted = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids
        with self._translate_errors():
            return _stored(self._opened.rows(schema, wanted))

    @property
    def dense(self) -> Mapping[str, Tensor]:
        """Parameters and buffers other than tables, by name, on the CPU. Raises the errors of `table`."""
        return self._values_under("dense/")

    @property
    def state(self) -> Mapping[str, Any]:
        """Saved entries of `state=` by name. Raises the errors of `table`."""
        return self._values_under("state/")

    @property
    def optimizers(self) -> tuple[Mapping[str, Any], ...]:
        """Parameter groups and dense state of each optimizer; rank 0's part if an optimizer is spread over ranks.

        Raises the errors of `table`.
        """
        parts = optimizer_parts(
            {f"optim/{key}": value for key, value in self._values_under("optim/").items()}
        )
        return tuple(part[0] for part in parts.values())

    def close(self) -> None:
        """Close the store."""
        self._opened.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<checkpoint {self.seq} of run {self.run!r}: step {self.step}, {len(self.tables)} tables>"

    @functools.cached_property
    def _blobs(self) -> dict[str, memoryview]:
        with self._translate_errors():
            return dict(sorted(self._opened.blobs().items()))

    def _values_under(self, prefix: str) -> Decoded:
        return Decoded(
            {name[len(prefix) :]: data for name, data in self._blobs.items() if name.startswith(prefix)}
        )

    def _schema(self, name: str) -> TableSchema:
        found = self.tables.get(name)
        if found is None:
            raise UserError(
                f"there is no table {name!r}",
                where=self._opened.where,
                remedy=f"its tables are {', '.join(self.tables) or 'none'}; other tensors are in .dense",
            )
        return found

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise `CheckpointNotFound` if bytes are missing because retention removed the checkpoint."""
        try:
            yield
        except InvalidCheckpoint as error:
            state = RunLog(self._opened.store, self.run).refresh(deadline_s=DEADLINE_S)
            if self.seq in state.checkpoints:
                raise
            raise CheckpointNotFound(
                f"checkpoint {self.seq} was retired while it was read",
                where=f"run {self.run}",
                remedy="open a newer one; save(pin=) keeps one regardless of retention",
            ) from error


def open_checkpoint(url: str | os.PathLike[str], run: str, which: str | int = "latest") -> CheckpointReader:
    """Open a checkpoint of a run for reading, whether or not the run is training.

    Args:
        url: Store of the run, as for `Checkpointer`. Credentials come from the environment.
        run: Name of the run.
        which: "latest" (default), a sequence number, "seq:N", "step:N" or "pin:NAME".

    Raises:
        CheckpointNotFound: The checkpoint does not exist.
        InvalidCheckpoint: Its indexes are damaged or missing.
        StoreUnavailable: The store cannot be read.
        UserError: `url`, `run` or `which` is invalid.
    """
    store = open_store(normal_url(url), policy=RetryPolicy(deadline_s=DEADLINE_S), create=False)
    try:
        return read_consistent(
            RunLog(store, validate_run(run)),
            lambda state: CheckpointReader(OpenCheckpoint.of(store, state, choose(state, str(which)))),
            deadline_s=DEADLINE_S,
        )
    except BaseException:
        store.close()
        raise


def _stored(arrays: TableArrays) -> StoredRows:
    schema = arrays.schema
    kinds = {spec.name: spec.dtype for spec in schema.fields}
    return StoredRows(
        weights=_tensor(arrays.weights, schema.dtype),
        state={name: _tensor(values, kinds[name]) for name, values in arrays.fields.items()},
    )


def _tensor(values: Any, dtype: str) -> Tensor:
    made = torch.from_numpy(values)
    wanted = getattr(torch, dtype)
    return made if made.dtype == wanted else made.view(wanted)
