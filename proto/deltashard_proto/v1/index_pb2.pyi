from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrameKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRAME_KIND_UNSPECIFIED: _ClassVar[FrameKind]
    FRAME_KIND_ROWS: _ClassVar[FrameKind]
    FRAME_KIND_BLOB: _ClassVar[FrameKind]
    FRAME_KIND_TOMBSTONE: _ClassVar[FrameKind]
FRAME_KIND_UNSPECIFIED: FrameKind
FRAME_KIND_ROWS: FrameKind
FRAME_KIND_BLOB: FrameKind
FRAME_KIND_TOMBSTONE: FrameKind

class FieldSpec(_message.Message):
    __slots__ = ("name", "pointwise", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POINTWISE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    pointwise: bool
    dtype: str
    def __init__(self, name: _Optional[str] = ..., pointwise: _Optional[bool] = ..., dtype: _Optional[str] = ...) -> None: ...

class TableSchema(_message.Message):
    __slots__ = ("fqn", "rows", "columns", "dtype", "fields")
    FQN_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    fqn: str
    rows: int
    columns: int
    dtype: str
    fields: _containers.RepeatedCompositeFieldContainer[FieldSpec]
    def __init__(self, fqn: _Optional[str] = ..., rows: _Optional[int] = ..., columns: _Optional[int] = ..., dtype: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[FieldSpec, _Mapping]]] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("table", "row_start", "row_stop", "col_start", "col_stop")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_START_FIELD_NUMBER: _ClassVar[int]
    ROW_STOP_FIELD_NUMBER: _ClassVar[int]
    COL_START_FIELD_NUMBER: _ClassVar[int]
    COL_STOP_FIELD_NUMBER: _ClassVar[int]
    table: str
    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    def __init__(self, table: _Optional[str] = ..., row_start: _Optional[int] = ..., row_stop: _Optional[int] = ..., col_start: _Optional[int] = ..., col_stop: _Optional[int] = ...) -> None: ...

class Pack(_message.Message):
    __slots__ = ("key", "bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    key: str
    bytes: int
    def __init__(self, key: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Tail(_message.Message):
    __slots__ = ("pack", "offset", "length", "xxh3_128")
    PACK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    XXH3_128_FIELD_NUMBER: _ClassVar[int]
    pack: int
    offset: int
    length: int
    xxh3_128: bytes
    def __init__(self, pack: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., xxh3_128: _Optional[bytes] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("kind", "pack", "offset", "length", "xxh3_128", "step", "table", "row_min", "row_max", "rows", "col_start", "col_stop", "encoding", "name", "blob_offset", "blob_bytes", "since", "duplicated_rows", "tail")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PACK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    XXH3_128_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_MIN_FIELD_NUMBER: _ClassVar[int]
    ROW_MAX_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COL_START_FIELD_NUMBER: _ClassVar[int]
    COL_STOP_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOB_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATED_ROWS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    kind: FrameKind
    pack: int
    offset: int
    length: int
    xxh3_128: bytes
    step: int
    table: int
    row_min: int
    row_max: int
    rows: int
    col_start: int
    col_stop: int
    encoding: str
    name: str
    blob_offset: int
    blob_bytes: int
    since: int
    duplicated_rows: int
    tail: Tail
    def __init__(self, kind: _Optional[_Union[FrameKind, str]] = ..., pack: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., xxh3_128: _Optional[bytes] = ..., step: _Optional[int] = ..., table: _Optional[int] = ..., row_min: _Optional[int] = ..., row_max: _Optional[int] = ..., rows: _Optional[int] = ..., col_start: _Optional[int] = ..., col_stop: _Optional[int] = ..., encoding: _Optional[str] = ..., name: _Optional[str] = ..., blob_offset: _Optional[int] = ..., blob_bytes: _Optional[int] = ..., since: _Optional[int] = ..., duplicated_rows: _Optional[int] = ..., tail: _Optional[_Union[Tail, _Mapping]] = ...) -> None: ...

class Index(_message.Message):
    __slots__ = ("format", "run", "attempt", "snapshot_id", "step", "rank", "token", "tables", "packs", "frames", "boxes", "covers", "raw_bytes", "kind")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PACKS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    COVERS_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    format: int
    run: str
    attempt: int
    snapshot_id: int
    step: int
    rank: int
    token: str
    tables: _containers.RepeatedCompositeFieldContainer[TableSchema]
    packs: _containers.RepeatedCompositeFieldContainer[Pack]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    boxes: _containers.RepeatedCompositeFieldContainer[Box]
    covers: int
    raw_bytes: int
    kind: str
    def __init__(self, format: _Optional[int] = ..., run: _Optional[str] = ..., attempt: _Optional[int] = ..., snapshot_id: _Optional[int] = ..., step: _Optional[int] = ..., rank: _Optional[int] = ..., token: _Optional[str] = ..., tables: _Optional[_Iterable[_Union[TableSchema, _Mapping]]] = ..., packs: _Optional[_Iterable[_Union[Pack, _Mapping]]] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., boxes: _Optional[_Iterable[_Union[Box, _Mapping]]] = ..., covers: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...
