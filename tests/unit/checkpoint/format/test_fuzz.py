"""Mutated bytes either raise a named error or are accepted with the same meaning; none crash or use unbounded memory.

There are two families over frames, indexes, trees and log entries. *Plain* mutations (truncate, flip, splice, lengths,
versions) must be refused by hash. *Sealed* mutations get a recomputed hash, so that they test the parser behind the
hash: what the parser accepts must decode or raise a named error.
"""

import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
import xxhash
from deltashard_checkpoint.errors import ForeignObject, FormatError
from deltashard_checkpoint.format import canonical_json, object_key, typed_tree
from deltashard_checkpoint.format import index as indexes
from deltashard_checkpoint.format.frame import FrameKind, parse_frame, parse_tail
from deltashard_checkpoint.format.frame_layout import HEADER_BYTES
from deltashard_checkpoint.format.index import decode_index, encode_index, parse_index
from deltashard_checkpoint.log import entry as entries
from deltashard_checkpoint.log import entry_codec
from deltashard_checkpoint.restore.frame_applier import BlobsTooLarge, FrameApplier, TableTarget
from deltashard_checkpoint.restore.plan import SchemaMismatch

from tests.golden.golden_case import TOKEN, golden_index
from tests.support.checkpoint.sample import RUN, sample_frames, schema, whole

SAMPLES = {name: bytes(frame.data) for name, frame in sample_frames().items()}
TAILS = [bytes(frame.tail) for frame in sample_frames().values() if frame.tail is not None]
LIMIT_BYTES = 192 << 20
"""The most memory that one decoding may use: a little more than twice MAX_ROWS ids of 8 bytes."""


def _mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind = rng.randrange(8)
        at = rng.randrange(len(out)) if out else 0
        if kind == 0:
            out = out[:at]
        elif kind == 1 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2 and out:
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 3:
            other = rng.choice(others)
            start = rng.randrange(len(other) or 1)
            piece = other[start : start + rng.randrange(1, 200)]
            out[at : at + rng.choice((0, len(piece)))] = piece
        elif kind == 4 and len(out) >= 8:
            width, code = rng.choice(((2, "<H"), (4, "<I"), (8, "<Q")))
            at = min(at, len(out) - width) & ~(width - 1)
            top = 1 << 8 * width
            value = rng.choice(
                (
                    0, 1, top - 1, top // 2, top // 2 - 1, len(data), len(data) + 64, 1 << 24,
                    rng.randrange(top),
                )
            )  # fmt: skip
            struct.pack_into(code, out, at, value % top)
        elif kind == 5:
            out += rng.randbytes(rng.choice((1, 8, 64)))
        elif kind == 6:
            del out[at : at + rng.randrange(1, 80)]
        elif kind == 7 and len(out) >= 64:  # lengths are in the headers
            out[rng.randrange(64)] = rng.randrange(256)
    return bytes(out)


def _sealed_frame(data: bytes, rng: random.Random) -> bytes:
    """Return the frame with a (mostly) corrected length and a recomputed hash."""
    out = bytearray(data)
    if len(out) < HEADER_BYTES:
        return data
    if rng.random() < 0.8:
        out += bytes(-len(out) % 64)
        struct.pack_into("<I", out, 28, len(out))
    digest = xxhash.xxh3_128(bytes(out[:48]) + bytes(out[64:])).digest()
    out[48:64] = digest
    return bytes(out)


def _runs(seed: int, count: int) -> Iterator[random.Random]:
    for i in range(count):
        yield random.Random(seed * 1_000_003 + i)


def _survives(count: int, seed: int, attempt: Callable[[random.Random], bool]) -> int:
    """Run all and return how many were accepted. Only named errors may occur, and peak memory stays bounded."""
    accepted = 0
    tracemalloc.start()
    try:
        for rng in _runs(seed, count):
            with suppress(FormatError):  # A named error is a refusal; any other error fails the test.
                accepted += attempt(rng)
            _, peak = tracemalloc.get_traced_memory()
            assert peak < LIMIT_BYTES, f"{peak} bytes for one input"
            tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    return accepted


def _applier(*, state: bool) -> FrameApplier:
    table = schema()
    target = TableTarget(
        schema=table, box=whole(table), weights=np.zeros((200, 8), np.float32),
        fields={"sum": np.zeros(200, np.float32), "exp_avg": np.zeros((200, 8), np.float32)} if state else {},
    )  # fmt: skip
    return FrameApplier([target], strict=False, max_blobs_bytes=1 << 20)


def test_mutated_frames_are_refused_by_hash() -> None:
    others = list(SAMPLES.values())

    def attempt(rng: random.Random) -> bool:
        data = rng.choice(others)
        mutated = _mutate(rng, data, others)
        frame = parse_frame(mutated)
        assert mutated in others, "a mutated frame was accepted"
        return frame is not None

    _survives(8000, 1, attempt)


@pytest.mark.slow
def test_mutated_tails_are_refused() -> None:
    by_tail = {bytes(each.tail): each for each in sample_frames().values() if each.tail is not None}

    def attempt(rng: random.Random) -> bool:
        data = rng.choice(TAILS)
        mutated = _mutate(rng, data, TAILS)
        with suppress(FormatError):
            parse_tail(mutated)
            assert mutated in TAILS, "a mutated tail was accepted"
        sealed = _sealed_frame(mutated, rng)
        tail = parse_tail(sealed)
        for section in tail.fields:
            assert len(section.values(tail.rows)) == tail.rows
        frame = by_tail[data]
        with suppress(FormatError):
            parse_frame(frame.data, sealed)
            assert sealed == data, "a frame took a tail that it does not name"
        return True

    assert _survives(4000, 6, attempt) > 200


