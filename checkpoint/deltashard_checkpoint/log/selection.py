"""Selection of the checkpoint to restore: latest, none, by seq, step or pin. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from deltashard_checkpoint.errors import EnvironmentFault, UserError
from deltashard_checkpoint.log.chain import CheckpointNotFound, closure, describe_live
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.run_state import RunState


class NothingRestorable(EnvironmentFault):
    """Checkpoints were committed, but all of them are excluded as invalid."""


def select(state: RunState, which: str = "latest", exclude: Iterable[int] = ()) -> Checkpoint | None:
    """Return the checkpoint selected by `which`: "latest", "none", "seq:N", "step:N" or "pin:NAME".

    Skips every checkpoint whose chain reads one in `exclude`. Returns None for "none", and for "latest" if nothing was
    ever committed.
    Raises `CheckpointNotFound`, `NothingRestorable`, or `UserError` for an unknown `which`.
    """
    where = f"run {state.run}"
    if which == "none":
        return None
    excluded = frozenset(exclude)
    usable = [c for seq, c in sorted(state.checkpoints.items()) if not closure(state, (seq,)) & excluded]
    kind, _, value = which.partition(":")
    if which == "latest":
        if current := [c for c in usable if c.seq not in state.detached]:
            return current[-1]
        if not state.committed:
            return None
        raise NothingRestorable(
            f"{state.committed} checkpoints were committed, none of the "
            f"{len(state.checkpoints.keys() - state.detached)} live ones is valid",
            where=where,
            remedy="`deltashard verify` reports what is broken; restore(fresh=True) starts from scratch"
            + (f"; {usable[-1].seq} is valid, but detached by a rewind: rewind to it" if usable else ""),
        )
    if kind == "pin":
        pinned_as = state.pinned_as(value)
        found = sorted((c for c in usable if c.seq in pinned_as), key=lambda c: pinned_as.index(c.seq))
    elif kind in {"seq", "step"} and value.isascii() and value.isdigit():
        found = [c for c in usable if (c.seq if kind == "seq" else c.step) == int(value)]
        # Several checkpoints may have the same step: prefer the current lineage to detached ones.
        found.sort(key=lambda c: (c.seq not in state.detached, c.seq))
    else:
        raise UserError(
            f"which={which!r} is unknown", where=where, remedy="latest, none, seq:N, step:N or pin:NAME"
        )
    if not found:
        raise CheckpointNotFound(
            f"no live, valid checkpoint {which}", where=where, remedy=describe_live(usable)
        )
    return found[-1]
