"""Leaderless commits: the rank that sees all parts creates the entry, and every other rank finds it."""

from contextlib import suppress
from dataclasses import replace

import pytest
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.object_key import snapshot_prefix
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.stores.abc import StoreUnavailable
from deltashard_checkpoint.write import commit_wait, snapshot_reports
from deltashard_checkpoint.write.commit import PartsMissing, _create, commit_parts
from deltashard_checkpoint.write.commit_wait import CommitLatency
from deltashard_checkpoint.write.report import ReportBodyCache
from deltashard_checkpoint.write.snapshot_reports import SnapshotAbandoned, SnapshotReports, abandon_part
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.faulty_store import FaultyStore
from tests.support.checkpoint.run_builder import HALVES, TABLE, TOKEN, MemoryRun, layout_of, started_run


def commit(
    run: MemoryRun,
    attempt: int,
    rank: int,
    *,
    snapshot_id: int = 1,
    step: int = 7,
    covers=None,
    log=None,
    **more,
):
    options = {"deadline_s": more.pop("deadline_s", 30.0), "layout": more.pop("layout", "")}
    reports = [run.report(attempt, snapshot_id, covers, rank=rank, boxes=[HALVES[rank]], **more)]
    place = {"attempt": attempt, "snapshot_id": snapshot_id, "step": step, "world_size": 2}
    return commit_parts(log or run.reader(), reports=reports, **place, **options)


def after(run: MemoryRun, seconds: float, action) -> None:
    """Run `action` once, after the given seconds, while another thread sleeps."""
    until, sleep, done = run.time.now_s + seconds, run.time.sleep, []

    def hooked(delay: float) -> None:
        end = run.time.now_s + delay
        if end >= until and not done:
            done.append(True)
            sleep(until - run.time.now_s)
            action()
        sleep(max(0.0, end - run.time.now_s))

    run.time.sleep = hooked


def _work(log, attempt, **more) -> SnapshotReports:
    options = {"step": 7, "world_size": 2, "layout": "", **more}
    return SnapshotReports(log, attempt=attempt, snapshot_id=1, bodies=ReportBodyCache(), **options)


def test_missing_ranks_are_reported_after_the_deadline():
    run, attempt = started_run(world_size=2)
    with pytest.raises(PartsMissing, match="ranks 1") as raised:
        commit(run, attempt, 0)
    assert raised.value.ranks == (1,)
    assert run.time.now_s - 1e9 == pytest.approx(30.0, abs=1)


def test_ranks_that_disagree_about_a_table_never_commit():
    run, attempt = started_run(world_size=2)
    with pytest.raises(PartsMissing):
        commit(run, attempt, 0)
    other = TableSchema(fqn="t", rows=9, columns=2, dtype="float32")
    with pytest.raises(SnapshotAbandoned, match="disagree about table t"):
        commit(run, attempt, 1, tables=(other,))


def test_a_single_rank_writes_no_report():
    run = MemoryRun()
    run.commit(run.open().attempt, 1)
    assert not [info for info in run.memory.list("job/data/") if info.key.endswith(".part")]


# With a layout


LAYOUT = layout_of()


def request_counts(run: MemoryRun) -> tuple[int, int]:
    """Return (GETs, LISTs) of the run's `data/` since the last call."""
    calls = [call.operation for call in run.store.calls if "/data/" in call.key]
    run.store.calls.clear()
    return calls.count("get"), calls.count("list")


def run_with_layout() -> tuple[MemoryRun, int]:
    run = MemoryRun()
    run.store = FaultyStore(run.memory)
    run.log = run.reader()
    return run, run.open(world_size=2, layout=LAYOUT.data).attempt


def test_entry_is_independent_of_the_committing_rank():
    entries = []
    for last in (0, 1):
        run, attempt = run_with_layout()
        with pytest.raises(PartsMissing):
            commit(run, attempt, 1 - last, layout=LAYOUT.digest, deadline_s=0.0, **rank_options(1 - last))
        done = commit(run, attempt, last, layout=LAYOUT.digest, deadline_s=0.0, **rank_options(last))
        assert done.by_us
        entries.append(replace(done.entry, writer="", previous=""))
        (manifest,) = [
            i.key for i in run.memory.list(f"job/{snapshot_prefix(attempt, 1)}") if ".manifest" in i.key
        ]
        assert manifest == f"job/{snapshot_prefix(attempt, 1)}{done.entry.listed.manifest}.manifest"
    assert entries[0] == entries[1]
    assert entries[0].metadata == {"loss": "0", "epoch": "1"}
    assert (entries[0].directive, entries[0].pins, entries[0].parts) == ("of rank 0", ("best", "paper"), ())
    assert (entries[0].rows, entries[0].raw_bytes, entries[0].stored_bytes) == (16, 128, 200)
    assert entries[0].tables == (TABLE,)


def rank_options(rank: int) -> dict:
    return {
        "metadata": ({"loss": "0"}, {"loss": "1", "epoch": "1"})[rank],
        "pins": (("paper",), ("best", "paper"))[rank],
        "directive": f"of rank {rank}",
        "fingerprint": {"rank": str(rank)},
    }


def test_unchanged_schemas_are_read_once_across_commits():
    """Schemas and encodings are equal in all snapshots. After the first snapshot, only names are listed."""
    run, attempt = run_with_layout()
    bodies = [ReportBodyCache(), ReportBodyCache()]
    for snapshot_id in range(1, 6):
        request_counts(run)
        for rank, wait_s in ((1, 0.0), (0, 30.0)):
            encodings = {"t": ("q8",) if rank == 0 else ("q4",)}
            report = run.report(attempt, snapshot_id, rank=rank, boxes=[HALVES[rank]], encodings=encodings)
            with suppress(PartsMissing):
                done = commit_parts(
                    run.reader(), attempt=attempt, snapshot_id=snapshot_id, step=snapshot_id, world_size=2, reports=(report,),
                    layout=LAYOUT.digest, bodies=bodies[rank], deadline_s=wait_s,
                )  # fmt: skip
        assert done.entry.snapshot_id == snapshot_id
        assert request_counts(run) == (int(snapshot_id == 1), 2)


