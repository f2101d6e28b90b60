"""Golden runs: the current reader reads them as before, and the current writer writes the same bytes."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.errors import UnsupportedVersion
from deltashard_checkpoint.format.canonical_json import content_digest
from deltashard_checkpoint.format.index import encode_index, parse_index
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.object_key import snapshot_prefix
from deltashard_checkpoint.log import folded_state
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import (
    FoldName,
    Ignored,
    Reclaimed,
    Repaired,
    entry_key,
    named_fold,
    seq_of,
)
from deltashard_checkpoint.log.entry_codec import parse, seal
from deltashard_checkpoint.log.folded_state import fold_key, fold_of
from deltashard_checkpoint.log.listing import Hint
from deltashard_checkpoint.log.manifest import Manifest
from deltashard_checkpoint.log.replay import fold
from deltashard_checkpoint.log.run_state import RunState, Unreadable
from deltashard_checkpoint.maintenance import user_entry
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.write.report import ReportBody, parse_report_name
from deltashard_proto.v1 import index_pb2

from tests.support.checkpoint.run_builder import layout_of, started_run
from tests.support.checkpoint.snapshot import arrays_of, read_checkpoint

RUN, RUN_2, RUN_3, RUN_4 = "run", "run-2", "run-3", "run-4"
COLUMNS = ("rank", "table", "row_start", "row_stop", "col_start", "col_stop")
"""The columns of a layout."""
GOLDEN = Path(__file__).parents[3] / "golden" / "v1"
PAGE = (Path(__file__).parents[4] / "docs" / "format.md").read_text()
LIVE_SEQS = (2, 4, 5, 6, 11, 14, 17, 19, 20)
LIVE_SEQS_2 = (2, 4, 8)
LIVE_SEQS_3 = (4, 5, 7, 9, 10, 13)
LIVE_SEQS_4 = (2, 3, 6, 13)
EACH = [
    (run, seq)
    for run, live in ((RUN, LIVE_SEQS), (RUN_2, LIVE_SEQS_2), (RUN_3, LIVE_SEQS_3), (RUN_4, LIVE_SEQS_4))
    for seq in live
]
"""Every live checkpoint as (run, seq)."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    for run in (RUN, RUN_2, RUN_3, RUN_4):
        shutil.copytree(GOLDEN / run, tmp_path / "store" / run)
    return open_store(f"file://{tmp_path}/store", create=False)


def found_in(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("run", "seq"), EACH)
def test_every_live_checkpoint_restores_bit_for_bit(store: Store, run: str, seq: int) -> None:
    found = read_checkpoint(store, run, f"seq:{seq}")
    expected = GOLDEN / f"{run}-expected"
    wanted = {path.stem: np.load(path) for path in (expected / str(seq)).glob("*.npy")}
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays_of(found).items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in wanted.items()
    }
    blobs = json.loads((expected / "blobs.json").read_text())
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.blobs.items()} == blobs[str(seq)]


BAD = {
    *(f"{run}/{entry_key(seq)}" for run, seq in ((RUN, 12), (RUN_2, 3), (RUN_2, 6), (RUN_2, 9))),
    f"{RUN}/{fold_key(FoldName(19, 'cf10efbafcdb99e08057c32705970a72'))}",
}
"""Corrupt entries, an entry of an unknown kind, an entry of a newer version, and a folded state that no entry names."""


def rewritten(run: str, key: str, data: bytes) -> bytes:
    """Read an object with the current reader and return what the current writer writes for it."""
    name = key.rpartition("/")[2]
    if name == "HINT":
        return Hint.of(data).data
    if name.startswith("fold-"):
        return folded_state.dump(folded_state.load(data, run, fold_of(key)))
    if (seq := seq_of(key)) is not None:
        return seal(parse(data, seq).entry).data
    if key.startswith("layout/"):
        layout = Layout.decode(data, digest=name)
        columns = {column: getattr(layout, column) for column in COLUMNS}
        return Layout(world_size=layout.world_size, tables=layout.tables, columns=columns).data
    if name.endswith(".manifest"):
        return Manifest.decode(data, digest=name.removesuffix(".manifest")).data
    if name.endswith(".index"):
        return encode_index(parse_index(data))
    if name.endswith(".part"):
        parsed = parse_report_name(name)
        assert parsed is not None
        assert (parsed.text, parsed.body) == (name, content_digest(data))
        world_size = json.loads(data)["world_size"]
        return ReportBody.decode(data, run, world_size, where=key).encode(run, world_size)
    raise AssertionError(f"{key} is an object of an unknown kind")


@pytest.mark.parametrize("run", [RUN, RUN_2, RUN_3, RUN_4])
def test_golden_objects_are_rewritten_with_the_same_bytes(run: str) -> None:
    for key, data in found_in(GOLDEN / run).items():
        if not key.endswith(".pack") and f"{run}/{key}" not in BAD:
            assert rewritten(run, key, data) == data, key


def test_current_documents_have_no_members_missing_in_golden() -> None:
    """Readers of version 1 refuse unknown members."""
    run, attempt = started_run(workload="a", pod="b")
    first = run.commit(attempt, 1, metadata={"loss": "1"}, directive="timer", pins=("best",))
    second = run.commit(attempt, 2, first)
    run.compacted(second)
    user_entry.pin(run.log, "paper", f"{first}")
    user_entry.rewind(run.log, f"{second}", ended=True)
    run.open(workload="a")
    run.retire((), [snapshot_prefix(attempt, 0)])
    run.append(Reclaimed, through=1)
    ranks, attempt = started_run(world_size=2, layout=layout_of().data)
    ranks.commit_halves(attempt, 1)
    found = set[str]()
    for each in (run, ranks):
        for info in each.memory.list("job/"):
            if info.key.endswith((".json", ".manifest", ".part")):
                found |= members(json.loads(each.memory.get(info.key)))
    assert found <= golden_members()


