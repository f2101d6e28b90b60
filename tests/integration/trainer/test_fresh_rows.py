"""A part's list of new rows (`since`) is correct and complete, with a real sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltashard
import numpy as np
import pytest
import torch
from deltashard.save import precopy_scheduler
from deltashard.snapshot import precopy
from deltashard.snapshot.block_writer import BlockWriter, TableSnapshot
from deltashard.tracking.marks import RowSelection
from deltashard.tracking.tracking import TrackingSettings
from deltashard_checkpoint.format.frame import FrameKind, parse_frame
from deltashard_checkpoint.format.index import Index, Place, decode_index
from deltashard_checkpoint.format.object_key import run_key
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.url import open_store
from deltashard_cli import verification
from deltashard_cli.target import Target
from deltashard_cli.verification import verify
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.checkpointers import MakeCheckpointer, checkpointers, simulate_crash
from tests.support.eventually import eventually

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
ROWS, DIM = 500, 8
TABLES = ("large", "small")


class SparseWriteLoop:
    """Two tables and steps that write the rows that a test names."""

    def __init__(self, *, pointwise: bool = False) -> None:
        """`pointwise` selects an optimizer with a value for each weight instead of one for each row."""
        torch.manual_seed(1)
        self.net: Any = nn.ModuleDict(
            {
                "large": nn.Embedding(ROWS, DIM, sparse=True),
                "small": nn.Embedding(ROWS // 5, DIM, sparse=True),
            }
        )
        adagrad: Any = torch.optim.Adagrad if pointwise else deltashard.optim.RowWiseAdagrad
        self.optimizer = adagrad(self.net.parameters(), lr=0.1)

    def step(self, ckpt: deltashard.Checkpointer, rng: np.random.Generator) -> None:
        self.write(ckpt, torch.from_numpy(rng.integers(ROWS, size=6)))

    def write(self, ckpt: deltashard.Checkpointer, ids: torch.Tensor, *, nan_rows: int = 0) -> None:
        """Write rows `ids`, and NaN to the last `nan_rows` of the large table."""
        self.optimizer.zero_grad()
        loss = self.net["large"](ids).square().sum() + self.net["small"](ids // 5).square().sum()
        if nan_rows:
            loss = loss + self.net["large"](ids[-nan_rows:]).sum() * torch.nan
        loss.backward()
        self.optimizer.step()
        ckpt.step()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCheckpointer]:
    with checkpointers(tmp_path, monkeypatch, keep_last=100, precopy=False) as build:
        yield build


def _save(loop: SparseWriteLoop, ckpt: deltashard.Checkpointer, rng: np.random.Generator, times: int) -> None:
    for _ in range(times):
        loop.step(ckpt, rng)
        ckpt.save().wait(60)


def _store(folder: Path) -> Store:
    return open_store(f"file://{folder / 'store'}")


def _checkpoints(folder: Path) -> dict[int, Checkpoint]:
    return dict(sorted(RunLog(_store(folder), "r").refresh().checkpoints.items()))


def _problems(folder: Path) -> Any:
    return verify(Target(store=_store(folder), run="r"), deep=True).problems


def _index(store: Store, key: str) -> Index:
    return decode_index(bytes(store.get(run_key("r", key))), key=key, run="r")


def _rows(store: Store, index: Index, place: Place) -> np.ndarray:
    data = bytes(store.get(run_key("r", index.packs[place.pack].key)))
    return parse_frame(memoryview(data)[place.offset : place.offset + place.info.length], None).row_ids()


def _values(folder: Path, seq: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = {}
    with deltashard.open_checkpoint(folder, "r", which=f"seq:{seq}") as stored:
        for table in TABLES:
            rows = ROWS if table == "large" else ROWS // 5
            read = stored.rows(f"{table}.weight", torch.arange(rows))
            found[table] = read.weights.numpy().copy(), read.state["sum"].numpy().reshape(rows, -1).copy()
    return found


def _check(folder: Path) -> list[int]:
    """Assert that every `since` is correct, and return the checkpoints that have one."""
    store = _store(folder)
    with_since = []
    for seq, entry in _checkpoints(folder).items():
        (part,) = entry.parts
        index = _index(store, part.index_key)
        places = [place for place in index.places if place.info.kind is FrameKind.ROWS]
        marked = {place.since for place in places} - {None}
        if not marked:
            continue
        (since,) = marked
        assert since is not None
        assert since < seq
        with_since.append(seq)
        before, now = _values(folder / "store", since), _values(folder / "store", seq)
        for table in TABLES:
            differ = np.zeros(len(now[table][0]), bool)
            for was, value in zip(before[table], now[table], strict=True):
                differ |= (was.view(np.int32) != value.view(np.int32)).reshape(len(was), -1).any(axis=1)
            mine = [place for place in places if place.info.table == f"{table}.weight"]
            none = np.empty(0, np.int64)
            fresh = np.concatenate(
                [none, *(_rows(store, index, each) for each in mine if each.since is not None)]
            )
            others = np.concatenate(
                [none, *(_rows(store, index, each) for each in mine if each.since is None)]
            )
            assert set(np.flatnonzero(differ)) <= set(fresh), (seq, table)
            assert not differ[sorted(set(others) - set(fresh))].any(), (seq, table)
            every = np.concatenate([fresh, others])
            repeated = len(every) - sum(place.rows for place in mine)
            assert repeated == len(every) - len(np.unique(every)), (seq, table)
    return with_since


@pytest.mark.parametrize(("encoding", "differential"), [("q4", "one-shot"), ("fp32", "consecutive")])
def test_since_is_omitted_where_invalid_or_redundant(
    make: MakeCheckpointer, tmp_path: Path, encoding: str, differential: str
) -> None:
    """A q4 row depends on its frame's shared exponent. Consecutive deltas already have this information in `covers`."""
    rng = np.random.default_rng(3)
    loop = SparseWriteLoop()
    ckpt = make(loop, encoding=encoding, differential=differential)
    ckpt.restore()
    _save(loop, ckpt, rng, 4)
    assert _check(tmp_path) == []