@pytest.mark.parametrize(
    "bad", [b"", b"{}", b'{"format":1}', b"[" * 9999], ids=["empty", "bare", "short", "deep"]
)
def test_report_with_mismatched_hash_is_ignored(bad):
    run, attempt = run_with_layout()
    with pytest.raises(PartsMissing):
        commit(run, attempt, 1, layout=LAYOUT.digest, deadline_s=0.0, **rank_options(1))
    (key,) = [info.key for info in run.memory.list("job/data/") if info.key.endswith(".part")]
    run.memory.put(key, bad)
    with pytest.raises(StoreUnavailable, match="does not match the hash in its name"):
        commit(run, attempt, 0, layout=LAYOUT.digest, deadline_s=5.0)
    assert run.reader().refresh().newest() is None


# The cost of waiting


class ListingPages:
    """Counts listing requests under `data/`: one request for each page of `snapshot_reports.LIST_PAGE` names."""

    def __init__(self, run: MemoryRun) -> None:
        self.count = 0
        inner = run.memory.list

        def paged(prefix: str, *args, **options):
            if "/data/" not in prefix:
                return inner(prefix, *args, **options)
            return self._names(inner(prefix, *args, **options))

        run.memory.list = paged

    def _names(self, found):
        found = list(found)
        for at in range(0, max(1, len(found)), snapshot_reports.LIST_PAGE):
            self.count += 1
            yield from found[at : at + snapshot_reports.LIST_PAGE]


def run_of_column_ranks(world: int) -> tuple[MemoryRun, Layout]:
    run = MemoryRun()
    layout = Layout.of(world, {"t": (8, 2 * world)}, {r: [columns(r)] for r in range(world)})
    return run, layout


def columns(rank: int) -> Box:
    return Box(table="t", row_start=0, row_stop=8, col_start=2 * rank, col_stop=2 * rank + 2)


def put_report(run: MemoryRun, work, attempt: int, rank: int, **more) -> None:
    report = run.report(attempt, 1, rank=rank, boxes=[columns(rank)], **more)
    work.put(report, run.log.retry_budget(1))


@given(st.data())
@settings(deadline=None)
def test_every_report_is_eventually_seen(data):
    """Reports come in any order between checks, some twice, among abandoned parts and unknown names."""
    world = data.draw(st.integers(2, 12), label="world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_reports, "LIST_PAGE", data.draw(st.integers(1, 5), label="page"))
        run, layout = run_of_column_ranks(world)
        attempt = run.open(world_size=world, layout=layout.data).attempt
        work = _work(run.log, attempt, world_size=world, layout=layout.digest)
        pages = ListingPages(run)
        order = data.draw(st.permutations(range(world)), label="order")
        written: set[int] = set()
        for rank in order:
            for token in data.draw(st.sampled_from([["a" * 8], ["b" * 8], ["c" * 8, "0" * 8]])):
                put_report(run, work, attempt, rank, token=token)
            if data.draw(st.booleans(), label="abandoned before"):
                abandon_part(run.log, attempt=attempt, snapshot_id=1, rank=rank, token=TOKEN, deadline_s=1.0)
            if data.draw(st.booleans(), label="junk"):
                name = data.draw(st.text("0123456789-x", min_size=1, max_size=7))
                run.memory.put(f"job/{snapshot_prefix(attempt, 1)}part/{name}", b"")
            written.add(rank)
            if data.draw(st.booleans(), label="check"):
                missing, absent = set(work.missing()), set(range(world)) - written
                assert missing >= absent
                # The first missing rank, which all ranks wait for, is always known.
                assert min(missing, default=None) == min(absent, default=None)
        assert list(work.missing()) == []
        names = len(list(run.memory.list(f"job/{snapshot_prefix(attempt, 1)}part/")))
        before = pages.count
        fresh = _work(run.log, attempt, world_size=world, layout=layout.digest)
        assert list(fresh.missing()) == []
        assert pages.count - before <= names // snapshot_reports.LIST_PAGE + 2
        assert _create(fresh, run.log.retry_budget(1)).entry.world_size == world


def test_early_snapshot_is_committed_and_observed_promptly():
    run, attempt = run_with_layout()
    latency = CommitLatency()
    latency.observe(True, 3600.0)
    started_run, ends = run.time.now_s, []

    def commit_rank(rank: int, since_s: float):
        report = run.report(attempt, 1, rank=rank, boxes=[HALVES[rank]])
        done = commit_parts(
            run.reader(), attempt=attempt, snapshot_id=1, step=1, world_size=2, reports=(report,),
            layout=LAYOUT.digest, latency=latency, since_s=since_s,
        )  # fmt: skip
        ends.append((rank, done.by_us, run.time.now_s - started_run))

    after(run, 3, lambda: commit_rank(1, 3.0))
    commit_rank(0, 0.0)
    (second, by_us, at_s), (first, _, observed_s) = ends
    assert (second, by_us, first) == (1, True, 0)
    assert at_s <= 3 + commit_wait.FOLLOWERS_WAIT_S
    assert observed_s <= at_s + commit_wait.MAX_POLL_S
    assert latency.typical_s(True) <= observed_s
