"""What sidecars report and what is answered, as plain values, and the seam to who keeps them.

A message from the wire becomes a value by `hello_of` and `heartbeat_of`, field by field of the same names. They trust
no peer: identities that cannot be are a `BadReport`; texts are clipped and hold no control characters, numbers are
finite, not negative and fit the API's int64 (what is not becomes 0, which means "not known" all over the contract);
lists are bounded; a phase or kind that a newer sidecar made up is UNKNOWN. So whatever arrives can be logged, counted
and written to a status.

`Fleet` (see `service`) calls a `Ledger`, which the controller is, on the asyncio loop: its methods must not block. What
Fleet proves is namespace, pod and pod UID, by the pod's token; that this pod is of the workload that Hello names is
for the ledger to check against what the API says of the pod.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from deltashard_checkpoint.deciding.precision import MAX_TABLES
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import FLEET_PROTOCOL, NO_BITS_RULE
from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import trainer_pb2 as trainer_wire

from deltashard_operator.api.workload_policy import OFFERED

T = TypeVar("T")
RunKey = tuple[str, str]
"""(namespace, workload UID): the pods that train together, and what one directive is for."""

MAX_COUNT = (1 << 63) - 1
"""Integers of the Kubernetes API are signed."""
MAX_NAME = 253
MAX_WORD = 64
MAX_TEXT = 1024
MAX_RANKS = 256
"""Ranks attached to a sidecar; a node has far fewer accelerators."""
MAX_SAMPLES = 4
MAX_INCIDENTS = 64
"""Incidents in a heartbeat; the sidecar keeps as many."""
MAX_REASON = 512
"""Characters of each text of a decision."""
TIMERS = ("every_s", "every_steps")
KEPT = ("encoding", "differential")
"""Fields of a policy that a directive leaves as the pod was started with, where they are empty."""
SUBJECTS = ("interval", "bits")
_LIMITS: Mapping[str, int] = {
    "run": 2 * MAX_NAME,
    **dict.fromkeys(("workload_name", "policy", "node", "save_blocked"), MAX_NAME),
    **dict.fromkeys(("url", "message"), MAX_TEXT),
    **dict.fromkeys(("value", "would", "why", "bound", "evidence", "unreachable"), MAX_REASON),
    "tables": MAX_TABLES,
}
"""Characters of a text, by its field; `MAX_WORD` of others."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?\Z")
_UID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._:]*\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class BadReport(UserError):
    """A message breaks the contract in a way that leaves it no meaning."""


class Unknown(UserError):
    """Nobody knows this pod, perhaps not yet: it may come again."""


class Refused(UserError):
    """This pod may not report; coming again changes nothing."""


