"""Sidecar reports as plain values, and the interface to the controller that processes them.

`parse_report` converts a message field by field, with equal names, and trusts no peer: an invalid identity raises
`InvalidReport`; texts are truncated and control characters removed; numbers are finite, non-negative and fit the API's
int64 (others become 0, which means "unknown"); lists are bounded; a phase or kind of a newer sidecar is UNKNOWN. Every
result is safe to log, count and write to a status.
"""

from __future__ import annotations

import enum
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from deltashard_checkpoint.deciding.precision import MAX_TABLES
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import NO_BITS_RULE
from deltashard_proto.v1 import fleet_pb2 as wire
from deltashard_proto.v1 import trainer_pb2 as trainer_wire
from google.protobuf.message import Message

# Messages without a plain value of their own: replies, and fields that need no conversion.
Directive = wire.Directive
KeptCheckpoint = wire.KeptCheckpoint
Rank = wire.Rank
SaveOrder = wire.SaveOrder
Reply = wire.ReportReply
RunKey = tuple[str, str]
"""(namespace, workload UID) of the pods that train together. A directive applies to one run key."""

MAX_INT64 = (1 << 63) - 1  # integers of the Kubernetes API are signed
MAX_NAME = 253
MAX_TEXT = 1024
LIMITS = (
    dict.fromkeys(("value", "proposed", "why", "bound", "evidence", "unreachable"), 512)
    | dict.fromkeys(("encoding", "differential"), 32)
    | {"goal": 64, "pins": MAX_NAME, "tables": MAX_TABLES}
)
"""Maximum characters of a text field if the CheckpointRun schema has another limit than `MAX_TEXT`."""
MAX_RANKS = 256  # ranks attached to a sidecar; a node has far fewer accelerators
MAX_INCIDENTS = 64  # incidents in a report; the sidecar keeps as many
MAX_CHECKPOINTS = 10
MAX_PINS = 4
MAX_ORDERS = 8
SUBJECTS = ("interval", "bits")

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?\Z")
_UID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._:]*\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class InvalidReport(UserError):
    """A message violates the contract and cannot be interpreted."""


class UnknownPod(UserError):
    """The pod is unknown, possibly not known yet; the sidecar may retry."""


class ReportRefused(UserError):
    """The pod must not report; retries are pointless."""


