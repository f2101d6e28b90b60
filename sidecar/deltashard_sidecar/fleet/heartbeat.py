"""What a sidecar tells the controller, and when; and when it comes back after the stream ended. Pure.

A heartbeat is worth sending at once when anything but steps, sizes and measured numbers changed, though not more often
than once a second, and in any case every `heartbeat_s`. After a stream ended the next one begins after a random part
of a pause that doubles from failure to failure: a controller that restarts meets its sidecars spread over seconds, and
one that is away costs a connection a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltashard_checkpoint.backoff import Backoff
from deltashard_checkpoint.vocabulary import FLEET_PROTOCOL
from deltashard_proto.v1 import fleet_pb2 as fleet

from deltashard_sidecar.settings import Settings

SHORTEST_S = 1.0
"""Between two heartbeats."""
LONGEST_S = 300.0
"""Between two heartbeats, whatever the controller asks for."""
DEFAULT_S = 15.0
"""Between two heartbeats, when the controller does not say."""

BACKOFF = Backoff(first_s=4.0, longest_s=60.0, jitter=0.95)
"""Between streams."""
LASTING_FAILURES = 4
"""A stream that ended for a lasting reason counts as so many in a row, at least."""
LASTING = frozenset({"verification", "unauthenticated", "denied", "protocol", "token"})
"""Coming again soon will hardly help; someone must mend it."""


def hello(settings: Settings, *, version: str, process: str, started_at_s: float) -> fleet.Hello:
    return fleet.Hello(
        protocol_min=FLEET_PROTOCOL.least,
        protocol_max=FLEET_PROTOCOL.most,
        version=version,
        namespace=settings.pod_namespace,
        pod=settings.pod_name,
        pod_uid=settings.pod_uid,
        node=settings.node_name,
        workload_kind=settings.workload_kind,
        workload_name=settings.workload_name,
        workload_uid=settings.workload_uid,
        run=settings.run,
        index=settings.index,
        replica=settings.replica,
        policy=settings.policy,
        url=settings.url,
        process=process,
        started_at_s=started_at_s,
    )


def phase(
    *, stopping: bool, attached: int, opened: bool, restoring: bool, saving: bool, closed: bool
) -> fleet.Phase:
    """What the pod is at; `attached` trainers, `opened`: their attempts are, `closed`: the last one left in order."""
    if closed and not attached:
        return fleet.PHASE_CLOSED
    if stopping:
        return fleet.PHASE_STOPPING
    if not attached:
        return fleet.PHASE_WAITING
    if not opened or restoring:
        return fleet.PHASE_RESTORING
    return fleet.PHASE_SAVING if saving else fleet.PHASE_TRAINING


def news(beat: fleet.Heartbeat) -> bytes:
    """What of a heartbeat is worth sending at once when it differs from the last one's."""
    told = fleet.Heartbeat()
    told.CopyFrom(beat)
    for rank in told.ranks:
        rank.step = 0
    told.stored_bytes = told.checkpoints = 0
    if told.HasField("last_commit"):
        told.last_commit.durable_s = 0.0
    told.ClearField("measured")
    for decision in told.decisions:
        # Their numbers change with every save; that there is a bound, or a goal that cannot be had, is news.
        decision.why = decision.evidence = ""
        decision.bound = "bound" if decision.bound else ""
        decision.unreachable = "unreachable" if decision.unreachable else ""
    return told.SerializeToString(deterministic=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatPace:
    """When the next heartbeat goes out."""

    heartbeat_s: float = DEFAULT_S
    sent_s: float | None = None
    sent: bytes = b""

    def asked(self, heartbeat_s: float) -> HeartbeatPace:
        return replace(self, heartbeat_s=min(max(heartbeat_s or DEFAULT_S, SHORTEST_S), LONGEST_S))

    def due(self, beat: fleet.Heartbeat, now_s: float) -> bool:
        """Whether `beat` goes out now."""
        if self.sent_s is None:
            return True
        since_s = now_s - self.sent_s
        return since_s >= self.heartbeat_s or (since_s >= SHORTEST_S and news(beat) != self.sent)

    def after(self, beat: fleet.Heartbeat, now_s: float) -> HeartbeatPace:
        """`beat` went out."""
        return replace(self, sent_s=now_s, sent=news(beat))


def failures_after(failures: int, *, welcomed: bool, lasting: bool) -> int:
    """Failures in a row, for `BACKOFF`: another stream ended, which was `welcomed`, or not, for a `lasting` reason."""
    if welcomed:
        return 1
    return max(failures + 1, LASTING_FAILURES if lasting else 0)
