"""A second reader, written from docs/format.md by someone who had never seen the code, restores the golden run bit for bit."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.unit.checkpoint.format.second_reader import CANONICAL, Refused, decode_tree, read_run, restore

GOLDEN = Path(__file__).parents[3] / "golden" / "v1"
pytestmark = pytest.mark.slow
LIVE = [2, 4, 5, 6, 11, 14, 17, 19, 20]


@pytest.fixture
def copied(tmp_path):
    """A copy of the golden run that a test may spoil."""
    return Path(shutil.copytree(GOLDEN / "run", tmp_path / "run"))


def flip(path, at):
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def keep_folds(path, *slots, named=True):
    """Take away all folded states but those of these slots that an entry names, or that none names."""
    said = b"".join(entry.read_bytes() for entry in path.glob("log/0*.json"))
    for fold in path.glob("log/fold-*"):
        if int(fold.name[5:25]) not in slots or (fold.stem[26:].encode() in said) is not named:
            fold.unlink()


def append(path, **members):
    """Put an entry behind the log, with the hashes that it must have."""
    last = max(path.glob("log/0*.json"))
    seq, previous = int(last.stem) + 1, json.loads(last.read_bytes())["hash"]
    entry = {"format": 1, "seq": seq, "previous": previous, "writer": "test", "at_s": 1} | members
    entry["hash"] = hashlib.sha256(CANONICAL(entry).encode()).hexdigest()
    (path / f"log/{seq:020d}.json").write_text(CANONICAL(entry))


def assert_restores(run, live, folder="run"):
    """Each living checkpoint has what `run-expected` has, bit for bit, and trees in its blobs."""
    assert sorted(run.checkpoints) == live
    for seq in live:
        arrays, blobs = restore(run, seq)
        want = {p.stem: np.load(p) for p in (GOLDEN / f"{folder}-expected/{seq}").glob("*.npy")}
        say = {n: (a.dtype, a.shape, a.tobytes()) for n, a in arrays.items()}
        assert say == {n: (a.dtype, a.shape, a.tobytes()) for n, a in want.items()}
        hashes = json.loads((GOLDEN / f"{folder}-expected/blobs.json").read_bytes())[str(seq)]
        assert {name: hashlib.sha256(data).hexdigest() for name, data in blobs.items()} == hashes
        if folder != "run-2":  # its blobs are no trees
            assert decode_tree(blobs["meta"])["step"] == run.checkpoints[seq]["step"]
            assert all(decode_tree(data) is not None for blob, data in blobs.items() if blob != "empty")


@pytest.mark.parametrize(
    ("slots", "named", "began_at"),
    [((19, 10), True, 19), ((10,), True, 10), ((19,), False, -1), ((), True, -1)],
)
def test_restores_from_each_folded_state_and_from_genesis(copied, slots, named, began_at):
    keep_folds(copied, *slots, named=named)
    assert len(list(copied.glob("log/fold-*"))) == len(slots)
    for seq in range(began_at + 1):
        (copied / f"log/{seq:020d}.json").unlink()
    run = read_run(copied)
    assert (run.began_at, run.stopped) == (began_at, None)
    assert_restores(run, LIVE)


def test_restores_what_a_repair_left():
    """Lost slots, an entry of an unknown kind, and one of a newer version at the end, behind which nothing counts."""
    run = read_run(GOLDEN / "run-2")
    assert run.stopped is not None
    assert_restores(run, [2, 4, 8], "run-2")


@pytest.mark.parametrize("folds", [2, 1, 0])
def test_restores_a_run_of_many_ranks(tmp_path, folds):
    """By layouts and manifests, from either folded state and from genesis; not if either is spoiled."""
    copied = Path(shutil.copytree(GOLDEN / "run-3", tmp_path / "run-3"))
    for fold in sorted(copied.glob("log/fold-*"), reverse=True)[: 2 - folds if folds else None]:
        fold.unlink()
    run = read_run(copied)
    assert (run.began_at, run.stopped) == ((-1, 11, 12)[folds], None)
    live = [4, 5, 7, 9, 10, 13]
    assert_restores(run, live, "run-3")
    for path in [*copied.glob("layout/*"), *copied.glob("data/*/*/*.manifest")] if folds == 2 else []:
        flip(path, path.stat().st_size // 2)
        with pytest.raises(Refused):
            _ = [restore(run, seq) for seq in live]
        flip(path, path.stat().st_size // 2)


@pytest.mark.parametrize("folds", [2, 1, 0])
@pytest.mark.parametrize(
    ("tip", "newest", "best"), [(6, 6, 6), (7, 3, 6), (9, 9, 6), (11, 6, None), (14, 13, None)]
)
def test_goes_on_where_a_person_said(tmp_path, folds, tip, newest, best):
    copied = Path(shutil.copytree(GOLDEN / "run-4", tmp_path / "run-4"))
    for entry in copied.glob("log/0*.json"):
        if int(entry.stem) > tip:
            entry.unlink()
    (copied / "log/HINT").unlink()
    for fold in sorted(copied.glob("log/fold-*"), reverse=True)[: 2 - folds if folds else None]:
        fold.unlink()
    run = read_run(copied)
    pins = {"paper": 2} | ({} if best is None else {"best": best})
    assert (run.stopped, *run.newest()) == (None, newest, pins)
    if tip == 14:
        assert run.began_at == (-1, 12, 13)[folds]
        assert_restores(run, [2, 3, 6, 13], "run-4")


@pytest.mark.parametrize(("seq", "live"), [(20, LIVE[:-1]), (17, LIVE[:6]), (15, LIVE), (12, LIVE)])
def test_a_spoiled_entry_ends_the_log_unless_it_is_void(copied, seq, live):
    keep_folds(copied)
    flip(copied / f"log/{seq:020d}.json", 60)
    run = read_run(copied)
    assert (run.stopped is None) == (live == LIVE)
    assert_restores(run, live)


def test_a_spoiled_folded_state_is_passed_by(copied):
    for slot, began_at in (19, 18), (18, 17):
        for fold in copied.glob(f"log/fold-{slot:020d}-*"):
            flip(fold, 1000)
        assert read_run(copied).began_at == began_at
    assert_restores(read_run(copied), LIVE)


@pytest.mark.parametrize("ending", ["index", "pack"])
def test_spoiled_data_is_refused(copied, ending):
    for path in copied.glob(f"data/*16/00000003/*.{ending}"):
        flip(path, path.stat().st_size // 2)
        with pytest.raises(Refused):
            restore(read_run(copied), 20)
        flip(path, path.stat().st_size // 2)
    assert_restores(read_run(copied), LIVE)


@pytest.mark.parametrize(("members", "live"), [({"ignorable": True}, 1), ({}, 0), ({"ignorable": False}, 0)])
def test_an_unknown_entry_is_passed_over_if_ignorable(copied, members, live):
    append(copied, kind="of-tomorrow", **members)
    append(copied, kind="retire", checkpoints=[19, 20], prefixes=[])
    run = read_run(copied)
    assert (sorted(run.checkpoints), run.stopped is None) == (LIVE[:-2] if live else LIVE, bool(live))
