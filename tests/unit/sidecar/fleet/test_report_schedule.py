"""The time of a sidecar's reports under any order of answers, changes and nudges."""

from __future__ import annotations

from deltashard_sidecar.fleet.report_schedule import BURST, ReportSchedule
from hypothesis import given
from hypothesis import strategies as st

CHANCES = st.floats(0, 1, exclude_max=True)
STATUSES = st.sampled_from([0, 200, 400, 401, 403, 404, 409, 413, 421, 429, 500, 503])


@given(
    st.lists(st.tuples(STATUSES, st.floats(0, 1e6), st.floats(0, 1e6), CHANCES, st.booleans()), max_size=40)
)
def test_next_report_is_timely_after_any_response(
    answers: list[tuple[int, float, float, float, bool]],
) -> None:
    """The time is never in the past, and not after the time that the answer or the table gives."""
    now_s, schedule = 100.0, ReportSchedule()
    for status, next_s, retry_after_s, uniform, changed in answers:
        chance, after_s = lambda uniform=uniform: uniform, retry_after_s * (status in (429, 503))
        if status == 200:
            schedule = schedule.accepted(next_s, now_s, chance)
        else:
            schedule = schedule.failed(status, now_s, retry_after_s=after_s, uniform=chance)
        pause_s = schedule.due_s - now_s
        asked_s = {200: next_s, 429: retry_after_s, 503: retry_after_s, 401: 60.0, 421: 60.0, 0: 60.0}
        assert 0 <= pause_s <= min(max(asked_s.get(status, 300.0), 60.0), 3600.0) * 1.1
        assert status != 200 or pause_s >= 0.89
        if changed:
            urgent = schedule.changed(now_s)
            assert (urgent.due_s < schedule.due_s) <= (status == 200)
            schedule = urgent
        now_s = schedule.due_s


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=200))
def test_changes_are_rate_limited_to_one_report_a_second(waits: list[float]) -> None:
    """The first three are sent at once, the others at one a second."""
    now_s, schedule, reports = 100.0, ReportSchedule(due_s=1e9), 0
    for wait_s in waits:
        now_s += wait_s
        schedule = schedule.changed(now_s)
        if now_s >= schedule.due_s:
            reports += 1
            schedule = schedule.accepted(300.0, now_s)
    assert reports <= BURST + sum(waits)
    assert reports >= min(len(waits), BURST)
