"""Stores damaged one object at a time, and the result of a plain restart for each: `python -m tests.crash.damage`.

The module writes in memory a run with compaction, retention, gc, a restart and a pin, and a second run of two ranks.
Then, for every object of every slot and every kind of damage, a fresh process restarts the run as a sidecar does: it
opens an attempt, restores the checkpoint that the attempt names, excludes what is invalid and opens again. The
restored checkpoint is compared with the newest one whose objects and entry are whole, and with what `deltashard
repair` would have kept.

The module writes docs/measured/damage.json and the table in docs/damage.md.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.errors import DeltashardError, InvalidCheckpoint
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.repair import NothingToRepair, salvage
from deltashard_checkpoint.maintenance import compaction, garbage_collection, retention, row_mover, user_entry
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.write import attempt as attempts

from tests.crash import log_victim
from tests.crash.log_victim import ROWS, TABLE
from tests.support.checkpoint.snapshot import read_checkpoint

RUN = "job"
ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs/measured/damage.json"
PAGE = ROOT / "docs/damage.md"
Objects = dict[str, bytes]


def _flipped(data: bytes, place: float) -> bytes:
    at = min(len(data) - 1, int(len(data) * place))
    return data[:at] + bytes((data[at] ^ 0x10,)) + data[at + 1 :] if data else b"\0"


DAMAGES: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "deleted": lambda data, other: None,
    "emptied": lambda data, other: b"",
    "truncated": lambda data, other: data[: len(data) // 2],
    "bit flipped": lambda data, other: _flipped(data, 0.5),
    "bit flipped at the end": lambda data, other: _flipped(data, 1.0),
    "replaced by another": lambda data, other: other,
}
"""Possible damages of an object's bytes; `other` is another object of the same kind."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run's objects in a store."""

    name: str
    objects: Objects
    expected: dict[int, np.ndarray]
    """Weights [rows, columns] of each checkpoint, by its slot."""
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class DamageOutcome:
    """The result of one damage. Checkpoints are slots; None means no checkpoint."""

    run: str
    kind: str
    """The kind of the damaged object."""
    damage: str
    key: str
    newest: int
    """The newest checkpoint before the damage."""
    possible: int | None
    """The newest checkpoint that the remaining objects restore."""
    repair: int | None
    """The newest checkpoint that `deltashard repair` keeps and that restores; None if it changes nothing."""
    resumed: int | None
    """The checkpoint that a plain restart restored."""
    reported: bool
    """Whether the restart reported the damage."""
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether no newer checkpoint was restorable, and a loss is reported."""
        if self.resumed is None:
            return self.possible is None and self.repair is None and bool(self.error)
        least = max(self.possible or 0, self.repair or 0)
        return self.resumed >= least and (self.resumed == self.newest or self.reported)


def kind_of(key: str) -> str:
    if key.startswith("log/"):
        return {"H": "HINT", "f": "folded state"}.get(key[4], "log entry")
    if key.startswith("layout/"):
        return "layout"
    return "report" if "/part/" in key else key.rpartition(".")[2]


def stored_runs(directory: Path) -> Iterator[StoredRun]:
    """Yield a run of one rank with every operation, once per kind of last entry, and a run of two ranks."""
    store, expected, step = MemoryStore(), dict[int, np.ndarray](), 0
    log, weights = _log(store), np.zeros((ROWS, log_victim.COLUMNS), np.float32)
    for number in range(3):
        opened = attempts.open_attempt(log, owner="me", closing_wait_s=0.0)
        covers: int | None = None
        for snapshot_id in range(1, 7):
            step += 1
            rows = np.arange(ROWS) if snapshot_id == 1 else np.arange(step % 8, ROWS, 8)
            weights[rows] = log_victim.values(step, rows)
            if number == 2 and snapshot_id == 1:
                yield StoredRun("ends in an attempt", _objects(store), dict(expected))
            covers = log_victim.save(directory, log, opened.attempt, snapshot_id, step, rows, covers)
            expected[covers] = weights.copy()
            if snapshot_id == 4:
                if number == 2:
                    yield StoredRun("ends in a checkpoint", _objects(store), dict(expected))
                with PackCache(directory / f"compaction-{step}", budget_bytes=64 << 20) as cache:
                    compaction.compact(log, covers, row_mover.mover(cache))
                if number == 2:
                    yield StoredRun("ends in a compaction", _objects(store), dict(expected))
                retention.append_retirement(log, retention.Retention(keep_last=2))
                if number == 2:
                    yield StoredRun("ends in a retirement", _objects(store), dict(expected))
                garbage_collection.collect(log, grace_s=0.0, min_reclaim_prefixes=1)
        user_entry.pin(log, "kept", f"{covers}")
    yield StoredRun("ends in a pin", _objects(store), dict(expected))
    store = MemoryStore()
    log = _log(store)
    expected = {
        log_victim.save_two_ranks(directory, log, step): log_victim.values(step, np.arange(ROWS))
        for step in (5, 6)
    }
    yield StoredRun("two ranks", _objects(store), expected, ranks=2)


def _log(store: MemoryStore) -> RunLog:
    return RunLog(store, RUN, readers=1)


def _store(objects: Objects) -> MemoryStore:
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    return store


def _objects(store: MemoryStore) -> Objects:
    return {info.key: store.get(info.key) for info in store.list("")}


