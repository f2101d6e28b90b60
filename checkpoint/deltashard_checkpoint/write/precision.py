"""Precision of the stored rows of a checkpoint, recorded in its commit, and detection of raised precision. Pure.

A delta keeps other rows as the covered checkpoint stored them. So a commit records under `PRECISION_KEY` in its
metadata the coarsest encodings that any row of its chain may have: its own for a baseline; for a delta, the coarser of
its own and the covered checkpoint's. This stays true after older checkpoints of the chain are compacted and retired. It
is a bound: all coarse rows may have been overwritten since.

If the policy asks for more bits, deltas would silently keep the coarse rows until they change, so the next snapshot is
a baseline. A checkpoint without a record (an import) does not cause one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any

from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.log.chain import closure
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.vocabulary import (
    DEFAULT_STATE_ENCODING,
    ENCODINGS,
    PRECISION_KEY,
    STATE_ENCODINGS,
    bits_of,
)

OTHERS = "*"
"""Key for every table that is not named."""
MAX_TEXT = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrecision:
    """Encodings of weights by table, and of point-wise optimizer state."""

    weights: Mapping[str, str]
    """Table's fully qualified name -> encoding; always contains `OTHERS`."""
    state: str = DEFAULT_STATE_ENCODING

    @classmethod
    def of(cls, weights: str | Mapping[str, str], state: str = DEFAULT_STATE_ENCODING) -> StoredPrecision:
        """Create from one encoding for all tables, or one per table (with `OTHERS`)."""
        named = {OTHERS: weights} if isinstance(weights, str) else dict(weights)
        return cls(weights=MappingProxyType(named), state=state)

    def of_table(self, fqn: str) -> str:
        return self.weights.get(fqn, self.others)

    @property
    def others(self) -> str:
        """Encoding of tables that are not named."""
        return self.weights[OTHERS]

    @property
    def named(self) -> dict[str, str]:
        """Encodings of tables that differ from `others`."""
        return {table: name for table, name in self.weights.items() if name != self.others}

    def text(self) -> str:
        document = {"state": self.state, "weights": dict(self.weights)}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


def parse_metadata(text: str) -> StoredPrecision | None:
    """Parse a commit's metadata; None if malformed: any writer of the bucket may have written it."""
    try:
        document: Any = json.loads(text[: MAX_TEXT + 1])
        weights, state = document["weights"], document["state"]
        found = StoredPrecision.of({str(table): str(encoding) for table, encoding in weights.items()}, state)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    known = OTHERS in found.weights and all(name in ENCODINGS for name in found.weights.values())
    return found if known and state in STATE_ENCODINGS else None


def coarser(one: StoredPrecision, other: StoredPrecision) -> StoredPrecision:
    """Return the fewer bits of the two, for every table."""
    weights = {
        table: min(one.of_table(table), other.of_table(table), key=_bits)
        for table in (*one.weights, *(name for name in other.weights if name not in one.weights))
    }
    return StoredPrecision.of(weights, min(one.state, other.state, key=_state_bits))


def finer(one: StoredPrecision, other: StoredPrecision) -> StoredPrecision:
    """Return the more bits of the two for every table's weights, and the state of `one`."""
    weights = {
        table: max(one.of_table(table), other.of_table(table), key=_bits)
        for table in (*one.weights, *(name for name in other.weights if name not in one.weights))
    }
    return StoredPrecision.of(weights, one.state)


def coarsest(texts: Iterable[str]) -> StoredPrecision | None:
    """Return the coarsest of several ranks' records; None if none can be parsed."""
    found = [one for one in map(parse_metadata, texts) if one is not None]
    return reduce(coarser, found) if found else None


def stored_precision(state: RunState, seq: int) -> StoredPrecision | None:
    """Return the record of live checkpoint `seq`; None if it has none (an import) or it cannot be parsed."""
    return parse_metadata(state.checkpoints[seq].metadata.get(PRECISION_KEY, ""))


def encoded_alike(
    state: RunState, attempt: int, seq: int, *, tables: Iterable[TableSchema], precision: StoredPrecision
) -> bool:
    """Return whether an unchanged row of `tables` encodes to the same bytes in `attempt` as in checkpoint `seq`.

    This holds if the row was encoded from the same values in the same way: by this attempt (values of another attempt
    were decoded since), with these encodings, and independently of the frame's other rows.
    """
    schemas = {table.fqn: table for table in tables}
    if seq not in state.checkpoints or any(_bits(name) < 8 for name in precision.weights.values()):
        return False
    for at in closure(state, (seq,), written=True):
        entry, stored = state.checkpoints[at], stored_precision(state, at)
        if (
            entry.attempt != attempt
            or at in state.compactions
            or not state.checkpoints.keys() >= {*entry.covered}
            or stored is None
            or stored.state != precision.state
            or any(schemas.get(table.fqn, table) != table for table in entry.tables)
            or any(names != (precision.of_table(table),) for table, names in entry.encodings.items())
        ):
            return False
    return True


def too_coarse_reason(asked: StoredPrecision, stored: StoredPrecision | None) -> str:
    """Return why rows at `stored` are too coarse for `asked`, for display; empty if they are not."""
    if stored is None:
        return ""
    for table in sorted({*asked.weights, *stored.weights}):
        now, then = asked.of_table(table), stored.of_table(table)
        if _bits(now) > _bits(then):
            return f"bits raised: {'' if table == OTHERS else f'{table} '}{then} to {now}"
    if _state_bits(asked.state) > _state_bits(stored.state):
        return f"bits raised: state {stored.state} to {asked.state}"
    return ""


def _bits(encoding: str) -> int:
    return bits_of(encoding) or 0


def _state_bits(state: str) -> int:
    return 16 if state == "bf16" else 32
