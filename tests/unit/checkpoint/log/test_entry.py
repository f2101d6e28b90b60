"""Entries have one canonical form; hostile entries are refused without a crash and at a bounded cost."""

import json

import pytest
from deltashard_checkpoint.errors import CorruptObject, ForeignObject, FormatError, UnsupportedVersion
from deltashard_checkpoint.format.object_key import compaction_index_key, snapshot_prefix
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.entry import (
    AttemptOpened,
    Checkpoint,
    Compacted,
    FoldName,
    Genesis,
    Ignored,
    ManifestRef,
    Part,
    Pinned,
    Reclaimed,
    Retired,
    Rewound,
    folding_writer,
    named_fold,
    sorted_covers,
    voiding_writer,
)
from deltashard_checkpoint.log.entry_codec import KINDS, parse, seal
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint.run_builder import TOKEN, WHOLE, part, rehashed

HASH = "ab" * 32
LAYOUT, MANIFEST = "1a" * 16, "2b" * 16
COMMON = {"previous": HASH, "writer": "w-1", "at_s": 1.25}
names = st.text(st.characters(codec="utf-8"), max_size=12)
numbers = st.integers(0, (1 << 63) - 1)
boxes = st.tuples(names, numbers, numbers, numbers, numbers).filter(lambda b: b[1] < b[2] and b[3] < b[4])
box = boxes.map(lambda b: Box(table=b[0], row_start=b[1], row_stop=b[2], col_start=b[3], col_stop=b[4]))
fields = st.builds(
    FieldSpec, name=names, kind=st.sampled_from(["rowwise", "pointwise"]), dtype=st.just("float32")
)
tables = st.lists(
    st.builds(
        TableSchema, fqn=names, rows=numbers, columns=numbers, dtype=st.sampled_from(["float32", "bfloat16"]),
        fields=st.lists(fields, max_size=2).map(tuple),
    ),
    max_size=3,
    unique_by=lambda t: t.fqn,
).map(tuple)  # fmt: skip


digests = st.text("0123456789abcdef", min_size=32, max_size=32)
listings = st.builds(
    ManifestRef, layout=digests, manifest=digests, world_size=st.integers(1, (1 << 63) - 1),
    covers=st.lists(st.none() | numbers, min_size=1, max_size=5).map(sorted_covers),
)  # fmt: skip


encodings = st.dictionaries(
    names,
    st.lists(st.sampled_from(["bf16", "q4", "q8"]), min_size=1, unique=True).map(
        lambda each: tuple(sorted(each))
    ),
    max_size=3,
)


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    attempt, snapshot_id = draw(st.integers(1, 10**9)), draw(st.integers(0, 10**8 - 1))
    listed = draw(st.none() | listings)
    parts = () if listed else tuple(
        part(attempt, snapshot_id, rank, draw(st.lists(box, max_size=2)), draw(st.none() | numbers))
        for rank in range(draw(st.integers(1, 3)))
    )  # fmt: skip
    text = st.dictionaries(names, names, max_size=2)
    return Checkpoint(
        seq=draw(st.integers(1, 10**9)), attempt=attempt, snapshot_id=snapshot_id, step=draw(numbers), parts=parts, tables=draw(tables),
        encodings=draw(encodings), rows=draw(numbers), raw_bytes=draw(numbers), stored_bytes=draw(numbers),
        stall_s=draw(st.floats(0, 1e9)), snapshot_at_s=draw(st.floats(0, 1e10)), directive=draw(names), fingerprint=draw(text), metadata=draw(text),
        pins=tuple(draw(st.lists(names, max_size=2))), listed=listed, **COMMON,
    )  # fmt: skip