def restored(store: MemoryStore, run: StoredRun, seq: int) -> int:
    """Restore a checkpoint, compare every bit, return its slot. Raises `InvalidCheckpoint` and `AssertionError`."""
    state = _log(store).refresh(deadline_s=0.0)  # no other process writes, so a missing object stays missing
    found = read_checkpoint(store, RUN, f"seq:{seq}", state=state).tables[TABLE.fqn].weights
    np.testing.assert_array_equal(found, run.expected[seq])
    return seq


def restart(store: MemoryStore, run: StoredRun) -> tuple[int, bool]:
    """Return (checkpoint, whether damage was reported) of a process that starts on this store."""
    excluded: set[int] = set()
    reported = False
    while True:
        opened = attempts.open_attempt(
            _log(store), owner="me", world_size=run.ranks,
            layout=log_victim.layout_of_two().data if run.ranks == 2 else None, exclude=excluded,
            closing_wait_s=0.0, deadline_s=0.0,
        )  # fmt: skip
        reported |= opened.fell_back or bool(opened.damage)
        assert opened.resume is not None, "the run starts from the beginning"
        try:
            return restored(store, run, opened.resume.seq), reported
        except InvalidCheckpoint:
            excluded.add(opened.resume.seq)


def outcomes(
    run: StoredRun, *, chosen: Callable[[str], bool] = lambda _key: True, every: int = 1
) -> Iterator[DamageOutcome]:
    """Yield every object of a `chosen` key with every damage, one at a time; `every` keeps the first of that many cases."""
    newest = _log(_store(run.objects)).refresh().newest()
    assert newest is not None
    by_kind: dict[str, list[str]] = {}
    for key in run.objects:
        by_kind.setdefault(kind_of(key.removeprefix(f"{RUN}/")), []).append(key)
    cases = [
        (kind, damage, key, keys[place - 1])
        for kind, keys in by_kind.items()
        for place, key in enumerate(keys)
        for damage in DAMAGES
        if chosen(key)
    ]
    for kind, damage, key, other in cases[::every]:
        data = DAMAGES[damage](run.objects[key], run.objects[other])
        if data == run.objects[key]:
            continue
        objects = {name: held for name, held in run.objects.items() if name != key}
        if data is not None:
            objects[key] = data
        yield _outcome(run, objects, kind, damage, key.removeprefix(f"{RUN}/"), newest.seq)


def _outcome(
    run: StoredRun, objects: Objects, kind: str, damage: str, key: str, newest: int
) -> DamageOutcome:
    repair: int | None = None
    with suppress(NothingToRepair):
        repair = _restorable(run, objects, salvage(_log(_store(objects)), deadline_s=0.0).state.checkpoints)
    resumed, reported, error = None, False, ""
    try:
        resumed, reported = restart(_store(objects), run)
    except (DeltashardError, AssertionError) as raised:
        error = f"{type(raised).__name__}: {raised}"[:300]
    possible = _possible(run, objects, key)
    return DamageOutcome(run.name, kind, damage, key, newest, possible, repair, resumed, reported, error)


def _possible(run: StoredRun, objects: Objects, key: str) -> int | None:
    """Return the newest checkpoint that the undamaged log restores with the remaining objects.

    The newest entry is excluded where that entry is the damaged one: no other object holds its content. The
    restarting ranks know the layout.
    """
    whole = {name: data for name, data in run.objects.items() if "/log/" in name or "/layout/" in name}
    state = _log(_store(run.objects)).refresh()
    live = [seq for seq in state.checkpoints if key != entry_key(state.tip) or seq < state.tip]
    return _restorable(run, {**objects, **whole}, live)


def _restorable(run: StoredRun, objects: Objects, seqs: Iterable[int]) -> int | None:
    """Return the newest of these checkpoints that these objects restore."""
    store = _store(objects)
    for seq in sorted(seqs, reverse=True):
        with suppress(DeltashardError):
            return restored(store, run, seq)
    return None


def table(found: Iterable[DamageOutcome]) -> str:
    """Return Markdown: a row for each kind of object."""
    kinds: dict[str, list[DamageOutcome]] = {}
    for each in found:
        kinds.setdefault(each.kind, []).append(each)
    lines = [
        "| damaged object | cases | newest checkpoint restored | older one restored and reported: no newer one could be | other |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, cases in kinds.items():
        same = sum(case.good and case.resumed == case.newest for case in cases)
        older = sum(case.good and case.resumed != case.newest for case in cases)
        lines.append(f"| {kind} | {len(cases)} | {same} | {older} | {len(cases) - same - older} |")
    return "\n".join(lines)


def main() -> None:
    found: list[DamageOutcome] = []
    with tempfile.TemporaryDirectory() as name:
        for run in stored_runs(Path(name)):
            folder = "" if run.name in {"ends in a pin", "two ranks"} else "/log/"
            found += outcomes(run, chosen=lambda key, folder=folder: folder in key)
            print(f"{run.name}: {len(run.objects)} objects, {len(found)} cases so far")
    bad = [case for case in found if not case.good]
    for case in bad:
        print("NOT GOOD", case)
    counts = Counter((case.kind, case.damage, case.resumed == case.newest, case.good) for case in found)
    rows = [
        {"kind": kind, "damage": damage, "newest": same, "good": good, "cases": n}
        for (kind, damage, same, good), n in sorted(counts.items())
    ]
    MEASURED.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    begin, end = "<!-- table -->\n", "<!-- end -->"
    page = PAGE.read_text()
    head, tail = page.partition(begin)[0], page.partition(end)[2]
    PAGE.write_text(f"{head}{begin}\n{table(found)}\n\n{end}{tail}")
    sys.exit(f"{len(bad)} of {len(found)} cases lost more than necessary" if bad else 0)


if __name__ == "__main__":
    main()