def test_rows_of_failed_save_are_new_in_next_one(
    make: MakeCheckpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar is killed after it stored the third save except the commit. The next save's `since` is the second."""
    monkeypatch.setenv("DELTASHARD_CRASH_AT", "index.after_put:3")
    rng = np.random.default_rng(3)
    loop = SparseWriteLoop()
    ckpt = make(loop, encoding="q8", differential="full")
    ckpt.restore()
    _save(loop, ckpt, rng, 2)
    second = max(_checkpoints(tmp_path))
    before = loop.net["large"].weight.detach().clone()
    loop.step(ckpt, rng)
    lost = ckpt.save()
    with pytest.raises(deltashard.SaveFailed):
        lost.wait(60)
    rows = set(np.flatnonzero((loop.net["large"].weight.detach() != before).any(1).numpy()))
    assert rows

    eventually(lambda: loop.step(ckpt, rng) or ckpt._attachment.link, what="another sidecar")
    ckpt.save().wait(60)
    seq, entry = next(each for each in _checkpoints(tmp_path).items() if each[0] > second)
    assert seq in _check(tmp_path)
    store = _store(tmp_path)
    index = _index(store, entry.parts[0].index_key)
    fresh = [each for each in index.places if each.since is not None and each.info.table == "large.weight"]
    assert {place.since for place in fresh} == {second}
    assert rows <= {int(row) for place in fresh for row in _rows(store, index, place)}


@pytest.mark.slow
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    moves=st.lists(
        st.one_of(st.integers(1, 14), st.integers(1, 14), st.sampled_from(["save", "restart", "nan"])),
        min_size=5,
        max_size=14,
    ),
    pointwise=st.booleans(),
    encoding=st.sampled_from(["fp32", "q8"]),
    differential=st.sampled_from(["full", "one-shot", "intermittent"]),
)
def test_since_is_correct_for_any_program(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    moves: list[int | str],
    pointwise: bool,
    encoding: str,
    differential: str,
) -> None:
    """Steps alternate with saves that are copied ahead, requested saves, and programs that are killed and resume."""
    monkeypatch.setattr(precopy, "MIN_PRECOPY_TABLE_BYTES", 0)
    monkeypatch.setattr(precopy_scheduler, "MIN_PRECOPY_BYTES", 0)
    folder = tmp_path_factory.mktemp("program")
    rng = np.random.default_rng(3)
    with checkpointers(folder, monkeypatch, keep_last=100) as make:

        def begun() -> tuple[SparseWriteLoop, deltashard.Checkpointer]:
            loop = SparseWriteLoop(pointwise=pointwise)
            settings = {"every_steps": 8, "tracking": TrackingSettings(hash_below_bytes=0)}
            ckpt = make(loop, encoding=encoding, differential=differential, **settings)
            ckpt.restore()
            return loop, ckpt

        loop, ckpt = begun()
        for move in (10, "save", 10, *moves, "save"):
            if move == "restart":
                simulate_crash(ckpt)
                loop, ckpt = begun()
            elif move == "nan":
                loop.write(ckpt, torch.from_numpy(rng.integers(ROWS, size=6)), nan_rows=1)
            elif move == "save":
                loop.step(ckpt, rng)
                ckpt.save().wait(60)
            else:
                for _ in range(int(move)):
                    loop.step(ckpt, rng)
                    if (copying := ckpt._outcomes.precopy._now) is not None:
                        eventually(lambda copying=copying: copying.done, what="the copy")
                ckpt._outcomes.drain(float("inf"))
        simulate_crash(ckpt)
        assert _check(folder)
        assert _problems(folder) == ()


