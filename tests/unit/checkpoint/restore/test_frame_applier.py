"""Frames become arrays again under any sharding, through packs, log and plan."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from deltashard_checkpoint.codecs import quantizer
from deltashard_checkpoint.errors import InvalidCheckpoint
from deltashard_checkpoint.format.frame import parse_frame
from deltashard_checkpoint.format.frame_encoder import EncodedFrame, encode_rows
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.restore.fetcher import FetchedFrame
from deltashard_checkpoint.restore.frame_applier import Applied, FrameApplier, TableTarget
from deltashard_checkpoint.restore.plan import SchemaMismatch
from deltashard_checkpoint.vocabulary import ENCODINGS
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.sample import SampleModel, box, schema, tombstone, whole


def _apply(applier: FrameApplier, frame: EncodedFrame | FetchedFrame) -> tuple[Applied, ...]:
    return applier.apply(frame.data, frame.tail)


def _target(table: TableSchema, held: Box | None = None, dtype=np.float32) -> TableTarget:
    held = held or whole(table)
    rows, columns = held.row_stop - held.row_start, held.col_stop - held.col_start
    fields = {
        spec.name: np.full((rows, columns) if spec.kind == "pointwise" else (rows,), -9, dtype)
        for spec in table.fields
    }
    return TableTarget(schema=table, box=held, weights=np.full((rows, columns), -9, dtype), fields=fields)


def test_narrowed_state_is_reported_by_table() -> None:
    """The report has the stored type. A target without state or without rows of the frame reports nothing."""
    model = SampleModel(schema(rows=20))
    table = model.table

    def narrowed(target: TableTarget, state_encoding: str) -> dict[str, str]:
        options = EncodeOptions(encoding=ENCODINGS["fp32"], state_encoding=state_encoding)
        frame = encode_rows(model.block(range(10)), options, step=1)
        applier = FrameApplier([target])
        _apply(applier, frame)
        return applier.narrowed

    target = _target(table)
    assert narrowed(target, "fp32") == {}
    assert narrowed(target, "bf16") == {table.fqn: "bfloat16"}
    weights = TableTarget(schema=table, box=target.box, weights=target.weights, fields={})
    assert narrowed(weights, "bf16") == {}
    assert narrowed(_target(table, box(table, 10, 20, 0, table.columns)), "bf16") == {}


def test_only_written_rows_are_returned() -> None:
    model = SampleModel(schema(rows=50))
    applier = FrameApplier([_target(model.table, box(model.table, 10, 40, 0, 8))])
    newer = _apply(applier, model.frames(np.array([5, 12, 13, 45]))[0])
    older = _apply(applier, model.frames(np.array([12, 13, 14, 39, 40]))[0])
    assert [list(a.rows) for a in (*newer, *older)] == [[12, 13], [14, 39]]
    assert _apply(applier, model.frames(np.array([13, 14]))[0]) == ()
    assert _apply(applier, SampleModel(schema("other")).frames(range(5))[0]) == ()


def test_tombstone_hides_only_older_rows() -> None:
    """Rows are applied before tombstones of the same checkpoint, so a row takes precedence over its tombstone."""
    model = SampleModel(schema(rows=20))
    applier = FrameApplier([target := _target(model.table)])
    _apply(applier, model.frames(np.array([4, 5]))[0])
    _apply(applier, tombstone(model.table, np.array([5, 6], np.int64), step=2))
    _apply(applier, model.frames(range(20))[0])
    applier.finish()
    expected = model.weights.copy()
    expected[6] = 0
    np.testing.assert_array_equal(target.weights, expected)
    assert target.fields["sum"][6] == 0
    assert target.fields["sum"][5] == model.fields["sum"][5]


def test_missing_tables_and_fields_are_reported() -> None:
    model = SampleModel(schema(rows=20))
    applier = FrameApplier([_target(model.table)])
    _apply(applier, model.frames(np.arange(20)[np.arange(20) != 7])[0])
    with pytest.raises(InvalidCheckpoint, match=r"items.weight\[7:8, 0:8\]"):
        applier.finish()
    assert applier.missing() == [box(model.table, 7, 8, 0, 8)]
    applier.finish(initial=applier.missing())


def test_other_dtype_or_missing_field_needs_strict_false() -> None:
    model = SampleModel(schema(rows=10))
    grown = TableSchema(
        fqn=model.table.fqn, rows=10, columns=8, dtype="float16",
        fields=(*model.table.fields, FieldSpec(name="new", kind="rowwise", dtype="float32")),
    )  # fmt: skip
    encoded = model.frames(range(10))[0]
    frame = parse_frame(encoded.data, encoded.tail)

    def target() -> TableTarget:
        made = _target(grown)
        made.weights = made.weights.astype(np.float16)
        return made

    with pytest.raises(SchemaMismatch, match="float32 is stored.*field new is not stored"):
        FrameApplier([target()]).apply(frame)
    into = target()
    applier = FrameApplier([into], strict=False)
    applier.apply(frame)
    applier.finish()
    assert len(applier.notes) == 2
    np.testing.assert_array_equal(into.weights, model.weights.astype(np.float16))
    assert (into.fields["new"] == -9).all()


@st.composite
def _histories(draw: st.DrawFn) -> list[list[tuple[Box, list[int]]]]:
    """Draw checkpoints, newest first: each is split into boxes of columns, and each box has the rows of its frame."""

    def columns() -> list[tuple[int, int]]:
        at = [0, *sorted(draw(st.sets(st.integers(1, COLUMNS - 1), max_size=3))), COLUMNS]
        return list(itertools.pairwise(at))

    deltas = [
        [
            (box(SPLIT, 0, ROWS, a, b), draw(st.lists(st.integers(0, ROWS - 1), unique=True)))
            for a, b in columns()
        ]
        for _ in range(draw(st.integers(0, 3)))
    ]
    return [*deltas, [(box(SPLIT, 0, ROWS, a, b), list(range(ROWS))) for a, b in columns()]]


ROWS, COLUMNS = 6, 7
SPLIT = TableSchema(
    fqn="t",
    rows=ROWS,
    columns=COLUMNS,
    dtype="float32",
    fields=tuple(
        FieldSpec(name=dtype, kind="rowwise", dtype=dtype)
        for dtype in ("bfloat16", "float16", "float32", "float64", "int64")
    ),
)


@settings(max_examples=150, deadline=None)
@given(history=_histories(), few=st.booleans(), seed=st.integers(0, 99))
def test_rowwise_state_of_column_splits_is_summed_or_equal(history, few, seed):
    """The oracle uses fractions. A frame counts once per row, regardless of earlier or later column snapshots."""
    rng = np.random.default_rng(seed)
    values = (np.array([0.1, -0.0]) if few else rng.normal(0, 1, 50)).astype(np.float32)
    target = TableTarget(
        schema=SPLIT,
        box=whole(SPLIT),
        weights=np.zeros((ROWS, COLUMNS), np.float32),
        fields={f.name: np.zeros(ROWS, "uint16" if f.name == "bfloat16" else f.name) for f in SPLIT.fields},
    )
    applier = FrameApplier([target])
    open_ = np.ones((ROWS, COLUMNS), np.bool_)
    shares: list[list[tuple[int, float]]] = [[] for _ in range(ROWS)]
    for held, ids in itertools.chain.from_iterable(history):
        rows = np.array(sorted(ids), np.int64)
        state = rng.choice(values, len(rows))
        if not len(rows):
            continue
        cells = np.ix_(rows, np.arange(held.col_start, held.col_stop))
        filled = open_[cells].sum(axis=1)
        open_[cells] = False
        for row, width, value in zip(rows, filled, state, strict=True):
            shares[row] += [(int(width), float(value))] if width else []
        block = RowBlock(
            schema=SPLIT,
            columns=range(held.col_start, held.col_stop),
            ids=rows,
            weights=np.zeros((len(rows), held.col_stop - held.col_start), np.float32),
            fields={
                f.name: quantizer.narrowed(state, f.name)
                if f.name != "int64"
                else (state * 1000).astype(np.int64)
                for f in SPLIT.fields
            },
        )
        _apply(applier, encode_rows(block, EncodeOptions(encoding=ENCODINGS["fp32"]), step=1))
    assert not open_.any()
    applier.finish()
    for row, found in enumerate(shares):
        assert target.fields["int64"][row] == int(np.float32(found[0][1]) * np.float32(1000))
        for name in ("bfloat16", "float16", "float32", "float64"):
            stored = [(w, quantizer.narrowed(np.array([v], np.float32), name)) for w, v in found]
            got = target.fields[name][row : row + 1]
            if len({each.tobytes() for _, each in stored}) == 1:
                assert got.tobytes() == stored[0][1].tobytes()
                continue
            total = 0.0
            for w, each in stored:
                total += (w / COLUMNS) * float(quantizer.widened(each, name)[0])
            assert got.tobytes() == _nearest(total, name).tobytes()


def _nearest(value: float, name: str) -> np.ndarray:
    """Round `value` once, by comparison with both neighbours."""
    if name != "bfloat16":
        return np.array([value], name)
    with np.errstate(over="ignore"):
        start = int(quantizer.narrowed(np.array([value], np.float32), name)[0])
    near = list(range(max(start - 1, 0), start + 2))
    exact = [Fraction(float(quantizer.widened(np.array([b], np.uint16), name)[0])) for b in near]
    distances = [(abs(each - Fraction(value)), b & 1) for each, b in zip(exact, near, strict=True)]
    return np.array([near[distances.index(min(distances))]], np.uint16)
