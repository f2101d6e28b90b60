"""Format 2: what the log says of many ranks, and the law of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltashard_checkpoint.errors import CorruptObject, InvalidCheckpoint, UnsupportedVersion, UserError
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.log import entry_codec, folded_state
from deltashard_checkpoint.log.chain import chain, closure, may_cover, parts_of
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import AttemptOpened, Checkpoint, Listed, entry_key
from deltashard_checkpoint.log.manifest import Manifest, Manifests, manifest_key
from deltashard_checkpoint.log.part_list import ListedPart
from deltashard_checkpoint.log.replay import EntryRefused, advance
from deltashard_checkpoint.maintenance.compaction import compact, compactable
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.commit import PartsMissing, commit_parts
from deltashard_checkpoint.write.cut_reports import Abandoned, GivenUp, abandon_part
from deltashard_checkpoint.write.report import PartReport, ReportBodyCache
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.sample import RUN, Model, Run, box, schema
from tests.support.checkpoint.snapshot import read_checkpoint

TABLE = schema(rows=40, columns=8)
HALVES = [[box(TABLE, 0, 20, 0, 8)], [box(TABLE, 20, 40, 0, 8)]]
COLUMNS = [[box(TABLE, 0, 40, 0, 4)], [box(TABLE, 0, 40, 4, 8)]]


def _save(
    run: Run, model: Model, layout: list[list[Box]], ids: Any, step: int, covers: int | None = None
) -> int:
    ranks = [(list(held), [f for b in held for f in model.frames(ids, b, step=step)]) for held in layout]
    return run.save([TABLE], ranks, step=step, covers=covers, blobs={"meta": b"m%d" % step})


def test_a_run_of_two_ranks_is_saved_resharded_and_read(tmp_path: Path) -> None:
    """Entries say layout, manifest and what is covered, and no part; a reader finds the parts by the manifest."""
    run, model = Run(tmp_path, world_size=2, layout=HALVES), Model(TABLE)
    first = _save(run, model, HALVES, range(40), 1)
    second = _save(run, model, HALVES, model.train(), 2, first)
    for seq in (first, second):
        document = json.loads(run.store.get(f"{RUN}/{entry_key(seq)}"))
        assert "parts" not in document
        assert document["covers"] == ([None] if seq == first else [first])
    found = read_checkpoint(run.store, RUN)
    np.testing.assert_array_equal(found.tables[TABLE.fqn].weights, model.weights)
    run.open(2, COLUMNS)
    third = _save(run, model, COLUMNS, range(40), 3)
    fourth = _save(run, model, COLUMNS, model.train(), 4, third)
    run.open(1)
    read_checkpoint(run.store, RUN, f"seq:{third}")
    found = read_checkpoint(run.store, RUN, f"seq:{fourth}")
    np.testing.assert_array_equal(found.tables[TABLE.fqn].weights, model.weights)
    np.testing.assert_array_equal(found.tables[TABLE.fqn].fields["sum"], model.fields["sum"])
    assert len({info.key for info in run.store.list(f"{RUN}/layout/")}) == 2


def test_a_cut_covers_nothing_of_another_layout(tmp_path: Path) -> None:
    """The first cut after a change of layout is a baseline, or abandoned; so it is without a layout after one."""
    run, model = Run(tmp_path, world_size=2, layout=HALVES), Model(TABLE)
    first = _save(run, model, HALVES, range(40), 1)
    run.open(2, HALVES)
    assert may_cover(run.log.state, run.attempt, first)
    again = _save(run, model, HALVES, model.train(), 2, first)
    run.open(2, COLUMNS)
    assert not may_cover(run.log.state, run.attempt, again)
    with pytest.raises(Abandoned, match="another layout"):
        _save(run, model, COLUMNS, range(40), 3, again)
    run.open(1)
    with pytest.raises(Abandoned, match="another layout"):
        _save(run, model, [[box(TABLE, 0, 40, 0, 8)]], range(40), 3, again)


def test_ranks_of_another_layout_or_step_make_no_checkpoint(tmp_path: Path) -> None:
    run, model = Run(tmp_path, world_size=2, layout=HALVES), Model(TABLE)
    _save(run, model, HALVES, range(40), 1)
    for cut, step, layout, why in (
        (9, 5, "0" * 32, "another layout"),
        (10, 6, run.layout, "cut at step 5, this one at step 6"),
    ):
        first, second = _reports(run, cut)
        with pytest.raises(PartsMissing):
            _commit(run, [first], cut=cut, deadline_s=0.0)
        with pytest.raises(Abandoned, match=why):
            _commit(run, [second], cut=cut, step=step, layout=layout, deadline_s=0.0)
    assert len(RunLog(run.store, RUN).refresh().checkpoints) == 1


def _reports(run: Run, cut: int) -> list[PartReport]:
    from deltashard_checkpoint.format.object_key import index_key
    from deltashard_checkpoint.log.entry import Part

    return [
        PartReport(
            part=Part(
                rank=rank,
                index_key=index_key(
                    attempt=run.attempt, cut=cut, rank=rank, token="a" * 16, xxh3=f"{rank:032x}"
                ),
                boxes=tuple(HALVES[rank]),
                stored_bytes=10,
                covers=None,
            ),
            tables=(TABLE,),
            encodings={"items": ("fp32",)},
            rows=20,
            raw_bytes=100,
            stall_s=0.25 * (rank + 1),
            cut_at_s=1000.5 + rank,
        )
        for rank in range(2)
    ]


def _commit(run: Run, reports: list[PartReport], **more: Any) -> Any:
    options = {"step": 5, "layout": run.layout, "deadline_s": 30.0, **more}
    return commit_parts(RunLog(run.store, RUN), attempt=run.attempt, world_size=2, reports=reports, **options)


def test_a_pod_commits_all_its_ranks_at_once_and_needs_no_object_for_it(tmp_path: Path) -> None:
    """Counted: what is said beside names is remembered by its hash, so a commit by rank 0's pod gets nothing."""
    run = Run(tmp_path, world_size=2, layout=HALVES)
    gets: list[str] = []
    get = run.store.get
    run.store.get = lambda key: gets.append(key) or get(key)  # type: ignore[method-assign]
    bodies = ReportBodyCache()
    for cut in (1, 2):
        done = _commit(run, _reports(run, cut), cut=cut, bodies=bodies)
        assert done.by_us
    assert (done.entry.stall_s, done.entry.cut_at_s) == (0.5, 1000.5)
    assert done.entry.encodings == {"items": ("fp32",)}
    assert done.entry.rows == 40
    assert [key for key in gets if "/data/" in key] == []


