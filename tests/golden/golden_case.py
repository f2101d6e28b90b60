"""The index and the tree in the golden files; the frames are `samples.sample_frames`.

`python -m tests.golden.golden_case` writes missing files. Files of a released version never change.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from deltashard_checkpoint.format import frame_layout, object_key, typed_tree
from deltashard_checkpoint.format.frame import FrameKind, parse_frame
from deltashard_checkpoint.format.frame_encoder import EncodedFrame
from deltashard_checkpoint.format.index import Index, Pack, Place, encode_index, index_order
from deltashard_checkpoint.format.schema import TableSchema

from tests.support.checkpoint.sample import RUN, sample_frames, schema, whole

TOKEN = "0123456789abcdef"


def golden_index() -> Index:
    """Return an index of all sample frames in one pack and their tails in another."""
    places, tables = sample_places(sample_frames().values())
    places = (replace(places[0], since=1, duplicated_rows=2), *places[1:])
    return Index(
        run=RUN, attempt=3, snapshot_id=2, step=20, rank=1, token=TOKEN, tables=tables, packs=sample_packs(places),
        places=places, boxes=(whole(schema()),), covers=1, raw_bytes=12345,
    )  # fmt: skip


def sample_places(frames: Iterable[EncodedFrame]) -> tuple[tuple[Place, ...], tuple[TableSchema, ...]]:
    """Return the places of consecutive frames in a first pack, of their tails in a second one, and their tables."""
    places, tables, at, tail_at = [], {}, 0, 0
    for frame in frames:
        place = Place(pack=0, offset=at, info=frame.info)
        at += frame.info.length
        if frame.info.tail is not None:
            place = replace(place, tail_pack=1, tail_offset=tail_at)
            tail_at += frame.info.tail.length
        places.append(place)
        table = parse_frame(frame.data, frame.tail).table
        if table is not None and frame.info.kind is FrameKind.ROWS:
            tables[table.fqn] = table
    return tuple(sorted(places, key=index_order)), tuple(tables.values())


def sample_packs(places: Iterable[Place]) -> tuple[Pack, ...]:
    pieces = [piece for place in places for piece in place.pieces]
    return tuple(
        Pack(
            key=object_key.pack_key(attempt=3, snapshot_id=2, rank=1, token=TOKEN, n=0, state=bool(number)),
            bytes=max(piece.offset + piece.length for piece in pieces if piece.pack == number),
        )
        for number in range(2)
    )


def golden_tree() -> dict[Any, Any]:
    """Return a value of every type of the tree codec."""
    counts = defaultdict(int)
    counts["x"] = 2
    return {
        "scalars": [None, True, False, 0, -1, 255, -(2**200), 0.5, float("inf"), 1 - 2j, "grün", b"\x00\xff", bytearray(b"ab")],
        ("tuple", 1): (1, (2, ())), -5: {"b": 1, "a": 2}, 2.5: OrderedDict(z=1, y=2), frozenset({1, 2}): {3, "3", (3,)},
        "counter": Counter("aab"), "default": counts, "queue": deque([1, 2], 5), "range": range(1, 9, 2),
        "arrays": [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.float16), np.array(7.0), np.array(["a", "bc"])],
        "numpy": [np.float32(1.25), np.int64(-3), np.bool_(True)],
        "tensors": [typed_tree.Tensor(dtype="bfloat16", shape=(2, 2), data=bytes(range(8))), typed_tree.Tensor(dtype="float32", shape=(), data=bytes(4))],
        "tagged": typed_tree.Tagged(tag="torch.Size", value=(1, 2)),
    }  # fmt: skip


def main() -> None:
    files: dict[str, bytes | bytearray | memoryview | None] = {
        "part.index": encode_index(golden_index()),
        "state.tree": typed_tree.encode(golden_tree()).to_bytes(),
    }
    for name, frame in sample_frames().items():
        files |= {f"{name}.frame": frame.data, f"{name}.tail": frame.tail}
    for file, data in files.items():
        path = Path(__file__).parent / f"v{frame_layout.VERSION}" / file
        if data is not None and not path.exists():
            path.write_bytes(data)


if __name__ == "__main__":
    main()
