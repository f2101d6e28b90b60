"""When a save is due: seconds, steps, both, neither; what comes due under a running save is skipped and counted."""

from deltashard_proto.arena_layout import NEVER
from deltashard_sidecar.session.schedule import Schedule


def schedule(every_s: float = 0.0, every_steps: int = 0) -> Schedule:
    return Schedule(every_s=every_s, every_steps=every_steps, anchor_s=0.0).opened(now_s=100.0, step=7)


def test_nothing_is_due_before_an_attempt_is_open() -> None:
    """A trainer that has not restored has nothing to save."""
    closed = Schedule(every_s=1.0, every_steps=1, anchor_s=0.0)
    assert closed.advance(now_s=1e9, step=1000)[1] == NEVER


def test_off_means_never() -> None:
    """Both intervals 0."""
    assert schedule().advance(now_s=1e9, step=10**9)[1] == NEVER


def test_seconds_become_the_trainers_next_step() -> None:
    """Not before the interval has passed; then at the step the trainer has reached."""
    timer = schedule(every_s=30.0)
    assert timer.advance(now_s=129.9, step=50)[1] == NEVER
    assert timer.advance(now_s=130.0, step=50)[1] == 50


def test_steps_are_written_ahead() -> None:
    """The trainer sees the exact step long before it comes."""
    assert schedule(every_steps=10).advance(now_s=100.0, step=7)[1] == 17


def test_of_two_intervals_the_earlier_counts() -> None:
    """Time due now beats a step far ahead."""
    timer = schedule(every_s=5.0, every_steps=1000)
    assert timer.advance(now_s=101.0, step=9)[1] == 1007
    assert timer.advance(now_s=106.0, step=9)[1] == 9


def test_nothing_is_due_while_a_save_runs_and_what_came_due_is_counted() -> None:
    """Three intervals under one upload are three skipped saves; the next is a whole interval later."""
    timer = schedule(every_s=10.0).began(now_s=110.0, step=20)
    timer, at = timer.advance(now_s=119.0, step=30)
    assert (timer.skipped, at) == (0, NEVER)
    timer, at = timer.advance(now_s=145.0, step=60)
    assert (timer.skipped, at) == (3, NEVER)
    timer, at = timer.ended().advance(now_s=146.0, step=61)
    assert at == NEVER
    assert timer.advance(now_s=150.0, step=65)[1] == 65


def test_an_attempts_first_interval_is_off_by_its_phase() -> None:
    """By a share of it, earlier or later; the next one is whole."""
    fresh = Schedule(every_s=100.0, every_steps=0, anchor_s=0.0)
    for phase, due_s in ((-0.1, 190.0), (0.0, 200.0), (0.05, 205.0)):
        timer = fresh.opened(now_s=100.0, step=7, phase=phase)
        assert timer.advance(now_s=due_s - 0.1, step=50)[1] == NEVER
        assert timer.advance(now_s=due_s + 0.1, step=50)[1] == 50
        assert timer.began(now_s=due_s, step=50).ended().advance(now_s=due_s + 99.9, step=90)[1] == NEVER


def test_skipped_steps_keep_their_rhythm() -> None:
    """every_steps=10 with a save that lasts 25 steps: the next cut is at the next multiple."""
    timer = schedule(every_steps=10).began(now_s=101.0, step=10)
    timer, at = timer.advance(now_s=102.0, step=35)
    assert (timer.skipped, at) == (2, NEVER)
    assert timer.ended().advance(now_s=103.0, step=36)[1] == 40


def test_a_users_own_save_starts_the_interval_anew() -> None:
    """A save by hand at 109 s moves the next timed one to 119 s."""
    timer = schedule(every_s=10.0).began(now_s=109.0, step=9).ended()
    assert timer.advance(now_s=118.9, step=10)[1] == NEVER
    assert timer.advance(now_s=119.0, step=10)[1] == 10
