"""Indexes and names: golden bytes, strict reading, round trips of every key."""

from pathlib import Path

import pytest
from deltashard_checkpoint.errors import CorruptObject, UnsupportedVersion, UserError
from deltashard_checkpoint.format import object_key
from deltashard_checkpoint.format.index import decode_index, digest_hex, encode_index, parse_index
from deltashard_proto.v1 import index_pb2
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.golden_case import TOKEN, golden_index
from tests.support.checkpoint.sample import RUN

GOLDEN = Path(__file__).parents[3] / "golden" / "v1" / "part.index"


def test_golden_index_round_trips() -> None:
    data = GOLDEN.read_bytes()
    assert encode_index(golden_index()) == data
    key = object_key.index_key(attempt=3, snapshot_id=2, rank=1, token=TOKEN, xxh3=digest_hex(data))
    index = decode_index(data, key=key, run=RUN)
    assert index == golden_index()
    assert index.encodings == {"embeddings.items.weight": ("fp32", "q2", "q3", "q4", "q8"), "half": ("bf16",)}
    assert index.blobs == {"dense/mlp.0.weight": 400, "rng": 0}


def _set(path: str, value: object):
    def change(message: index_pb2.Index) -> None:
        at = message
        *steps, last = path.split(".")
        for step in steps:
            at = at[int(step)] if step.isdigit() else getattr(at, step)
        if last == "*":
            at.append(value)
        else:
            setattr(at, last, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("format", 0), _set("frames.0.pack", 1), _set("frames.0.offset", 32), _set("frames.0.offset", 1 << 40),
        _set("frames.1.offset", 0), _set("frames.0.length", 63), _set("frames.0.length", 0), _set("frames.0.length", (8 << 20) + 64),
        _set("frames.0.kind", 0), _set("frames.0.kind", 9), _set("frames.0.kind", 2), _set("frames.0.xxh3_128", b"short"),
        _set("frames.0.table", 7), _set("frames.0.row_max", 200), _set("frames.0.row_min", 100), _set("frames.0.rows", 0),
        _set("frames.0.rows", 1 << 40), _set("frames.0.col_stop", 9), _set("frames.0.col_start", 8), _set("frames.12.encoding", "q8"),
        _set("frames.0.encoding", ""), _set("frames.0.name", "x"), _set("tables.0.fqn", ""), _set("tables.0.columns", 1 << 30),
        _set("tables.0.rows", 0), _set("tables.0.dtype", "int8"), _set("tables.0.fields.0.dtype", "object"), _set("tables.0.fields.1.name", "sum"),
        _set("tables.1.fqn", "embeddings.items.weight"), _set("boxes.0.row_stop", 201), _set("boxes.0.col_start", 8),
        _set("boxes.0.table", "other"), _set("packs.0.bytes", 64), _set("packs.0.bytes", 0), _set("packs.0.key", "../x.pack"),
        _set("frames.12.blob_offset", 401), _set("frames.12.rows", 1), _set("frames.12.name", ""),
        _set("frames.12.since", 1), _set("frames.0.duplicated_rows", 1 << 20), _set("frames.1.duplicated_rows", 1),
    ],
)  # fmt: skip
def test_invalid_index_contents_are_refused(change) -> None:
    """The cases are places outside packs, rows and boxes outside tables, unknown types and overlaps."""
    message = index_pb2.Index.FromString(GOLDEN.read_bytes())
    parse_index(message.SerializeToString())
    change(message)
    with pytest.raises(CorruptObject):
        parse_index(message.SerializeToString())


def test_frames_out_of_order_are_refused() -> None:
    message = index_pb2.Index.FromString(GOLDEN.read_bytes())
    message.frames.sort(key=lambda frame: -frame.offset)
    with pytest.raises(CorruptObject, match="out of order"):
        parse_index(message.SerializeToString())


@pytest.mark.parametrize(
    "change",
    [_set("format", 2), _set("kind", "keys"), _set("kind", ""), _set("frames.0.encoding", "q9")],
    ids=["format", "kind", "no kind", "encoding"],
)
def test_a_newer_index_is_unsupported_and_garbage_is_corrupt(change) -> None:
    message = index_pb2.Index.FromString(GOLDEN.read_bytes())
    change(message)
    with pytest.raises(UnsupportedVersion):
        parse_index(message.SerializeToString())
    with pytest.raises(CorruptObject):
        parse_index(b"\xff" * 50)


@given(
    st.integers(0, 10**20 - 1), st.integers(0, 10**8 - 1), st.integers(0, 10**5 - 1), st.from_regex(r"\A[0-9a-z]{8,32}\Z"),
    st.integers(0, 10**5 - 1),
)  # fmt: skip
def test_names_round_trip(attempt: int, snapshot_id: int, rank: int, token: str, n: int) -> None:
    pack = object_key.parse_pack_key(
        object_key.pack_key(attempt=attempt, snapshot_id=snapshot_id, rank=rank, token=token, n=n)
    )
    assert (pack.attempt, pack.snapshot_id, pack.rank, pack.token, pack.n) == (
        attempt,
        snapshot_id,
        rank,
        token,
        n,
    )
    digest = digest_hex(token.encode())
    key = object_key.index_key(attempt=attempt, snapshot_id=snapshot_id, rank=rank, token=token, xxh3=digest)
    assert object_key.is_index_key(key)
    index = object_key.parse_index_key(key)
    assert (index.attempt, index.snapshot_id, index.rank, index.token, index.xxh3) == (
        attempt,
        snapshot_id,
        rank,
        token,
        digest,
    )
    compact = object_key.parse_pack_key(object_key.compaction_pack_key(token=token, n=n))
    assert (compact.attempt, compact.token, compact.n) == (None, token, n)
    assert (
        object_key.parse_index_key(object_key.compaction_index_key(token=token, xxh3=digest)).snapshot_id
        is None
    )
    if snapshot_id:
        assert object_key.snapshot_prefix(attempt, snapshot_id - 1) < object_key.snapshot_prefix(
            attempt, snapshot_id
        )


@pytest.mark.parametrize(
    "key",
    ["", "data/1/2/x.pack", "log/00000000000000000000.json", "data/compact-x/00000.pack", "/etc/passwd"],
)
def test_malformed_keys_are_refused(key: str) -> None:
    with pytest.raises(CorruptObject):
        object_key.parse_pack_key(key)
    with pytest.raises(CorruptObject):
        object_key.parse_index_key(key)


@pytest.mark.parametrize("run", ["", "/x", "a//b", "../x", "a/../b", "a/.hidden", "ü", "a b", "x" * 600])
def test_invalid_run_names_are_refused(run: str) -> None:
    with pytest.raises(UserError):
        object_key.validate_run(run)
    assert object_key.validate_run("ns/job-1.a_b") == "ns/job-1.a_b"


def test_numbers_too_wide_for_key_padding_are_refused() -> None:
    """A wider number would break the zero padding and the order of listings."""
    with pytest.raises(UserError):
        object_key.pack_key(attempt=1, snapshot_id=10**8, rank=0, token=TOKEN, n=0)
    with pytest.raises(UserError):
        object_key.pack_key(attempt=1, snapshot_id=1, rank=0, token="bad-token", n=0)
