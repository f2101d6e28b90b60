"""How many bits the rows of a checkpoint are stored with, at least: said by its commit, and what raises them. Pure.

A delta leaves the other rows as what it covers stored them. So a commit says, under `PRECISION_KEY` in its metadata,
the coarsest encodings that a row of its whole chain may have been written with: its own for a baseline, for a delta the
coarser of its own and of what the covered checkpoint says. That stays true when older checkpoints of the chain are
compacted and retired. It is an upper bound of the harm: all coarse rows may have been overwritten since.

When the policy asks for more bits than that, deltas would keep the coarse rows for as long as nobody touches them, and
nothing would say so: the next cut is a baseline. A checkpoint that says nothing (an import) raises nothing.
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
"""Instead of a table's name: every table that is not named."""
MAX_TEXT = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrecision:
    """Encodings of weights by table, and of point-wise optimizer state."""

    weights: Mapping[str, str]
    """Table's fully qualified name -> encoding; `OTHERS` is always among them."""
    state: str = DEFAULT_STATE_ENCODING

    @classmethod
    def of(cls, weights: str | Mapping[str, str], state: str = DEFAULT_STATE_ENCODING) -> StoredPrecision:
        """One encoding for all tables, or one by table (with `OTHERS`)."""
        named = {OTHERS: weights} if isinstance(weights, str) else dict(weights)
        return cls(weights=MappingProxyType(named), state=state)

    def of_table(self, fqn: str) -> str:
        return self.weights.get(fqn, self.others)

    @property
    def others(self) -> str:
        """Encoding of the tables that are not named."""
        return self.weights[OTHERS]

    @property
    def named(self) -> dict[str, str]:
        """Encodings of the tables that are not stored as `others` are."""
        return {table: name for table, name in self.weights.items() if name != self.others}

    def text(self) -> str:
        document = {"state": self.state, "weights": dict(self.weights)}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


def parse_metadata(text: str) -> StoredPrecision | None:
    """What a commit's metadata says; None when it cannot be read: whoever can write the bucket wrote it."""
    try:
        document: Any = json.loads(text[: MAX_TEXT + 1])
        weights, state = document["weights"], document["state"]
        found = StoredPrecision.of({str(table): str(encoding) for table, encoding in weights.items()}, state)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    known = OTHERS in found.weights and all(name in ENCODINGS for name in found.weights.values())
    return found if known and state in STATE_ENCODINGS else None


def coarser(one: StoredPrecision, other: StoredPrecision) -> StoredPrecision:
    """The fewer bits of both, for every table."""
    weights = {
        table: min(one.of_table(table), other.of_table(table), key=_bits)
        for table in (*one.weights, *(name for name in other.weights if name not in one.weights))
    }
    return StoredPrecision.of(weights, min(one.state, other.state, key=_state_bits))


def finer(one: StoredPrecision, other: StoredPrecision) -> StoredPrecision:
    """The weights' more bits of both, for every table; the state of `one`."""
    weights = {
        table: max(one.of_table(table), other.of_table(table), key=_bits)
        for table in (*one.weights, *(name for name in other.weights if name not in one.weights))
    }
    return StoredPrecision.of(weights, one.state)


def coarsest(texts: Iterable[str]) -> StoredPrecision | None:
    """What several ranks say of one checkpoint, together; None when none can be read."""
    found = [one for one in map(parse_metadata, texts) if one is not None]
    return reduce(coarser, found) if found else None


def stored_precision(state: RunState, seq: int) -> StoredPrecision | None:
    """What live checkpoint `seq` says of its rows; None when it says nothing (an import), or cannot be read."""
    return parse_metadata(state.checkpoints[seq].metadata.get(PRECISION_KEY, ""))


def encoded_alike(
    state: RunState, attempt: int, seq: int, *, tables: Iterable[TableSchema], precision: StoredPrecision
) -> bool:
    """Whether a row of `tables` that `attempt` encodes with `precision` is as in checkpoint `seq` if it did not change.

    So it is if that row was encoded from the same values in the same way: by this attempt, for what another one wrote
    was decoded since, with these encodings, and with what does not depend on the frame's other rows.
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
    """Why rows stored with `stored` are too coarse for what is `asked`, for people; empty: they are not."""
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
