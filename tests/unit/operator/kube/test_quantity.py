"""Quantities of the Kubernetes API."""

from __future__ import annotations

from fractions import Fraction

import pytest
from deltashard_operator.kube import quantity
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", Fraction(1)),
        ("1.5Gi", Fraction(3 << 29)),
        ("100m", Fraction(1, 10)),
        ("2k", Fraction(2000)),
        ("1e3", Fraction(1000)),
        ("1E", Fraction(10**18)),
        ("1E2", Fraction(100)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("3u", Fraction(3, 10**6)),
        ("1Ei", Fraction(1 << 60)),
    ],
)
def test_every_form_is_parsed(text: str, value: Fraction) -> None:
    assert quantity.parse(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1gi", "1Mi2", "0x10", "nan", "1e", "--1"])
def test_malformed_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity.parse(text)


@given(st.integers(0, 1 << 60))
def test_quantity_round_trips(n: int) -> None:
    assert quantity.bytes_of(quantity.format_bytes(n)) == n
    assert quantity.parse(quantity.format_millis(n)) * 1000 == n