@pytest.mark.slow
def test_mutated_frames_with_valid_hash_decode_or_are_refused() -> None:
    others = list(SAMPLES.values())
    by_digest = {tail[48:64]: tail for tail in TAILS}

    def attempt(rng: random.Random) -> bool:
        data = _sealed_frame(_mutate(rng, rng.choice(others), others), rng)
        frame = parse_frame(data)
        if frame.info.tail is not None and (tail := by_digest.get(frame.info.tail.digest)) is not None:
            with suppress(ForeignObject):
                frame = parse_frame(data, tail)
        if frame.info.kind is not FrameKind.BLOB:
            ids = frame.row_ids()
            assert len(ids) == frame.info.rows
            assert (np.diff(ids) > 0).all()
        # The caller refuses whole frames of another table shape and huge blobs.
        with suppress(SchemaMismatch, BlobsTooLarge):
            _applier(state=frame.info.tail is None or bool(frame.fields)).apply(frame)
        return True

    accepted = _survives(9000, 2, attempt)
    assert accepted > 500, "no mutated frame passes the header check: the test is vacuous"


def _index() -> tuple[str, bytes]:
    index = golden_index()
    data = encode_index(index)
    key = object_key.index_key(attempt=3, snapshot_id=2, rank=1, token=TOKEN, xxh3=indexes.digest_hex(data))
    assert decode_index(data, key=key, run=RUN) == index
    return key, data


@pytest.mark.slow
def test_mutated_indexes_are_refused_or_round_trip() -> None:
    """The hash in the name refuses every mutation. With a matching name, accepted indexes survive a round trip."""
    key, data = _index()

    def attempt(rng: random.Random) -> bool:
        mutated = _mutate(rng, data, [data])
        if mutated != data:
            with pytest.raises(FormatError):
                decode_index(mutated, key=key, run=RUN)
        index = parse_index(mutated)
        assert parse_index(encode_index(index)) == index
        for place in index.places:
            for piece in place.pieces:
                assert piece.offset + piece.length <= index.packs[piece.pack].bytes
        return True

    _survives(5000, 3, attempt)


@pytest.mark.parametrize(
    ("run", "attempt", "snapshot_id", "rank"),
    [("other", 3, 2, 1), (RUN, 4, 2, 1), (RUN, 3, 1, 1), (RUN, 3, 2, 0)],
)
def test_index_of_another_snapshot_is_refused(run: str, attempt: int, snapshot_id: int, rank: int) -> None:
    key, data = _index()
    name = object_key.parse_index_key(key)
    moved = object_key.index_key(
        attempt=attempt, snapshot_id=snapshot_id, rank=rank, token=name.token, xxh3=name.xxh3
    )
    with pytest.raises(FormatError, match="index of"):
        decode_index(data, key=moved, run=run)


@pytest.mark.slow
def test_mutated_trees_are_refused_or_decode() -> None:
    """Trees have no hash (their frames do), so the decoder alone must be safe."""
    tree = {
        "a": [1, -(2**80), 2.5, None, True, 1j, "text", b"bytes", bytearray(b"x")], (1, "k"): {3, "s", (4,)},
        7: np.arange(12, dtype=np.int16).reshape(3, 4), "t": typed_tree.Tensor(dtype="bfloat16", shape=(2, 3), data=bytes(12)),
        "n": np.float32(1.5), "nested": [[[[{"deep": (frozenset({1, 2}), range(3))}]]]],
    }  # fmt: skip
    data = typed_tree.encode(tree).to_bytes()

    def attempt(rng: random.Random) -> bool:
        out = bytearray(_mutate(rng, data, [data]))
        if len(out) >= 32 and rng.random() < 0.8:
            out += bytes(-len(out) % 64)
            struct.pack_into("<Q", out, 16, len(out))
        decoded = typed_tree.decode(bytes(out))
        again = typed_tree.encode(decoded).to_bytes()
        assert typed_tree.encode(typed_tree.decode(again)).to_bytes() == again
        return True

    assert _survives(7000, 4, attempt) > 100


@pytest.mark.slow
def test_mutated_log_entries_are_refused() -> None:
    """With a recomputed hash, an entry is accepted only in canonical, bounded form."""
    entry = entries.Checkpoint(
        seq=5, previous="a" * 64, writer="w", at_s=1.5, attempt=3, snapshot_id=2, step=20, tables=(schema(),),
        parts=(entries.Part(rank=0, index_key=_index()[0], boxes=(whole(schema()),), stored_bytes=9, covers=1),),
        encodings={"items": ("q8",)}, rows=3, raw_bytes=4, stored_bytes=5, stall_s=0.1, snapshot_at_s=1.5, metadata={"auc": "0.8"}, pins=("best",),
    )  # fmt: skip
    sealed = entry_codec.seal(entry)

    def attempt(rng: random.Random) -> bool:
        mutated = _mutate(rng, sealed.data, [sealed.data])
        if rng.random() < 0.5:
            try:
                document = json.loads(mutated)
                document.pop("hash", None)
                import hashlib

                document["hash"] = hashlib.sha256(canonical_json.canonical(document)).hexdigest()
                mutated = canonical_json.canonical(document)
            except (ValueError, AttributeError, TypeError, RecursionError):
                pass
        found = entry_codec.parse(mutated, 5)
        assert entry_codec.seal(found.entry).data == mutated
        return True

    _survives(4000, 5, attempt)
