"""What a log says of a run: its intervals, rows, failures and measured costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from deltashard_checkpoint.deciding.cost import KEY, Measure, Profile
from deltashard_checkpoint.deciding.evidence import Evidence, rates
from deltashard_checkpoint.deciding.interval import ENOUGH, Basis
from deltashard_checkpoint.deciding.record import Held, Record
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from deltashard_checkpoint.log.entry import AttemptOpened, Checkpoint, Listed, Rewound
from deltashard_cli.planning.assumption import Said, settled
from deltashard_cli.planning.recorded_run import recorded_run

TABLE = TableSchema(
    fqn="emb", rows=1000, columns=16, dtype="float32",
    fields=(FieldSpec(name="sum", kind="rowwise", dtype="float32"),),
)  # fmt: skip
HALF = TableSchema(fqn="half", rows=1000, columns=8, dtype="bfloat16")
ROW_BYTES = 1000 * (16 * 4 + 4) + 1000 * 8 * 2
BASE = {"previous": "", "writer": "w"}
DAY_S = 86400.0


def opened(seq: int, at_s: float, resumes_from: int | None = None) -> AttemptOpened:
    return AttemptOpened(seq=seq, at_s=at_s, world_size=2, resumes_from=resumes_from, owner="o", **BASE)


def saved(
    seq: int, at_s: float, *, attempt: int, covers: int | None, rows: int, reason: str = "timer", **more
) -> Checkpoint:
    listed = Listed(layout="l", world_size=2, manifest="m", covers=(covers,))
    return Checkpoint(
        seq=seq, at_s=at_s, attempt=attempt, cut=seq, step=10 * seq, tables=(TABLE, HALF), encodings=("bf16", "q8"),
        rows=rows, raw_bytes=ROW_BYTES + 500 if covers is None else 1000, stored_bytes=4000, stall_s=0.02,
        listed=listed, directive=f"{reason}; full: baseline", **BASE, **more,
    )  # fmt: skip


LOG = [
    opened(1, 0.0),
    saved(2, 100.0, attempt=1, covers=None, rows=2000),
    saved(3, 200.0, attempt=1, covers=2, rows=200),
    saved(4, 300.0, attempt=1, covers=2, rows=400),
    opened(5, 1000.0, resumes_from=4),
    saved(6, 1100.0, attempt=5, covers=4, rows=220),
]


def test_a_log_of_two_attempts():
    found = recorded_run(LOG)
    assert found is not None
    assert (found.rows, found.columns, found.state_bytes, found.dense_bytes) == (2000, 12, 2, 500)
    assert (found.ranks, found.checkpoints, found.attempts) == (2, 4, 2)
    assert (found.interval_s, found.step_s, found.encoding) == (100.0, 10.0, "q8")
    assert found.stall_s == pytest.approx(0.02)
    assert found.touched == ((100.0, 0.1), (200.0, 0.2), (800.0, 0.11))
    assert found.gaps == (350.0,)  # half an interval after the last checkpoint
    assert found.evidence.lossy == pytest.approx(1, rel=0.01)
    assert found.evidence.restores == found.evidence.lossy
    assert found.evidence.exposure_s == pytest.approx(400, rel=0.01), "what was committed"


def day(first: int, begin_s: float, *, attempt: int, end: str = "timer") -> list[Checkpoint]:
    """Saves of a day, ten minutes apart; what asked for the last one."""
    return [
        saved(
            first + at,
            begin_s + 600.0 * (at + 1),
            attempt=attempt,
            covers=None,
            rows=2000,
            reason="timer" if at < 143 else end,
        )
        for at in range(144)
    ]


def test_a_crash_loop_is_one_failure():
    """A hundred attempts that came back to one checkpoint trained nothing, and tell of one trouble."""
    loop = [opened(1000 + at, DAY_S + 60.0 * at, resumes_from=145) for at in range(100)]
    last = loop[-1]
    log = [
        opened(1, 0.0),
        *day(2, 0.0, attempt=1),
        *loop,
        *day(1100, last.at_s, attempt=last.seq),
    ]
    found = recorded_run(log)
    assert found is not None
    assert found.gaps == (DAY_S + 300,)
    assert found.evidence.lossy == pytest.approx(2 ** (-1 / 7)), "a day ago"
    assert found.evidence.exposure_s == pytest.approx(Evidence().trained(2 * DAY_S).exposure_s)
    assert rates(found.evidence, pods=1).mtbf_s / 3600 == pytest.approx(124.8, abs=0.1)
    source = {each.name: each.source for each in settled(Said(), found)[1]}
    assert "0.906 in 43.5 h of training" in source["lossy failures"]
    assert "0.906" in source["restores"]


def test_a_rewind_is_a_restore_and_no_failure():
    rewound = [*LOG[:4], Rewound(seq=5, at_s=900.0, to=2, **BASE), opened(6, 1000.0, resumes_from=2)]
    found = recorded_run([*rewound, saved(7, 1100.0, attempt=6, covers=2, rows=220)])
    assert found is not None
    assert (found.evidence.lossy, found.gaps) == (0, ())
    assert found.evidence.restores == pytest.approx(1, rel=0.01)


def test_a_trainer_that_closed_lost_nothing():
    """It is a restore, and the time until steps are lost goes on."""
    log = [
        opened(1, 0.0),
        *day(2, 0.0, attempt=1, end="close"),
        opened(200, 2 * DAY_S, resumes_from=145),
        *day(201, 2 * DAY_S, attempt=200),
        opened(400, 4 * DAY_S, resumes_from=344),
    ]
    found = recorded_run(log)
    assert found is not None
    assert found.gaps == (2 * DAY_S + 300,)
    assert found.evidence.lossy == 1
    assert found.evidence.restores == pytest.approx(1 + 2 ** (-1 / 7))


def test_what_the_runs_decider_counted_stands_over_what_its_log_shows():
    """It knows of more than the log does; and what came after its commit is added."""
    counted = Evidence(exposure_s=5e5, lossy=3.5, restores=7.25)
    text = Record(profile=Profile(), evidence=counted).text()
    decided = [*LOG[:-1], replace(LOG[-1], metadata={KEY: text})]
    found = recorded_run(decided)
    assert found is not None
    assert (found.evidence, found.gaps) == (counted, (350.0,))
    back = opened(7, 1200.0, resumes_from=6)
    found = recorded_run([*decided, back, replace(back, seq=8)])
    assert found is not None
    assert found.evidence == counted.incident(lossy=True)
    closing = Record(profile=Profile(), evidence=counted, closing=True).text()
    found = recorded_run([*LOG[:-1], replace(LOG[-1], metadata={KEY: closing}), back])
    assert found is not None
    assert found.evidence == counted.incident(lossy=False)
    later = saved(9, 1300.0, attempt=7, covers=None, rows=2000)
    found = recorded_run([*decided, back, later])
    assert found is not None
    assert found.evidence == counted.incident(lossy=True).trained(100.0), "its goal was taken away"
    spoiled = [*LOG[:-1], replace(LOG[-1], metadata={KEY: "{"})]
    assert recorded_run(spoiled).evidence == recorded_run(LOG).evidence


def test_a_run_without_checkpoints_says_nothing():
    assert recorded_run([]) is None
    assert recorded_run(LOG[:1]) is None
    found = recorded_run(LOG[:2])
    assert found is not None
    assert (found.interval_s, found.step_s, found.touched, found.gaps) == (None, None, (), ())


def measured(value: float) -> Measure:
    return Measure().sampled(value).sampled(value)


def test_the_profile_in_a_commit_is_taken_before_what_entries_say():
    profile = Profile(
        key="k",
        step_s=0.25,
        save=measured(0.5),
        stall=measured(0.125),
        durable=measured(2.0),
        reschedule=measured(60.0),
    )
    log = [*LOG[:-1], replace(LOG[-1], metadata={KEY: profile.text()})]
    known, notes = settled(Said(), recorded_run(log))
    assert (known.stall_s, known.slowdown_s, known.step_s, known.restart_s) == (0.125, 0.375, 0.25, 60.0)
    assert known.bandwidth == pytest.approx(4000 / 2)
    assert {each.name: each.value for each in notes}["bandwidth of a pod"] == "0.002 MB/s"
    assert known.ranks == 2
    assert all("log" in each.source for each in notes if each.name in {"a step", "a save's slowdown"})
    spoiled = [*LOG[:-1], replace(LOG[-1], metadata={KEY: "{"})]
    known, _ = settled(Said(), recorded_run(spoiled))
    assert (known.stall_s, known.step_s) == (pytest.approx(0.02), 10.0)


def several(value: float, count: int) -> Measure:
    found = Measure()
    for _ in range(count):
        found = found.sampled(value)
    return found


@pytest.mark.parametrize(
    ("chosen", "saves", "slowdown_s"),
    [
        (True, 0, 0.75),
        (True, ENOUGH - 1, 0.75),
        (True, ENOUGH, 1.875),
        (False, ENOUGH - 1, 1.875),
    ],
)
def test_right_after_a_change_a_save_costs_what_was_measured_for_it(
    *, chosen: bool, saves: int, slowdown_s: float
):
    """The mean of saves begins anew with each change of interval; the run itself goes by the old one until eight."""
    profile = Profile(save=several(2.0, saves), stall=several(0.125, 40))
    choice = Held(basis=Basis(seconds=600.0, cost_s=0.875, mtbf_s=1e5), goal="auto 0 inf") if chosen else None
    for applied in (True, False):
        text = Record(profile=profile, held=choice, applied=applied).text()
        known, notes = settled(Said(), recorded_run([*LOG[:-1], replace(LOG[-1], metadata={KEY: text})]))
        assert (known.stall_s, known.slowdown_s) == (0.125, slowdown_s)
        assert {each.name: each.source for each in notes}["a save's slowdown"] == "the run's log"


def test_a_run_that_has_measured_no_save_has_no_cost():
    text = Record(profile=Profile(stall=several(0.125, 1))).text()
    found = recorded_run([*LOG[:-1], replace(LOG[-1], metadata={KEY: text})])
    assert found is not None
    assert found.cost_s is None
    assert {each.name: each.source for each in settled(Said(), found)[1]}["a save's slowdown"].startswith(
        "assumed"
    )


def held(text: str | None, seconds: object, **others: object) -> str:
    choice = None if text is None else {"goal": text, "seconds": seconds, "cost_s": 1.0, "mtbf_s": 1e5}
    return json.dumps(json.loads(Record(profile=Profile(), applied=True).text()) | {"held": choice} | others)


def test_how_often_it_saves_now_is_what_the_newest_commit_says_or_how_its_last_saves_lay():
    """Old commits of a run that saved every two seconds while it measured say nothing of today."""
    old = [saved(2 + at, 2.0 * at, attempt=1, covers=None, rows=2000) for at in range(20)]
    new = [saved(31 + at, 1000 + 600.0 * at, attempt=30, covers=None, rows=2000) for at in range(3)]
    found = recorded_run([opened(1, 0.0), *old, opened(30, 900.0, resumes_from=21), *new])
    assert found is not None
    assert (found.interval_s, found.recent_s, found.held_s, found.now_s) == (2.0, 600.0, None, 600.0)

    def now_s(*texts: str) -> float | None:
        log = [
            opened(1, 0.0),
            *(
                replace(each, metadata={KEY: text} if text else {})
                for each, text in zip(new, texts, strict=True)
            ),
        ]
        return recorded_run(log).now_s

    assert now_s("", "", held("auto 0 inf", 1140.0)) == 1140.0
    assert now_s("", held("auto 0 inf", 1140.0), "") == 600.0, "its goal was taken away"
    for spoiled in (
        held(None, 0),
        held("auto", "soon"),
        held("auto", -5),
        held("auto", 0),
        held("auto", 1140.0, applied=False),
        held("auto", 1140.0, applied=None),
        held("auto", 1140.0, evidence={}),
        Profile().text(),
        "[",
        "[]",
    ):
        assert now_s("", "", spoiled) == 600.0


def test_what_is_said_stands_over_the_log():
    known, _ = settled(Said(stall_s=3.0, step_s=1.0, ranks=7, dirty=((60.0, 0.5),)), recorded_run(LOG))
    assert (known.stall_s, known.step_s, known.ranks) == (3.0, 1.0, 7)
    assert known.growth.touched(60) == pytest.approx(0.5)