class SidecarPhase(enum.StrEnum):
    """Phase of a sidecar."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    RESTORING = "restoring"
    TRAINING = "training"
    CLOSED = "closed"
    STOPPING = "stopping"


class IncidentKind(enum.StrEnum):
    """Kind of an incident to report to users."""

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
    """Result of an ordered save."""

    UNKNOWN = "unknown"
    COMMITTED = "committed"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarIdentity:
    """Identity of the reporting sidecar, constant for its process. Other fields of the message are ignored."""

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
class Incident:
    """Incident to report to users. Ids ascend within a process of the sidecar."""

    id: int
    kind: IncidentKind
    at_s: float = 0.0
    cause: str = ""
    message: str = ""
    lost_steps: int = 0
    attempt: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """State of one pod."""

    run: str = ""
    """{namespace}/{run id} of this pod; empty: not known yet."""
    phase: SidecarPhase = SidecarPhase.UNKNOWN
    ranks: tuple[Rank, ...] = ()
    attempt: int = 0
    consecutive_save_failures: int = 0
    store_ok: bool = True
    credentials_ok: bool = True
    save_blocked: str = ""
    """Why a due save does not happen; empty: not blocked."""
    directive: int = 0
    """Id of the directive in force; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """State of the run by its log, from the run's reporter."""

    newest: trainer_wire.Commit | None = None
    newest_age_s: float = 0.0
    stall_s: float = 0.0
    checkpoints: tuple[KeptCheckpoint, ...] = ()
    checkpoint_count: int = 0
    stored_bytes: int = 0
    attempts_opened: int = 0
    lost_share: float = 0.0
    partial_recoveries: int = 0
    measured: wire.Measured | None = None
    decisions: tuple[wire.Decision, ...] = ()
    """At most one per subject."""
    policy: trainer_wire.Policy = field(default_factory=trainer_wire.Policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Result of an ordered save."""

    id: str
    outcome: Outcome
    step: int = 0
    seq: int = 0
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report of a sidecar."""

    identity: SidecarIdentity
    process: str
    """Id of the sidecar's process, which changes with a restart of the container."""
    sequence: int
    pod: PodState = PodState()
    run: RunReport | None = None
    incidents: tuple[Incident, ...] = ()
    save_results: tuple[SaveResult, ...] = ()


ReportHandler = Callable[[Report], Reply]
"""Processes a report and returns the reply. The report's pod is authenticated by its token, its workload is not.

Called on the asyncio loop; must not block. Raises `UnknownPod` if the pod is unknown, possibly not known yet, and
`ReportRefused` if the pod belongs to another workload, or its run id is held by another one.
"""


def parse_report(message: wire.ReportRequest) -> Report:
    """Convert a received report. Raises `InvalidReport` if a name or UID is invalid, or a part is missing."""
    if not message.HasField("identity") or not message.HasField("pod") or not message.sequence:
        raise InvalidReport("who, pod or sequence is missing", where="report")
    identity = message.identity
    for name, value in (("namespace", identity.namespace), ("pod", identity.pod)):
        _check(name, value, _NAME)
    for name, value in (
        ("pod_uid", identity.pod_uid),
        ("workload_uid", identity.workload_uid),
        ("process", message.process),
    ):
        _check(name, value, _UID)
    found: Report = _value("report", message)
    return found


def _check(name: str, value: str, pattern: re.Pattern[str]) -> None:
    if len(value) > MAX_NAME or not pattern.match(value):
        raise InvalidReport(f"{name} is not a valid name: {_text(value, MAX_NAME)!r}", where="report")


def _value(name: str, value: Any) -> Any:
    """Return a field's value within its bounds; for a message with a class in this module, an instance of it."""
    if isinstance(value, str):
        return _text(value, LIMITS.get(name, MAX_TEXT))
    if isinstance(value, float):
        return value if math.isfinite(value) and value >= 0 else 0.0
    if name in _ENUMS:
        return _ENUMS[name].get(value) or _ENUMS[name][0]
    if isinstance(value, bool | int):
        return value if value <= MAX_INT64 or name == "directive" else 0
    if name in _LISTS:
        return _LISTS[name](value)
    kind = _KINDS.get(type(value))
    if kind is None:
        found = {each.name: _value(each.name, item) for each, item in value.ListFields()}
        if isinstance(value, trainer_wire.Policy):  # alternative spelling of no goal
            found = {field: text for field, text in found.items() if text != NO_BITS_RULE}
        return type(value)(**found)
    fields_of = value.DESCRIPTOR.fields_by_name
    return kind(
        **{
            each.name: _value(each.name, getattr(value, each.name))
            for each in fields(kind)
            if not fields_of[each.name].has_presence or value.HasField(each.name)
        }
    )


def _list(name: str, max_items: int) -> Callable[[Any], tuple[Any, ...]]:
    return lambda values: tuple(_value(name, each) for each in values[:max_items])


def _incidents(messages: Sequence[wire.Incident]) -> tuple[Incident, ...]:
    # Keep the lowest ids: acknowledged incidents must have been processed, and the others are repeated.
    by_id: dict[int, Incident] = {each.id: each for each in map(partial(_value, ""), messages)}
    return tuple(
        replace(by_id[number], count=max(by_id[number].count, 1)) for number in sorted(by_id)[:MAX_INCIDENTS]
    )


def _decisions(messages: Sequence[wire.Decision]) -> tuple[wire.Decision, ...]:
    found = {each.subject: _value("", each) for each in reversed(messages[:MAX_INCIDENTS])}
    return tuple(found[subject] for subject in SUBJECTS if subject in found)


def _enum_values(kind: type[enum.StrEnum], words: Any, prefix: str) -> dict[int, enum.StrEnum]:
    """Return enum values by number; 0 is unset, or a value of a newer sidecar."""
    return {number: kind(name.removeprefix(prefix).lower()) for name, number in words.items() if number} | {
        0: kind("unknown")
    }


_ENUMS = {
    "phase": _enum_values(SidecarPhase, wire.Phase, "PHASE_"),
    "kind": _enum_values(IncidentKind, wire.IncidentKind, "INCIDENT_KIND_"),
    "outcome": _enum_values(Outcome, wire.SaveResult.Outcome, "OUTCOME_"),
}
_KINDS: Mapping[type[Message], type[Any]] = {
    wire.ReportRequest: Report,
    wire.SidecarIdentity: SidecarIdentity,
    wire.PodState: PodState,
    wire.RunState: RunReport,
    wire.Incident: Incident,
    wire.SaveResult: SaveResult,
}
_LISTS: Mapping[str, Callable[[Any], tuple[Any, ...]]] = {
    "ranks": _list("", MAX_RANKS),
    "checkpoints": _list("", MAX_CHECKPOINTS),
    "pins": _list("pins", MAX_PINS),
    "save_results": _list("", MAX_ORDERS),
    "incidents": _incidents,
    "decisions": _decisions,
}


def _text(value: str, limit: int) -> str:
    clean = _CONTROL.sub(" ", value[: limit + 1])
    return sys.intern(clean if len(clean) <= limit else clean[: limit - 1] + "…")
