"""Bits per table: the budget holds, small tables keep 8 bits, and Gaussian rows match the formulas."""

import numpy as np
import pytest
from deltashard_checkpoint.deciding.precision import (
    BITS,
    BUDGET,
    GAUSSIAN_ERRORS,
    BadTables,
    RestoreForecast,
    TableStats,
    check_n_run_bits,
    choose_bits,
    large_tables,
    parse_encodings,
)
from deltashard_checkpoint.vocabulary import BITS_CHOICES, ENCODING_CHOICES, ENCODINGS, bits_of
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.checkpoint.codecs.support import store

errors = st.lists(st.floats(0, 2), min_size=4, max_size=4).map(
    lambda found: dict(zip(BITS, sorted(found, reverse=True), strict=True))
)
facts = st.builds(
    TableStats,
    raw_bytes=st.integers(1, 10**12),
    errors=st.one_of(st.just({}), errors),
    spent=st.floats(0, 0.3),
)
tables = st.dictionaries(st.text(min_size=1, max_size=3), facts, min_size=1, max_size=8)
forecasts = st.builds(
    RestoreForecast, restores=st.integers(0, 5000), expected=st.floats(0, 200), restores_so_far=st.integers(0, 50),
    near_end=st.booleans(), min_bits=st.integers(0, 8),
)  # fmt: skip


def real_error(bits: int, columns: int = 64) -> float:
    """Return the relative L2 error of Gaussian rows under the real codec."""
    rows = np.random.default_rng(7).standard_normal((2000, columns)).astype(np.float32)
    restored = store(BITS_CHOICES[bits], rows).restored()
    return float(np.linalg.norm(rows - restored) / np.linalg.norm(rows))


def test_gaussian_row_errors_match_the_codecs():
    for bits in BITS:
        assert GAUSSIAN_ERRORS[bits] == pytest.approx(real_error(bits), rel=0.01)


def test_restores_allowed_per_bit_width_for_gaussian_rows():
    """The counts are stricter than the paper's 1, 3, 20 and over 100, which cost more accuracy than it reports."""
    found = {}
    for restores in range(1, 6000):
        large = {"t": TableStats(raw_bytes=1, errors=GAUSSIAN_ERRORS)}
        bits = bits_of(
            choose_bits("budget", large, RestoreForecast(restores=restores, expected=0), {}).encodings["t"]
        )
        if restores * GAUSSIAN_ERRORS[bits] ** 2 <= BUDGET:
            found[bits] = restores
    assert [found.get(bits) for bits in (2, 3, 4)] == [None, 1, 4]
    assert found[8] == pytest.approx(1076, rel=0.03)


@given(tables, forecasts)
def test_error_budget_is_met_and_small_tables_use_8_bit(model, forecast):
    found = choose_bits("budget", model, forecast, {})
    assert found.encodings.keys() == model.keys()
    large = large_tables(model)
    for name, encoding in found.encodings.items():
        bits = bits_of(encoding)
        assert bits in BITS
        assert bits >= min(forecast.min_bits, 8)
        if bits < 8:
            assert name in large
            assert not forecast.near_end
            assert model[name].spent + max(forecast.restores, 1) * model[name].errors[bits] ** 2 <= BUDGET
    assert found.why


@given(tables)
def test_large_tables_are_the_fewest_with_90_percent_of_bytes(model):
    large = large_tables(model)
    total = sum(each.raw_bytes for each in model.values())
    held = sum(model[name].raw_bytes for name in large)
    assert held >= 0.9 * total
    smallest = min(model[name].raw_bytes for name in large)
    assert held - smallest < 0.9 * total
    assert all(each.raw_bytes <= smallest for name, each in model.items() if name not in large)


@given(tables, forecasts, st.sampled_from(ENCODING_CHOICES))
def test_user_encoding_of_a_table_takes_precedence(model, forecast, encoding):
    name = next(iter(model))
    for rule in ("budget", "check-n-run"):
        assert choose_bits(rule, model, forecast, {name: encoding}).encodings[name] == encoding


@given(tables, forecasts)
def test_check_n_run_uses_one_width_for_all_tables(model, forecast):
    found = set(choose_bits("check-n-run", model, forecast, {}).encodings.values())
    assert len(found) == 1
    bits = bits_of(found.pop())
    assert bits >= max(
        check_n_run_bits(forecast.expected, forecast.restores_so_far), min(forecast.min_bits, 8)
    )
    assert bits == 8 or not forecast.near_end


@pytest.mark.parametrize(
    ("expected", "restores_so_far", "bits"),
    [(0.5, 0, 2), (1, 1, 2), (1, 2, 8), (3, 3, 3), (20, 4, 4), (21, 4, 8), (0, 0, 2), (2.5, 3, 8)],
)
def test_check_n_run_width_follows_the_restore_count(expected, restores_so_far, bits):
    assert check_n_run_bits(expected, restores_so_far) == bits


@given(
    st.dictionaries(st.from_regex(r"[a-z][a-z.=]{0,8}", fullmatch=True), st.sampled_from(ENCODING_CHOICES))
)
def test_table_encodings_round_trip(wanted):
    text = ", ".join(f"{table}={encoding}" for table, encoding in wanted.items())
    assert parse_encodings(text, where="tables") == wanted


@pytest.mark.parametrize("text", ["emb", "emb=", "=q8", "emb=q5", "emb=fp64", "emb=q8,emb=q4"])
def test_invalid_table_encoding_is_refused(text):
    with pytest.raises(BadTables) as refused:
        parse_encodings(text, where="tables")
    assert refused.value.where == "tables"
    assert ENCODINGS["q8"].name in refused.value.remedy
