"""State of this sidecar, as its heartbeat says it.

Called from the fleet's thread, and it only reads: a handful of the pipeline's attributes, and the newest log state any
handle has seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from deltashard_checkpoint.log.chain import held_bytes
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.probe import proven
from deltashard_checkpoint.vocabulary import PLS_KEY, RECOVERIES_KEY
from deltashard_proto.v1 import fleet_pb2 as fleet

from deltashard_sidecar.arena.arena import ArenaKeeper
from deltashard_sidecar.deciding.decider import Decider
from deltashard_sidecar.fleet import heartbeat as heartbeats
from deltashard_sidecar.fleet.activity import Activity
from deltashard_sidecar.fleet.step_sample import StepSamples
from deltashard_sidecar.policy import InForce
from deltashard_sidecar.run.run import Run, commit_message
from deltashard_sidecar.save.save import InFlightSaves
from deltashard_sidecar.session.session import Session, Sessions


class Standing:
    """State of one sidecar, read from its parts."""

    def __init__(
        self,
        *,
        run: Run,
        sessions: Sessions,
        in_flight_saves: InFlightSaves,
        keeper: ArenaKeeper,
        activity: Activity,
        decider: Decider,
        in_force: Callable[[], InForce],
        stopping: Callable[[], bool],
    ) -> None:
        self._run = run
        self._sessions = sessions
        self._in_flight_saves = in_flight_saves
        self._keeper = keeper
        self._activity = activity
        self._decider = decider
        self._in_force = in_force
        self._stopping = stopping
        self._sizes: tuple[int, int, int] = (-1, 0, 0)
        self._samples = StepSamples()

    def heartbeat(self) -> fleet.Heartbeat:
        run, activity, in_force = self._run, self._activity, self._in_force()
        sessions = self._sessions.all()
        state = run.state()
        opened = [s for s in sessions if s.attempt.number is not None]
        attempt = max((s.attempt.number or 0 for s in opened), default=0)
        beat = fleet.Heartbeat(
            run=run.name,
            phase=heartbeats.phase(
                stopping=self._stopping(),
                attached=len(sessions),
                opened=len(opened) == len(sessions),
                restoring=any(self._restores_now(s) for s in opened),
                saving=bool(self._in_flight_saves.in_flight()),
                closed=activity.closed_in_order,
            ),
            ranks=[
                fleet.Rank(
                    rank=who.rank, world_size=who.world_size, step=self._keeper.step_of(who.local_rank)
                )
                for who in (s.who for s in sessions)
            ],
            attempt=attempt,
            openings=openings(state, attempt),
            samples=self._samples.message(),
            policy=self._decider.over(in_force.policy),
            saves_failed=activity.saves_failed,
            saves_failed_in_a_row=activity.failed_in_a_row,
            restores=activity.restores,
            store_ok=run.health.store_ok,
            store_proven=proven(run.store),
            credentials_ok=run.health.credentials_ok,
            directive=in_force.generation,
            incidents=activity.incidents.kept(),
            measured=self._decider.measured(),
            save_blocked=self._keeper.blocked(self._sessions.ranks())[1],
            decisions=self._decisions(),
        )
        beat.stored_bytes, beat.checkpoints = self._held(state)
        newest = state.newest()
        if newest is not None:
            commits = (s.attempt.last_commit for s in opened)
            mine = next((commit for commit in commits if commit is not None), None)
            # Our own says how long the commit took, the log does not.
            own = mine is not None and mine.seq == newest.seq
            beat.last_commit.CopyFrom(mine if own and mine is not None else commit_message(newest))
            beat.last_commit_at_s = newest.at_s
            beat.stall_s = newest.stall_s
            beat.lost_share = _number(state.said(PLS_KEY, newest))
            beat.partial_recoveries = int(_number(state.said(RECOVERIES_KEY, newest)))
        return beat

    def look(self, now_s: float) -> None:
        """Look at the steps of several ranks, if a moment has come at which all pods do."""
        if not self._samples.due(now_s):
            return
        group = [s.who for s in self._sessions.all() if s.who.world_size > 1 and s.attempt.number is not None]
        self._samples.take(now_s, [(who.rank, self._keeper.step_of(who.local_rank)) for who in group])

    def _decisions(self) -> list[fleet.Decision]:
        bits = self._run.bits.decision
        return [*self._decider.decisions(), *([] if bits is None else [bits])]

    def _restores_now(self, session: Session) -> bool:
        """Until every row is there; a trainer that steps has what it wanted."""
        attempt = session.attempt
        if attempt.restored or not attempt.resumed:
            return False
        return self._keeper.step_time_s(session.who.local_rank) < attempt.asked_at_s

    def _held(self, state: RunState) -> tuple[int, int]:
        """(bytes, checkpoints) live in the store, counted anew only when the log went on."""
        if self._sizes[0] != state.tip:
            held = sum(held_bytes(state, seq) for seq in state.checkpoints)
            self._sizes = state.tip, held, len(state.checkpoints)
        return self._sizes[1:]


def openings(state: RunState, attempt: int) -> int:
    """How often the workload of this attempt has opened the run, up to it; 0 while the log is not known that far. Pure.

    A restore that falls back past a checkpoint that is not whole opens another attempt, which is the same opening:
    right behind the one before, which has committed nothing, and from an older checkpoint. A person's rewind (an
    attempt of no ranks) opens nothing.
    """
    if attempt not in state.attempts:
        return 0
    workload = state.attempts[attempt].workload
    known = [each for n, each in sorted(state.attempts.items()) if n <= attempt]
    mine = sum(each.workload == workload and each.world_size > 0 for each in known)
    fell_back = sum(
        before.workload == after.workload == workload
        and before.world_size > 0 < after.world_size
        and before.last_seq is None
        and before.resumes_from is not None
        and (after.resumes_from is None or after.resumes_from < before.resumes_from)
        for before, after in itertools.pairwise(known)
    )
    return mine - fell_back


def _number(said: str | None) -> float:
    """A number out of a commit's metadata, which is the trainer's word; 0 for what is none."""
    try:
        value = float(said or 0)
    except ValueError:
        return 0.0
    return value if 0 <= value < 2**53 else 0.0
