from deltashard_proto.v1 import trainer_pb2 as _trainer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_WAITING: _ClassVar[Phase]
    PHASE_RESTORING: _ClassVar[Phase]
    PHASE_TRAINING: _ClassVar[Phase]
    PHASE_CLOSED: _ClassVar[Phase]
    PHASE_STOPPING: _ClassVar[Phase]

class IncidentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INCIDENT_KIND_UNSPECIFIED: _ClassVar[IncidentKind]
    INCIDENT_KIND_RESTORED: _ClassVar[IncidentKind]
    INCIDENT_KIND_SAVE_FAILED: _ClassVar[IncidentKind]
    INCIDENT_KIND_FENCED: _ClassVar[IncidentKind]
    INCIDENT_KIND_TRACKING_FAULT: _ClassVar[IncidentKind]
    INCIDENT_KIND_FELL_BACK: _ClassVar[IncidentKind]
    INCIDENT_KIND_CREDENTIALS_MISSING: _ClassVar[IncidentKind]
    INCIDENT_KIND_STORE_UNAVAILABLE: _ClassVar[IncidentKind]
    INCIDENT_KIND_TRAINER_LOST: _ClassVar[IncidentKind]
PHASE_UNSPECIFIED: Phase
PHASE_WAITING: Phase
PHASE_RESTORING: Phase
PHASE_TRAINING: Phase
PHASE_CLOSED: Phase
PHASE_STOPPING: Phase
INCIDENT_KIND_UNSPECIFIED: IncidentKind
INCIDENT_KIND_RESTORED: IncidentKind
INCIDENT_KIND_SAVE_FAILED: IncidentKind
INCIDENT_KIND_FENCED: IncidentKind
INCIDENT_KIND_TRACKING_FAULT: IncidentKind
INCIDENT_KIND_FELL_BACK: IncidentKind
INCIDENT_KIND_CREDENTIALS_MISSING: IncidentKind
INCIDENT_KIND_STORE_UNAVAILABLE: IncidentKind
INCIDENT_KIND_TRAINER_LOST: IncidentKind