@pytest.mark.parametrize("fault", ["two checkpoints", "itself"])
def test_verify_finds_inconsistent_since(
    make: MakeCheckpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The fault is injected into the index of the newest of three baselines when it is read: its name has its hash."""
    rng = np.random.default_rng(3)
    loop = SparseWriteLoop()
    ckpt = make(loop, encoding="fp32", differential="full")
    ckpt.restore()
    _save(loop, ckpt, rng, 3)
    simulate_crash(ckpt)
    store, checkpoints = _store(tmp_path), _checkpoints(tmp_path)
    first, _, seq = checkpoints
    key = checkpoints[seq].parts[0].index_key
    index = _index(store, key)
    places = list(index.places)
    fresh = [(place.info.table, place.since is not None) for place in places]
    if fault == "itself":
        at = fresh.index(("large.weight", True))
        places[at] = replace(places[at], since=seq)
    else:
        at = fresh.index(("large.weight", False))
        places[at] = replace(places[at], since=first)
    read = verification._read_indexes
    planted = {key: replace(index, places=tuple(places))}
    monkeypatch.setattr(verification, "_read_indexes", lambda *args: read(*args) | planted)
    (problem,) = verify(Target(store=store, run="r")).problems
    assert problem.object == key
    assert "instead of one earlier checkpoint" in problem.what
    assert problem.checkpoints == (seq,)


def test_verify_finds_changed_row_missing_from_since(
    make: MakeCheckpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The injected fault: the trainer omits some changed rows of one table."""
    rng = np.random.default_rng(3)
    loop = SparseWriteLoop()
    ckpt = make(loop, encoding="q8", differential="full")
    ckpt.restore()
    _save(loop, ckpt, rng, 2)
    assert _problems(tmp_path) == ()
    whole = BlockWriter.table

    def table(
        writer: BlockWriter,
        snapshot: TableSnapshot,
        *,
        start: int = 0,
        fresh: bool | None = None,
        duplicated: bool = False,
    ) -> None:
        ids = snapshot.selection.ids
        if not fresh or ids is None or not snapshot.fqn.startswith("large"):
            whole(writer, snapshot, start=start, fresh=fresh, duplicated=duplicated)
            return
        for some, marked in ((ids[:1], True), (ids[1:], False)):
            whole(writer, replace(snapshot, selection=RowSelection(all=False, ids=some)), fresh=marked)

    monkeypatch.setattr(BlockWriter, "table", table)
    loop.step(ckpt, rng)
    ckpt.save().wait(60)
    *_, (seq, entry) = _checkpoints(tmp_path).items()
    found = verify(Target(store=_store(tmp_path), run="r"), deep=True)
    (problem,) = found.problems
    assert problem.object == entry.parts[0].index_key
    assert "rows of large.weight" in problem.what
    assert problem.checkpoints == (seq,)
    assert seq in found.restored, "the checkpoint was restored"
