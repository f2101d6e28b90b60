"""Whole runs, as they lie in a store: they read as ever, and are written as ever.

All of it is deterministic: nothing is compressed, one rank writes at a time, ranges are plain, tokens and clocks fixed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.errors import UnsupportedVersion
from deltashard_checkpoint.format.frame import Frame, FrameInfo, TailInfo, parse_frame, scan_pack
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import (
    AttemptOpened,
    Checkpoint,
    Ignored,
    Repaired,
    Sealed,
    named_fold,
)
from deltashard_checkpoint.log.folded_state import fold_key
from deltashard_checkpoint.log.replay import fold
from deltashard_checkpoint.log.run_state import RunState, Unreadable
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.url import open_store
from deltashard_proto.v1 import index_pb2

from tests.golden.golden_run import RUN, Held, make_run
from tests.golden.golden_run_2 import CUT, RUN_2, make_run_2
from tests.golden.golden_run_3 import RUN_3, make_run_3
from tests.golden.golden_run_4 import RUN_4, make_run_4
from tests.support.checkpoint.run_builder import voided_digest
from tests.support.checkpoint.snapshot import Snapshot, read_checkpoint

GOLDEN = Path(__file__).parents[3] / "golden" / "v1"
PAGE = (Path(__file__).parents[4] / "docs" / "format.md").read_text()
LIVING = (2, 4, 5, 6, 11, 14, 17, 19, 20)
LIVING_2 = (2, 4, 8)
LIVING_3 = (4, 5, 7, 9, 10, 13)
LIVING_4 = (2, 3, 6, 13)
EACH = [
    (run, seq)
    for run, living in ((RUN, LIVING), (RUN_2, LIVING_2), (RUN_3, LIVING_3), (RUN_4, LIVING_4))
    for seq in living
]
"""All living checkpoints."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store that holds copies."""
    for run in (RUN, RUN_2, RUN_3, RUN_4):
        shutil.copytree(GOLDEN / run, tmp_path / "store" / run)
    return open_store(f"file://{tmp_path}/store", create=False)


def found_in(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def times_in(directory: Path) -> dict[str, int]:
    return {str(p.relative_to(directory)): p.stat().st_mtime_ns for p in [directory, *directory.rglob("*")]}


def arrays(snapshot: Snapshot) -> dict[str, np.ndarray]:
    found = {}
    for name, table in snapshot.tables.items():
        found[name] = table.weights
        found |= {f"{name}.{field}": values for field, values in table.fields.items()}
    return found


@pytest.mark.parametrize(("run", "seq"), EACH)
def test_every_living_checkpoint_restores_to_the_same_bits(store: Store, run: str, seq: int) -> None:
    found = read_checkpoint(store, run, f"seq:{seq}")
    expected = GOLDEN / f"{run}-expected"
    wanted = {path.stem: np.load(path) for path in (expected / str(seq)).glob("*.npy")}
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays(found).items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in wanted.items()
    }
    blobs = json.loads((expected / "blobs.json").read_text())
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.blobs.items()} == blobs[str(seq)]


@pytest.mark.parametrize(
    ("run", "make", "slots"),
    [
        (RUN, make_run, LIVING),
        (RUN_2, make_run_2, LIVING_2),
        (RUN_3, make_run_3, LIVING_3),
        (RUN_4, make_run_4, LIVING_4),
    ],
)
def test_the_same_bytes_are_written_again(
    tmp_path: Path, run: str, make: Callable[[Path], tuple[dict[str, bytes], dict[int, Held]]], slots: tuple[int, ...]
) -> None:  # fmt: skip
    objects, living = make(tmp_path)
    golden = found_in(GOLDEN / run)
    assert objects.keys() == golden.keys()
    assert [key for key in golden if objects[key] != golden[key]] == []
    assert tuple(living) == slots
    for seq, held in living.items():
        for name, values in held.arrays():
            assert (
                values.tobytes() == np.load(GOLDEN / f"{run}-expected" / str(seq) / f"{name}.npy").tobytes()
            )


def test_reading_touches_nothing(store: Store, tmp_path: Path) -> None:
    before = found_in(tmp_path / "store"), times_in(tmp_path / "store"), times_in(GOLDEN)
    for run, seq in EACH:
        read_checkpoint(store, run, f"seq:{seq}")
    assert (found_in(tmp_path / "store"), times_in(tmp_path / "store"), times_in(GOLDEN)) == before


