"""Parts of many ranks: a plan creates only the parts, and reads only the indexes, whose boxes overlap the request."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.log.chain import ChainIncomplete, blob_parts_of, chain, missing
from deltashard_checkpoint.log.entry import Checkpoint, Part
from deltashard_checkpoint.log.manifest import Manifest
from deltashard_checkpoint.log.part_list import ListedPart, PartList
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.restore.checkpoint_reader import plan_restore
from deltashard_checkpoint.restore.plan import Want

from tests.support.checkpoint.sample import RUN, SampleModel, SampleRun, box, schema

TABLE = schema(rows=40, columns=8)
QUARTERS = [[box(TABLE, at, at + 10, 0, 8)] for at in range(0, 40, 10)]
SHAPES = {"a": (9, 4), "b": (5, 6)}


def tiling(chance: random.Random, world_size: int) -> Layout:
    boxes: dict[int, list[Box]] = {}
    for table, (rows, columns) in SHAPES.items():
        pieces = [Box(table=table, row_start=0, row_stop=rows, col_start=0, col_stop=columns)]
        for _ in range(chance.randrange(6)):
            piece = pieces.pop(chance.randrange(len(pieces)))
            a, b, c, d = piece.row_start, piece.row_stop, piece.col_start, piece.col_stop
            if chance.random() < 0.5 and b - a > 1:
                at = chance.randrange(a + 1, b)
                pieces += [replace(piece, row_stop=at), replace(piece, row_start=at)]
            elif d - c > 1:
                at = chance.randrange(c + 1, d)
                pieces += [replace(piece, col_stop=at), replace(piece, col_start=at)]
            else:
                pieces.append(piece)
        for piece in pieces:
            boxes.setdefault(chance.randrange(world_size), []).append(piece)
    layout = Layout.of(world_size, SHAPES, boxes)
    layout.check()
    return layout


def listed_part(covers: int | None, common: bool, token: str = "a" * 16, xxh3: str = "0" * 32) -> ListedPart:
    return ListedPart(token=token, xxh3=xxh3, covers=covers, rows=0, stored_bytes=0, common_blobs=common)


def entry_of(seq: int, parts: PartList) -> Checkpoint:
    manifest = Manifest(
        run=RUN, attempt=1, snapshot_id=seq, step=seq, layout=parts.layout.digest, parts=parts.listed
    )
    return Checkpoint(
        seq=seq, previous="", writer="", at_s=0.0, attempt=1, snapshot_id=seq, step=seq, listed=manifest.listed, tables=(),
        encodings={}, rows=0, raw_bytes=0, stored_bytes=0, stall_s=0.0, snapshot_at_s=0.0,
    )  # fmt: skip


def states(chance: random.Random) -> tuple[RunState, RunState]:
    """Draw checkpoints as (with parts in manifests, with parts in entries). A part is a delta or has all rows.

    Layouts change in between, and a delta may cover another layout, which the log does not allow.
    """
    listings: dict[int, PartList] = {}
    layout = tiling(chance, 3)
    for seq in range(1, 6):
        if chance.random() < 0.3:
            layout = tiling(chance, chance.randrange(1, 5))
        listed = tuple(
            listed_part(
                chance.choice([None, *range(1, seq)]), chance.random() < 0.3, f"{rank:016x}", f"{seq:032x}"
            )
            for rank in range(layout.world_size)
        )
        listings[seq] = PartList(attempt=1, snapshot_id=seq, layout=layout, listed=listed)
    entries = {seq: entry_of(seq, each) for seq, each in listings.items()}
    inline = {seq: replace(entry, listed=None, parts=tuple(listings[seq])) for seq, entry in entries.items()}
    return (RunState(run=RUN, checkpoints=entries, listings=listings), RunState(run=RUN, checkpoints=inline))


def any_box(chance: random.Random) -> Box:
    table = chance.choice([*SHAPES, "unknown"])
    rows, columns = SHAPES.get(table, (3, 3))
    a, c = chance.randrange(rows), chance.randrange(columns)
    return Box(
        table=table, row_start=a, row_stop=chance.randrange(a + 1, rows + 3), col_start=c,
        col_stop=chance.randrange(c + 1, columns + 1),
    )  # fmt: skip


def chain_parts(state: RunState, seq: int, boxes: list[Box] | None) -> list[tuple[int, str, list[Box]]]:
    links = chain(state, seq, boxes, strict=False)
    return sorted((link.seq, link.part.index_key, sorted(map(repr, link.boxes))) for link in links)


@pytest.mark.parametrize("seed", range(300))
def test_chains_through_part_lists_equal_full_chains(seed: int) -> None:
    chance = random.Random(seed)
    listed, inline = states(chance)
    for boxes in (None, [any_box(chance) for _ in range(chance.randrange(1, 4))]):
        assert chain_parts(listed, 5, boxes) == chain_parts(inline, 5, boxes)
        if boxes is None:
            continue
        lacks = missing(listed, 5, boxes)
        assert set(lacks) == set(missing(inline, 5, boxes))
        if lacks:
            with pytest.raises(ChainIncomplete):
                chain(listed, 5, boxes)


def test_chain_materializes_only_needed_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of 4,096 over six checkpoints; after a reshard to 4,095, the two or three parts that overlap."""
    world, rows = 4096, 4096 * 4095
    each = rows // world

    def share(r: int, size: int) -> Box:
        return Box(table="t", row_start=r * size, row_stop=(r + 1) * size, col_start=0, col_stop=8)

    layout = Layout.of(world, {"t": (rows, 8)}, {r: [share(r, each)] for r in range(world)})
    listings = {
        seq: PartList(
            attempt=1, snapshot_id=seq, layout=layout, listed=tuple(listed_part(seq - 1 or None, rank == 0) for rank in range(world))
        )
        for seq in range(1, 7)
    }  # fmt: skip
    entries = {seq: entry_of(seq, each) for seq, each in listings.items()}
    state = RunState(run=RUN, checkpoints=entries, listings=listings)
    made: list[int] = []
    part_of = PartList.part
    monkeypatch.setattr(PartList, "part", lambda self, rank: made.append(rank) or part_of(self, rank))
    links = chain(state, 6, layout.boxes_of(2000))
    assert [(link.seq, link.part.rank) for link in links] == [(seq, 2000) for seq in range(6, 0, -1)]
    assert made == [2000] * 6
    made.clear()
    assert [part.rank for part in blob_parts_of(state, 6, [2000, 5000])] == [0, 2000]
    assert made == [0, 2000]
    assert {link.part.rank for link in chain(state, 6, [share(7, rows // 4095)])} == {7, 8}


def test_rank_reads_its_own_indexes_and_shared_blobs(tmp_path: Path) -> None:
    """The run has four ranks and three checkpoints. A reader for a new layout reads the indexes that overlap it."""
    run, model = SampleRun(tmp_path, world_size=4, layout=QUARTERS), SampleModel(TABLE)
    blobs = {"meta": b"0", "dense/w": b"w", "rank/1/rng": b"1", "rank/2/rng": b"2", "rank/3/rng": b"3"}
    blobs["rank/3/loader"] = b"4"
    covers, ids = None, np.arange(40)
    for step in range(3):
        ranks = [(list(held), model.frames(ids, held[0], step=step)) for held in QUARTERS]
        covers = seq = run.save([TABLE], ranks, step=step, covers=covers, blobs=blobs)
        ids = model.train()
    state = run.log.refresh()
    read: list[Part] = []
    get = run.store.get

    def counted(key: str) -> bytes:
        if key.endswith(".index"):
            read.append(key.rsplit("/", 2)[1:])
        return get(key)

    run.store.get = counted  # type: ignore[method-assign]

    def reads(
        rank: int | None, *boxes: Box, names: bool | list[str] = True, world: int | None = None
    ) -> list[tuple[int, int]]:
        read.clear()
        wants = [Want(schema=TABLE, boxes=boxes)] if boxes else []
        plan = plan_restore(run.store, state, seq, wants, rank=rank, world_size=world, blobs=names)
        assert ("rank/3/loader" in plan.blobs) is (rank == 3 or (rank == 1 and world == 2))
        assert {"meta", "dense/w"} <= set(plan.blobs) or isinstance(names, list)
        return sorted((int(snapshot_id), int(name[:5])) for snapshot_id, name in read)

    assert reads(2, *QUARTERS[2]) == [(1, 2), (2, 2), (3, 0), (3, 2)]
    assert reads(0, *QUARTERS[0]) == [(1, 0), (2, 0), (3, 0)]
    assert reads(1, box(TABLE, 15, 25, 0, 4)) == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]
    assert reads(1, world=2) == [(3, 0), (3, 1), (3, 3)], "with the loader positions of a removed rank"
    assert reads(7) == [(3, 0)], "a rank that no save had"
    assert reads(None) == [(3, 0)]
    assert reads(None, names=["rank/3/rng"]) == [(3, 0), (3, 3)]