class SidecarIdentity(_message.Message):
    __slots__ = ("version", "namespace", "pod", "pod_uid", "node", "workload_kind", "workload_name", "workload_uid", "run", "index", "replica", "policy", "url", "started_at_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_KIND_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_NAME_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_UID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_S_FIELD_NUMBER: _ClassVar[int]
    version: str
    namespace: str
    pod: str
    pod_uid: str
    node: str
    workload_kind: str
    workload_name: str
    workload_uid: str
    run: str
    index: str
    replica: str
    policy: str
    url: str
    started_at_s: float
    def __init__(self, version: _Optional[str] = ..., namespace: _Optional[str] = ..., pod: _Optional[str] = ..., pod_uid: _Optional[str] = ..., node: _Optional[str] = ..., workload_kind: _Optional[str] = ..., workload_name: _Optional[str] = ..., workload_uid: _Optional[str] = ..., run: _Optional[str] = ..., index: _Optional[str] = ..., replica: _Optional[str] = ..., policy: _Optional[str] = ..., url: _Optional[str] = ..., started_at_s: _Optional[float] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("rank", "world_size", "step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    step: int
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Incident(_message.Message):
    __slots__ = ("id", "kind", "at_s", "cause", "message", "step", "lost_steps", "seconds", "attempt", "count")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOST_STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: IncidentKind
    at_s: float
    cause: str
    message: str
    step: int
    lost_steps: int
    seconds: float
    attempt: int
    count: int
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[_Union[IncidentKind, str]] = ..., at_s: _Optional[float] = ..., cause: _Optional[str] = ..., message: _Optional[str] = ..., step: _Optional[int] = ..., lost_steps: _Optional[int] = ..., seconds: _Optional[float] = ..., attempt: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("step_s", "stall_s", "slowdown_s", "cost_s", "durable_s", "restore_s", "reschedule_s", "saves", "mtbf_s", "trained_s")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_S_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    DURABLE_S_FIELD_NUMBER: _ClassVar[int]
    RESTORE_S_FIELD_NUMBER: _ClassVar[int]
    RESCHEDULE_S_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    MTBF_S_FIELD_NUMBER: _ClassVar[int]
    TRAINED_S_FIELD_NUMBER: _ClassVar[int]
    step_s: float
    stall_s: float
    slowdown_s: float
    cost_s: float
    durable_s: float
    restore_s: float
    reschedule_s: float
    saves: int
    mtbf_s: float
    trained_s: float
    def __init__(self, step_s: _Optional[float] = ..., stall_s: _Optional[float] = ..., slowdown_s: _Optional[float] = ..., cost_s: _Optional[float] = ..., durable_s: _Optional[float] = ..., restore_s: _Optional[float] = ..., reschedule_s: _Optional[float] = ..., saves: _Optional[int] = ..., mtbf_s: _Optional[float] = ..., trained_s: _Optional[float] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("subject", "goal", "value", "proposed", "why", "bound", "evidence", "unreachable")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    subject: str
    goal: str
    value: str
    proposed: str
    why: str
    bound: str
    evidence: str
    unreachable: str
    def __init__(self, subject: _Optional[str] = ..., goal: _Optional[str] = ..., value: _Optional[str] = ..., proposed: _Optional[str] = ..., why: _Optional[str] = ..., bound: _Optional[str] = ..., evidence: _Optional[str] = ..., unreachable: _Optional[str] = ...) -> None: ...

class PodState(_message.Message):
    __slots__ = ("run", "phase", "ranks", "attempt", "consecutive_save_failures", "store_ok", "credentials_ok", "save_blocked", "directive")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONSECUTIVE_SAVE_FAILURES_FIELD_NUMBER: _ClassVar[int]
    STORE_OK_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_OK_FIELD_NUMBER: _ClassVar[int]
    SAVE_BLOCKED_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    run: str
    phase: Phase
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    attempt: int
    consecutive_save_failures: int
    store_ok: bool
    credentials_ok: bool
    save_blocked: str
    directive: int
    def __init__(self, run: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., attempt: _Optional[int] = ..., consecutive_save_failures: _Optional[int] = ..., store_ok: _Optional[bool] = ..., credentials_ok: _Optional[bool] = ..., save_blocked: _Optional[str] = ..., directive: _Optional[int] = ...) -> None: ...

class KeptCheckpoint(_message.Message):
    __slots__ = ("seq", "step", "age_s", "bytes", "pins")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    step: int
    age_s: float
    bytes: int
    pins: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, seq: _Optional[int] = ..., step: _Optional[int] = ..., age_s: _Optional[float] = ..., bytes: _Optional[int] = ..., pins: _Optional[_Iterable[str]] = ...) -> None: ...

class RunState(_message.Message):
    __slots__ = ("newest", "newest_age_s", "stall_s", "checkpoints", "checkpoint_count", "stored_bytes", "attempts_opened", "lost_share", "partial_recoveries", "measured", "decisions", "policy")
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_COUNT_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_OPENED_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARE_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    newest: _trainer_pb2.Commit
    newest_age_s: float
    stall_s: float
    checkpoints: _containers.RepeatedCompositeFieldContainer[KeptCheckpoint]
    checkpoint_count: int
    stored_bytes: int
    attempts_opened: int
    lost_share: float
    partial_recoveries: int
    measured: Measured
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    policy: _trainer_pb2.Policy
    def __init__(self, newest: _Optional[_Union[_trainer_pb2.Commit, _Mapping]] = ..., newest_age_s: _Optional[float] = ..., stall_s: _Optional[float] = ..., checkpoints: _Optional[_Iterable[_Union[KeptCheckpoint, _Mapping]]] = ..., checkpoint_count: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., attempts_opened: _Optional[int] = ..., lost_share: _Optional[float] = ..., partial_recoveries: _Optional[int] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., policy: _Optional[_Union[_trainer_pb2.Policy, _Mapping]] = ...) -> None: ...

class SaveResult(_message.Message):
    __slots__ = ("id", "outcome", "step", "seq", "cause")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[SaveResult.Outcome]
        OUTCOME_COMMITTED: _ClassVar[SaveResult.Outcome]
        OUTCOME_FAILED: _ClassVar[SaveResult.Outcome]
        OUTCOME_EXPIRED: _ClassVar[SaveResult.Outcome]
    OUTCOME_UNSPECIFIED: SaveResult.Outcome
    OUTCOME_COMMITTED: SaveResult.Outcome
    OUTCOME_FAILED: SaveResult.Outcome
    OUTCOME_EXPIRED: SaveResult.Outcome
    ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    id: str
    outcome: SaveResult.Outcome
    step: int
    seq: int
    cause: str
    def __init__(self, id: _Optional[str] = ..., outcome: _Optional[_Union[SaveResult.Outcome, str]] = ..., step: _Optional[int] = ..., seq: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("protocol", "process", "sequence", "now_s", "identity", "pod", "run", "incidents", "save_results")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    SAVE_RESULTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    process: str
    sequence: int
    now_s: float
    identity: SidecarIdentity
    pod: PodState
    run: RunState
    incidents: _containers.RepeatedCompositeFieldContainer[Incident]
    save_results: _containers.RepeatedCompositeFieldContainer[SaveResult]
    def __init__(self, protocol: _Optional[int] = ..., process: _Optional[str] = ..., sequence: _Optional[int] = ..., now_s: _Optional[float] = ..., identity: _Optional[_Union[SidecarIdentity, _Mapping]] = ..., pod: _Optional[_Union[PodState, _Mapping]] = ..., run: _Optional[_Union[RunState, _Mapping]] = ..., incidents: _Optional[_Iterable[_Union[Incident, _Mapping]]] = ..., save_results: _Optional[_Iterable[_Union[SaveResult, _Mapping]]] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("id", "policy", "explicit_fields", "workload")
    ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EXPLICIT_FIELDS_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    id: int
    policy: _trainer_pb2.Policy
    explicit_fields: _containers.RepeatedScalarFieldContainer[str]
    workload: str
    def __init__(self, id: _Optional[int] = ..., policy: _Optional[_Union[_trainer_pb2.Policy, _Mapping]] = ..., explicit_fields: _Optional[_Iterable[str]] = ..., workload: _Optional[str] = ...) -> None: ...

class SaveOrder(_message.Message):
    __slots__ = ("id", "reason", "urgent", "deadline_s", "pin")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    URGENT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    id: str
    reason: str
    urgent: bool
    deadline_s: float
    pin: str
    def __init__(self, id: _Optional[str] = ..., reason: _Optional[str] = ..., urgent: _Optional[bool] = ..., deadline_s: _Optional[float] = ..., pin: _Optional[str] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("sequence", "next_s", "report_run", "directive", "saves", "acknowledged_incident")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_S_FIELD_NUMBER: _ClassVar[int]
    REPORT_RUN_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_INCIDENT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    next_s: float
    report_run: bool
    directive: Directive
    saves: _containers.RepeatedCompositeFieldContainer[SaveOrder]
    acknowledged_incident: int
    def __init__(self, sequence: _Optional[int] = ..., next_s: _Optional[float] = ..., report_run: _Optional[bool] = ..., directive: _Optional[_Union[Directive, _Mapping]] = ..., saves: _Optional[_Iterable[_Union[SaveOrder, _Mapping]]] = ..., acknowledged_incident: _Optional[int] = ...) -> None: ...
