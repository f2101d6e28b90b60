"""Fencing of attempts that a newer attempt, another workload or another pod has superseded. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from deltashard_proto.cause import Cause

from deltashard_checkpoint.errors import EnvironmentFault
from deltashard_checkpoint.log.run_state import RunState


class FencedError(EnvironmentFault):
    """A newer attempt is open: this trainer must neither save nor open an attempt again."""

    cause = Cause.FENCED

    def __init__(
        self, attempt: int, by: int, run: str, *, workload: str = "", pod: str = "", rewound: bool = False
    ) -> None:
        """`workload` or `pod` is the UID of the newer attempt's opener if it differs; `rewound`: a rewind opened it."""
        self.attempt = attempt
        self.by = by
        self.workload = workload
        who, remedy = "", "another process holds the run; end this one"
        if rewound:
            who = ", opened by a rewind"
            remedy = "end this process; a new one continues from the rewound checkpoint"
        elif workload:
            who = f" of another workload ({workload})"
            remedy = "end this workload, the other holds the run; restore(takeover=True) takes it back"
        elif pod:
            who = f" of another pod ({pod})"
        super().__init__(
            f"attempt {attempt} is fenced by attempt {by}{who}", where=f"run {run}", remedy=remedy
        )


class TakenOver(FencedError):
    """Another workload (Job, JobSet, ...) holds the run: this workload has ended, restarts included."""

    cause = Cause.TAKEN_OVER


def fencing(state: RunState, attempt: int) -> FencedError | None:
    """Return the error with which `attempt` is fenced, or None if no newer attempt is open."""
    if state.attempt is None or state.attempt <= attempt:
        return None
    newest = state.attempts[state.attempt]
    mine = state.attempts[attempt].workload if attempt in state.attempts else ""
    if mine and newest.workload and mine != newest.workload:
        return TakenOver(attempt, state.attempt, state.run, workload=newest.workload)
    return FencedError(attempt, state.attempt, state.run, rewound=newest.world_size == 0)


def displacement(
    state: RunState, workload: str, pod: str, participated_attempt: int = 0
) -> FencedError | None:
    """Return the error for a workload or pod that held this run once and was superseded, or None.

    Attempts up to `participated_attempt`, in which a pod of the same group takes part, do not supersede it.
    """
    if lost := _superseded_by({n: opened.workload for n, opened in state.attempts.items()}, workload):
        return TakenOver(*lost, state.run, workload=state.attempts[lost[1]].workload)
    pods = {n: opened.pod for n, opened in state.attempts.items()}
    if (lost := _superseded_by(pods, pod)) and lost[1] > participated_attempt:
        return FencedError(*lost, state.run, pod=state.attempts[lost[1]].pod)
    return None


def _superseded_by(names: Mapping[int, str], mine: str) -> tuple[int, int] | None:
    """Return (last attempt of `mine`, newer attempt of another name), or None; unnamed attempts do not count."""
    own = [number for number, name in names.items() if mine and name == mine]
    newest = max((number for number, name in names.items() if name), default=-1)
    return (max(own), newest) if own and newest > max(own) else None
