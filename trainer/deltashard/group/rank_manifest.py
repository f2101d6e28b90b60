"""The description that each rank sends at a rendezvous, and the layout that rank 0 derives from all of them. Pure.

Everything except the boxes must be equal on all ranks: the run, the call, the model.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.format.layout import Layout, NotTiled
from deltashard_checkpoint.format.schema import Box

from deltashard.errors import RanksDiffer

_MAX_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """Description of one rank."""

    facts: Mapping[str, Any]
    """Names and plain values that must be equal on all ranks."""
    tables: Mapping[str, tuple[int, int]]
    """(rows, columns) of every table of the model, on whatever rank; equal on all ranks."""
    dense: Mapping[str, str]
    """Type and shape of every dense tensor; equal on all ranks."""
    boxes: Sequence[Box]
    """Boxes that this rank saves."""
    participated_attempt: int = 0
    """Newest attempt in which trainers of this pod took part, as reported by its sidecar."""

    def text(self) -> bytes:
        boxes = [[b.table, b.row_start, b.row_stop, b.col_start, b.col_stop] for b in self.boxes]
        values = [
            dict(self.facts),
            {k: list(v) for k, v in self.tables.items()},
            dict(self.dense),
            boxes,
            self.participated_attempt,
        ]
        return zlib.compress(json.dumps(values).encode(), 1)

    @classmethod
    def of(cls, text: bytes) -> RankManifest:
        facts, tables, dense, boxes, participated_attempt = json.loads(zlib.decompress(text))
        return cls(
            facts=facts,
            tables={name: (rows, columns) for name, (rows, columns) in tables.items()},
            dense=dense,
            boxes=[
                Box(table=table, row_start=a, row_stop=b, col_start=c, col_stop=d)
                for table, a, b, c, d in boxes
            ],
            participated_attempt=participated_attempt,
        )


def agreed_layout(manifests: Sequence[RankManifest]) -> Layout:
    """Return the layout of all ranks.

    Raises:
        RanksDiffer: The ranks do not train the same model in the same run, or their boxes leave a gap or overlap.
    """
    first = manifests[0]
    for rank, manifest in enumerate(manifests):
        _check_same("has fact", first.facts, manifest.facts, rank)
        _check_same("has table", first.tables, manifest.tables, rank)
        _check_same("has dense tensor", first.dense, manifest.dense, rank)
    layout = Layout.of(
        len(manifests), dict(first.tables), {rank: manifest.boxes for rank, manifest in enumerate(manifests)}
    )
    try:
        layout.check()
    except NotTiled as error:
        raise RanksDiffer(
            f"the ranks' shards do not make whole tables: {error.what}",
            where="restore()",
            remedy="shard tables with TorchRec, or have them whole on every rank under DistributedDataParallel",
        ) from None
    return layout


def _check_same(what: str, zero: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    if zero == other:
        return
    differ = [key for key in sorted(zero.keys() | other.keys()) if zero.get(key) != other.get(key)]
    shown = "; ".join(
        f"{key}: {_shown(zero, key)} on rank 0, {_shown(other, key)} on rank {rank}"
        for key in differ[:_MAX_SHOWN]
    )
    more = f" and {len(differ) - _MAX_SHOWN} more" if len(differ) > _MAX_SHOWN else ""
    raise RanksDiffer(
        f"rank {rank} {what} otherwise than rank 0: {shown}{more}",
        where="restore()",
        remedy="train the same model under the same run, with the same arguments, on all ranks",
    )


def _shown(facts: Mapping[str, Any], key: str) -> str:
    return repr(facts[key]) if key in facts else "nothing"