def an_example_of_each() -> list:
    compact = Part(
        rank=0, index_key=compaction_index_key(token=TOKEN, xxh3="0" * 32), boxes=(WHOLE,), stored_bytes=9,
        covers=None,
    )  # fmt: skip
    one = part(3, 7, 0, [WHOLE], 4)
    return [
        Genesis(seq=0, previous="", writer="w", at_s=0.0, run="a/b", owner="me"),
        AttemptOpened(seq=3, world_size=2, resumes_from=None, owner="me", **COMMON),
        AttemptOpened(seq=9, world_size=2, resumes_from=4, owner="you", takeover=True, voids=5, **COMMON),
        Checkpoint(
            seq=5, attempt=3, snapshot_id=7, step=70, parts=(one,), tables=(), encodings={"items": ("q4", "q8")}, rows=1, raw_bytes=2,
            stored_bytes=3, stall_s=0.25, snapshot_at_s=1.8e9, metadata={"loss": "0.5"}, pins=("best",), **COMMON,
        ),
        Compacted(
            seq=6, replaces=5, parts=(compact,), encodings={"items": ("q8",)}, rows=1, stored_bytes=2, **COMMON
        ),
        Retired(seq=8, checkpoints=(5,), prefixes=(snapshot_prefix(3, 7),), **COMMON),
        Reclaimed(seq=9, through=8, **COMMON),
        Pinned(seq=20, name="paper \u2713", checkpoint=5, **COMMON),
        Pinned(seq=21, name="paper", checkpoint=None, **COMMON),
        Rewound(seq=22, to=5, **COMMON),
        AttemptOpened(seq=11, world_size=4, resumes_from=5, owner="me", layout=LAYOUT, **COMMON),
        Checkpoint(
            seq=12, attempt=11, snapshot_id=1, step=90, tables=(), encodings={"items": ("q8",)}, rows=1, raw_bytes=2, stored_bytes=3,
            stall_s=0.5, snapshot_at_s=0, listed=ManifestRef(layout=LAYOUT, world_size=4, manifest=MANIFEST, covers=(None, 3, 12)), **COMMON,
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("entry", an_example_of_each(), ids=lambda e: f"{type(e).__name__}-{e.seq}")
def test_every_entry_kind_round_trips(entry):
    sealed = seal(entry)
    assert parse(sealed.data, entry.seq) == sealed
    assert sealed.entry == entry


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(checkpoints())
def test_any_checkpoint_entry_round_trips(entry):
    assert parse(seal(entry).data, entry.seq).entry == entry


@pytest.mark.parametrize("entry", an_example_of_each(), ids=lambda e: f"{type(e).__name__}-{e.seq}")
def test_wrong_values_with_a_valid_hash_are_refused(entry):
    """Each field in turn is missing or has another type or range, with a recomputed hash."""
    document = json.loads(seal(entry).data)
    bad = [
        None, -1, 1 << 63, True, 1e300, "x" * 70_000, "\ud800", [], [[]], {}, {"a": 1}, [None], ["nope"], "é",
    ]  # fmt: skip
    for key in document:
        if key == "hash":
            continue
        smaller = {k: v for k, v in document.items() if k != key}
        if key != "layout" or "manifest" in document:  # an attempt of one rank has none
            with pytest.raises(UnsupportedVersion):
                parse(rehashed(smaller), entry.seq)
        for value in bad:
            if document[key] != value or type(document[key]) is not type(value):
                try:
                    read = parse(rehashed({**document, key: value}), entry.seq).entry
                except (
                    UnsupportedVersion,
                    ForeignObject,
                ):  # never corrupt: the next attempt would void the slot
                    continue
                if isinstance(read, Ignored):  # an ignorable entry of an unknown kind is not read
                    continue
                # An accepted value is legal for that field and round-trips unchanged.
                assert parse(seal(read).data, entry.seq).entry == read
    with pytest.raises(UnsupportedVersion, match="intact"):
        parse(rehashed({**document, "surprise": 1}), entry.seq)


def many_ranks(seq: int) -> dict:
    (entry,) = (each for each in an_example_of_each() if each.seq == seq)
    return json.loads(seal(entry).data)


def test_writer_holds_its_token_and_optional_voids_and_fold():
    token = "0" * 16
    writer = folding_writer(voiding_writer(token, "ab" * 32), FoldName(10**15 - 1, "c" * 32))
    opened = AttemptOpened(
        seq=1 << 62, world_size=1, resumes_from=None, owner="me", voids=5, **{**COMMON, "writer": writer}
    )
    read = parse(seal(opened).data, opened.seq).entry
    assert "-voids-" + "ab" * 16 in read.writer
    assert named_fold(read) == (10**15 - 1, "c" * 32)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"covers": []}, {"covers": [3, None, 12]}, {"covers": [None, None]},
        {"covers": [12, 3]}, {"covers": [3, 3]}, {"covers": [True]}, {"covers": [-1]}, {"covers": [1.0]},
        {"covers": [[3]]}, {"covers": None}, {"manifest": MANIFEST.upper()}, {"manifest": MANIFEST[:-1]},
        {"manifest": "../" + MANIFEST[3:]}, {"manifest": None}, {"layout": ""}, {"layout": LAYOUT + "0"},
        {"layout": None}, {"world_size": 0}, {"world_size": 2.0}, {"world_size": True}, {"parts": []},
    ],
    ids=str,
)  # fmt: skip
def test_part_references_are_parsed_strictly(change):
    with pytest.raises(UnsupportedVersion):
        parse(rehashed({**many_ranks(12), **change}), 12)