def test_fold_is_independent_of_its_start(store: Store) -> None:
    """The folds start at the newest folded state that an entry names, at the previous one, and at genesis."""
    states: list[RunState] = []
    while True:
        log = RunLog(store, RUN)
        states.append(log.refresh())
        folds = log.listed().folds
        if not folds:
            break
        store.delete(
            [
                f"{RUN}/log/fold-{folds[0].seq:020d}-{name.digest}.json"
                for name in folds
                if name.seq == folds[0].seq
            ]
        )
        store.delete([f"{RUN}/log/HINT"])
    assert len(states) == 12
    assert all(state == states[0] for state in states)
    assert (tuple(states[0].checkpoints), states[0].attempt, states[0].stopped) == (LIVE_SEQS, 16, None)


def test_repaired_run_reads_up_to_the_newer_version(store: Store) -> None:
    log = RunLog(store, RUN_2)
    state = log.refresh()
    assert (tuple(state.checkpoints), state.tip) == (LIVE_SEQS_2, 9)
    assert state.stopped is not None
    assert (state.stopped.seq, state.stopped.voidable) == (9, False)
    assert isinstance(state.stopped.error, UnsupportedVersion)
    assert read_checkpoint(store, RUN_2).entry.seq == LIVE_SEQS_2[-1]
    corrupt, repaired, skipped = (log.read_slot(seq) for seq in (3, 5, 6))
    assert isinstance(corrupt, Unreadable)
    assert isinstance(repaired.entry, Repaired)
    assert repaired.entry.lost == (3,)
    assert named_fold(repaired.entry).seq == 4
    assert isinstance(skipped.entry, Ignored)
    # Without the repair's folded state, no entry from the corrupt slot on would count.
    slots = [log.read_slot(seq) for seq in range(10)]
    assert tuple(fold(RunState(run=RUN_2), slots).checkpoints) == LIVE_SEQS_2[:1]


def test_pins_and_rewinds_are_folded_at_every_entry(store: Store) -> None:
    log = RunLog(store, RUN_4)
    slots = [log.read_slot(seq) for seq in range(15)]
    states = [fold(RunState(run=RUN_4), slots[: tip + 1]) for tip in range(15)]
    newest = [(state.newest() or slots[2].entry).seq for state in states]
    assert newest == [2, 2, 2, 3, 3, 3, 6, 3, 3, 9, 9, 6, 6, 13, 13]
    pins = [dict(state.pinned) for state in states]
    assert pins[4:7] == [{"best": 2, "paper": 2}, {"best": 3, "paper": 2}, {"best": 6, "paper": 2}]
    assert pins[10:] == [{"paper": 2}] * 5
    assert [sorted(states[tip].detached) for tip in (7, 9, 11, 13, 14)] == [[6], [6], [9], [9], []]
    state = log.refresh()
    assert state == states[-1]
    store.delete([f"{RUN_4}/{fold_key(name)}" for name in log.listed().folds] + [f"{RUN_4}/log/HINT"])
    assert RunLog(store, RUN_4).refresh() == state


def test_unknown_part_kind_refuses_only_its_checkpoint(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("deltashard_checkpoint.format.index.ROWS_AND_BLOBS", "keys")
        with pytest.raises(UnsupportedVersion, match="kind 'rows'"):
            read_checkpoint(store, RUN_4, "seq:2")
        assert tuple(RunLog(store, RUN_4).refresh().checkpoints) == LIVE_SEQS_4
    with monkeypatch.context() as patch:
        patch.setattr("deltashard_checkpoint.log.manifest.ROWS_AND_BLOBS", "keys")
        with pytest.raises(UnsupportedVersion, match="kind 'rows'"):
            read_checkpoint(store, RUN_3, "seq:4")
        assert read_checkpoint(store, RUN_3, "seq:13").entry.seq == 13
    read_checkpoint(store, RUN_3, "seq:4")


def members(value: object) -> set[str]:
    """Return the names of all members of a JSON value, except keys of maps that the user names."""
    if isinstance(value, list):
        return {name for each in value for name in members(each)}
    if not isinstance(value, dict):
        return set()
    inner = {
        name
        for key, each in value.items()
        if key not in {"metadata", "fingerprint", "encodings"}
        for name in members(each)
    }
    return set(value) | inner


def golden_members() -> set[str]:
    documents = {
        path for ending in ("json", "part", "manifest") for path in GOLDEN.glob(f"run*/*/**/*.{ending}")
    }
    return {
        name
        for path in documents
        if str(path.relative_to(GOLDEN)) not in BAD
        for name in members(json.loads(path.read_text()))
    }


def test_format_page_lists_all_document_members() -> None:
    assert {name for name in golden_members() if f"`{name}`" not in PAGE} == set()


@pytest.mark.parametrize("message", index_pb2.DESCRIPTOR.message_types_by_name)
def test_format_page_has_the_index_wire_form(message: str) -> None:
    (row,) = re.findall(rf"^\| {message} \| (.*) \|$", PAGE, re.MULTILINE)
    parsed = {int(number): name for number, name in re.findall(r"(?:^|[·:] )(\d+) (\w+) ", row)}
    assert parsed == {f.number: f.name for f in index_pb2.DESCRIPTOR.message_types_by_name[message].fields}
