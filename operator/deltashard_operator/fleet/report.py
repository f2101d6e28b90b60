"""What sidecars report, as plain values, and the seam to the controller that keeps them and answers.

`report_of` makes a value of a message, field by field of the same names. It trusts no peer: an identity that cannot be
one is a `BadReport`; texts are clipped and hold no control characters; numbers are finite, not negative and fit the
API's int64 (what does not becomes 0, "not known" all over the contract); lists are bounded; a phase or kind of a newer
sidecar is UNKNOWN. So whatever arrives can be logged, counted and written to a status.

The server (`service`) calls a `Ledger`, which the controller is, on the asyncio loop: it must not block. The server has
proven namespace, pod and pod UID by the pod's token; that the pod is of the workload that the report names is for the
ledger to check against the API's pods.
"""

from __future__ import annotations

import enum
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from deltashard_checkpoint.deciding.precision import MAX_TABLES
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import NO_BITS_RULE
from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import trainer_pb2 as trainer_wire
from google.protobuf.message import Message

# What is answered goes out as it is.
Directive = wire.Directive
SaveOrder = wire.SaveOrder
Reply = wire.ReportReply
T = TypeVar("T")
M = TypeVar("M", bound=Message)
W = TypeVar("W", bound=enum.StrEnum)
RunKey = tuple[str, str]
"""(namespace, workload UID): the pods that train together, and what one directive is for."""

MAX_COUNT = (1 << 63) - 1
"""Integers of the Kubernetes API are signed."""
MAX_NAME = 253
MAX_WORD = 64
MAX_TEXT = 1024
MAX_RANKS = 256
"""Ranks attached to a sidecar; a node has far fewer accelerators."""
MAX_INCIDENTS = 64
"""Incidents in a report; the sidecar keeps as many."""
MAX_CHECKPOINTS = 10
MAX_PINS = 4
MAX_ORDERS = 8
MAX_REASON = 512
"""Characters of each text of a decision."""
SUBJECTS = ("interval", "bits")
_LIMITS: Mapping[str, int] = {
    "run": 2 * MAX_NAME,
    **dict.fromkeys(("node", "save_blocked"), MAX_NAME),
    **dict.fromkeys(("url", "message"), MAX_TEXT),
    **dict.fromkeys(("value", "would", "why", "bound", "evidence", "unreachable"), MAX_REASON),
    "cause": MAX_REASON,
    "tables": MAX_TABLES,
}
"""Characters of a text, by its field; `MAX_WORD` of others."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?\Z")
_UID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._:]*\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class BadReport(UserError):
    """A message breaks the contract in a way that leaves it no meaning."""


class Unknown(UserError):
    """This pod is not known, perhaps not yet: it may come again."""


class Refused(UserError):
    """This pod may not report; coming again changes nothing."""


class Phase(enum.StrEnum):
    """Phase of a sidecar."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    RESTORING = "restoring"
    TRAINING = "training"
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


