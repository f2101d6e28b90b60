"""Run size, intervals, failures and costs as read from the log."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deltashard_checkpoint.deciding.cost import KEY, Profile
from deltashard_checkpoint.deciding.evidence import Evidence, rates
from deltashard_checkpoint.deciding.record import Record
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from deltashard_checkpoint.log.entry import AttemptOpened, Checkpoint, ManifestRef, Rewound
from deltashard_cli.planning.plan import PlanInputs, plan
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
    listed = ManifestRef(layout="l", world_size=2, manifest="m", covers=(covers,))
    return Checkpoint(
        seq=seq, at_s=at_s, attempt=attempt, snapshot_id=seq, step=10 * seq, tables=(TABLE, HALF), encodings={"items": ("bf16", "q8")},
        rows=rows, raw_bytes=ROW_BYTES + 500 if covers is None else 1000, stored_bytes=4000, stall_s=0.02, snapshot_at_s=0.0,
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


def test_size_cost_and_failures_are_read_from_two_attempts():
    found = recorded_run(LOG)
    assert (found.raw_bytes, found.stored_bytes, found.checkpoints) == (ROW_BYTES, 4000, 4)
    assert (found.now_s, found.step_s, found.cost_s) == (100.0, 10.0, None)
    assert found.evidence.lossy == pytest.approx(1, rel=0.01)
    assert found.evidence.restores == found.evidence.lossy
    assert found.evidence.exposure_s == pytest.approx(400, rel=0.01), "up to the newest commit"


def day(first: int, begin_s: float, *, attempt: int, end: str = "timer") -> list[Checkpoint]:
    """Return one day of saves, ten minutes apart, with the trigger of the newest save."""
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
    """One hundred attempts that resume from the same checkpoint train nothing and count as one failure."""
    loop = [opened(1000 + at, DAY_S + 60.0 * at, resumes_from=145) for at in range(100)]
    last = loop[-1]
    log = [opened(1, 0.0), *day(2, 0.0, attempt=1), *loop, *day(1100, last.at_s, attempt=last.seq)]
    found = recorded_run(log)
    assert found.evidence.lossy == pytest.approx(2 ** (-1 / 7)), "decayed over one day"
    assert found.evidence.exposure_s == pytest.approx(Evidence().after_training(2 * DAY_S).exposure_s)
    assert rates(found.evidence, pods=1).mtbf_s / 3600 == pytest.approx(124.8, abs=0.1)
    source = {each.name: each.source for each in plan(PlanInputs(), found).figures}
    assert "0.906 in 43.5 h of training" in source["failures"]


def test_a_rewind_is_a_restore_and_no_failure():
    rewound = [*LOG[:4], Rewound(seq=5, at_s=900.0, to=2, **BASE), opened(6, 1000.0, resumes_from=2)]
    found = recorded_run([*rewound, saved(7, 1100.0, attempt=6, covers=2, rows=220)])
    assert found.evidence.lossy == 0
    assert found.evidence.restores == pytest.approx(1, rel=0.01)


def test_closed_trainer_is_no_failure():
    log = [
        opened(1, 0.0),
        *day(2, 0.0, attempt=1, end="close"),
        opened(200, 2 * DAY_S, resumes_from=145),
        *day(201, 2 * DAY_S, attempt=200),
        opened(400, 4 * DAY_S, resumes_from=344),
    ]
    found = recorded_run(log)
    assert found.evidence.lossy == 1
    assert found.evidence.restores == pytest.approx(1 + 2 ** (-1 / 7))


def test_decider_counts_take_precedence_over_the_log():
    """The decider's counts include facts that the log lacks. Failures after its commit are added."""
    counted = Evidence(exposure_s=5e5, lossy=3.5, restores=7.25)
    text = Record(profile=Profile(), evidence=counted).text()
    decided = [*LOG[:-1], replace(LOG[-1], metadata={KEY: text})]
    found = recorded_run(decided)
    assert found.evidence == counted
    back = opened(7, 1200.0, resumes_from=6)
    found = recorded_run([*decided, back, replace(back, seq=8)])
    assert found.evidence == counted.with_incident(lossy=True)
    closing = Record(profile=Profile(), evidence=counted, closing=True).text()
    found = recorded_run([*LOG[:-1], replace(LOG[-1], metadata={KEY: closing}), back])
    assert found.evidence == counted.with_incident(lossy=False)
    later = saved(9, 1300.0, attempt=7, covers=None, rows=2000)
    found = recorded_run([*decided, back, later])
    assert found.evidence == counted.with_incident(lossy=True).after_training(100.0), (
        "the newest commit has no record"
    )
    spoiled = [*LOG[:-1], replace(LOG[-1], metadata={KEY: "{"})]
    assert recorded_run(spoiled).evidence == recorded_run(LOG).evidence
