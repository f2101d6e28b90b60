"""A whole run of version 1, as it lies in a store: it reads as ever, and is written as ever.

All of it is deterministic: nothing is compressed, one rank writes at a time, ranges are plain, tokens and clocks fixed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, Sealed, named_fold, voided_digest
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.restore.checkpoint_reader import Snapshot, read_checkpoint
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.url import open_store
from deltashard_proto.v1 import index_pb2

from tests.golden.golden_run import RUN, make_run

GOLDEN = Path(__file__).parents[3] / "golden" / "v1"
PAGE = (Path(__file__).parents[4] / "docs" / "format.md").read_text()
LIVING = (2, 4, 5, 6, 11, 14, 17, 19, 20)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store that holds a copy."""
    shutil.copytree(GOLDEN / RUN, tmp_path / "store" / RUN)
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


@pytest.mark.parametrize("seq", LIVING)
def test_every_living_checkpoint_restores_to_the_same_bits(store: Store, seq: int) -> None:
    found = read_checkpoint(store, RUN, f"seq:{seq}")
    wanted = {path.stem: np.load(path) for path in (GOLDEN / "run-expected" / str(seq)).glob("*.npy")}
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays(found).items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in wanted.items()
    }
    blobs = json.loads((GOLDEN / "run-expected" / "blobs.json").read_text())
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.blobs.items()} == blobs[str(seq)]


def test_the_same_bytes_are_written_again(tmp_path: Path) -> None:
    objects, living = make_run(tmp_path)
    golden = found_in(GOLDEN / RUN)
    assert objects.keys() == golden.keys()
    assert [key for key in golden if objects[key] != golden[key]] == []
    assert tuple(living) == LIVING
    for seq, held in living.items():
        for name, values in held.arrays():
            assert values.tobytes() == np.load(GOLDEN / "run-expected" / str(seq) / f"{name}.npy").tobytes()


def test_reading_touches_nothing(store: Store, tmp_path: Path) -> None:
    before = found_in(tmp_path / "store"), times_in(tmp_path / "store"), times_in(GOLDEN)
    for seq in LIVING:
        read_checkpoint(store, RUN, f"seq:{seq}")
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
    assert len(states) == 3
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
    assert [name in named for name in log.listed().folds].count(False) == 1


def members(value: object) -> set[str]:
    """Names of all members of a JSON value, but for those of maps of the user's."""
    if isinstance(value, list):
        return {name for each in value for name in members(each)}
    if not isinstance(value, dict):
        return set()
    inner = {
        name
        for key, each in value.items()
        if key not in {"metadata", "fingerprint"}
        for name in members(each)
    }
    return set(value) | inner


def test_the_page_names_all_members_of_the_documents() -> None:
    """A member that the page does not know makes other readers refuse what is written."""
    documents = [*GOLDEN.glob("run/log/*.json"), *GOLDEN.glob("run/data/**/*.part")]
    rotten = GOLDEN / "run" / "log" / f"{12:020d}.json"
    found = {name for path in documents if path != rotten for name in members(json.loads(path.read_text()))}
    assert {name for name in found if f"`{name}`" not in PAGE} == set()


@pytest.mark.parametrize("message", index_pb2.DESCRIPTOR.message_types_by_name)
def test_the_page_has_the_wire_form_of_the_index(message: str) -> None:
    (row,) = re.findall(rf"^\| {message} \| (.*) \|$", PAGE, re.MULTILINE)
    said = {int(number): name for number, name in re.findall(r"(?:^|[·:] )(\d+) (\w+) ", row)}
    assert said == {f.number: f.name for f in index_pb2.DESCRIPTOR.message_types_by_name[message].fields}
