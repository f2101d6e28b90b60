"""Life of a pass over a wrapped loader, as tables: which state follows an event, and what a cut saves in each state.

A pass begins at the first `next()`; `iter()` does nothing. Everything that decides about states is in this file.

| state     | a cut saves                                                                  |
|-----------|------------------------------------------------------------------------------|
| none      | the beginning of the epoch                                                   |
| waiting   | the restored position, unchanged                                             |
| open      | the position inside the pass                                                 |
| exhausted | the beginning of the next epoch if the pass was an epoch, else of this one   |
| left      | before a further step the position inside the pass, else the next epoch      |

A restored position is used up by the first step, not by the first pass: until then the loader counts as waiting, and
each pass seeks that position again (a peek at one batch, a sanity check).
"""

from __future__ import annotations

from enum import Enum


class PassState(Enum):
    """Where a loader's newest pass is."""

    NONE = "none"
    WAITING = "waiting"
    OPEN = "open"
    EXHAUSTED = "exhausted"
    ABANDONED = "left"


class PassEvent(Enum):
    """What happens to it."""

    RESTORED = "a position inside a pass was restored"
    STARTED = "the first batch of a pass is asked for"
    STOPPED = "the loader has no further batch"
    DROPPED = "the iterator is dropped before its end"


TRANSITIONS = {
    (PassState.NONE, PassEvent.RESTORED): PassState.WAITING,
    (PassState.NONE, PassEvent.STARTED): PassState.OPEN,
    (PassState.WAITING, PassEvent.RESTORED): PassState.WAITING,
    (PassState.WAITING, PassEvent.STARTED): PassState.OPEN,
    (
        PassState.OPEN,
        PassEvent.STARTED,
    ): PassState.OPEN,  # the former iterator is kept somewhere, and not asked again
    (PassState.OPEN, PassEvent.STOPPED): PassState.EXHAUSTED,
    (PassState.OPEN, PassEvent.DROPPED): PassState.ABANDONED,
    (PassState.EXHAUSTED, PassEvent.STARTED): PassState.OPEN,
    (PassState.ABANDONED, PassEvent.STARTED): PassState.OPEN,
}


class SavedPosition(Enum):
    """What a cut saves."""

    RESTORED = "the restored position"
    INSIDE = "a position inside the pass"
    EPOCH = "the beginning of the epoch"
    NEXT_EPOCH = "the beginning of the next epoch"


def after(state: PassState, event: PassEvent) -> PassState:
    """The state that follows; raises KeyError for an event that cannot happen in `state`."""
    return TRANSITIONS[state, event]


def position_to_save(state: PassState, *, was_epoch: bool, stepped_since: bool) -> SavedPosition:
    """What a cut saves in `state`.

    Args:
        state: of the loader's newest pass.
        was_epoch: a step was taken in that pass.
        stepped_since: a step was taken after the pass ended.
    """
    if state is PassState.WAITING:
        return SavedPosition.RESTORED
    if state is PassState.OPEN or (state is PassState.ABANDONED and not stepped_since):
        return SavedPosition.INSIDE
    return SavedPosition.NEXT_EPOCH if was_epoch else SavedPosition.EPOCH
