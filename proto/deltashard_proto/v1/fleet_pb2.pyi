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
    PHASE_SAVING: _ClassVar[Phase]
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
PHASE_SAVING: Phase
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

class Hello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "version", "namespace", "pod", "pod_uid", "node", "workload_kind", "workload_name", "workload_uid", "run", "index", "replica", "policy", "url", "process", "started_at_s")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
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
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_S_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
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
    process: str
    started_at_s: float
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., version: _Optional[str] = ..., namespace: _Optional[str] = ..., pod: _Optional[str] = ..., pod_uid: _Optional[str] = ..., node: _Optional[str] = ..., workload_kind: _Optional[str] = ..., workload_name: _Optional[str] = ..., workload_uid: _Optional[str] = ..., run: _Optional[str] = ..., index: _Optional[str] = ..., replica: _Optional[str] = ..., policy: _Optional[str] = ..., url: _Optional[str] = ..., process: _Optional[str] = ..., started_at_s: _Optional[float] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("rank", "world_size", "step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    step: int
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class StepSample(_message.Message):
    __slots__ = ("at_s", "ranks", "steps")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    at_s: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, at_s: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ...) -> None: ...

class Incident(_message.Message):
    __slots__ = ("id", "kind", "at_s", "cause", "message", "step", "lost_steps", "seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOST_STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: IncidentKind
    at_s: float
    cause: str
    message: str
    step: int
    lost_steps: int
    seconds: float
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[_Union[IncidentKind, str]] = ..., at_s: _Optional[float] = ..., cause: _Optional[str] = ..., message: _Optional[str] = ..., step: _Optional[int] = ..., lost_steps: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

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
    __slots__ = ("subject", "goal", "value", "would", "why", "bound", "evidence", "unreachable")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WOULD_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    subject: str
    goal: str
    value: str
    would: str
    why: str
    bound: str
    evidence: str
    unreachable: str
    def __init__(self, subject: _Optional[str] = ..., goal: _Optional[str] = ..., value: _Optional[str] = ..., would: _Optional[str] = ..., why: _Optional[str] = ..., bound: _Optional[str] = ..., evidence: _Optional[str] = ..., unreachable: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("run", "phase", "ranks", "attempt", "last_commit", "last_commit_at_s", "policy", "stored_bytes", "checkpoints", "restores", "saves_failed", "saves_failed_in_a_row", "store_ok", "credentials_ok", "directive", "incidents", "measured", "decisions", "openings", "stall_s", "lost_share", "partial_recoveries", "samples", "store_proven", "save_blocked")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMIT_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMIT_AT_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    SAVES_FAILED_FIELD_NUMBER: _ClassVar[int]
    SAVES_FAILED_IN_A_ROW_FIELD_NUMBER: _ClassVar[int]
    STORE_OK_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_OK_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARE_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STORE_PROVEN_FIELD_NUMBER: _ClassVar[int]
    SAVE_BLOCKED_FIELD_NUMBER: _ClassVar[int]
    run: str
    phase: Phase
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    attempt: int
    last_commit: _trainer_pb2.Commit
    last_commit_at_s: float
    policy: _trainer_pb2.Policy
    stored_bytes: int
    checkpoints: int
    restores: int
    saves_failed: int
    saves_failed_in_a_row: int
    store_ok: bool
    credentials_ok: bool
    directive: int
    incidents: _containers.RepeatedCompositeFieldContainer[Incident]
    measured: Measured
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    openings: int
    stall_s: float
    lost_share: float
    partial_recoveries: int
    samples: _containers.RepeatedCompositeFieldContainer[StepSample]
    store_proven: bool
    save_blocked: str
    def __init__(self, run: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., attempt: _Optional[int] = ..., last_commit: _Optional[_Union[_trainer_pb2.Commit, _Mapping]] = ..., last_commit_at_s: _Optional[float] = ..., policy: _Optional[_Union[_trainer_pb2.Policy, _Mapping]] = ..., stored_bytes: _Optional[int] = ..., checkpoints: _Optional[int] = ..., restores: _Optional[int] = ..., saves_failed: _Optional[int] = ..., saves_failed_in_a_row: _Optional[int] = ..., store_ok: _Optional[bool] = ..., credentials_ok: _Optional[bool] = ..., directive: _Optional[int] = ..., incidents: _Optional[_Iterable[_Union[Incident, _Mapping]]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., openings: _Optional[int] = ..., stall_s: _Optional[float] = ..., lost_share: _Optional[float] = ..., partial_recoveries: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[StepSample, _Mapping]]] = ..., store_proven: _Optional[bool] = ..., save_blocked: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("hello", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "heartbeat_s", "reauthenticate_s")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    REAUTHENTICATE_S_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    heartbeat_s: float
    reauthenticate_s: float
    def __init__(self, protocol: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., reauthenticate_s: _Optional[float] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("generation", "policy", "whole", "workload")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    generation: int
    policy: _trainer_pb2.Policy
    whole: _containers.RepeatedScalarFieldContainer[str]
    workload: str
    def __init__(self, generation: _Optional[int] = ..., policy: _Optional[_Union[_trainer_pb2.Policy, _Mapping]] = ..., whole: _Optional[_Iterable[str]] = ..., workload: _Optional[str] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("welcome", "ack", "directive", "save_now")
    class Ack(_message.Message):
        __slots__ = ("incident",)
        INCIDENT_FIELD_NUMBER: _ClassVar[int]
        incident: int
        def __init__(self, incident: _Optional[int] = ...) -> None: ...
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    SAVE_NOW_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    ack: ReportReply.Ack
    directive: Directive
    save_now: SaveRequested
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ack: _Optional[_Union[ReportReply.Ack, _Mapping]] = ..., directive: _Optional[_Union[Directive, _Mapping]] = ..., save_now: _Optional[_Union[SaveRequested, _Mapping]] = ...) -> None: ...

class SaveRequested(_message.Message):
    __slots__ = ("reason", "urgent", "deadline_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    URGENT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    urgent: bool
    deadline_s: float
    def __init__(self, reason: _Optional[str] = ..., urgent: _Optional[bool] = ..., deadline_s: _Optional[float] = ...) -> None: ...