def test_who_gives_a_cut_up_is_not_waited_for_and_a_commit_that_happened_is_adopted(tmp_path: Path) -> None:
    run = Run(tmp_path, world_size=2, layout=HALVES)
    reports = _reports(run, 1)
    abandon_part(run.log, attempt=run.attempt, cut=1, rank=1, token="a" * 16, deadline_s=5)
    with pytest.raises(GivenUp, match="rank 1"):
        _commit(run, reports[:1], cut=1)
    seq = _commit(run, reports, cut=1).seq  # its part came after all, and a peer saw it
    abandon_part(run.log, attempt=run.attempt, cut=1, rank=0, token="b" * 16, deadline_s=5)
    assert _commit(run, reports[:1], cut=1).seq == seq


def test_a_layout_that_does_not_fit_is_refused_before_an_attempt(tmp_path: Path) -> None:
    run = Run(tmp_path)
    tip = run.log.refresh().tip
    good = Layout.of(2, {TABLE.fqn: (40, 8)}, dict(enumerate(HALVES)))
    for data, world_size, why in (
        (good.data, 3, "layout of 2 ranks, 3 train"),
        (good.data[:-8], 2, "layout"),
        (Layout.of(2, {TABLE.fqn: (40, 8)}, {0: HALVES[0]}).data, 2, "no rank holds rows 20 to 39"),
    ):
        with pytest.raises(UserError, match=why):
            open_attempt(run.log, owner="tests", world_size=world_size, layout=data)
    assert run.log.refresh().tip == tip
    assert not list(run.store.list(f"{RUN}/layout/"))


def test_a_manifest_or_layout_that_is_gone_or_wrong_makes_the_checkpoint_invalid(tmp_path: Path) -> None:
    """Not the log: it is read, judged and appended to without either."""
    run, model = Run(tmp_path, world_size=2, layout=HALVES), Model(TABLE)
    seq = _save(run, model, HALVES, range(40), 1)
    entry = run.log.refresh().checkpoints[seq]
    assert entry.listed is not None
    key = f"{RUN}/{manifest_key(entry.attempt, entry.cut, entry.listed.manifest)}"
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
def test_several_ranks_are_not_compacted(tmp_path: Path) -> None:
    run, model = Run(tmp_path, world_size=2, layout=HALVES), Model(TABLE)
    seq = None
    for step in range(1, 12):
        seq = _save(run, model, HALVES, range(40) if seq is None else model.train(), step, seq)
    assert seq is not None
    assert not compactable(run.log.refresh(), seq)
    with pytest.raises(UserError, match="several ranks"):
        compact(run.log, seq, lambda *_: pytest.fail("moved"))