class Phase(enum.StrEnum):
    """Phase of a sidecar."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    RESTORING = "restoring"
    TRAINING = "training"
    SAVING = "saving"
    CLOSED = "closed"
    STOPPING = "stopping"


class IncidentKind(enum.StrEnum):
    """Kind of an incident that people should hear of."""

    UNKNOWN = "unknown"
    RESTORED = "restored"
    SAVE_FAILED = "save_failed"
    FENCED = "fenced"
    TRACKING_FAULT = "tracking_fault"
    FELL_BACK = "fell_back"
    CREDENTIALS_MISSING = "credentials_missing"
    STORE_UNAVAILABLE = "store_unavailable"
    TRAINER_LOST = "trainer_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a sidecar's process: who it is."""

    namespace: str
    pod: str
    pod_uid: str
    process: str
    """Names this process of the sidecar: changes when the container restarts."""
    workload_uid: str
    workload_kind: str = ""
    workload_name: str = ""
    run: str = ""
    """{namespace}/{run id} of the workload; `Heartbeat.run` is the one of the pod."""
    index: str = ""
    replica: str = ""
    policy: str = ""
    url: str = ""
    node: str = ""
    version: str = ""
    protocol_min: int = FLEET_PROTOCOL.least
    protocol_max: int = FLEET_PROTOCOL.most
    started_at_s: float = 0.0

    @property
    def run_key(self) -> RunKey:
        return self.namespace, self.workload_uid

    @property
    def stream_key(self) -> tuple[str, str]:
        """Key of its stream: (pod UID, process)."""
        return self.pod_uid, self.process


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Trainer process."""

    rank: int
    world_size: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Steps of a pod's ranks at a moment that all pods share."""

    at_s: int
    steps: Mapping[int, int]
    """By rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Entry of the commit log."""

    seq: int
    attempt: int
    step: int
    cut: int = 0
    baseline: bool = False
    durable_s: float = 0.0
    """Seconds from the save's begin to its log entry."""
    stored_bytes: int = 0
    raw_bytes: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something people should hear of; ids rise by one within a process of the sidecar."""

    id: int
    kind: IncidentKind
    at_s: float = 0.0
    cause: str = ""
    message: str = ""
    step: int = 0
    lost_steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What saves and restores cost a run, as its decider measures it. Seconds; 0: not measured."""

    step_s: float = 0.0
    stall_s: float = 0.0
    slowdown_s: float = 0.0
    cost_s: float = 0.0
    durable_s: float = 0.0
    restore_s: float = 0.0
    reschedule_s: float = 0.0
    saves: int = 0
    mtbf_s: float = 0.0
    trained_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """State of a sidecar now."""

    run: str = ""
    """{namespace}/{run id} of this pod; empty: not known yet."""
    phase: Phase = Phase.UNKNOWN
    ranks: tuple[Rank, ...] = ()
    attempt: int = 0
    openings: int = 0
    """Attempts that the workload has opened, `attempt` included; 0: not known."""
    stall_s: float = 0.0
    """Of the newest commit: the longest that any rank stood still for it."""
    lost_share: float = 0.0
    """Of samples, by partial recoveries so far (PLS)."""
    partial_recoveries: int = 0
    samples: tuple[StepSample, ...] = ()
    store_proven: bool = False
    """Whether its process has tried that the store creates only what is absent."""
    last_commit: Commit | None = None
    last_commit_at_s: float = 0.0
    policy: trainer_wire.Policy = field(default_factory=trainer_wire.Policy)
    stored_bytes: int = 0
    checkpoints: int = 0
    restores: int = 0
    saves_failed: int = 0
    saves_failed_in_a_row: int = 0
    store_ok: bool = True
    credentials_ok: bool = True
    save_blocked: str = ""
    """Why a save that is due does not happen; empty: none is blocked."""
    directive: int = 0
    """Generation of the newest directive in force; 0: none."""
    incidents: tuple[Incident, ...] = ()
    """Incidents that are not acknowledged yet, ids rising."""
    measured: Measured | None = None
    decisions: tuple[wire.Decision, ...] = ()
    """Of the run, by the pod that decides; one of a subject at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What a run shall do from now on; replaces the one before. Generations start at 1 and rise."""

    generation: int
    policy: trainer_wire.Policy

    def message(self) -> wire.Directive:
        return wire.Directive(generation=self.generation, policy=self.policy, whole=whole(self.policy))


def timed(policy: trainer_wire.Policy) -> bool:
    """Whether anything but a person or the pod's end makes it save."""
    return bool(policy.every_s or policy.every_steps)


def whole(policy: trainer_wire.Policy) -> list[str]:
    """Fields that a directive with this policy states, zero and empty too: without a timer it states none of them."""
    silent = KEPT if timed(policy) else (*KEPT, *TIMERS)
    return sorted(OFFERED.difference(silent))


class Ledger(Protocol):
    """Who keeps what sidecars say. Called on the asyncio loop; must not block."""

    def connected(self, hello: Hello) -> None:
        """A sidecar came. Its pod is proven, its workload is not.

        Raises:
            Unknown: the pod is not known, perhaps not yet; it is told to come again.
            Refused: it may not report (the pod is not of that workload).
        """

    def reported(self, hello: Hello, heartbeat: Heartbeat) -> int:
        """A heartbeat of one that is connected; returns the highest incident id that is in good hands (0: none)."""

    def disconnected(self, hello: Hello) -> None:
        """It went; exactly once after each `connected` that did not raise."""