class Outcome(enum.StrEnum):
    """How an ordered save ended."""

    UNKNOWN = "unknown"
    COMMITTED = "committed"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """Which sidecar reports; fixed while its process runs. What else it says of itself is not asked for here."""

    namespace: str
    pod: str
    pod_uid: str
    workload_uid: str
    url: str = ""
    node: str = ""
    started_at_s: float = 0.0

    @property
    def run_key(self) -> RunKey:
        return self.namespace, self.workload_uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Trainer process."""

    rank: int
    world_size: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something people should hear of; ids rise within a process of the sidecar."""

    id: int
    kind: IncidentKind
    at_s: float = 0.0
    cause: str = ""
    message: str = ""
    step: int = 0
    lost_steps: int = 0
    seconds: float = 0.0
    attempt: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """State of one pod."""

    run: str = ""
    """{namespace}/{run id} of this pod; empty: not known yet."""
    phase: Phase = Phase.UNKNOWN
    ranks: tuple[Rank, ...] = ()
    attempt: int = 0
    saves_failed_in_a_row: int = 0
    store_ok: bool = True
    store_proven: bool = False
    credentials_ok: bool = True
    save_blocked: str = ""
    """Why a save that is due does not happen; empty: none is blocked."""
    directive: int = 0
    """Id of the directive in force; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint that can be restored."""

    seq: int
    step: int
    age_s: float = 0.0
    bytes: int = 0
    pins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """State of the run by its log, from the sidecar that speaks for it."""

    newest: trainer_wire.Commit | None = None
    newest_age_s: float = 0.0
    stall_s: float = 0.0
    checkpoints: tuple[KeptCheckpoint, ...] = ()
    checkpoint_count: int = 0
    stored_bytes: int = 0
    openings: int = 0
    lost_share: float = 0.0
    partial_recoveries: int = 0
    measured: wire.Measured | None = None
    decisions: tuple[wire.Decision, ...] = ()
    """One of a subject at most."""
    policy: trainer_wire.Policy = field(default_factory=trainer_wire.Policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOver:
    """How an ordered save ended."""

    id: str
    outcome: Outcome
    step: int = 0
    seq: int = 0
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report."""

    who: Who
    process: str
    """Names the process of the sidecar: changes when the container restarts."""
    sequence: int
    now_s: float = 0.0
    """The pod's clock."""
    pod: PodState = PodState()
    run: RunReport | None = None
    incidents: tuple[Incident, ...] = ()
    """Ids rising."""
    saves_over: tuple[SaveOver, ...] = ()


class Ledger(Protocol):
    """Who keeps what sidecars report."""

    def report(self, report: Report) -> Reply:
        """Take a report of a pod that is proven; its workload is not.

        Raises:
            Unknown: the pod is not known, perhaps not yet.
            Refused: it may not report: the pod is of another workload, or its run id is held by another one.
        """


def report_of(message: wire.ReportRequest) -> Report:
    """Value of a report that came; raises `BadReport`: a name or UID cannot be one, or a part is missing."""
    if not message.HasField("who") or not message.HasField("pod") or not message.sequence:
        raise BadReport("who, pod or sequence is missing", where="report")
    return Report(
        who=_value(
            Who,
            message.who,
            namespace=_identity(message.who.namespace, _NAME, "namespace"),
            pod=_identity(message.who.pod, _NAME, "pod"),
            pod_uid=_identity(message.who.pod_uid, _UID, "pod_uid"),
            workload_uid=_identity(message.who.workload_uid, _UID, "workload_uid"),
        ),
        process=_identity(message.process, _UID, "process"),
        sequence=_count(message.sequence),
        now_s=_number(message.now_s),
        pod=_value(
            PodState,
            message.pod,
            phase=_word(Phase, wire.Phase, "PHASE_", message.pod.phase),
            ranks=tuple(_value(Rank, each) for each in message.pod.ranks[:MAX_RANKS]),
            directive=message.pod.directive,
        ),
        run=_run(message.run) if message.HasField("run") else None,
        incidents=_incidents(message.incidents),
        saves_over=tuple(
            _value(
                SaveOver,
                each,
                outcome=_word(Outcome, wire.SaveOver.Outcome, "OUTCOME_", each.outcome),
                id=_text(each.id, 2 * MAX_NAME),
            )
            for each in message.saves_over[:MAX_ORDERS]
        ),
    )


def _run(message: wire.RunState) -> RunReport:
    return _value(
        RunReport,
        message,
        newest=_clean(message.newest) if message.HasField("newest") else None,
        checkpoints=tuple(
            _value(KeptCheckpoint, each, pins=tuple(_text(pin, MAX_NAME) for pin in each.pins[:MAX_PINS]))
            for each in message.checkpoints[:MAX_CHECKPOINTS]
        ),
        measured=_clean(message.measured) if message.HasField("measured") else None,
        decisions=_decisions(message.decisions),
        policy=_policy(message.policy),
    )


def _value(kind: type[T], message: Any, /, **found: Any) -> T:
    """A dataclass of a message whose fields have the same names, but for those that were `found`."""
    plain = {
        each.name: _plain(each.name, getattr(message, each.name))
        for each in fields(kind)  # type: ignore[arg-type]
        if each.name not in found
    }
    return kind(**plain, **found)


def _clean(message: M) -> M:
    """The message with each of its plain fields within bounds."""
    return type(message)(**{each.name: _plain(each.name, value) for each, value in message.ListFields()})


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
            found[each.subject] = _clean(each)
    return tuple(found.values())


def _incidents(messages: Sequence[wire.Incident]) -> tuple[Incident, ...]:
    # The lowest ids of too many: what is told must have been seen, and the others come again.
    by_id = {_count(each.id): each for each in messages}
    return tuple(
        _value(
            Incident,
            by_id[number],
            id=number,
            kind=_word(IncidentKind, wire.IncidentKind, "INCIDENT_KIND_", by_id[number].kind),
            count=max(_count(by_id[number].count), 1),
        )
        for number in sorted(by_id)[:MAX_INCIDENTS]
    )


def _policy(message: trainer_wire.Policy) -> trainer_wire.Policy:
    found = {each.name: _plain(each.name, value) for each, value in message.ListFields()}
    # The other word for no goal.
    return trainer_wire.Policy(**{name: value for name, value in found.items() if value != NO_BITS_RULE})


def _word(kind: type[W], words: Any, prefix: str, number: int) -> W:
    """The word for an enum's number; UNKNOWN for one of a newer sidecar, and where nothing was said."""
    try:
        return kind[words.Name(number).removeprefix(prefix)]
    except (ValueError, KeyError):
        return kind("unknown")


def _identity(value: str, pattern: re.Pattern[str], name: str) -> str:
    if len(value) > MAX_NAME or not pattern.match(value):
        raise BadReport(f"{name} is no name: {_text(value, MAX_WORD)!r}", where="report")
    return value


def _text(value: str, limit: int) -> str:
    clean = _CONTROL.sub(" ", value[: limit + 1])
    return sys.intern(clean if len(clean) <= limit else clean[: limit - 1] + "…")


def _number(value: float) -> float:
    return value if math.isfinite(value) and value >= 0 else 0.0


def _count(value: int) -> int:
    return value if value <= MAX_COUNT else 0
