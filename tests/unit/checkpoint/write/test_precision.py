"""How commits record the bits of their rows, and which policies request more."""

import pytest
from deltashard_checkpoint.vocabulary import ENCODING_CHOICES, ENCODINGS, PRECISION_KEY
from deltashard_checkpoint.write.precision import (
    StoredPrecision,
    coarser,
    coarsest,
    parse_metadata,
    stored_precision,
    too_coarse_reason,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint.run_builder import started_run

encodings = st.sampled_from(ENCODING_CHOICES)
precisions = st.builds(
    lambda others, tables, state: StoredPrecision.of({"*": others, **tables}, state),
    encodings,
    st.dictionaries(st.sampled_from(["a", "b"]), encodings, max_size=2),
    st.sampled_from(["fp32", "bf16"]),
)
TABLES = ("a", "b", "c")


def bits(of: StoredPrecision) -> tuple[int, ...]:
    return (*(ENCODINGS[of.of_table(table)].bits for table in TABLES), 16 if of.state == "bf16" else 32)


@given(precisions, precisions)
def test_coarser_precision_has_the_fewer_bits_per_table(one, other):
    assert bits(coarser(one, other)) == tuple(map(min, bits(one), bits(other)))


@given(precisions)
def test_stored_precision_round_trips(precision):
    assert parse_metadata(precision.text()) == precision
    assert len(precision.text()) < 200


@given(precisions, precisions)
def test_precision_is_raised_if_any_table_needs_more(asked, stored):
    named = {*asked.weights, *stored.weights} - {"*"}
    more = any(ENCODINGS[asked.of_table(t)].bits > ENCODINGS[stored.of_table(t)].bits for t in (*named, "*"))
    state = (asked.state, stored.state) == ("fp32", "bf16")
    assert bool(too_coarse_reason(asked, stored)) == (more or state)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"state":"fp32"}', '{"state":"fp32","weights":{"a":"q8"}}', '{"state":"fp32","weights":[]}',
     '{"state":"fp8","weights":{"*":"q8"}}', '{"state":[],"weights":{"*":"q8"}}', '{"state":"fp32","weights":{"*":"q9"}}',
     "[" * 100_000],
)  # fmt: skip
def test_malformed_precision_is_ignored(text):
    assert parse_metadata(text) is None
    assert too_coarse_reason(StoredPrecision.of("fp32"), parse_metadata(text)) == ""


def test_precision_of_several_ranks_is_the_coarsest():
    texts = [StoredPrecision.of("q8").text(), "rot", StoredPrecision.of("q4", "bf16").text()]
    assert coarsest(texts) == StoredPrecision.of("q4", "bf16")
    assert coarsest(["rot"]) is None


def test_import_has_no_precision_and_later_deltas_have_theirs():
    run, attempt = started_run()
    silent = run.commit(attempt, 1, directive="full")
    assert stored_precision(run.log.state, silent) is None
    newer = run.commit(attempt, 2, silent, metadata={PRECISION_KEY: StoredPrecision.of("q3").text()})
    assert stored_precision(run.log.state, newer) == StoredPrecision.of("q3")


def test_compacted_checkpoint_keeps_its_chains_precision():
    run, attempt = started_run()
    base = run.commit(attempt, 1, metadata={PRECISION_KEY: StoredPrecision.of("q2").text()})
    delta = run.commit(attempt, 2, base, metadata={PRECISION_KEY: StoredPrecision.of("q2").text()})
    run.compacted(delta)
    run.retire([base])
    assert stored_precision(run.log.state, delta) == StoredPrecision.of("q2")