def test_the_state_is_the_same_from_wherever_it_is_folded(store: Store) -> None:
    """From the newest folded state that an entry names, from the one before, and from genesis."""
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
    assert (tuple(states[0].checkpoints), states[0].attempt, states[0].stopped) == (LIVING, 16, None)


def test_it_holds_what_a_reader_must_judge(store: Store) -> None:
    log = RunLog(store, RUN)
    slots = [log.read_slot(seq) for seq in range(21)]
    assert [seq for seq, slot in enumerate(slots) if not isinstance(slot, Sealed)] == [12]
    rotten = hashlib.sha256(store.get(f"{RUN}/log/{12:020d}.json")).hexdigest()
    stale = slots[15]
    assert isinstance(stale.entry, Checkpoint)
    assert stale.entry.attempt == 10
    assert [voided_digest(slots[seq].entry) for seq in (13, 16)] == [rotten[:32], stale.hash[:32]]
    named = {named_fold(slot.entry) for slot in slots if isinstance(slot, Sealed)}
    assert [name in named for name in log.listed().folds].count(
        False
    ) == 2  # one was named by what has rotted


def test_a_repaired_run_reads_up_to_what_is_newer(store: Store) -> None:
    log = RunLog(store, RUN_2)
    state = log.refresh()
    assert (tuple(state.checkpoints), state.tip) == (LIVING_2, 9)
    assert state.stopped is not None
    assert (state.stopped.seq, state.stopped.voidable) == (9, False)
    assert isinstance(state.stopped.error, UnsupportedVersion)
    assert read_checkpoint(store, RUN_2).entry.seq == LIVING_2[-1]
    rotten, mended, passed = (log.read_slot(seq) for seq in (3, 5, 6))
    assert isinstance(rotten, Unreadable)
    assert isinstance(mended.entry, Repaired)
    assert mended.entry.lost == (3,)
    assert named_fold(mended.entry).seq == 4
    assert isinstance(passed.entry, Ignored)
    # Without the repair's folded state nothing from the rotten slot on would count.
    slots = [log.read_slot(seq) for seq in range(10)]
    assert tuple(fold(RunState(run=RUN_2), slots).checkpoints) == LIVING_2[:1]


def test_a_run_of_many_ranks_has_a_layout_for_each_way_to_shard(store: Store) -> None:
    log = RunLog(store, RUN_3)
    entries = [log.read_slot(seq).entry for seq in range(14)]
    assert [e.seq for e in entries if getattr(e, "layout", "")] == [3, 4, 5, 6, 7, 8, 9, 10]
    assert entries[7].covers == (None, 4, 5)
    assert len({e.layout for e in entries if isinstance(e, AttemptOpened) and e.layout}) == 2
    # The state is the same without any folded state.
    state = log.refresh()
    store.delete([f"{RUN_3}/{fold_key(name)}" for name in log.listed().folds] + [f"{RUN_3}/log/HINT"])
    assert RunLog(store, RUN_3).refresh() == state


def test_a_run_in_which_people_pinned_and_rewound(store: Store) -> None:
    log = RunLog(store, RUN_4)
    slots = [log.read_slot(seq) for seq in range(15)]
    states = [fold(RunState(run=RUN_4), slots[: tip + 1]) for tip in range(15)]
    newest = [(state.newest() or slots[2].entry).seq for state in states]
    assert newest == [2, 2, 2, 3, 3, 3, 6, 3, 3, 9, 9, 6, 6, 13, 13]
    pins = [dict(state.pinned) for state in states]
    assert pins[4:7] == [{"best": 2, "paper": 2}, {"best": 3, "paper": 2}, {"best": 6, "paper": 2}]
    assert pins[10:] == [{"paper": 2}] * 5
    assert [sorted(states[tip].aside) for tip in (7, 9, 11, 13, 14)] == [[6], [6], [9], [9], []]
    state = log.refresh()
    assert state == states[-1]
    store.delete([f"{RUN_4}/{fold_key(name)}" for name in log.listed().folds] + [f"{RUN_4}/log/HINT"])
    assert RunLog(store, RUN_4).refresh() == state


