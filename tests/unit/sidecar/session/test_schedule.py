"""When a save is due: seconds, steps, both or neither. Saves due during a running save are skipped and counted."""

import pytest
from deltashard_proto.arena_layout import NEVER
from deltashard_sidecar.session.schedule import Schedule


@pytest.mark.parametrize(
    ("every_s", "every_steps", "now_s", "step", "due"),
    [
        (0, 0, 1e9, 10**9, NEVER),
        (30, 0, 129.9, 50, NEVER),
        (30, 0, 130.0, 50, 50),  # at the trainer's current step
        (0, 10, 100.0, 7, 17),  # written ahead
        (5, 1000, 101.0, 9, 1007),
        (5, 1000, 106.0, 9, 9),
    ],
)
def test_a_save_is_due_once_an_attempt_is_open(every_s, every_steps, now_s, step, due) -> None:
    timer = Schedule(every_s=every_s, every_steps=every_steps, anchor_s=0.0)
    assert timer.advance(now_s=now_s, step=step)[1] == NEVER
    assert timer.opened(now_s=100.0, step=7).advance(now_s=now_s, step=step)[1] == due


def test_saves_due_during_a_save_are_skipped_and_counted() -> None:
    """Three intervals during one upload are three skipped saves. The next save follows a whole interval later."""
    for every, started, now, after in (
        ({"every_s": 10.0, "every_steps": 0}, (110.0, 20), ((119.0, 30), 0, (145.0, 60), 3), ((149.9, 65), NEVER, (150.0, 65), 65)),
        ({"every_s": 0.0, "every_steps": 10}, (101.0, 10), ((101.0, 19), 0, (102.0, 35), 2), ((103.0, 36), 40, (103.0, 39), 40)),
    ):  # fmt: skip
        timer = (
            Schedule(**every, anchor_s=0.0)
            .opened(now_s=100.0, step=0)
            .began(now_s=started[0], step=started[1])
        )
        for (now_s, step), skipped in zip(now[::2], now[1::2], strict=True):
            timer, at = timer.advance(now_s=now_s, step=step)
            assert (timer.skipped, at) == (skipped, NEVER)
        ended = timer.opened(now_s=timer.anchor_s, step=timer.anchor_step)
        for (now_s, step), due in zip(after[::2], after[1::2], strict=True):
            assert ended.advance(now_s=now_s, step=step)[1] == due
