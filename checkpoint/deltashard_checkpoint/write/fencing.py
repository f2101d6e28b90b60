"""Who may not commit, or open, any more: a newer attempt is open, or another workload or pod has followed. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from deltashard_proto.cause import Cause

from deltashard_checkpoint.errors import EnvironmentFault
from deltashard_checkpoint.log.run_state import RunState


class FencedError(EnvironmentFault):
    """A newer attempt is open: this trainer's run is over, it must neither save nor open an attempt again."""

    cause = Cause.FENCED

    def __init__(
        self, attempt: int, by: int, run: str, *, workload: str = "", pod: str = "", rewound: bool = False
    ) -> None:
        """`workload` or `pod`: UID of what opened the newer attempt, where it is another one; `rewound`: no process."""
        self.attempt = attempt
        self.by = by
        self.workload = workload
        who, remedy = "", "another process has taken the run over; end this one"
        if rewound:
            who = ", with which a person rewound the run"
            remedy = "end this process; a new one goes on from where the run was rewound to"
        elif workload:
            who = f" of another workload ({workload})"
            remedy = "end this workload, the other one trains on; restore(takeover=True) takes the run back on purpose"
        elif pod:
            who = f" of another pod ({pod})"
        super().__init__(
            f"attempt {attempt} is fenced by attempt {by}{who}", where=f"run {run}", remedy=remedy
        )


class TakenOver(FencedError):
    """Another workload (Job, JobSet, ...) holds the run now: for this workload it is over, restarts included."""

    cause = Cause.TAKEN_OVER


def fencing(state: RunState, attempt: int) -> FencedError | None:
    """Why `attempt` can commit no more, if a newer one is open."""
    if state.attempt is None or state.attempt <= attempt:
        return None
    newest = state.attempts[state.attempt]
    mine = state.attempts[attempt].workload if attempt in state.attempts else ""
    if mine and newest.workload and mine != newest.workload:
        return TakenOver(attempt, state.attempt, state.run, workload=newest.workload)
    return FencedError(attempt, state.attempt, state.run, rewound=newest.world_size == 0)


def displacement(state: RunState, workload: str, pod: str, took_part: int = 0) -> FencedError | None:
    """The refusal of a workload, or pod, that held this run once and was followed by another one.

    A pod of a group is not followed by the pods that open attempts in which it takes part (up to `took_part`).
    """
    if lost := _superseded_by({n: opened.workload for n, opened in state.attempts.items()}, workload):
        return TakenOver(*lost, state.run, workload=state.attempts[lost[1]].workload)
    pods = {n: opened.pod for n, opened in state.attempts.items()}
    if (lost := _superseded_by(pods, pod)) and lost[1] > took_part:
        return FencedError(*lost, state.run, pod=state.attempts[lost[1]].pod)
    return None


def _superseded_by(names: Mapping[int, str], mine: str) -> tuple[int, int] | None:
    """(the last attempt of `mine`, the newer one of another), if there are both; nameless attempts don't count."""
    own = [number for number, name in names.items() if mine and name == mine]
    newest = max((number for number, name in names.items() if name), default=-1)
    return (max(own), newest) if own and newest > max(own) else None
