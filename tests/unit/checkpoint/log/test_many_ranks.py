"""Format 2: log entries of many ranks and their rules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltashard_checkpoint.errors import InvalidCheckpoint, UserError
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.log import entry_codec
from deltashard_checkpoint.log.chain import chain, closure, may_cover, parts_of
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.manifest import Manifests, manifest_key
from deltashard_checkpoint.log.replay import EntryRefused, advance
from deltashard_checkpoint.maintenance.compaction import compact, compactable
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.snapshot_reports import SnapshotAbandoned

from tests.support.checkpoint.sample import RUN, SampleModel, SampleRun, box, schema
from tests.support.checkpoint.snapshot import read_checkpoint

TABLE = schema(rows=40, columns=8)
HALVES = [[box(TABLE, 0, 20, 0, 8)], [box(TABLE, 20, 40, 0, 8)]]
COLUMNS = [[box(TABLE, 0, 40, 0, 4)], [box(TABLE, 0, 40, 4, 8)]]


def _save(
    run: SampleRun,
    model: SampleModel,
    layout: list[list[Box]],
    ids: Any,
    step: int,
    covers: int | None = None,
) -> int:
    ranks = [(list(held), [f for b in held for f in model.frames(ids, b, step=step)]) for held in layout]
    return run.save([TABLE], ranks, step=step, covers=covers, blobs={"meta": b"m%d" % step})


def test_snapshot_cannot_cover_another_layout(tmp_path: Path) -> None:
    """The first snapshot after a change of layout is a baseline or abandoned, also when the new attempt has no layout."""
    run, model = SampleRun(tmp_path, world_size=2, layout=HALVES), SampleModel(TABLE)
    first = _save(run, model, HALVES, range(40), 1)
    run.open(2, HALVES)
    assert may_cover(run.log.state, run.attempt, first)
    again = _save(run, model, HALVES, model.train(), 2, first)
    run.open(2, COLUMNS)
    assert not may_cover(run.log.state, run.attempt, again)
    with pytest.raises(SnapshotAbandoned, match="another layout"):
        _save(run, model, COLUMNS, range(40), 3, again)
    run.open(1)
    with pytest.raises(SnapshotAbandoned, match="another layout"):
        _save(run, model, [[box(TABLE, 0, 40, 0, 8)]], range(40), 3, again)


def test_mismatched_layout_is_refused_before_the_attempt(tmp_path: Path) -> None:
    run = SampleRun(tmp_path)
    tip = run.log.refresh().tip
    good = Layout.of(2, {TABLE.fqn: (40, 8)}, dict(enumerate(HALVES)))
    for data, world_size, why in (
        (good.data, 3, "layout of 2 ranks, but 3 ranks train"),
        (good.data[:-8], 2, "layout"),
        (Layout.of(2, {TABLE.fqn: (40, 8)}, {0: HALVES[0]}).data, 2, "no rank holds rows 20 to 39"),
    ):
        with pytest.raises(UserError, match=why):
            open_attempt(run.log, owner="tests", world_size=world_size, layout=data)
    assert run.log.refresh().tip == tip
    assert not list(run.store.list(f"{RUN}/layout/"))


def test_missing_or_wrong_manifest_makes_the_checkpoint_invalid(tmp_path: Path) -> None:
    run, model = SampleRun(tmp_path, world_size=2, layout=HALVES), SampleModel(TABLE)
    seq = _save(run, model, HALVES, range(40), 1)
    entry = run.log.refresh().checkpoints[seq]
    assert entry.listed is not None
    key = f"{RUN}/{manifest_key(entry.attempt, entry.snapshot_id, entry.listed.manifest)}"
    layout = f"{RUN}/layout/{run.layout}"
    for each in (key, layout):
        data = run.store.get(each)
        for bad in (b"", data[:-1] + b"x", None):
            run.store.delete([each])
            if bad is not None:
                run.store.put(each, bad)
            with pytest.raises(InvalidCheckpoint):
                read_checkpoint(run.store, RUN)
            assert RunLog(run.store, RUN).refresh().newest() == entry
        run.store.delete([each])
        run.store.put(each, data)
    assert read_checkpoint(run.store, RUN).entry == entry
    other = Manifests(run.store, RUN)
    with pytest.raises(InvalidCheckpoint, match="not that of the entry"):
        other.parts(replace(entry, step=entry.step + 1))


@pytest.mark.slow
def test_multi_rank_checkpoints_are_not_compacted(tmp_path: Path) -> None:
    run, model = SampleRun(tmp_path, world_size=2, layout=HALVES), SampleModel(TABLE)
    seq = None
    for step in range(1, 12):
        seq = _save(run, model, HALVES, range(40) if seq is None else model.train(), step, seq)
    assert seq is not None
    assert not compactable(run.log.refresh(), seq)
    with pytest.raises(UserError, match="several ranks"):
        compact(run.log, seq, lambda *_: pytest.fail("moved"))


def test_entry_with_another_world_size_is_refused(tmp_path: Path) -> None:
    run, model = SampleRun(tmp_path, world_size=2, layout=HALVES), SampleModel(TABLE)
    seq = _save(run, model, HALVES, range(40), 1)
    state = run.log.refresh()
    good = state.checkpoints[seq]
    assert good.listed is not None
    for listed, why in (
        (replace(good.listed, world_size=3), "3 parts of 2 ranks"),
        (replace(good.listed, layout="0" * 32), "not its attempt's"),
        (None, "0 parts of 2 ranks"),
        (replace(good.listed, covers=(None, 77)), "covers 77"),
    ):
        entry = replace(
            good, seq=state.tip + 1, previous=state.tip_hash, snapshot_id=good.snapshot_id + 1, listed=listed
        )
        with pytest.raises(EntryRefused, match=why):
            advance(state, entry_codec.Sealed(entry=entry, data=b"", hash="f" * 64))
    assert closure(state, (seq,)) == {seq}
    assert len(parts_of(Manifests(run.store, RUN).listing(state, (seq,)), seq)) == 2
    assert len(chain(Manifests(run.store, RUN).listing(state, (seq,)), seq, HALVES[1])) == 1
