"""A layout equals its bytes, and the boxes of all ranks tile every table."""

import contextlib

import numpy as np
import pytest
from deltashard_checkpoint.errors import CorruptObject, DeltashardError, UnsupportedVersion, UserError
from deltashard_checkpoint.format import layout as layouts
from deltashard_checkpoint.format.layout import Layout, NotTiled
from deltashard_checkpoint.format.schema import Box
from hypothesis import given, settings
from hypothesis import strategies as st


def _box(table: str, a: int, b: int, c: int, d: int) -> Box:
    return Box(table=table, row_start=a, row_stop=b, col_start=c, col_stop=d)


COLUMNS = ("rank", "table", "row_start", "row_stop", "col_start", "col_stop")


def _reencoded(layout: Layout) -> bytes:
    columns = {name: getattr(layout, name) for name in COLUMNS}
    return Layout(world_size=layout.world_size, tables=layout.tables, columns=columns).data


@st.composite
def tilings(draw: st.DrawFn) -> tuple[int, dict[str, tuple[int, int]], dict[int, list[Box]]]:
    """Draw tables split repeatedly on both axes, and ranks for the pieces: (world size, shapes, boxes by rank)."""
    world_size = draw(st.integers(1, 5))
    shapes = {
        name: (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
        for name in draw(st.sets(st.sampled_from(["a", "b", "ä.weight"]), min_size=1))
    }
    boxes: dict[int, list[Box]] = {}
    for name, (rows, columns) in shapes.items():
        pieces = [_box(name, 0, rows, 0, columns)]
        for _ in range(draw(st.integers(0, 6))):
            piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
            a, b, c, d = piece.row_start, piece.row_stop, piece.col_start, piece.col_stop
            if draw(st.booleans()) and b - a > 1:
                at = draw(st.integers(a + 1, b - 1))
                pieces += [_box(name, a, at, c, d), _box(name, at, b, c, d)]
            elif d - c > 1:
                at = draw(st.integers(c + 1, d - 1))
                pieces += [_box(name, a, b, c, at), _box(name, a, b, at, d)]
            else:
                pieces.append(piece)
        for piece in pieces:
            boxes.setdefault(draw(st.integers(0, world_size - 1)), []).append(piece)
    return world_size, shapes, boxes


@settings(max_examples=150, deadline=None)
@given(tilings())
def test_any_tiling_round_trips(tiling) -> None:
    world_size, shapes, boxes = tiling
    layout = Layout.of(world_size, shapes, boxes)
    layout.check()
    again = Layout.decode(layout.data, digest=layout.digest)
    assert _reencoded(again) == layout.data
    assert again.key == f"layout/{layout.digest}"
    for rank in range(world_size):
        assert set(again.boxes_of(rank)) == set(boxes.get(rank, ()))
    shuffled = {rank: list(reversed(held)) for rank, held in reversed(boxes.items())}
    assert Layout.of(world_size, shapes, shuffled).digest == layout.digest


@settings(max_examples=150, deadline=None)
@given(tilings(), st.data())
def test_gap_or_overlap_of_one_cell_is_detected(tiling, data) -> None:
    world_size, shapes, boxes = tiling
    rank = data.draw(st.sampled_from(sorted(boxes)))
    held = list(boxes[rank])
    at = data.draw(st.integers(0, len(held) - 1))
    old = held[at]
    rows, columns = shapes[old.table]
    new = _box(
        old.table, a := data.draw(st.integers(0, rows - 1)), data.draw(st.integers(a + 1, rows)),
        c := data.draw(st.integers(0, columns - 1)), data.draw(st.integers(c + 1, columns)),
    )  # fmt: skip
    changed = {**boxes, rank: [*held[:at], new, *held[at + 1 :]]}
    count = np.zeros((rows, columns), int)
    for each in (box for boxes_ in changed.values() for box in boxes_ if box.table == old.table):
        count[each.row_start : each.row_stop, each.col_start : each.col_stop] += 1
    layout = Layout.of(world_size, shapes, changed)
    if (count == 1).all():
        layout.check()
    else:
        with pytest.raises(NotTiled, match="overlaps" if (count > 0).all() else "overlaps|no rank holds"):
            layout.check()
        with pytest.raises(CorruptObject):
            Layout.decode(layout.data, digest=layout.digest)


def test_rank_may_be_empty_and_table_without_boxes_is_a_gap() -> None:
    Layout.of(3, {"a": (4, 2)}, {1: [_box("a", 0, 4, 0, 2)]}).check()
    with pytest.raises(NotTiled, match="no rank holds rows 0 to 3, columns 0 to 1"):
        Layout.of(3, {"a": (4, 2)}, {}).check()
    with pytest.raises(UserError, match="no rank"):
        Layout.of(1, {"a": (4, 2)}, {1: [_box("a", 0, 4, 0, 2)]}).check()
    assert issubclass(NotTiled, DeltashardError)


def test_layout_too_expensive_to_check_is_refused() -> None:
    """Each of 3,000 columns is split at a different row: 6,000 boxes, 9 million cells of bands."""
    n = 3000
    held = [_box("a", *rows, c, c + 1) for c in range(n) for rows in ((0, c + 1), (c + 1, n + 1))]
    with pytest.raises(NotTiled, match="too finely"):
        Layout.of(1, {"a": (n + 1, n)}, {0: held}).check()


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
def test_boxes_are_checked_slice_by_slice(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults at the border of a slice are found: two boxes in the wrong order, or a box outside every table."""
    monkeypatch.setattr(layouts, "_SLICE", at_once)
    n = 7
    good = Layout.of(n, {"a": (n, 2)}, {r: [_box("a", r, r + 1, 0, 2)] for r in range(n)})
    assert Layout.decode(good.data).boxes_of(4) == (_box("a", 4, 5, 0, 2),)
    columns = {name: getattr(good, name) for name in COLUMNS}
    for i in range(n - 1):
        order = [*range(i), i + 1, i, *range(i + 2, n)]
        turned = {name: np.ascontiguousarray(column[order]) for name, column in columns.items()}
        with pytest.raises(CorruptObject, match="not sorted"):
            Layout.decode(Layout(world_size=n, tables=good.tables, columns=turned).data)
    for i in range(n):
        wide = columns["col_stop"].copy()
        wide[i] = 3
        with pytest.raises(CorruptObject, match=rf"box rank {i}'s .* is in no table"):
            Layout.decode(
                Layout(world_size=n, tables=good.tables, columns={**columns, "col_stop": wide}).data
            )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(tilings(), st.data())
def test_mutated_layout_bytes_are_refused(tiling, data):
    """The hash refuses most mutations. With a recomputed hash only one form is accepted, including zeros between columns."""
    layout = Layout.of(*tiling)
    raw = bytearray(layout.data)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    mutated = bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    if mutated != layout.data:
        with pytest.raises(CorruptObject):
            Layout.decode(mutated, digest=layout.digest)
        with contextlib.suppress(CorruptObject, UnsupportedVersion):
            assert _reencoded(Layout.decode(mutated)) == mutated


@pytest.mark.parametrize(
    ("ranks", "shapes"), [(1, {"a": (0, 2)}), (1, {"a": (4, 1 << 40)}), (1, {"": (4, 2)}), (0, {"a": (4, 2)})]
)
def test_invalid_tables_or_ranks_have_no_layout(ranks, shapes):
    with pytest.raises(UserError):
        Layout.of(ranks, shapes, {}).check()