def test_the_folded_state_remembers_layouts(tmp_path: Path) -> None:
    run, model = Run(tmp_path, world_size=2, layout=HALVES), Model(TABLE)
    _save(run, model, HALVES, range(40), 1)
    state = run.log.refresh()
    data = folded_state.dump(state)
    assert folded_state.load(data, RUN, folded_state.name_of(state, data)) == state


_digests = st.text("0123456789abcdef", min_size=32, max_size=32)
_covers = st.lists(st.one_of(st.none(), st.integers(0, 50)), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(
    layout=_digests,
    parts=st.lists(
        st.tuples(_digests, st.one_of(st.none(), st.integers(0, 9)), st.integers(0, 99)), min_size=1
    ),
)
def test_manifests_and_entries_read_back_as_they_were_written(layout: str, parts: list[Any]) -> None:
    manifest = Manifest(
        run="job",
        attempt=3,
        cut=4,
        step=5,
        layout=layout,
        parts=tuple(
            ListedPart(
                token="a" * 16,
                xxh3=xxh3,
                covers=covers,
                rows=rows,
                stored_bytes=rows * 2,
                common_blobs=rows % 2 == 0,
            )
            for xxh3, covers, rows in parts
        ),
    )
    listed = manifest.listed
    assert Manifest.decode(manifest.data, digest=listed.manifest) == manifest
    with pytest.raises(CorruptObject):
        Manifest.decode(manifest.data + b" ", digest=listed.manifest)
    entry = _entry(listed)
    sealed = entry_codec.seal(entry)
    assert sealed.entry == entry
    assert entry.world_size == len(parts)
    assert entry.baseline == all(covers is None for _, covers, _ in parts)


def _entry(listed: Listed | None) -> Checkpoint:
    return Checkpoint(
        seq=7, previous="a" * 64, writer="w", at_s=0.0, attempt=3, cut=4, step=5, tables=(), encodings={}, rows=0,
        raw_bytes=0, stored_bytes=0, stall_s=0.0, cut_at_s=0.0, listed=listed,
    )  # fmt: skip


def test_hostile_entries_of_many_ranks_are_newer_never_corrupt() -> None:
    """Whatever is unknown in bytes whose hash fits may be a newer version's word: no attempt may leave it behind."""
    import hashlib

    from deltashard_checkpoint.format.canonical_json import canonical

    listed = Listed(layout="1" * 32, world_size=2, manifest="2" * 32, covers=(None, 4))
    document = entry_codec.document_of(_entry(listed))
    opened = entry_codec.document_of(
        AttemptOpened(
            seq=7, previous="a" * 64, writer="w", at_s=0.0, world_size=2, resumes_from=None, owner="o",
            layout="1" * 32,
        )
    )  # fmt: skip

    def parse(changed: dict[str, Any]) -> Any:
        digest = hashlib.sha256(canonical(changed)).hexdigest()
        return entry_codec.parse(canonical({**changed, "hash": digest}), 7)

    assert parse(document).entry.listed == listed
    for base in (document, opened):
        for key in base:
            if key in {"seq", "hash", "at_s", "owner", "directive"}:
                continue
            for bad in (None, -1, "x", [[]], {"a": 1}, [4, None], [None, 4, 4], "3" * 31):
                if base[key] == bad or (key in {"resumes_from", "voids"} and bad is None):
                    continue
                if key in {"writer", "run"} and isinstance(bad, str):
                    continue
                if key == "previous" and isinstance(bad, str):
                    pass
                with pytest.raises(UnsupportedVersion):
                    parse({**base, key: bad})
        for key in ("layout", "world_size") if base is document else ("world_size",):
            with pytest.raises(UnsupportedVersion):
                parse({k: v for k, v in base.items() if k != key})
        with pytest.raises(UnsupportedVersion):
            parse({**base, "format": 2})
        with pytest.raises(UnsupportedVersion):
            parse({**base, "shape": "unheard of"})
    with pytest.raises(UnsupportedVersion):
        parse({**document, "parts": []})


def test_an_entry_of_another_size_than_its_attempt_is_refused(tmp_path: Path) -> None:
    run, model = Run(tmp_path, world_size=2, layout=HALVES), Model(TABLE)
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
        entry = replace(good, seq=state.tip + 1, previous=state.tip_hash, cut=good.cut + 1, listed=listed)
        with pytest.raises(EntryRefused, match=why):
            advance(state, entry_codec.Sealed(entry=entry, data=b"", hash="f" * 64))
    assert closure(state, (seq,)) == {seq}
    assert len(parts_of(Manifests(run.store, RUN).listing(state, (seq,)), seq)) == 2
    assert len(chain(Manifests(run.store, RUN).listing(state, (seq,)), seq, HALVES[1])) == 1
