"""Tracking and forked children."""

from __future__ import annotations

import os

from tests.support.trainer.tracking_case import (
    begin,
    quiet,
)


def test_a_forked_child_is_not_watched():
    """A loader's worker may run parts of the model: no hook of ours is left in it."""
    training, cutter = begin("sgd", "embedding", True)
    child = os.fork()
    if child == 0:
        os._exit(int(bool(training.optimizer._optimizer_step_pre_hooks)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with quiet():
        training.train()
        assert cutter.take()
    assert cutter.table.tracker == "gradients"
