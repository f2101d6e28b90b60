"""The back-off that every retry uses."""

from deltashard_checkpoint.backoff import Backoff, Clocks, RetryBudget
from hypothesis import given
from hypothesis import strategies as st


@given(
    failures=st.integers(1, 10_000), uniform=st.floats(0, 1, exclude_max=True), first_s=st.floats(0.001, 10),
    longest_s=st.floats(0.001, 1000), jitter=st.floats(0, 1),
)  # fmt: skip
def test_delays_stay_in_bounds(failures, uniform, first_s, longest_s, jitter):
    backoff = Backoff(first_s=first_s, longest_s=longest_s, jitter=jitter)
    due_s = min(longest_s, first_s * 2.0 ** min(failures - 1, 60))
    delay_s = backoff.delay_s(failures, lambda: uniform)
    assert due_s * (1 - jitter) * 0.999999 <= delay_s <= due_s


def test_retry_budget_sleeps_until_the_deadline() -> None:
    now, slept = [0.0], list[float]()

    def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        now[0] += delay_s

    clocks = Clocks(monotonic_s=lambda: now[0], sleep=sleep, uniform=lambda: 1.0)
    retry_budget = RetryBudget(clocks=clocks, deadline_s=10.0, backoff=Backoff(first_s=1.0, longest_s=4.0))
    while retry_budget.pause():
        pass
    assert slept == [1.0, 2.0, 4.0, 3.0]