def hello_of(message: wire.Hello) -> Hello:
    """Value of a Hello that came.

    Raises:
        BadReport: a name or UID cannot be one, or the protocol's range is empty.
    """
    if not 1 <= message.protocol_min <= message.protocol_max:
        raise BadReport(
            f"protocol range {message.protocol_min}..{message.protocol_max} is empty", where="Hello"
        )
    return _value(
        Hello,
        message,
        namespace=_identity(message.namespace, _NAME, "namespace"),
        pod=_identity(message.pod, _NAME, "pod"),
        pod_uid=_identity(message.pod_uid, _UID, "pod_uid"),
        process=_identity(message.process, _UID, "process"),
        workload_uid=_identity(message.workload_uid, _UID, "workload_uid"),
    )


def heartbeat_of(message: wire.Heartbeat) -> Heartbeat:
    """Value of a heartbeat that came; there is nothing in it that could be refused."""
    return _value(
        Heartbeat,
        message,
        phase=_PHASES.get(message.phase, Phase.UNKNOWN),
        ranks=tuple(_value(Rank, each) for each in message.ranks[:MAX_RANKS]),
        samples=tuple(map(_sample, message.samples[-MAX_SAMPLES:])),
        last_commit=_value(Commit, message.last_commit) if message.HasField("last_commit") else None,
        policy=_policy(message.policy),
        incidents=_incidents(message.incidents),
        measured=_value(Measured, message.measured) if message.HasField("measured") else None,
        decisions=_decisions(message.decisions),
    )


def _value(kind: type[T], message: Any, /, **found: Any) -> T:
    """A dataclass of a message whose fields have the same names, but for those that were `found`."""
    plain = {
        each.name: _plain(each.name, getattr(message, each.name))
        for each in fields(kind)  # type: ignore[arg-type]
        if each.name not in found
    }
    return kind(**plain, **found)


def _plain(name: str, value: Any) -> Any:
    """A field's value within its bounds."""
    if isinstance(value, str):
        return _text(value, _LIMITS.get(name, MAX_WORD))
    if isinstance(value, float):
        return _number(value)
    return value if isinstance(value, bool) else _count(value)


def _decisions(messages: Sequence[wire.Decision]) -> tuple[wire.Decision, ...]:
    """The first of each subject; a subject that is not known is skipped."""
    found: dict[str, wire.Decision] = {}
    for each in messages[:MAX_INCIDENTS]:
        if each.subject in SUBJECTS and each.subject not in found:
            texts = {known.name: _plain(known.name, value) for known, value in each.ListFields()}
            found[each.subject] = wire.Decision(**texts)
    return tuple(found.values())


def _incidents(messages: Sequence[wire.Incident]) -> tuple[Incident, ...]:
    # The lowest ids of too many: what is acknowledged must have been seen, and the others come again.
    by_id = {_count(each.id): each for each in messages}
    return tuple(
        _value(Incident, by_id[number], id=number, kind=_KINDS.get(by_id[number].kind, IncidentKind.UNKNOWN))
        for number in sorted(by_id)[:MAX_INCIDENTS]
    )


def _sample(message: wire.StepSample) -> StepSample:
    told = zip(message.ranks[:MAX_RANKS], message.steps[:MAX_RANKS], strict=False)
    return StepSample(at_s=_count(message.at_s), steps={rank: _count(step) for rank, step in told})


def _policy(message: trainer_wire.Policy) -> trainer_wire.Policy:
    found = {each.name: _plain(each.name, value) for each, value in message.ListFields()}
    # The other word for no goal.
    return trainer_wire.Policy(**{name: value for name, value in found.items() if value != NO_BITS_RULE})


_PHASES = {wire.Phase.Value(f"PHASE_{each.name}"): each for each in Phase if each is not Phase.UNKNOWN}
_KINDS = {
    wire.IncidentKind.Value(f"INCIDENT_KIND_{each.name}"): each
    for each in IncidentKind
    if each is not IncidentKind.UNKNOWN
}


def _identity(value: str, pattern: re.Pattern[str], field: str) -> str:
    if len(value) > MAX_NAME or not pattern.match(value):
        raise BadReport(f"{field} is no name: {_text(value, MAX_WORD)!r}", where="Hello")
    return value


def _text(value: str, limit: int) -> str:
    clean = _CONTROL.sub(" ", value[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def _number(value: float) -> float:
    return value if math.isfinite(value) and value >= 0 else 0.0


def _count(value: int) -> int:
    return value if value <= MAX_COUNT else 0
