"""Leaderless commits: whoever sees all parts creates the entry; everyone else finds it."""

import pytest
from deltashard_checkpoint.errors import ForeignObject
from deltashard_checkpoint.format.object_key import cut_prefix
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.write import commit as commits
from deltashard_checkpoint.write.commit import Abandoned, FencedError, PartsMissing, commit_part

from tests.support.checkpoint.run_builder import TABLE, TOKEN, Run, rows

HALVES = [rows(0, 4), rows(4, 8)]


def commit(run: Run, attempt: int, rank: int, *, cut: int = 1, step: int = 7, covers=None, log=None, **more):
    options = {"deadline_s": more.pop("deadline_s", 30.0)}
    report = run.report(attempt, cut, covers, rank=rank, boxes=[HALVES[rank]], **more)
    return commit_part(
        log or run.reader(),
        attempt=attempt,
        cut=cut,
        step=step,
        world_size=2,
        report=report,
        **options,
    )


def after(run: Run, seconds: float, action) -> None:
    """Run `action` once, when somebody has waited so long."""
    until, sleep, done = run.time.now_s + seconds, run.time.sleep, []

    def hooked(delay: float) -> None:
        sleep(delay)
        if run.time.now_s >= until and not done:
            done.append(True)
            action()

    run.time.sleep = hooked


def test_the_last_rank_commits_and_a_waiting_rank_finds_the_entry():
    run = Run()
    attempt = run.open(world_size=2).attempt
    others = []
    after(run, 3, lambda: others.append(commit(run, attempt, 1, metadata={"loss": "1"}, pins=("best",))))
    first = commit(run, attempt, 0, metadata={"loss": "0", "epoch": "3"}, directive="q8 timer")
    (second,) = others
    assert second.by_us
    assert not first.by_us
    assert first.entry == second.entry
    entry = first.entry
    assert [p.rank for p in entry.parts] == [0, 1]
    assert (entry.rows, entry.raw_bytes, entry.stored_bytes) == (16, 128, 200)
    assert entry.metadata == {"loss": "0", "epoch": "3"}
    assert (entry.directive, entry.pins, entry.tables) == ("q8 timer", ("best",), (TABLE,))


def _work(log, attempt):
    return commits._Commit(log, attempt, 1, 7, 2, "", commits.Sayings())


def test_any_rank_commits_when_the_last_finisher_died_before_the_entry():
    run = Run()
    attempt = run.open(world_size=2).attempt
    report = run.report(attempt, 1, rank=1, boxes=[HALVES[1]])
    commits._put(run.log, *_work(run.log, attempt).document(report), run.log.patience(1))
    assert commit(run, attempt, 0).by_us


def test_missing_ranks_are_named_after_the_deadline():
    run = Run()
    attempt = run.open(world_size=2).attempt
    begun = run.time.now_s
    with pytest.raises(PartsMissing, match="ranks 1") as raised:
        commit(run, attempt, 0)
    assert raised.value.ranks == (1,)
    assert run.time.now_s - begun == pytest.approx(30.0, abs=1)


def test_a_waiting_rank_is_fenced_as_soon_as_the_log_says_so():
    run = Run()
    attempt = run.open(world_size=2).attempt
    after(run, 3, run.open)
    with pytest.raises(FencedError):
        commit(run, attempt, 0)
    assert run.time.now_s < 1e9 + 20


def test_an_older_cut_is_abandoned_however_complete():
    run = Run()
    attempt = run.open().attempt
    run.commit(attempt, 5)
    with pytest.raises(Abandoned, match="cut 5 was committed before cut 4"):
        run.commit(attempt, 4)


def test_a_cut_that_is_in_the_log_already_is_success():
    run = Run()
    attempt = run.open().attempt
    assert run.commit(attempt, 1) == run.commit(attempt, 1)
    assert run.log.refresh().tip == 2


@pytest.mark.parametrize("covers", [1, 99, 0])
def test_covering_what_is_no_checkpoint_of_the_lineage_is_abandoned(covers):
    run = Run()
    attempt = run.open().attempt
    with pytest.raises(Abandoned, match="not live in the lineage"):
        run.commit(attempt, 1, covers)


def test_covering_a_retired_checkpoint_is_abandoned():
    run = Run()
    attempt = run.open().attempt
    old = run.commit(attempt, 1)
    run.commit(attempt, 2)
    run.retire([old], [cut_prefix(attempt, 1)])
    with pytest.raises(Abandoned, match=f"covers {old}"):
        run.commit(attempt, 3, old)


def test_ranks_that_cut_at_different_steps_never_make_one_checkpoint():
    run = Run()
    attempt = run.open(world_size=2).attempt
    with pytest.raises(PartsMissing):
        commit(run, attempt, 0, step=7)
    with pytest.raises(Abandoned, match="rank 0 cut at step 7, this one at step 8"):
        commit(run, attempt, 1, step=8)
    assert run.reader().refresh().newest() is None


def test_ranks_that_disagree_about_a_table_never_make_one_checkpoint():
    run = Run()
    attempt = run.open(world_size=2).attempt
    with pytest.raises(PartsMissing):
        commit(run, attempt, 0)
    other = TableSchema(fqn="t", rows=9, columns=2, dtype="float32")
    with pytest.raises(Abandoned, match="disagree about table t"):
        commit(run, attempt, 1, tables=(other,))


def test_a_rank_that_reported_twice_counts_once():
    run = Run()
    attempt = run.open(world_size=2).attempt
    for token in (TOKEN, "bbbbbbbbbbbbbbbb"):
        report = run.report(attempt, 1, rank=0, boxes=[HALVES[0]], token=token)
        with pytest.raises(PartsMissing):
            commit_part(
                run.reader(),
                attempt=attempt,
                cut=1,
                step=7,
                world_size=2,
                report=report,
                deadline_s=1.0,
            )
    entry = commit(run, attempt, 1).entry
    assert [TOKEN in part.index_key for part in entry.parts] == [True, True]


def test_a_report_of_another_run_is_foreign():
    """Copied there by hand: same key, same hash, other run."""
    run = Run()
    attempt = run.open(world_size=2).attempt
    with pytest.raises(PartsMissing):
        commit(run, attempt, 0, deadline_s=1.0)
    from deltashard_checkpoint.log.commit_log import RunLog

    for info in list(run.memory.list("job/")):
        run.memory.put("other" + info.key[3:], run.memory.get(info.key))
    log = RunLog(run.memory, "other", clocks=run.time.clocks)
    work = _work(log, attempt)
    reports = [work.reports()[0]] * 2
    with pytest.raises(ForeignObject):
        work.create(reports, log.patience(1))


def test_a_single_rank_writes_no_report():
    run = Run()
    run.commit(run.open().attempt, 1)
    assert not [info for info in run.memory.list("job/data/") if info.key.endswith(".part")]