def test_a_part_of_an_unknown_kind_refuses_its_checkpoint_and_not_the_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("deltashard_checkpoint.format.index.ROWS_AND_BLOBS", "keys")
        with pytest.raises(UnsupportedVersion, match="kind 'rows'"):
            read_checkpoint(store, RUN_4, "seq:2")
        assert tuple(RunLog(store, RUN_4).refresh().checkpoints) == LIVING_4
    with monkeypatch.context() as patch:
        patch.setattr("deltashard_checkpoint.log.manifest.ROWS_AND_BLOBS", "keys")
        with pytest.raises(UnsupportedVersion, match="kind 'rows'"):
            read_checkpoint(store, RUN_3, "seq:4")
        assert read_checkpoint(store, RUN_3, "seq:13").entry.seq == 13
    read_checkpoint(store, RUN_3, "seq:4")


def rows_of_run_2(attempt: int, cut: int) -> list[Frame]:
    """Row frames of a cut, by rank."""
    packs = sorted((GOLDEN / RUN_2 / "data" / f"{attempt:020d}" / f"{cut:08d}").glob("*.pack"))
    data = [pack.read_bytes() for pack in packs]
    stored = [(found.info, each[at:][: found.info.length]) for each in data for at, found in scan_pack(each)]
    tails = {info.digest: each for info, each in stored if isinstance(info, TailInfo)}
    rows = [(info, each) for info, each in stored if isinstance(info, FrameInfo) and info.tail is not None]
    return [parse_frame(each, tails[info.tail.digest]) for info, each in rows]


def test_the_second_run_tells_rounding_once_from_rounding_twice(store: Store) -> None:
    frame, _ = rows_of_run_2(7, 1)
    scales, biases = (np.frombuffer(part, "<f4")[:, None] for part in (frame.scales, frame.biases))
    codes = np.frombuffer(frame.codes, np.uint8).reshape(-1, CUT)
    found = read_checkpoint(store, RUN_2).tables["wide"].weights[frame.row_ids(), :CUT]
    wide = codes.astype(np.float64) * scales.astype(np.float64) + biases.astype(np.float64)
    for values in (wide.astype(np.float32), codes.astype(np.float32) * scales + biases):
        assert (values != found).any(axis=1).all()


def test_the_second_run_tells_how_shards_are_joined(store: Store) -> None:
    """`sum` is divided before it is multiplied, `count` is that of the shard which comes first."""
    found = read_checkpoint(store, RUN_2, "seq:2").tables["wide"].fields
    first, other = ([part.values(9) for part in frame.fields] for frame in rows_of_run_2(1, 1))
    assert (found["sum"] == CUT / 7 * first[0] + (7 - CUT) / 7 * other[0]).all()
    assert (found["sum"] != CUT * first[0] / 7 + (7 - CUT) * other[0] / 7).any()
    assert (found["count"] == first[1]).all()
    assert (found["count"] != other[1]).all()
    (alone,) = set(rows_of_run_2(1, 3)[1].row_ids()) - set(rows_of_run_2(1, 3)[0].row_ids())
    newest = read_checkpoint(store, RUN_2, "seq:4").tables["wide"].fields["count"][alone]
    assert newest == rows_of_run_2(1, 3)[1].fields[1].values(3)[-1] != first[1][alone]


def members(value: object) -> set[str]:
    """Names of all members of a JSON value, but for those of maps by the user's names."""
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


def test_the_page_names_all_members_of_the_documents() -> None:
    """A member that the page does not know makes other readers refuse what is written."""
    documents = [
        *GOLDEN.glob("run*/log/*.json"),
        *GOLDEN.glob("run*/data/**/*.part"),
        *GOLDEN.glob("run*/data/**/*.manifest"),
    ]
    others = {
        GOLDEN / run / "log" / f"{seq:020d}.json"
        for run, seq in ((RUN, 12), (RUN_2, 3), (RUN_2, 6), (RUN_2, 9))
    }
    found = {
        name for path in documents if path not in others for name in members(json.loads(path.read_text()))
    }
    assert {name for name in found if f"`{name}`" not in PAGE} == set()


@pytest.mark.parametrize("message", index_pb2.DESCRIPTOR.message_types_by_name)
def test_the_page_has_the_wire_form_of_the_index(message: str) -> None:
    (row,) = re.findall(rf"^\| {message} \| (.*) \|$", PAGE, re.MULTILINE)
    said = {int(number): name for number, name in re.findall(r"(?:^|[·:] )(\d+) (\w+) ", row)}
    assert said == {f.number: f.name for f in index_pb2.DESCRIPTOR.message_types_by_name[message].fields}
