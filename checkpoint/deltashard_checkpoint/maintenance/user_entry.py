"""User actions as log entries: pins and rewinds.

Each is validated at the slot that it takes, concurrently with a trainer's commits, and retried on top of the winner
after a lost slot. A pin does not affect attempts. A rewind fences every earlier attempt, so it is rejected while one
may be alive (`holder`); a trainer that is alive after all is fenced at its next commit.
"""

from __future__ import annotations

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.log.chain import CheckpointNotFound
from deltashard_checkpoint.log.commit_log import DEFAULT_DEADLINE_S, RunLog
from deltashard_checkpoint.log.entry import Checkpoint, Entry, Pinned, Rewound
from deltashard_checkpoint.log.log_error import stopped
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.log.selection import select
from deltashard_checkpoint.maintenance.holder import check_ended

MAX_NAME = 256


def resolve_checkpoint(state: RunState, which: str) -> Checkpoint:
    """Return the live checkpoint selected by `which`: latest, seq:N (or N), step:N or pin:NAME.

    Raises `LogStopped` for a log that cannot be followed to its end, `CheckpointNotFound`, and `UserError`.
    """
    if state.stopped is not None:
        raise stopped(state)
    found = None if which == "none" else select(state, f"seq:{which}" if which.isdecimal() else which)
    if found is None:
        raise CheckpointNotFound("nothing has been committed yet", where=f"run {state.run}")
    return found


def pin(
    log: RunLog, name: str, which: str | None, *, deadline_s: float = DEFAULT_DEADLINE_S
) -> Pinned | None:
    """Point a pinned name to checkpoint `which`, or remove it with None; return None if that is the case already.

    Raises `UserError` for an invalid or unknown name, and the errors of `resolve_checkpoint` and `RunLog.append`.
    """
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise UserError(
            f"{name[:80]!r} is not a valid pinned name",
            remedy=f"use up to {MAX_NAME} visible characters, without leading or trailing spaces",
        )
    log.refresh(deadline_s=deadline_s)

    def build(state: RunState, seq: int, writer: str) -> Entry | None:
        held = state.pinned.get(name)
        wanted = None if which is None else resolve_checkpoint(state, which).seq
        if wanted is None and held is None:
            raise UserError(
                f"nothing is pinned {name!r}",
                where=f"run {state.run}",
                remedy=f"pinned names: {', '.join(state.pinned) or 'none'}",
            )
        if wanted == held:
            return None
        return Pinned(seq=seq, previous="", writer=writer, at_s=0.0, name=name, checkpoint=wanted)

    sealed = log.append(build, before="pin.before_put", after="pin.after_put", deadline_s=deadline_s)
    if sealed is None:
        return None
    assert isinstance(sealed.entry, Pinned)
    return sealed.entry


def rewind(
    log: RunLog, which: str, *, ended: bool = False, deadline_s: float = DEFAULT_DEADLINE_S
) -> Rewound | None:
    """Make the run continue from checkpoint `which`; return None if that is the newest already.

    Newer checkpoints are superseded, and stay live until they are retired. `ended`: a user confirms that the trainer
    has ended. Raises `RunInUse` if it may be alive, and the errors of `resolve_checkpoint` and `RunLog.append`.
    """
    log.refresh(deadline_s=deadline_s)

    def build(state: RunState, seq: int, writer: str) -> Entry | None:
        to = resolve_checkpoint(state, which)
        if to == state.newest():
            return None
        # IMPORTANT: checked at the slot being won: a trainer that opened an attempt just now holds the run.
        check_ended(log, state, ended=ended, what="a rewind")
        return Rewound(seq=seq, previous="", writer=writer, at_s=0.0, to=to.seq)

    sealed = log.append(build, before="rewind.before_put", after="rewind.after_put", deadline_s=deadline_s)
    if sealed is None:
        return None
    assert isinstance(sealed.entry, Rewound)
    return sealed.entry
