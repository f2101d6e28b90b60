from deltashard_proto.v1 import index_pb2 as _index_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Refusal(_message.Message):
    __slots__ = ("cause",)
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    def __init__(self, cause: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "rank", "local_rank", "world_size", "attempt", "tables", "boxes", "fingerprint", "pid", "blob_bytes", "layout")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    rank: int
    local_rank: int
    world_size: int
    attempt: int
    tables: _containers.RepeatedCompositeFieldContainer[_index_pb2.TableSchema]
    boxes: _containers.RepeatedCompositeFieldContainer[_index_pb2.Box]
    fingerprint: _containers.ScalarMap[str, str]
    pid: int
    blob_bytes: int
    layout: str
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., world_size: _Optional[int] = ..., attempt: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[_index_pb2.TableSchema, _Mapping]]] = ..., boxes: _Optional[_Iterable[_Union[_index_pb2.Box, _Mapping]]] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., pid: _Optional[int] = ..., blob_bytes: _Optional[int] = ..., layout: _Optional[str] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("protocol", "arena_path", "arena_bytes", "block_bytes", "epoch", "control_line", "session", "has_checkpoint", "last_commit", "policy", "run", "url", "participated_attempt", "grace_s")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTROL_LINE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HAS_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMIT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    PARTICIPATED_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    arena_path: str
    arena_bytes: int
    block_bytes: int
    epoch: int
    control_line: int
    session: str
    has_checkpoint: bool
    last_commit: Commit
    policy: Policy
    run: str
    url: str
    participated_attempt: int
    grace_s: float
    def __init__(self, protocol: _Optional[int] = ..., arena_path: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., epoch: _Optional[int] = ..., control_line: _Optional[int] = ..., session: _Optional[str] = ..., has_checkpoint: _Optional[bool] = ..., last_commit: _Optional[_Union[Commit, _Mapping]] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., run: _Optional[str] = ..., url: _Optional[str] = ..., participated_attempt: _Optional[int] = ..., grace_s: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("seq", "attempt", "snapshot_id", "step", "baseline", "durable_s", "stored_bytes", "raw_bytes", "rows")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_S_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    attempt: int
    snapshot_id: int
    step: int
    baseline: bool
    durable_s: float
    stored_bytes: int
    raw_bytes: int
    rows: int
    def __init__(self, seq: _Optional[int] = ..., attempt: _Optional[int] = ..., snapshot_id: _Optional[int] = ..., step: _Optional[int] = ..., baseline: _Optional[bool] = ..., durable_s: _Optional[float] = ..., stored_bytes: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("every_s", "every_steps", "encoding", "differential", "state_encoding", "goal", "min_interval_s", "max_interval_s", "bits_goal", "min_bits", "tables")
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DIFFERENTIAL_FIELD_NUMBER: _ClassVar[int]
    STATE_ENCODING_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    BITS_GOAL_FIELD_NUMBER: _ClassVar[int]
    MIN_BITS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    every_s: float
    every_steps: int
    encoding: str
    differential: str
    state_encoding: str
    goal: str
    min_interval_s: float
    max_interval_s: float
    bits_goal: str
    min_bits: int
    tables: str
    def __init__(self, every_s: _Optional[float] = ..., every_steps: _Optional[int] = ..., encoding: _Optional[str] = ..., differential: _Optional[str] = ..., state_encoding: _Optional[str] = ..., goal: _Optional[str] = ..., min_interval_s: _Optional[float] = ..., max_interval_s: _Optional[float] = ..., bits_goal: _Optional[str] = ..., min_bits: _Optional[int] = ..., tables: _Optional[str] = ...) -> None: ...

class Basis(_message.Message):
    __slots__ = ("attempt", "resume_seq", "token")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_SEQ_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    resume_seq: int
    token: str
    def __init__(self, attempt: _Optional[int] = ..., resume_seq: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("session", "which", "from_run", "exclude_seqs", "takeover", "participated_attempt", "basis", "layout")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WHICH_FIELD_NUMBER: _ClassVar[int]
    FROM_RUN_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_SEQS_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    PARTICIPATED_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    session: str
    which: str
    from_run: str
    exclude_seqs: _containers.RepeatedScalarFieldContainer[int]
    takeover: bool
    participated_attempt: int
    basis: Basis
    layout: bytes
    def __init__(self, session: _Optional[str] = ..., which: _Optional[str] = ..., from_run: _Optional[str] = ..., exclude_seqs: _Optional[_Iterable[int]] = ..., takeover: _Optional[bool] = ..., participated_attempt: _Optional[int] = ..., basis: _Optional[_Union[Basis, _Mapping]] = ..., layout: _Optional[bytes] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("attempt", "resume_seq", "step", "snapshot_id", "resume_attempt", "last_step_seen", "waited_s", "fingerprint", "tables", "fell_back", "log_damage", "layout", "previous_attempt", "metadata", "basis", "deferred_reason")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_SEEN_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    FELL_BACK_FIELD_NUMBER: _ClassVar[int]
    LOG_DAMAGE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_REASON_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    resume_seq: int
    step: int
    snapshot_id: int
    resume_attempt: int
    last_step_seen: int
    waited_s: float
    fingerprint: _containers.ScalarMap[str, str]
    tables: _containers.RepeatedCompositeFieldContainer[_index_pb2.TableSchema]
    fell_back: bool
    log_damage: str
    layout: str
    previous_attempt: int
    metadata: _containers.ScalarMap[str, str]
    basis: Basis
    deferred_reason: str
    def __init__(self, attempt: _Optional[int] = ..., resume_seq: _Optional[int] = ..., step: _Optional[int] = ..., snapshot_id: _Optional[int] = ..., resume_attempt: _Optional[int] = ..., last_step_seen: _Optional[int] = ..., waited_s: _Optional[float] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., tables: _Optional[_Iterable[_Union[_index_pb2.TableSchema, _Mapping]]] = ..., fell_back: _Optional[bool] = ..., log_damage: _Optional[str] = ..., layout: _Optional[str] = ..., previous_attempt: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., basis: _Optional[_Union[Basis, _Mapping]] = ..., deferred_reason: _Optional[str] = ...) -> None: ...

class RowBatch(_message.Message):
    __slots__ = ("block", "offset", "table", "rows", "contiguous", "row_start", "col_start", "col_stop", "fresh", "duplicated")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CONTIGUOUS_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    COL_START_FIELD_NUMBER: _ClassVar[int]
    COL_STOP_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    DUPLICATED_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    table: int
    rows: int
    contiguous: bool
    row_start: int
    col_start: int
    col_stop: int
    fresh: bool
    duplicated: bool
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., table: _Optional[int] = ..., rows: _Optional[int] = ..., contiguous: _Optional[bool] = ..., row_start: _Optional[int] = ..., col_start: _Optional[int] = ..., col_stop: _Optional[int] = ..., fresh: _Optional[bool] = ..., duplicated: _Optional[bool] = ...) -> None: ...

class BlobChunk(_message.Message):
    __slots__ = ("block", "offset", "length", "name", "blob_offset", "blob_bytes")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOB_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    length: int
    name: str
    blob_offset: int
    blob_bytes: int
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., name: _Optional[str] = ..., blob_offset: _Optional[int] = ..., blob_bytes: _Optional[int] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("begin", "rows", "blob", "seal", "abort", "ready", "batch", "prepare")
    class Begin(_message.Message):
        __slots__ = ("session", "step", "snapshot_id", "reason", "urgent", "since_commit_seq", "since_baseline_seq", "full", "dirty_rows_commit", "dirty_rows_baseline", "total_rows", "tracking_faults", "planned_steps", "pls_target")
        SESSION_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        URGENT_FIELD_NUMBER: _ClassVar[int]
        SINCE_COMMIT_SEQ_FIELD_NUMBER: _ClassVar[int]
        SINCE_BASELINE_SEQ_FIELD_NUMBER: _ClassVar[int]
        FULL_FIELD_NUMBER: _ClassVar[int]
        DIRTY_ROWS_COMMIT_FIELD_NUMBER: _ClassVar[int]
        DIRTY_ROWS_BASELINE_FIELD_NUMBER: _ClassVar[int]
        TOTAL_ROWS_FIELD_NUMBER: _ClassVar[int]
        TRACKING_FAULTS_FIELD_NUMBER: _ClassVar[int]
        PLANNED_STEPS_FIELD_NUMBER: _ClassVar[int]
        PLS_TARGET_FIELD_NUMBER: _ClassVar[int]
        session: str
        step: int
        snapshot_id: int
        reason: str
        urgent: bool
        since_commit_seq: int
        since_baseline_seq: int
        full: bool
        dirty_rows_commit: int
        dirty_rows_baseline: int
        total_rows: int
        tracking_faults: int
        planned_steps: int
        pls_target: float
        def __init__(self, session: _Optional[str] = ..., step: _Optional[int] = ..., snapshot_id: _Optional[int] = ..., reason: _Optional[str] = ..., urgent: _Optional[bool] = ..., since_commit_seq: _Optional[int] = ..., since_baseline_seq: _Optional[int] = ..., full: _Optional[bool] = ..., dirty_rows_commit: _Optional[int] = ..., dirty_rows_baseline: _Optional[int] = ..., total_rows: _Optional[int] = ..., tracking_faults: _Optional[int] = ..., planned_steps: _Optional[int] = ..., pls_target: _Optional[float] = ...) -> None: ...
    class Seal(_message.Message):
        __slots__ = ("rows", "raw_bytes", "stall_s", "metadata", "full", "pins", "precopied_rows", "recopied_rows", "slowdown_s", "snapshot_at_s")
        class MetadataEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        ROWS_FIELD_NUMBER: _ClassVar[int]
        RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
        STALL_S_FIELD_NUMBER: _ClassVar[int]
        METADATA_FIELD_NUMBER: _ClassVar[int]
        FULL_FIELD_NUMBER: _ClassVar[int]
        PINS_FIELD_NUMBER: _ClassVar[int]
        PRECOPIED_ROWS_FIELD_NUMBER: _ClassVar[int]
        RECOPIED_ROWS_FIELD_NUMBER: _ClassVar[int]
        SLOWDOWN_S_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_AT_S_FIELD_NUMBER: _ClassVar[int]
        rows: int
        raw_bytes: int
        stall_s: float
        metadata: _containers.ScalarMap[str, str]
        full: bool
        pins: _containers.RepeatedScalarFieldContainer[str]
        precopied_rows: int
        recopied_rows: int
        slowdown_s: float
        snapshot_at_s: float
        def __init__(self, rows: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., stall_s: _Optional[float] = ..., metadata: _Optional[_Mapping[str, str]] = ..., full: _Optional[bool] = ..., pins: _Optional[_Iterable[str]] = ..., precopied_rows: _Optional[int] = ..., recopied_rows: _Optional[int] = ..., slowdown_s: _Optional[float] = ..., snapshot_at_s: _Optional[float] = ...) -> None: ...
    class Abort(_message.Message):
        __slots__ = ("cause",)
        CAUSE_FIELD_NUMBER: _ClassVar[int]
        cause: str
        def __init__(self, cause: _Optional[str] = ...) -> None: ...
    class Ready(_message.Message):
        __slots__ = ("session",)
        SESSION_FIELD_NUMBER: _ClassVar[int]
        session: str
        def __init__(self, session: _Optional[str] = ...) -> None: ...
    class Prepare(_message.Message):
        __slots__ = ("begin",)
        BEGIN_FIELD_NUMBER: _ClassVar[int]
        begin: SaveRequest.Begin
        def __init__(self, begin: _Optional[_Union[SaveRequest.Begin, _Mapping]] = ...) -> None: ...
    class Batch(_message.Message):
        __slots__ = ("requests",)
        REQUESTS_FIELD_NUMBER: _ClassVar[int]
        requests: _containers.RepeatedCompositeFieldContainer[SaveRequest]
        def __init__(self, requests: _Optional[_Iterable[_Union[SaveRequest, _Mapping]]] = ...) -> None: ...
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    begin: SaveRequest.Begin
    rows: RowBatch
    blob: BlobChunk
    seal: SaveRequest.Seal
    abort: SaveRequest.Abort
    ready: SaveRequest.Ready
    batch: SaveRequest.Batch
    prepare: SaveRequest.Prepare
    def __init__(self, begin: _Optional[_Union[SaveRequest.Begin, _Mapping]] = ..., rows: _Optional[_Union[RowBatch, _Mapping]] = ..., blob: _Optional[_Union[BlobChunk, _Mapping]] = ..., seal: _Optional[_Union[SaveRequest.Seal, _Mapping]] = ..., abort: _Optional[_Union[SaveRequest.Abort, _Mapping]] = ..., ready: _Optional[_Union[SaveRequest.Ready, _Mapping]] = ..., batch: _Optional[_Union[SaveRequest.Batch, _Mapping]] = ..., prepare: _Optional[_Union[SaveRequest.Prepare, _Mapping]] = ...) -> None: ...

class SaveReply(_message.Message):
    __slots__ = ("begun", "blocks", "staged", "failed", "prepared")
    class Begun(_message.Message):
        __slots__ = ("covers", "encoding", "stall_budget_s", "state_encoding", "rebased", "encodings", "fresh_first")
        class EncodingsEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        COVERS_FIELD_NUMBER: _ClassVar[int]
        ENCODING_FIELD_NUMBER: _ClassVar[int]
        STALL_BUDGET_S_FIELD_NUMBER: _ClassVar[int]
        STATE_ENCODING_FIELD_NUMBER: _ClassVar[int]
        REBASED_FIELD_NUMBER: _ClassVar[int]
        ENCODINGS_FIELD_NUMBER: _ClassVar[int]
        FRESH_FIRST_FIELD_NUMBER: _ClassVar[int]
        covers: int
        encoding: str
        stall_budget_s: float
        state_encoding: str
        rebased: bool
        encodings: _containers.ScalarMap[str, str]
        fresh_first: bool
        def __init__(self, covers: _Optional[int] = ..., encoding: _Optional[str] = ..., stall_budget_s: _Optional[float] = ..., state_encoding: _Optional[str] = ..., rebased: _Optional[bool] = ..., encodings: _Optional[_Mapping[str, str]] = ..., fresh_first: _Optional[bool] = ...) -> None: ...
    class Prepared(_message.Message):
        __slots__ = ("covers", "refused", "fresh_first")
        COVERS_FIELD_NUMBER: _ClassVar[int]
        REFUSED_FIELD_NUMBER: _ClassVar[int]
        FRESH_FIRST_FIELD_NUMBER: _ClassVar[int]
        covers: int
        refused: str
        fresh_first: bool
        def __init__(self, covers: _Optional[int] = ..., refused: _Optional[str] = ..., fresh_first: _Optional[bool] = ...) -> None: ...
    class Blocks(_message.Message):
        __slots__ = ("granted",)
        GRANTED_FIELD_NUMBER: _ClassVar[int]
        granted: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, granted: _Optional[_Iterable[int]] = ...) -> None: ...
    class Staged(_message.Message):
        __slots__ = ("snapshot_id",)
        SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
        snapshot_id: int
        def __init__(self, snapshot_id: _Optional[int] = ...) -> None: ...
    class Failed(_message.Message):
        __slots__ = ("snapshot_id", "cause", "message")
        SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
        CAUSE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        snapshot_id: int
        cause: str
        message: str
        def __init__(self, snapshot_id: _Optional[int] = ..., cause: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    begun: SaveReply.Begun
    blocks: SaveReply.Blocks
    staged: SaveReply.Staged
    failed: SaveReply.Failed
    prepared: SaveReply.Prepared
    def __init__(self, begun: _Optional[_Union[SaveReply.Begun, _Mapping]] = ..., blocks: _Optional[_Union[SaveReply.Blocks, _Mapping]] = ..., staged: _Optional[_Union[SaveReply.Staged, _Mapping]] = ..., failed: _Optional[_Union[SaveReply.Failed, _Mapping]] = ..., prepared: _Optional[_Union[SaveReply.Prepared, _Mapping]] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("want", "freed")
    class Want(_message.Message):
        __slots__ = ("session", "seq", "boxes", "blobs", "from_run", "lenient", "mapping", "weights_only", "rank")
        class MappingEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        SESSION_FIELD_NUMBER: _ClassVar[int]
        SEQ_FIELD_NUMBER: _ClassVar[int]
        BOXES_FIELD_NUMBER: _ClassVar[int]
        BLOBS_FIELD_NUMBER: _ClassVar[int]
        FROM_RUN_FIELD_NUMBER: _ClassVar[int]
        LENIENT_FIELD_NUMBER: _ClassVar[int]
        MAPPING_FIELD_NUMBER: _ClassVar[int]
        WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        session: str
        seq: int
        boxes: _containers.RepeatedCompositeFieldContainer[_index_pb2.Box]
        blobs: bool
        from_run: str
        lenient: bool
        mapping: _containers.ScalarMap[str, str]
        weights_only: bool
        rank: int
        def __init__(self, session: _Optional[str] = ..., seq: _Optional[int] = ..., boxes: _Optional[_Iterable[_Union[_index_pb2.Box, _Mapping]]] = ..., blobs: _Optional[bool] = ..., from_run: _Optional[str] = ..., lenient: _Optional[bool] = ..., mapping: _Optional[_Mapping[str, str]] = ..., weights_only: _Optional[bool] = ..., rank: _Optional[int] = ...) -> None: ...
    class Freed(_message.Message):
        __slots__ = ("blocks",)
        BLOCKS_FIELD_NUMBER: _ClassVar[int]
        blocks: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, blocks: _Optional[_Iterable[int]] = ...) -> None: ...
    WANT_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    want: RestoreRequest.Want
    freed: RestoreRequest.Freed
    def __init__(self, want: _Optional[_Union[RestoreRequest.Want, _Mapping]] = ..., freed: _Optional[_Union[RestoreRequest.Freed, _Mapping]] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("plan", "batch", "done", "failed")
    class Plan(_message.Message):
        __slots__ = ("step", "stored_bytes", "frames", "chain", "initial", "notes")
        STEP_FIELD_NUMBER: _ClassVar[int]
        STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
        FRAMES_FIELD_NUMBER: _ClassVar[int]
        CHAIN_FIELD_NUMBER: _ClassVar[int]
        INITIAL_FIELD_NUMBER: _ClassVar[int]
        NOTES_FIELD_NUMBER: _ClassVar[int]
        step: int
        stored_bytes: int
        frames: int
        chain: _containers.RepeatedScalarFieldContainer[int]
        initial: _containers.RepeatedCompositeFieldContainer[_index_pb2.Box]
        notes: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, step: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., frames: _Optional[int] = ..., chain: _Optional[_Iterable[int]] = ..., initial: _Optional[_Iterable[_Union[_index_pb2.Box, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...
    class Filled(_message.Message):
        __slots__ = ("block", "offset", "length", "last", "baseline", "tail_block", "tail_offset", "tail_length", "tail_last")
        BLOCK_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        LENGTH_FIELD_NUMBER: _ClassVar[int]
        LAST_FIELD_NUMBER: _ClassVar[int]
        BASELINE_FIELD_NUMBER: _ClassVar[int]
        TAIL_BLOCK_FIELD_NUMBER: _ClassVar[int]
        TAIL_OFFSET_FIELD_NUMBER: _ClassVar[int]
        TAIL_LENGTH_FIELD_NUMBER: _ClassVar[int]
        TAIL_LAST_FIELD_NUMBER: _ClassVar[int]
        block: int
        offset: int
        length: int
        last: bool
        baseline: bool
        tail_block: int
        tail_offset: int
        tail_length: int
        tail_last: bool
        def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., last: _Optional[bool] = ..., baseline: _Optional[bool] = ..., tail_block: _Optional[int] = ..., tail_offset: _Optional[int] = ..., tail_length: _Optional[int] = ..., tail_last: _Optional[bool] = ...) -> None: ...
    class Batch(_message.Message):
        __slots__ = ("frames",)
        FRAMES_FIELD_NUMBER: _ClassVar[int]
        frames: _containers.RepeatedCompositeFieldContainer[RestoreReply.Filled]
        def __init__(self, frames: _Optional[_Iterable[_Union[RestoreReply.Filled, _Mapping]]] = ...) -> None: ...
    class Done(_message.Message):
        __slots__ = ("cache_bytes", "store_bytes", "seconds", "baseline_seq")
        CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
        STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
        SECONDS_FIELD_NUMBER: _ClassVar[int]
        BASELINE_SEQ_FIELD_NUMBER: _ClassVar[int]
        cache_bytes: int
        store_bytes: int
        seconds: float
        baseline_seq: int
        def __init__(self, cache_bytes: _Optional[int] = ..., store_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., baseline_seq: _Optional[int] = ...) -> None: ...
    class Failed(_message.Message):
        __slots__ = ("cause", "message")
        CAUSE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        cause: str
        message: str
        def __init__(self, cause: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
    PLAN_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    plan: RestoreReply.Plan
    batch: RestoreReply.Batch
    done: RestoreReply.Done
    failed: RestoreReply.Failed
    def __init__(self, plan: _Optional[_Union[RestoreReply.Plan, _Mapping]] = ..., batch: _Optional[_Union[RestoreReply.Batch, _Mapping]] = ..., done: _Optional[_Union[RestoreReply.Done, _Mapping]] = ..., failed: _Optional[_Union[RestoreReply.Failed, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("committed", "save_failed", "save_now", "policy", "fenced")
    class SaveFailed(_message.Message):
        __slots__ = ("snapshot_id", "cause", "message")
        SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
        CAUSE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        snapshot_id: int
        cause: str
        message: str
        def __init__(self, snapshot_id: _Optional[int] = ..., cause: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
    class SaveNow(_message.Message):
        __slots__ = ("reason", "deadline_s", "urgent")
        REASON_FIELD_NUMBER: _ClassVar[int]
        DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
        URGENT_FIELD_NUMBER: _ClassVar[int]
        reason: str
        deadline_s: float
        urgent: bool
        def __init__(self, reason: _Optional[str] = ..., deadline_s: _Optional[float] = ..., urgent: _Optional[bool] = ...) -> None: ...
    class Fenced(_message.Message):
        __slots__ = ("attempt", "by", "message", "taken_over")
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
        attempt: int
        by: int
        message: str
        taken_over: bool
        def __init__(self, attempt: _Optional[int] = ..., by: _Optional[int] = ..., message: _Optional[str] = ..., taken_over: _Optional[bool] = ...) -> None: ...
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    SAVE_FAILED_FIELD_NUMBER: _ClassVar[int]
    SAVE_NOW_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    committed: Commit
    save_failed: Notice.SaveFailed
    save_now: Notice.SaveNow
    policy: Policy
    fenced: Notice.Fenced
    def __init__(self, committed: _Optional[_Union[Commit, _Mapping]] = ..., save_failed: _Optional[_Union[Notice.SaveFailed, _Mapping]] = ..., save_now: _Optional[_Union[Notice.SaveNow, _Mapping]] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., fenced: _Optional[_Union[Notice.Fenced, _Mapping]] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("session", "wait", "deadline_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    session: str
    wait: bool
    deadline_s: float
    def __init__(self, session: _Optional[str] = ..., wait: _Optional[bool] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class DetachReply(_message.Message):
    __slots__ = ("last_commit", "idle")
    LAST_COMMIT_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    last_commit: Commit
    idle: bool
    def __init__(self, last_commit: _Optional[_Union[Commit, _Mapping]] = ..., idle: _Optional[bool] = ...) -> None: ...

class NotifyRequest(_message.Message):
    __slots__ = ("reason", "deadline_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    deadline_s: float
    def __init__(self, reason: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class NotifyReply(_message.Message):
    __slots__ = ("trainers",)
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    trainers: int
    def __init__(self, trainers: _Optional[int] = ...) -> None: ...
