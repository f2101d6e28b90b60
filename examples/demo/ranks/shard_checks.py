"""Checks that the ranks hold one checkpoint of the store: every shard, every bit, all of one step.

After a partial recovery a lost rank's shards must be the checkpoint's, a survivor's shards its own last recorded
content, and the dense half on all ranks that of the survivor that was furthest.

This process reads the checkpoint from the store alone, as any reader would (`deltashard.open_checkpoint`). The ranks'
content is the hashes of their live tensors (`shard_evidence.py`). A shard that differs from the checkpoint is
searched in all other checkpoints, to distinguish a rank at another step from damage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deltashard
from content import Content, Kept, dense_of, sha256, short
from deltashard import CheckpointReader, StoredRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardComparison:
    """The ranks compared with one checkpoint."""

    step_per_shard: dict[str, int | None]
    """`rank 1: pair[262144:524288]` -> the step whose rows and optimizer state it holds; None: in no checkpoint."""
    ahead: tuple[str, ...]
    """Survivors' shards among them that hold the update of one more, unfinished step."""
    wrong: tuple[str, ...]
    """Shards, dense parameters and state that differ in any bit from the expected content, or are missing; gaps."""
    rows: int

    @property
    def exact(self) -> bool:
        return not self.wrong


class StoredCheckpoint:
    """One checkpoint in the store; its tables are cached once read."""

    def __init__(self, url: str, run: str, seq: int) -> None:
        self._reader: CheckpointReader = deltashard.open_checkpoint(url, run, seq)
        self._tables: dict[str, StoredRows] = {}
        self.step = self._reader.step
        self.rows = {name: schema.rows for name, schema in self._reader.tables.items()}

    def holds(self, shard: Mapping[str, Any]) -> bool:
        """Return whether a rank's shard equals this checkpoint's content at its place."""
        name = shard["table"]
        if name not in self._tables:
            self._tables[name] = self._reader.table(name)
        table, rows = self._tables[name], slice(*shard["rows"])
        state = sorted(sha256(values[rows]) for values in table.state.values())
        return sha256(table.weights[rows]) == shard["weights"] and state == shard["state"]

    @property
    def dense(self) -> dict[str, str]:
        state = {name: values for each in self._reader.optimizers for name, values in each["state"].items()}
        return dense_of(self._reader.dense, state)

    def close(self) -> None:
        self._tables.clear()
        self._reader.close()


def compare(
    url: str,
    run: str,
    seq: int,
    ranks: Mapping[int, Content],
    others: Mapping[int, int],
    kept: Mapping[int, Kept] | None = None,
) -> ShardComparison:
    """Compare `ranks` with checkpoint `seq`; `others` are the seqs of all checkpoints of the run, with their steps.

    `kept`: the survivors' last content before a partial recovery; every other rank was lost.
    """
    kept = kept or {}
    steps: dict[str, int | None] = {}
    wrong: list[str] = []
    ahead: list[str] = []
    stored = StoredCheckpoint(url, run, seq)
    try:
        dense = max(kept.values(), key=lambda own: own["step"])["dense"] if kept else stored.dense
        covered = dict.fromkeys(stored.rows, 0)
        for rank, content in sorted(ranks.items()):
            differing = {
                n for n in dense.keys() | content["dense"].keys() if dense.get(n) != content["dense"].get(n)
            }
            wrong += [f"rank {rank}: {name}" for name in sorted(differing)]
            for shard in content["shards"]:
                name = f"rank {rank}: {short(shard['table'])}[{shard['rows'][0]}:{shard['rows'][1]}]"
                covered[shard["table"]] += shard["rows"][1] - shard["rows"][0]
                if rank in kept:
                    step, elsewhere = kept[rank]["step"], others
                    updated = _updated_last(kept[rank], shard)
                    right = updated is not None
                    ahead += [name] if updated is not None and updated > step else []
                else:
                    right, step = stored.holds(shard), stored.step
                    elsewhere = {s: k for s, k in others.items() if s != seq}
                steps[name] = step if right else _step_of(url, run, shard, elsewhere)
                if not right:
                    wrong.append(f"{name} holds {_step_text(steps[name])}")
    finally:
        stored.close()
    wrong += [
        f"the ranks hold {covered[name]} of {rows} rows of {short(name)}"
        for name, rows in stored.rows.items()
        if covered[name] != rows
    ]
    return ShardComparison(
        step_per_shard=steps, ahead=tuple(ahead), wrong=tuple(wrong), rows=sum(covered.values())
    )


def lost_samples(
    ranks: Mapping[int, Content], kept: Mapping[int, Kept], committed_step: int, planned_steps: int
) -> float:
    """Compute one partial recovery's PLS: sum over ranks of lost / planned steps times the rank's share of rows.

    A lost rank restarts at `committed_step`, a survivor at its own last step; a rank in a later step loses that step.
    """
    rows = {
        rank: sum(stop - first for first, stop in (shard["rows"] for shard in content["shards"]))
        for rank, content in ranks.items()
    }
    furthest = max(own["step"] for own in kept.values())
    lost = dict.fromkeys(rows, furthest - committed_step)
    for rank, own in kept.items():
        within = any(shard["step"] > own["step"] for shard in own["shards"])
        lost[rank] = max(furthest - own["step"], within)
    return sum(lost[rank] / planned_steps * rows[rank] / sum(rows.values()) for rank in rows)


def _updated_last(own: Kept, shard: Mapping[str, Any]) -> int | None:
    """Return the step of the last update of this shard, as a survivor recorded it; None: it had no such shard."""
    for was in own["shards"]:
        if {name: value for name, value in was.items() if name != "step"} == shard:
            return int(was["step"])
    return None


def _step_text(step: int | None) -> str:
    return "what no checkpoint holds" if step is None else f"step {step}"


def _step_of(url: str, run: str, shard: Mapping[str, Any], others: Mapping[int, int]) -> int | None:
    for seq, step in others.items():
        stored = StoredCheckpoint(url, run, seq)
        try:
            if stored.holds(shard):
                return step
        finally:
            stored.close()
    return None
