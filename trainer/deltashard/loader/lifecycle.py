"""Lifecycle of a pass over a wrapped loader, as tables: transitions, and what a snapshot saves in each state.

A pass begins at the first `next()`. `iter()` has no effect. All decisions about states are in this module.

| state     | a snapshot saves                                                             |
|-----------|------------------------------------------------------------------------------|
| none      | the beginning of the epoch                                                   |
| waiting   | the restored position, unchanged                                             |
| open      | the position inside the pass                                                 |
| exhausted | the beginning of the next epoch if the pass was an epoch, else of this one   |
| left      | the position inside the pass until the next step, then the next epoch        |

The first step uses up a restored position, not the first pass. Until then, each pass (a peek at one batch, a sanity
check) seeks to that position again, and a snapshot saves it unchanged.
"""

from __future__ import annotations

from enum import Enum


class PassState(Enum):
    """State of a loader's newest pass."""

    NONE = "none"
    WAITING = "waiting"
    OPEN = "open"
    EXHAUSTED = "exhausted"
    ABANDONED = "left"


class PassEvent(Enum):
    """Event that changes the state of a pass."""

    RESTORED = "a position inside a pass was restored"
    STARTED = "the first batch of a pass is asked for"
    STOPPED = "the loader has no further batch"
    DROPPED = "the iterator is dropped before its end"


TRANSITIONS = {
    (PassState.NONE, PassEvent.RESTORED): PassState.WAITING,
    (PassState.NONE, PassEvent.STARTED): PassState.OPEN,
    (PassState.WAITING, PassEvent.RESTORED): PassState.WAITING,
    (PassState.WAITING, PassEvent.STARTED): PassState.OPEN,
    # The previous iterator still exists but is not used any more.
    (PassState.OPEN, PassEvent.STARTED): PassState.OPEN,
    (PassState.OPEN, PassEvent.STOPPED): PassState.EXHAUSTED,
    (PassState.OPEN, PassEvent.DROPPED): PassState.ABANDONED,
    (PassState.EXHAUSTED, PassEvent.STARTED): PassState.OPEN,
    (PassState.ABANDONED, PassEvent.STARTED): PassState.OPEN,
}


class SavedPosition(Enum):
    """Position that a snapshot saves."""

    RESTORED = "the restored position"
    INSIDE = "a position inside the pass"
    EPOCH = "the beginning of the epoch"
    NEXT_EPOCH = "the beginning of the next epoch"


def after(state: PassState, event: PassEvent) -> PassState:
    """Return the next state; raises KeyError for an event that cannot happen in `state`."""
    return TRANSITIONS[state, event]


def position_to_save(state: PassState, *, was_epoch: bool, stepped_since: bool) -> SavedPosition:
    """Return which position a snapshot saves in `state`.

    Args:
        state: State of the loader's newest pass.
        was_epoch: Whether a step was taken in that pass.
        stepped_since: Whether a step was taken after the pass ended.
    """
    if state is PassState.WAITING:
        return SavedPosition.RESTORED
    if state is PassState.OPEN or (state is PassState.ABANDONED and not stepped_since):
        return SavedPosition.INSIDE
    return SavedPosition.NEXT_EPOCH if was_epoch else SavedPosition.EPOCH