def test_pin_needs_a_name_and_user_entries_are_not_ignorable():
    for seq, change in (
        (20, {"name": ""}),
        (20, {"ignorable": True}),
        (22, {"ignorable": True}),
        (11, {"layout": ""}),
    ):
        with pytest.raises(UnsupportedVersion):
            parse(rehashed({**many_ranks(seq), **change}), seq)


def test_parts_are_in_either_the_entry_or_a_manifest():
    here, there = many_ranks(5), many_ranks(12)
    listed = {name: there[name] for name in ("layout", "manifest", "world_size", "covers")}
    without = {name: value for name, value in there.items() if name not in listed}
    for wrong in ({**here, **listed}, {**here, "layout": LAYOUT}, {**there, "parts": here["parts"]}, without):
        with pytest.raises(UnsupportedVersion):
            parse(rehashed(wrong), wrong["seq"])


def test_non_canonical_json_is_refused():
    data = seal(an_example_of_each()[0]).data
    for other in (
        data + b" ",
        data.replace(b":0,", b":0.0,"),
        b"[" * 100_000,
        b"{" * 100_000,
        b"1" * 10_000,
        b"1e999",
        b"NaN",
        b"[]",
        b"",
        b"\xff",
        data[:-1] + b',"writer":"w"}',
        json.dumps(json.loads(data)).encode(),
    ):
        with pytest.raises(CorruptObject):
            parse(other, 0)


def test_reclaim_entry_is_ignorable_for_older_versions(monkeypatch):
    """The golden bytes mark the entry as ignorable. Otherwise older versions could not read a run after a collection."""
    entry = Reclaimed(seq=9, through=8, **COMMON)
    data = seal(entry).data
    assert data.endswith(
        b'"ignorable":true,"kind":"reclaim","previous":"%s","seq":9,"through":8,"writer":"w-1"}'
        % HASH.encode()
    )
    with pytest.raises(UnsupportedVersion):
        parse(rehashed({**json.loads(data), "ignorable": False}), 9)
    monkeypatch.delitem(KINDS, "reclaim")
    assert isinstance(parse(data, 9).entry, Ignored)


def test_entry_of_another_slot_or_snapshot_is_foreign():
    genesis, *_, checkpoint = an_example_of_each()[:4]
    with pytest.raises(ForeignObject):
        parse(seal(genesis).data, 1)
    document = json.loads(seal(checkpoint).data)
    with pytest.raises(ForeignObject):
        parse(rehashed({**document, "snapshot_id": 8}), 5)


@pytest.mark.parametrize("seq", [5, 12])
def test_out_of_range_snapshot_is_an_unsupported_version(seq):
    with pytest.raises(UnsupportedVersion, match="does not fit its object name"):
        parse(rehashed({**many_ranks(seq), "snapshot_id": 10**8}), seq)


def test_unreadable_entry_is_never_written():
    with pytest.raises(FormatError):
        seal(Genesis(seq=0, previous="", writer="spaces are none", at_s=0.0, run="r", owner="o"))
    with pytest.raises(FormatError):
        seal(Retired(seq=8, checkpoints=(), prefixes=("data/",), **COMMON))
    with pytest.raises(FormatError):
        seal(Retired(seq=8, checkpoints=(), prefixes=("log/",), **COMMON))
